"""The host as a device for CUDA kernels finds their errors, and goes to both ends of tensors above 2^31 elements."""

import ctypes

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests import processes
from tests.cases import assert_same, floats, scales
from tests.ops.cuda_host import ORDERS, compiled, guarded, on_host

pytestmark = pytest.mark.slow  # the kernels are compiled for the host

native = torch.ops.qtoolkit
ENDS, PART = 2**31, 2048  # the first block of a kernel has the elements at 0 and at 2^31
ERRORS = {
    "load": "misaligned address",
    "store": "misaligned address",
    "barrier": "some threads of a block ended before a barrier",
    "stream": "launched on another stream than the current one",
    "none": "",
}
orders = pytest.mark.parametrize("order", ORDERS)


@orders
@pytest.mark.parametrize("error", ERRORS)
def test_errors_of_kernels_are_found(error: str, order: str) -> None:
    say = compiled().message_of_error
    say.restype = ctypes.c_char_p
    data = torch.zeros(16)
    assert ERRORS[error] in say(error.encode(), ctypes.c_void_p(data.data_ptr())).decode()
    assert say(b"none", ctypes.c_void_p(data.data_ptr())) == b""  # the next kernel runs
    with on_host(order):
        assert_same(ops.fake_quant(data + 3, torch.tensor(2.0)), data + 4)


def batch_norms_at_the_ends_of_pages() -> None:
    """Of few rows, so that some threads of a block have none."""
    for shape in ((1, 512, 7, 7), (3, 512, 7, 7), (2, 264, 1, 1), (5, 1032, 1, 1)):
        for dtype in (torch.bfloat16, torch.float32):
            x = floats(dtype)(*shape).contiguous(memory_format=torch.channels_last)
            found = []
            for of in (Tensor.clone, guarded):
                weight, bias, scale = of(torch.ones(shape[1])), of(torch.zeros(shape[1])), of(torch.tensor([0.05]))
                forward = (of(x), weight, bias, *[None] * 5)
                tail = (1e-5, 0.0, float("inf"), 0.0, scale, None, -128, 127, 1.0)
                with on_host("forwards"):
                    results = native.batch_norm_fake_quant(*forward, *tail)
                    of_y = (of(x), *forward, *map(of, results[2:]), *tail, False, True)
                    found.append([*results, *native.batch_norm_fake_quant_backward(*of_y)])
            for got, want in zip(*found, strict=True):
                assert_same(got, want)


def test_no_kernel_of_batch_norm_reads_behind_a_tensor() -> None:
    """In a process of its own, which such a read would end."""
    program = "from tests.ops import test_cuda_host_device as tests; tests.batch_norms_at_the_ends_of_pages()"
    run = processes.python("-c", program)
    assert run.returncode == 0, run.stderr


def test_memory_of_an_op_holds_nothing_at_first() -> None:
    with on_host("forwards"):
        assert torch.empty(9).isnan().all()
        assert (torch.empty(9, dtype=torch.int8) == 127).all()
    assert not torch.are_deterministic_algorithms_enabled()


def large(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of which only these ends are in memory."""
    x = torch.empty(shape, dtype=dtype)
    for first, seed in ((0, 1), (ENDS, 2)):
        part = x.view(-1)[first : first + PART]
        part.copy_(floats(torch.float32, seed)(PART).to(dtype))
    return x


def ends(t: Tensor) -> list[Tensor]:
    return [t.view(-1)[first : first + PART] for first in (0, ENDS)]


@orders
@pytest.mark.parametrize("shape", [(ENDS + 5003,), (3, 2**30), (2, 3, 2**29)], ids=str)
def test_elements_above_two_to_the_31(shape: tuple[int, ...], order: str) -> None:
    """Values, masks, codes and the gradients of the input at both ends, each with the scale of its channel."""
    x, axis = large(*shape), None if len(shape) == 1 else len(shape) - 2
    s = scales(1 if axis is None else shape[axis])
    own = [s[i : i + 1] for i in ((0, 0) if axis is None else (0, ENDS // shape[-1] % shape[axis]))]
    with on_host(order, only_ends=True):
        y, mask = native.fake_quant(x, s, None, -100, 90, axis, mask=True)
        codes = ops.quantize(x, s, None, -100, 90, axis)
        back = ops.dequantize(codes, s, None, axis)
        dx = native.fake_quant_backward(x, mask, [])
    for i, part in enumerate(ends(x)):
        wanted, inside = native.fake_quant(part.clone(), own[i], None, -100, 90, mask=True)
        assert_same(ends(y)[i], wanted)
        assert_same(mask[i * ENDS // 8 :][: PART // 8], inside)
        of_part = ops.quantize(part.clone(), own[i], None, -100, 90)
        assert_same(ends(codes)[i], of_part)
        assert_same(ends(back)[i], ops.dequantize(of_part, own[i]))
        assert_same(ends(dx)[i], native.fake_quant_backward(part.clone(), inside, []))


@orders
def test_reductions_above_two_to_the_31(order: str) -> None:
    """The gradient of the input, which the first and the last slice of the sums write."""
    x, s = large(ENDS + PART), scales(1)
    with on_host(order, only_ends=True):
        dx = native.fake_quant_learned_backward(x, x, s, None, -100, 90, None, 1, 0, 1.0)[0]
    for got, part in zip(ends(dx), ends(x), strict=True):
        assert_same(
            got, native.fake_quant_learned_backward(part.clone(), part.clone(), s, None, -100, 90, None, 1, 0, 1.0)[0]
        )


@orders
def test_pixels_above_two_to_the_31(order: str) -> None:
    """The last block of a max pool, whose indices need 64 bits."""
    shape, window = (3, 1, 2**15, 2**15), ([2], [2], [0], [1])
    x = torch.empty(shape, dtype=torch.bfloat16)
    corner = (slice(2, 3), slice(None), slice(-2, None), slice(-512, None))
    x[corner] = floats(torch.bfloat16)(1, 1, 2, 512)
    with on_host(order, only_ends=True):
        y, offsets = native.max_pool_offsets(x, *window, False)
        dx = native.max_pool_offsets_backward(y, offsets, list(shape), *window, False)
    wanted, places = native.max_pool_offsets(x[corner].contiguous(), *window, False)
    assert_same(y[-1:, :, -1:, -256:], wanted)
    assert_same(offsets[-1:, :, -1:, -256:], places)
    of_corner = native.max_pool_offsets_backward(wanted, places, [1, 1, 2, 512], *window, False)
    assert_same(dx[-1:, :, -1:, -256:], of_corner[:, :, -1:, -256:])
