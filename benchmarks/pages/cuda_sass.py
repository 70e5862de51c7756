"""What the compiled CUDA kernels take: registers, occupancy, and instructions for each element. Counted, not timed.

python -m benchmarks.pages.cuda_sass                   prints the tables, from the built library
python -m benchmarks.pages.cuda_sass --library FILE    those of another build
python -m benchmarks.pages.cuda_sass --write           writes results/cuda_sass.json and the table of the page on design too

It needs no GPU: it reads the machine code with cuobjdump, which comes with CUDA and with Triton. A loop is the shortest path
from the load of a vector of 8 elements back to it, among those that round and store 8 elements; an instruction on it counts
whether or not its predicate holds. The roof is the number of instructions for each element at which the processors' issue
slots are full when memory is: more than that, and the kernel waits for instructions.
"""

import argparse
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from benchmarks.pages.stored import commands_of, write_part, write_rows
from benchmarks.report import markdown_lines, show

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "qtoolkit" / "_C.abi3.so"
OUT = ROOT / "benchmarks" / "results" / "cuda_sass.json"
PAGE = ROOT / "docs" / "design" / "performance.md"
BEGIN, END = (
    "<!-- Written by benchmarks/pages/cuda_sass.py: change nothing up to the next mark. -->",
    "<!-- End of its table. -->",
)
ELEMENTS = 8  # of a vector
WARP = 32
ISSUED = 4 * WARP  # instructions of threads that a multiprocessor issues in a cycle


