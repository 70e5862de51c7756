"""What the compiled CUDA kernels take, read from the machine code of the built library (docs/design/performance.md)."""

import pytest

from benchmarks.pages import cuda_sass
from qtoolkit import _native


@pytest.fixture
def kernels() -> list:

    if not cuda_sass.has_kernels(_native.FILE):
        pytest.skip("this build of qtoolkit has no CUDA kernels")
    if cuda_sass.cuobjdump() is None:
        pytest.skip(
            "cuobjdump, which reads the kernels' resources, is not installed; it comes with CUDA and with Triton"
        )
    return [k for k in cuda_sass.kernels_of(_native.FILE) if k.architecture in cuda_sass.PROCESSORS]


def named(kernels: list, *words: str) -> list:
    found = [k for k in kernels if all(word in k.symbol for word in words)]
    assert found, words
    return found


def test_no_kernel_spills_registers(kernels):
    assert [k for k in kernels if k.stack + k.local > 0] == []


@pytest.mark.parametrize(
    ("words", "registers", "occupancy"),
    [
        (("18elementwise_kernelIfNS", "IntegerFunctorELb0E"), 40, 0.75),
        (("18elementwise_kernelIfNS", "IntegerFunctorELb1E"), 64, 0.5),  # with codes
        (("attention_weights_kernel", "Li32ELi8ELb"), 80, 0.375),
        (("flash_forward_kernelI13__nv_bfloat16Li64E",), 255, 0.125),  # fragments of matrices: two blocks of four warps
        (("flash_queries_backward_kernelI13__nv_bfloat16Li64E",), 255, 0.125),
        (("flash_keys_backward_kernelI13__nv_bfloat16Li64E",), 255, 0.125),
        (("learned_backward_kernelIf13__nv_bfloat16", "LearnedGradient"), 64, 0.5),
        (("norm_forward_kernelI13__nv_bfloat16LNS0_6SpreadE0",), 64, 0.375),  # three blocks of 48 KiB on an A100
        (
            ("norm_forward_kernelI13__nv_bfloat16LNS0_6SpreadE2",),
            80,
            0.375,
        ),  # a thread keeps 8 channels
        (("norm_backward_kernelI13__nv_bfloat16LNS0_6SpreadE0", "LearnedE0"), 64, 0.375),
        (("norm_backward_kernelI13__nv_bfloat16LNS0_6SpreadE0", "LearnedE1"), 80, 0.375),
        (("norm_backward_kernelI13__nv_bfloat16LNS0_6SpreadE2",), 128, 0.25),
        (("11sums_kernelI13__nv_bfloat16",), 80, 0.375),
        (("row_sums_kernelI13__nv_bfloat16",), 128, 0.25),
        (("row_moments_kernelI13__nv_bfloat16",), 128, 0.25),  # sums of 8 channels in float64
        (("plane_moments_kernelI13__nv_bfloat16",), 64, 0.375),
        (("plane_sums_kernelI13__nv_bfloat16",), 64, 0.375),
        (("pool_backward_kernelIfLi8",), 80, 0.375),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_registers_and_occupancy(kernels, words, registers, occupancy):
    for kernel in named(kernels, *words):
        assert kernel.registers <= registers, kernel
        assert kernel.occupancy >= occupancy, kernel


# Kernels that wait for instructions: their elements are loaded one by one, and those of an attention have an exponential each.
ABOVE_THE_ROOF = {
    "batch norm backward, bfloat16, planes of 7x7": 53,
    "attention weights, bfloat16, 256 keys": 55,
    "attention weights backward, bfloat16, 256 keys": 76,
}


def titles() -> list[str]:
    return [loop.title for loop in cuda_sass.loops() if "bfloat16" in loop.title]


@pytest.mark.parametrize("title", titles())
def test_instructions_of_a_16_bit_element_fit_below_the_roof(kernels, title):
    """On an H100, whose memory is the faster one for its multiprocessors."""

    (loop,) = (loop for loop in cuda_sass.loops() if loop.title == title)
    (kernel,) = (k for k in named(kernels, *loop.kernel.split(".*")) if k.architecture == "sm_90")
    count = cuda_sass.counted(loop, kernel, cuda_sass.code_of(_native.FILE, kernel))
    assert count is not None
    assert count.instructions <= ABOVE_THE_ROOF.get(title, count.roof)


def test_the_shortest_path_has_what_it_needs():

    code = {0: "LDG R0", 1: "@P0 BRA 0x4", 2: "FRND R1", 3: "FRND R2", 4: "@P1 BRA 0x0", 5: "CALL 0x2", 6: "EXIT"}
    assert cuda_sass.shortest(code, 0, 0, {}) == [0, 1, 4]
    assert cuda_sass.shortest(code, 0, 0, {"FRND": 2}) == [0, 1, 2, 3, 4]
    assert cuda_sass.shortest(code, 0, 0, {"FRND": 2}, without="R2") is None
    assert cuda_sass.shortest(code, 0, 6, {}) is None  # behind a call


def test_occupancy_is_limited_by_registers_shared_memory_and_threads():

    h100 = cuda_sass.PROCESSORS["sm_90"]
    assert h100.occupancy(79, 4096, 256) == 0.375
    assert h100.occupancy(64, 4096, 256) == 0.5
    assert h100.occupancy(32, 0, 256) == 1
    assert h100.occupancy(32, 100 << 10, 256) == 0.25
    assert h100.occupancy(16, 0, 1024) == 1
