"""Build the one extension, qtoolkit._C, from csrc/: for the CPU always, for CUDA where a GPU and its compiler are."""

import os
import re
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
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
IS_SOURCE = "sdist" in sys.argv
INCLUDED = (".cpp", ".h", ".cuh")
INSTRUCTION_SETS = ("avx2", "avx512", "plain")
# The translation unit of a folder's files; of other folders "ops". These two only register, check, record and call: torch's
# headers and templates are what takes long in them, and a step spends nothing there.
UNITS = {"autograd": "layers", "layer": "layers", "cpu": "cpu"}
QUICKLY = ("layers", "ops")
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
    """Whether to compile CUDA sources: QTOOLKIT_CUDA=0/1 decides, else whether a GPU is visible and its compiler there."""
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
    return TYPES_WITH_CUDA.get(wanted, possible and torch.cuda.is_available())


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


def translation_units(files: list[Path]) -> list[str]:
    """Files in build/units, each of which includes the sources of several folders: most of the time goes into torch's headers.

    The instruction sets stay apart, since each sets a target for what it includes, and take as long as a folder. CUDA's
    sources are compiled one by one.
    """
    units: dict[str, list[Path]] = {}
    for file in files:
        name = file.stem if file.stem in INSTRUCTION_SETS else UNITS.get(file.parent.name, "ops")
        units.setdefault(name, []).append(file)
    place = ROOT / "build" / "units"
    place.mkdir(parents=True, exist_ok=True)
    for name, members in units.items():
        unit = place / f"{name}.cpp"
        quickly = name in QUICKLY and sys.platform == "linux"
        lines = (
            ['#pragma GCC optimize("O1")', '#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"'] if quickly else []
        )
        lines += [f'#include "../../{member.relative_to(ROOT)}"' for member in members]
        text = "\n".join(lines) + "\n"
        if not unit.exists() or unit.read_text() != text:  # a file with a new time would be compiled again
            unit.write_text(text)
    return [f"build/units/{name}.cpp" for name in units]


def sources_of(cuda: bool) -> list[str]:
    """What to compile; for a source distribution, all that could be."""
    others = {"python", *([] if cuda else ["cuda"])}
    files = [p for p in sorted((ROOT / "csrc").rglob("*.c*")) if p.parent.name not in others]
    kernels = [str(p.relative_to(ROOT)) for p in files if p.suffix == ".cu"]
    files = [p for p in files if p.suffix == ".cpp"]
    return [*kernels, *([str(p.relative_to(ROOT)) for p in files] if IS_SOURCE else translation_units(files))]


def extension(cuda: bool) -> object:
    sources = sources_of(cuda)
    # What the units include; without it, a change of these would build nothing.
    included = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").rglob("*")) if p.suffix in INCLUDED]
    # The library has no Python in it: one build serves every version of Python.
    common = {"depends": [*included, EXPORTS], "py_limited_api": True}
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


@contextmanager
def short_lines() -> Iterator[None]:
    """Of the compiler's commands, which ninja prints whole, print the number and the name of the file alone."""
    sys.stdout.flush()
    read, write = os.pipe()
    before = os.dup(1)
    os.dup2(write, 1)
    os.close(write)

    def copy() -> None:
        with open(read, errors="replace") as lines, open(before, "w", closefd=False) as terminal:
            for line in lines:
                command = re.match(r"(\[\d+/\d+\]) .*? -c (?:-o )?\S*?((?:csrc|tests|units)/\S+\.\w+)", line)
                print(" ".join(command.groups()) if command else line.rstrip(), file=terminal, flush=True)

    reader = threading.Thread(target=copy)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        reader.join()
        os.close(before)


class Build(cpp_extension.BuildExtension):
    """Compiles only what changed since the last build of its kind, by pip too."""

    def finalize_options(self) -> None:
        """Name the folder of object files: pip would give a new one each time."""
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"torch-{torch.__version__}-{KERNELS}")

    def build_extensions(self) -> None:
        with short_lines():
            super().build_extensions()


CUDA = with_cuda() and "QTOOLKIT_SANITIZE" not in os.environ
# The library is for one minor version of torch (docs/packaging.md). So is a wheel, which requires that version.
MINOR = ".".join(torch.__version__.split(".")[:2])
KERNELS = f"cu{torch.version.cuda.replace('.', '')}" if CUDA else "cpu"
# A relative link or image of Markdown: its "!", its text and its path.
RELATIVE = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\((?!\w+:)([^()\s]+)\)")


def version_tag() -> str:
    """Return what follows the version: .post214 for torch 2.14, and a local label, +cu130, for CUDA kernels.

    The package index takes post-releases and refuses local labels. pip refuses a source distribution that builds a wheel of
    another version, so a wheel from one has no tag.
    """
    if IS_SOURCE or (ROOT / "PKG-INFO").exists():
        return ""
    major, minor = map(int, MINOR.split("."))
    return f".post{100 * major + minor}" + (f"+{KERNELS}" if CUDA else "")


def source_address() -> str | None:
    """Return the repository's address: `Source` in [project.urls] of pyproject.toml."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return urls.get("Source")


def long_description(readme: str, address: str | None) -> str:
    """Return a readme without relative links, which lead nowhere on a package index.

    They lead to the repository's address. Without an address, links become plain text, and images are left out.
    """

    def absolute(found: re.Match[str]) -> str:
        image, text, path = found.groups()
        if address is not None:
            return f"{image}[{text}]({address}/{'raw' if image else 'blob'}/HEAD/{path})"
        return "" if image else text

    where = (
        "" if address is not None else "\nThe pages that this text names are in the folder `docs` of the repository.\n"
    )
    return RELATIVE.sub(absolute, readme) + where


setup(
    long_description=long_description((ROOT / "README.md").read_text(), source_address()),
    long_description_content_type="text/markdown",
    install_requires=["torch>=2.11" if IS_SOURCE else f"torch=={MINOR}.*", "numpy", "tqdm>=4.57"],
    ext_modules=[extension(CUDA), snapshot()],
    cmdclass={"build_ext": Build},
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        "egg_info": {"tag_build": version_tag()},
    },
)