@dataclass(frozen=True)
class Processor:
    """A GPU's memory and multiprocessors, from its data sheet and the CUDA programming guide's table of capabilities."""

    name: str
    bytes_per_second: float
    multiprocessors: int
    clock: float  # Hz, under load
    shared_bytes: int  # of a multiprocessor
    threads: int = 2048
    registers: int = 65536
    blocks: int = 32

    def roof(self, bytes_per_element: float) -> float:
        """Return the instructions for each element that fit into the time in which memory moves it."""
        bytes_per_cycle = self.bytes_per_second / self.multiprocessors / self.clock
        return ISSUED * bytes_per_element / bytes_per_cycle

    def occupancy(self, registers: int, shared: int, threads: int) -> float:
        """Return the share of the threads that a multiprocessor can hold which blocks of a kernel fill."""
        warps = threads // WARP
        of_a_warp = -(-max(registers, 1) * WARP // 256) * 256
        fits = [self.blocks, self.threads // threads, self.registers // of_a_warp // warps]
        fits.append(self.shared_bytes // (shared + 1024))  # the system takes 1 KiB for each block
        return min(fits) * threads / self.threads


PROCESSORS = {
    "sm_80": Processor("A100 80 GB", 2.039e12, 108, 1.41e9, 164 << 10),
    "sm_90": Processor("H100 SXM", 3.35e12, 132, 1.7e9, 228 << 10),
}


@dataclass(frozen=True)
class Kernel:
    """The resources of a compiled kernel. Spilled registers are on the stack."""

    architecture: str
    symbol: str
    registers: int
    stack: int
    shared: int
    local: int

    @property
    def name(self) -> str:
        """Name and template arguments, as the compiler abbreviates them."""
        return re.sub(
            r"E+v(NS|PK?|R|K).*$",
            "",
            re.sub(r"^_ZN8qtoolkit4cuda(\d+_GLOBAL__N__\w+?_cu_[0-9a-f]{8})?\d+", "", self.symbol),
        )

    @property
    def threads(self) -> int:
        """Of a block, as the launches give them."""
        return 1024 if self.name.startswith("grow_kernel") else 256

    @property
    def occupancy(self) -> float:
        """In theory, with only this kernel on the processor."""
        return PROCESSORS[self.architecture].occupancy(self.registers, self.shared, self.threads)


def cuobjdump() -> str | None:
    """Return the path of the program, or None where it is not installed."""
    triton = find_spec("triton")
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", os.environ.get("PATH", "")]
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def dumped(library: Path, *options: str) -> str:
    """Return what cuobjdump prints about a library.

    Raises:
        SystemExit: cuobjdump is not installed.
    """
    program = cuobjdump()
    if program is None:
        raise SystemExit("cuobjdump is not installed; it comes with CUDA and with Triton: pip install triton.")
    return subprocess.run([program, *options, str(library)], capture_output=True, text=True, check=True).stdout


def has_kernels(library: Path) -> bool:
    """Whether a library was built with CUDA."""
    return b".nv_fatbin" in library.read_bytes()


def kernels_of(library: Path) -> list[Kernel]:
    """Return the kernels of a library for each architecture that it is built for; none in a build without CUDA."""
    if not has_kernels(library):  # cuobjdump fails
        return []
    kernels, architecture, symbol = [], "", ""
    for line in dumped(library, "--dump-resource-usage").splitlines():
        if found := re.match(r"arch = (\w+)", line):
            architecture = found[1]
        elif found := re.match(r" Function (\w+):", line):
            symbol = found[1]
        elif found := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            kernels.append(Kernel(architecture, symbol, *map(int, found.groups())))
    return sorted(kernels, key=lambda k: (k.architecture, -k.registers, k.name))


Code = dict[int, str]  # instructions by address
Place = tuple[int, tuple[int, ...]]  # an address, and what a path that leads there still needs


def code_of(library: Path, kernel: Kernel) -> Code:
    """Return the machine code of a kernel."""
    text = dumped(library, "-sass", "-arch", kernel.architecture, "-fun", kernel.symbol)
    lines = re.finditer(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text, re.MULTILINE)
    return {int(line[1], 16): line[2] for line in lines}


def successors_of(code: Code) -> dict[int, list[int]]:
    """Return the addresses to which control can go from each instruction. A call is a slow path, and goes nowhere."""
    addresses = sorted(code)
    following = dict(pairwise(addresses))
    successors = {}
    for address, text in code.items():
        is_conditional = text.startswith("@")
        name, _, operands = (text.split(" ", 1)[1] if is_conditional else text).partition(" ")
        successors[address] = [following[address]] if address in following else []
        if name.split(".")[0] not in ("BRA", "EXIT", "RET", "CALL"):
            continue
        if not is_conditional and ".U" not in name:
            successors[address] = []
        if name.startswith("BRA"):
            successors[address].append(int(re.findall(r"0x([0-9a-f]+)", operands)[-1], 16))
    return successors


def shortest(code: Code, begin: int, end: int, needs: Mapping[str, int], without: str = "(?!)") -> list[int] | None:
    """Return the shortest path that has each of the instructions as often as `needs` says, and none like `without`."""
    successors = successors_of(code)
    matches = {a: tuple(bool(re.search(need, text)) for need in needs) for a, text in code.items()}
    allowed = {a for a, text in code.items() if not re.search(without, text)}
    start = (begin, tuple(needs.values()))
    before: dict[Place, Place | None] = {start: None}
    waiting = deque([start])
    while waiting:
        at = waiting.popleft()
        left = tuple(max(n - found, 0) for n, found in zip(at[1], matches[at[0]], strict=True))
        for successor in successors[at[0]]:
            if successor == end and not any(left):
                return path_to(at, before)
            if (successor, left) not in before and successor in allowed:
                before[successor, left] = at
                waiting.append((successor, left))
    return None


def path_to(place: Place, before: Mapping[Place, Place | None]) -> list[int]:
    """Return the addresses up to a place."""
    path = []
    at: Place | None = place
    while at is not None:
        path.append(at[0])
        at = before[at]
    return path[::-1]


@dataclass(frozen=True)
class Loop:
    """A loop to count: of which kernel, and the instructions that tell it from the others there."""

    title: str
    kernel: str  # of the symbol
    bytes_per_element: float
    load: str
    loads: int
    needs: Mapping[str, int]
    without: str = "(?!)"
    elements: int = ELEMENTS
    loops: bool = True  # else it is the whole kernel, whose threads compute some elements each
    inner: "Loop | None" = None  # a loop in it, on which a thread goes so many times more than once
    times: int = 0


TYPES = {"float32": "f", "bfloat16": "13__nv_bfloat16", "float16": "6__half"}  # as symbols have them
WIDE = {"float32": 2, "bfloat16": 1, "float16": 1}  # vectors of 16 bytes for 8 elements
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
ROUNDED = {"float32": {}, "bfloat16": {r"F2FP\.BF16": 4}, "float16": {r"F2FP\.(F16\.F32\.)?PACK": 4}}
WITHOUT = {"float32": "(?!)", "bfloat16": r"HADD2\.F32", "float16": "(?!)"}  # unpacking of another dtype


def loops() -> Iterator[Loop]:
    """Return the loops of dense tensors that a training step runs."""
    yield from fake_quant_loops()
    for dtype in SIZES:
        yield from batch_norm_loops(dtype)
    yield from attention_loops()
    # Four pixels of 8 channels, four windows that hold them, nine gradients for them and those of padding beside them.
    needs, kernel = {r"STG\.E\.128": 4, "BF16": 9 * ELEMENTS // 2}, "pool_backward_kernelIfLi8Ej"
    title, bytes_per_element = "max pool 3x3/2 backward, bfloat16, channels_last", 2 + 3 / 4
    yield Loop(title, kernel, bytes_per_element, r"LDG\.E\.128", 4, needs, elements=4 * ELEMENTS, loops=False)


def fake_quant_loops() -> Iterator[Loop]:
    """Return those of fake_quant and of the backward of its learned scale."""
    forward, backward = (
        "elementwise_kernelIfNS.*IntegerFunctorELb0E",
        "learned_backward_kernelIf{}NS.*{}ELb0E.*LearnedGradient",
    )
    for dtype, size in SIZES.items():
        load, wide, without = r"LDG\.E\.128", WIDE[dtype], WITHOUT[dtype]
        needs = {r"STG\.E\.128": wide, "FRND": ELEMENTS, **ROUNDED[dtype]}
        kinds: dict[str, tuple[dict[str, int], float]] = {
            "per tensor": ({}, 0),
            "per tensor, mask": ({r"STG\.E\.U8": 1}, 1 / 8),
            "per channel, mask": ({r"STG\.E\.U8": 1, r"I2F\.U32\.RP": 2}, 1 / 8),
        }
        for kind, (of_kind, mask) in kinds.items():
            title = f"fake_quant, {dtype}, {kind}"
            yield Loop(title, forward, 2 * size + mask, load, wide, {**needs, **of_kind}, without)
        title, kernel = (
            f"learned backward, {dtype}, planes of whole vectors",
            backward.format(TYPES[dtype], "Contiguous"),
        )
        yield Loop(title, kernel, 3 * size, load, 2 * wide, needs, without)
        each = "" if dtype == "float32" else r"\.U16"
        needs = {rf"STG\.E{each} ": ELEMENTS, **dict.fromkeys(ROUNDED[dtype], 1)}
        title, kernel = f"learned backward, {dtype}, planes of 7x7", backward.format(TYPES[dtype], "Scattered")
        yield Loop(title, kernel, 3 * size, rf"LDG\.E{each} ", 2 * ELEMENTS, needs, without)


COPIED = r"LDGSTS\.E"  # whole vectors, to the memory of the block (csrc/cuda/stream.cuh)
# How the channels of batch norm lie in vectors of 8 elements (csrc/cuda/norm_channels.cuh), and how the vectors are loaded.
LAYOUTS = {
    "planes of whole vectors": (0, COPIED),
    "planes of 7x7": (1, r"LDG\.E\.128"),
    "channels_last": (2, COPIED),
}


def batch_norm_loops(dtype: str) -> Iterator[Loop]:
    """Return those of batch norm with a quantizer with a learned scale behind it, and its gradients."""
    size, wide = SIZES[dtype], WIDE[dtype]
    needs = {r"STG\.E\.128": wide, **ROUNDED[dtype], "FRND": ELEMENTS}
    for layout, (spread, load) in LAYOUTS.items():
        kernel = f"norm_{{}}_kernelI{TYPES[dtype]}LNS.*SpreadE{spread}E"
        title, codes = f"batch norm, {dtype}, {layout}", {r"STG\.E\.64": 1}
        yield Loop(title, kernel.format("forward"), 2 * size + 1, load, wide, {**needs, **codes})
        title, learned = f"batch norm backward, {dtype}, {layout}", "LNS.*LearnedE1E"
        yield Loop(title, kernel.format("backward") + learned, 3 * size, load, 2 * wide, needs)
    yield from row_loops(dtype)
    for layout, walk in {"planes of whole vectors": "Contiguous", "planes of 7x7": "Scattered"}.items():
        yield from plane_loops(dtype, layout, walk)


def attention_loops() -> Iterator[Loop]:
    """Return those of a row of scores of 256 keys: a thread of its warp has eight of them."""
    kernel, exponentials = "attention_weights_kernelI13__nv_bfloat16.*Li32ELi8ELb{:d}", {r"MUFU\.EX2": ELEMENTS}
    for title, backward in (("attention weights", False), ("attention weights backward", True)):
        of_each = ELEMENTS * (1 + backward)  # scores; weights; a gradient read and one written
        needs = {**exponentials, "FRND": ELEMENTS, r"STG\.E\.U16": of_each}
        name, bytes_per_element = f"{title}, bfloat16, 256 keys", 8 if backward else 4
        yield Loop(name, kernel.format(backward), bytes_per_element, r"LDG\.E\.U16", of_each, needs)


def row_loops(dtype: str) -> Iterator[Loop]:
    """Return the loops of batch norm's moments and of the sums of its gradients in channels_last.

    A loop has 8 rows of 8 channels, whose sums it adds to those in float64; two rows are a loop in it. Of the moments the first
    row is before that, and the last one behind it.
    """
    size, wide, elements = SIZES[dtype], WIDE[dtype], ELEMENTS**2
    title, kernel = f"batch norm moments, {dtype}, channels_last", f"row_moments_kernelI{TYPES[dtype]}E"
    two = Loop(title, kernel, size, COPIED, 2 * wide, {})
    yield Loop(title, kernel, size, COPIED, 4 * wide, {"DADD": 2 * ELEMENTS}, elements=elements, inner=two, times=2)
    title, kernel = f"batch norm sums, {dtype}, channels_last", f"row_sums_kernelI{TYPES[dtype]}E"
    two = Loop(title, kernel, 2 * size, COPIED, 4 * wide, {})
    yield Loop(title, kernel, 2 * size, COPIED, 4 * wide, {"DADD": 2 * ELEMENTS}, elements=elements, inner=two, times=3)


def plane_loops(dtype: str, layout: str, walk: str) -> Iterator[Loop]:
    """Return the same loops where a thread has elements of one channel."""
    size, of, needs = SIZES[dtype], TYPES[dtype], {"DADD": 2}
    loads, load, moments, sums = WIDE[dtype], COPIED, f"plane_moments_kernelI{of}E", f"plane_sums_kernelI{of}E"
    if walk == "Scattered":
        loads, load = ELEMENTS, r"LDG\.E " if dtype == "float32" else r"LDG\.E\.U16"
        moments, sums = f"14moments_kernelI{of}NS.*{walk}E", f"11sums_kernelI{of}NS.*{walk}E"
    yield Loop(f"batch norm moments, {dtype}, {layout}", moments, size, load, loads, needs)
    yield Loop(f"batch norm sums, {dtype}, {layout}", sums, 2 * size, load, 2 * loads, needs)


@dataclass(frozen=True)
class Count:
    """The instructions of a loop for each element, and before the first; the roof is that of the memory."""

    loop: str
    architecture: str
    instructions: float
    start: int
    roof: float


def loads_on(path: Sequence[int], loop: Loop, code: Code) -> int:
    """Return how many of the loop's loads are on a path: more than it has, if the path goes through another loop too."""
    return sum(bool(re.search(loop.load, code[address])) for address in path)


def counted(loop: Loop, kernel: Kernel, code: Code) -> Count | None:
    """Count a loop; None if the kernel does not have it."""
    needs = {loop.load: loop.loads, **loop.needs}
    roof = round(PROCESSORS[kernel.architecture].roof(loop.bytes_per_element), 1)
    if not loop.loops:
        ends = [address for address, text in code.items() if text.startswith("EXIT")]
        whole = [path for end in ends if (path := shortest(code, min(code), end, needs, loop.without)) is not None]
        return Count(loop.title, kernel.architecture, min(map(len, whole)) / loop.elements, 0, roof) if whole else None
    path = shortest_loop(loop, code)
    if path is None:
        return None
    inner = [] if loop.inner is None else loop.times * (shortest_loop(loop.inner, code) or [])
    scale = {} if any("LDG.E.CONSTANT" in code[a] for a in path) else {r"LDG\.E\.CONSTANT": 1, r"MUFU\.RCP": 1}
    start = shortest(code, min(code), path[0], scale) or shortest(code, min(code), path[0], {}) or []
    instructions = (len(path) + len(inner)) / loop.elements
    return Count(loop.title, kernel.architecture, instructions, len(start), roof)


def shortest_loop(loop: Loop, code: Code) -> list[int] | None:
    """Return the shortest path of a loop, from one of its loads back to it."""
    needs = {loop.load: loop.loads, **loop.needs}
    paths: list[list[int]] = []
    for address in (a for a, text in code.items() if re.search(loop.load, text)):
        if any(address in path and loads_on(path, loop, code) == loop.loads for path in paths):
            continue  # the same loop
        path = shortest(code, address, address, needs, loop.without)
        paths += [] if path is None else [path]
    return min(paths, key=len, default=None)


def counts_of(library: Path, kernels: Sequence[Kernel]) -> Iterator[Count]:
    """Count the loops of a library."""
    codes: dict[Kernel, Code] = {}
    for loop in loops():
        for kernel in kernels:
            if re.search(loop.kernel, kernel.symbol):
                if kernel not in codes:
                    codes[kernel] = code_of(library, kernel)
                count = counted(loop, kernel, codes[kernel])
                if count is not None:
                    yield count


def of_both(counts: Sequence[Count]) -> tuple[list[str], list[list[str]]]:
    """Return the names of columns and the cells of a table with a row for each loop."""
    names, cells = ["op"], []
    for architecture, processor in PROCESSORS.items():
        names += [f"{processor.name}, {architecture}: in the loop", "roof", "once a thread"]
    for title in dict.fromkeys(count.loop for count in counts):
        found = {count.architecture: count for count in counts if count.loop == title}
        figures = [(f"{found[a].instructions:.1f}", f"{found[a].roof:.1f}", str(found[a].start)) for a in PROCESSORS]
        cells.append([title, *(figure for of_one in figures for figure in of_one)])
    return names, cells


def main() -> None:
    """Count, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    kernels = [k for k in kernels_of(args.library) if k.architecture in PROCESSORS]
    if {k.architecture for k in kernels} != set(PROCESSORS):
        raise SystemExit(
            f"{args.library} must have kernels for {' and '.join(PROCESSORS)}; build with QTOOLKIT_CUDA=1."
        )
    console = Console(width=170)
    counts = list(counts_of(args.library, kernels))
    names, cells = of_both(counts)
    show(console, "instructions for each element", names, cells)
    rows = [[k.architecture, k.name, str(k.registers), str(k.stack + k.local), f"{k.occupancy:.1%}"] for k in kernels]
    show(console, "kernels", ["architecture", "op", "registers", "bytes spilled", "occupancy"], rows)
    if args.write:
        facts = {"loops": [asdict(count) for count in counts], "commands": commands_of(OUT)}
        resources = [{"name": k.name, **asdict(k), "occupancy": k.occupancy} for k in kernels]
        write_rows(OUT, facts, [{name: row[name] for name in row if name != "symbol"} for row in resources])
        write_part(PAGE, BEGIN, END, ["", *markdown_lines(names, cells), ""])


if __name__ == "__main__":
    main()
