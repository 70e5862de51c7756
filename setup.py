"""Build the one extension, qtoolkit._C, from csrc/: for the CPU always, for CUDA where its compiler is."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

# Where only a wrapper of nvcc is on PATH, torch takes the wrapper's folder for the toolkit's: name the toolkit itself.
TOOLKIT = Path("/usr/local/cuda")
if "CUDA_HOME" not in os.environ and (TOOLKIT / "bin" / "nvcc").exists():
    os.environ["CUDA_HOME"] = str(TOOLKIT)

try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    sys.exit(
        "qtoolkit builds against the torch that you run, which an isolated build does not see. Install torch 2.11 or "
        "newer first, then type: pip install --no-build-isolation ."
    )

ROOT = Path(__file__).parent
EXPORTS = "csrc/exports.map"  # what the library shows to the linker
TYPES_WITH_CUDA = {"0": False, "1": True}
# What QTOOLKIT_SANITIZE may name (make sanitize): flags, and what is compiled in beside the library.
SANITIZERS = {
    "address": (
        ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-fno-wrapv"],
        ["faults"],
    ),
    "thread": (["-fsanitize=thread"], ["faults", "threads"]),
}


def with_cuda() -> bool:
    """Whether to compile CUDA sources: QTOOLKIT_CUDA=0/1 decides, else whether torch and the machine have CUDA."""
    wanted = os.environ.get("QTOOLKIT_CUDA", "")
    if wanted not in ("", *TYPES_WITH_CUDA):
        sys.exit(f"QTOOLKIT_CUDA must be 0 or 1, got {wanted!r}.")
    possible = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    if TYPES_WITH_CUDA.get(wanted, False) and not possible:
        sys.exit(
            f"QTOOLKIT_CUDA=1 asks for CUDA kernels, which need a CUDA build of torch (this one has CUDA "
            f"{torch.version.cuda}) and a CUDA toolkit (CUDA_HOME is {cpp_extension.CUDA_HOME}). Set CUDA_HOME, or "
            f"QTOOLKIT_CUDA=0 for the CPU alone."
        )
    return TYPES_WITH_CUDA.get(wanted, possible)


def choose_architectures() -> None:
    """Where no GPU is visible, build for two data-centre generations; torch detects visible ones. Both add PTX."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")


def sanitized(sources: list[str], flags: list[str]) -> object:
    """The library for the CPU with a sanitizer in it, and faults for it to find."""
    wanted = os.environ["QTOOLKIT_SANITIZE"]
    if wanted not in SANITIZERS:
        sys.exit(f"QTOOLKIT_SANITIZE must be address or thread, got {wanted!r}; unset it for an ordinary build.")
    extra, beside = SANITIZERS[wanted]
    slower = ["-O1", "-g1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS"]
    return cpp_extension.CppExtension(
        "qtoolkit._C",
        [*sources, *(f"tests/sanitize/{name}.cpp" for name in beside)],
        extra_compile_args=[*flags, *extra, *slower],
        extra_link_args=extra,
        py_limited_api=True,
    )


def extension(cuda: bool) -> object:
    others = {"python", *([] if cuda else ["cuda"])}
    sources = [
        str(p.relative_to(ROOT))
        for p in sorted((ROOT / "csrc").rglob("*"))
        if p.suffix in (".cpp", ".cu") and p.parent.name not in others
    ]
    headers = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").rglob("*")) if p.suffix in (".h", ".cuh")]
    # The library has no Python in it: one build serves every version of Python.
    common = {"depends": [*headers, EXPORTS], "py_limited_api": True}
    # The names of functions are a tenth of the library, and serve debuggers and profilers alone (docs/performance.md).
    if sys.platform == "linux":
        common["extra_link_args"] = ["-Wl,-s", f"-Wl,--version-script={ROOT / EXPORTS}"]
    # No contraction into fused multiply-adds: every back end computes the same bits (csrc/grid.h). ATen's parallel_for runs
    # on one thread unless the compiler has OpenMP on; its library is torch's own, so it is not linked again.
    flags = {"cxx": ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall"]}
    flags["cxx"] += [] if sys.platform == "darwin" else ["-fopenmp"]  # Apple's compiler has no OpenMP
    if "QTOOLKIT_SANITIZE" in os.environ:
        return sanitized(sources, flags["cxx"])
    if not cuda:
        return cpp_extension.CppExtension("qtoolkit._C", sources, extra_compile_args=flags, **common)
    choose_architectures()
    flags["nvcc"] = ["-O3", "--fmad=false", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
    flags["nvcc"] += ["-Xfatbin=-compress-all"]  # to a fifth
    # To an eighth, if torch's own kernels are packed so: every driver that loads them unpacks ours.
    flags["nvcc"] += [flag for flag in ["-compress-mode=size"] if flag in torch.__config__.show()]
    return cpp_extension.CUDAExtension(
        "qtoolkit._C",
        sources,
        extra_compile_args=flags,
        define_macros=[("QTOOLKIT_CUDA", None)],
        **common,
    )


def snapshot() -> Extension:
    """Compares attributes of Python objects: for Python's stable ABI, without torch."""
    return Extension(
        "qtoolkit._snapshot",
        ["csrc/python/snapshot.cpp"],
        extra_compile_args={"cxx": ["-O3", "-g0", "-Wall"]},
        py_limited_api=True,
    )


class Build(cpp_extension.BuildExtension):
    """Compiles only what changed since the last build for the same torch, by pip too."""

    def finalize_options(self) -> None:
        """Name the folder of object files: pip would give a new one each time."""
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"torch-{torch.__version__}")


CUDA = with_cuda() and "QTOOLKIT_SANITIZE" not in os.environ
IS_SOURCE = "sdist" in sys.argv
# The library is of one minor version of torch (docs/packaging.md): so is a wheel, which says so in its name and asks for it.
MINOR = ".".join(torch.__version__.split(".")[:2])
KERNELS = f"cu{torch.version.cuda.replace('.', '')}" if CUDA else "cpu"

setup(
    install_requires=["torch>=2.11" if IS_SOURCE else f"torch=={MINOR}.*", "numpy", "tqdm>=4.57"],
    ext_modules=[extension(CUDA), snapshot()],
    cmdclass={"build_ext": Build},
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        "egg_info": {"tag_build": "" if IS_SOURCE else f"+torch{MINOR}.{KERNELS}"},
    },
)
