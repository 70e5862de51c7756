"""The step of one layer on codes against the same step in float, by the number of positions, interleaved in one run.

OMP_NUM_THREADS=1 python -m benchmarks.pages.small_layers               prints the table
OMP_NUM_THREADS=1 python -m benchmarks.pages.small_layers --json FILE   writes the figures too
python -m benchmarks.pages.small_layers --page docs/design/performance.md  writes the table of benchmarks/results into the page
python -m benchmarks.pages.small_layers --device cuda [--autocast]      the same on a GPU, with more positions

A position is an output pixel of a convolution or a row of a linear layer: each multiplies the whole weight once. Each case is
a layer with its batch norm and ReLU between two pointwise convolutions, forward and backward, the least of the rounds.
On the CPU "auto" takes float below `qtoolkit.nn.on_codes.least_positions`, which is fitted to this table; on a GPU it is
float. --autocast compares with steps in bfloat16.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import Pace, sample, take_turns
from benchmarks.op_cases.integer_layer import Layer, step_of
from benchmarks.pages.stored import write_part, write_rows
from benchmarks.report import facts, markdown_lines
from qtoolkit.nn.on_codes import HAS_INT8

RESULTS = Path(__file__).parents[1] / "results" / "small_layers.json"
BEGIN, END = "<!-- begin: benchmarks/pages/small_layers.py -->", "<!-- end -->"
COLUMNS = ("layer", "positions", "auto: int8 kernel from", "float, ms", "integer", "auto")
FORWARDS = ("float", "integer", "auto")
SIZES = ((2, 1), (2, 2), (2, 4), (2, 8), (2, 16), (2, 28), (1, 56))  # images and their height
SIZES_ON_GPU = ((1, 4), (8, 7), (64, 7), (64, 14), (64, 28), (64, 56))


LAYERS = (Layer(64, 64, 3), Layer(256, 256, 3), Layer(512, 512, 3), Layer(64, 256, 1), Layer(96, 96, 3, 96))


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step in float, and its multiples by the other arithmetics."""

    layer: str
    positions: int
    least: int
    float_step: float
    integer: float
    auto: float


@dataclass(frozen=True)
class Place:
    """Where steps run, and whether their layers compute in bfloat16."""

    device: str = "cpu"
    autocast: bool = False

    def run(self, step: Callable[[], None]) -> None:
        """Run a step to its end."""
        with torch.autocast(self.device, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            step()
        if self.device != "cpu":
            torch.cuda.synchronize()


def least_times(steps: Mapping[str, Callable[[], None]], seconds: float, place: Place) -> dict[str, float]:
    """Return the least milliseconds of each step; they take turns for some seconds, after two runs that do not count."""
    samples = {name: partial(sample, partial(place.run, step)) for name, step in steps.items()}
    times = take_turns(samples, Pace(sys.maxsize, seconds))
    return {name: 1e3 * min(taken[2:]) for name, taken in times.items()}


def row_of(layer: Layer, images: int, size: int, seconds: float, place: Place) -> Row:
    """Measure one case."""
    made = {forward: step_of(layer, images, size, forward, place.device) for forward in FORWARDS}
    times = least_times({forward: step for forward, (step, _) in made.items()}, seconds, place)
    ratios = (times[forward] / times["float"] for forward in FORWARDS[1:])
    return Row(str(layer), images * size * size, made["auto"][1], times["float"], *ratios)


def lines_of(rows: Sequence[Row]) -> list[list[str]]:
    """Return the rows in words, in the order of COLUMNS."""
    return [
        [
            row.layer,
            f"{row.positions:,}",
            f"{row.least:,}",
            *(f"{n:.2f}" for n in (row.float_step, row.integer, row.auto)),
        ]
        for row in rows
    ]


def write_page(page: Path) -> None:
    """Write the stored figures into a page."""
    results = json.loads(RESULTS.read_text())
    rows = [Row(**row) for row in results["rows"]]
    made = f"{results['cpu']}, torch {results['torch']}, int8 kernels {results['kernels']}"
    where = f"{made}, one thread; multiples of the step in float."
    write_part(page, BEGIN, END, [where, "", *markdown_lines(COLUMNS, lines_of(rows)), ""])


def main() -> None:
    """Run, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each case")
    parser.add_argument("--few", action="store_true", help="the first layer at two sizes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.page is not None:
        write_page(args.page)
        return
    place = Place(args.device, args.autocast)
    sizes = SIZES if args.device == "cpu" else SIZES_ON_GPU
    cases = list(product(LAYERS[:1], sizes[:2])) if args.few else list(product(LAYERS, sizes))
    rows = [row_of(layer, *size, args.seconds, place) for layer, size in tqdm(cases, desc="layers")]
    kernels = ("used" if HAS_INT8 else "missing or not exact") if args.device == "cpu" else "products of matrices"
    where = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name()
    table = Table(
        title=f"{where}; torch's int8 kernels: {kernels}; ratios to {'bfloat16' if args.autocast else 'float'}"
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "layer" else "right")
    for line in lines_of(rows):
        table.add_row(*line)
    Console().print(table)
    if args.json is not None:
        write_rows(args.json, {**facts(args.device), "kernels": kernels}, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
