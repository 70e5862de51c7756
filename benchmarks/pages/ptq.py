"""The accuracy of post-training quantization: ResNet-20 on CIFAR-10, W8A8, W4A8 and W4A4, beside other tools.

python -m benchmarks.pages.ptq                     measures what is missing, writes results/ptq.json and prints the tables
python -m benchmarks.pages.ptq --only qdrop brecq  some of the methods
python -m benchmarks.pages.ptq --quick             few images and few steps
python -m benchmarks.pages.ptq --page docs/accuracy.md    writes the tables of the results into the page, and ptq.svg beside it

All methods have the same calibration images, of the training images, and the same test images; the first and the last layer
have eight bits. Differences are those on the same images, with their standard errors; one below two standard errors is marked
by ~: other images may give it the other sign. NNCF's rows need an environment with benchmarks/peers/requirements.txt.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from benchmarks.export_models import resnet20_of
from benchmarks.pages.post_training.hits import accuracy, difference, hits_of, packed, unpacked
from benchmarks.pages.post_training.methods import ALL_BITS, OURS, Bits, Forward, Method, Network
from benchmarks.pages.post_training.others import OTHERS
from benchmarks.pages.post_training.plot import draw
from benchmarks.pages.stored import commands_of, made_by, rows_before, write_part, write_rows
from benchmarks.real_data import DATA, MISSING
from benchmarks.report import facts, markdown_lines, show
from benchmarks.training.cifar import load

RESULTS = Path(__file__).parents[1] / "results" / "ptq.json"
BEGIN, END = "<!-- begin: benchmarks/pages/ptq.py -->", "<!-- end -->"
METHODS: Mapping[str, Method] = {**OURS, **OTHERS}
FULL = {"images": 512, "steps": 100, "test_images": 10_000}
QUICK = {"images": 64, "steps": 2, "test_images": 100}
# Lines that quantize the same tensors of the network, by the same rule as far as both tools have it.
LIKE = (
    ("minmax", "quantize_static, minmax"),
    ("histogram, entropy", "quantize_static, entropy"),
    ("histogram, percentile", "quantize_static, percentile"),
    ("onnxruntime's", "quantize_static, own placement"),
    ("openvino's", "NNCF, performance"),
    ("openvino's", "NNCF, mixed"),
)


@dataclass(frozen=True)
class Row:
    """What a method gave with some bits.

    Attributes:
        method: A name of METHODS.
        bits: The name of a column.
        seconds: How long the method took, without the test images.
        hits: Which test images are classified correctly, as text; "" where there is no figure.
        failure: Why there is none.
    """

    method: str
    bits: str
    seconds: float = 0.0
    hits: str = ""
    failure: str = ""


def measure(name: str, bits: Bits, network: Network, test: tuple[Tensor, Tensor]) -> Row:
    """Quantize and test, or say why that cannot be."""
    start = time.perf_counter()
    torch.manual_seed(0)
    try:
        forward: Forward = METHODS[name].quantize(network, bits)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        return Row(name, str(bits), failure=" ".join(str(error).split())[:300])
    return Row(name, str(bits), time.perf_counter() - start, packed(hits_of(forward, *test)))


def table(results: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the names of columns and the lines: a line for each method."""
    count, of_float = results["test_images"], unpacked(results["float_hits"], results["test_images"])
    title = (
        f"ResNet-20, CIFAR-10: accuracy on {count:,} images, %, and its difference from the float model's "
        f"{accuracy(of_float):.2f} on the same images, ± standard error"
    )
    found = {(row["method"], row["bits"]): Row(**row) for row in results["rows"]}
    lines = []
    for name, method in METHODS.items():
        of = [found[name, str(bits)] for bits in ALL_BITS if (name, str(bits)) in found]
        if of:
            cells = {row.bits: _cell(row, of_float) for row in of if row.hits}
            why = "; ".join(dict.fromkeys(row.failure for row in of if row.failure))
            lines.append([method.group, name, *(cells.get(str(bits), "") for bits in ALL_BITS), why])
    return title, ["group", "method", *map(str, ALL_BITS), "why there is no figure"], lines


def _cell(row: Row, of_float: Tensor) -> str:
    hits = unpacked(row.hits, len(of_float))
    return f"{accuracy(hits):.2f} ({difference(hits, of_float)})"


def beside(results: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return the table of our lines beside those of other tools, on the same images."""
    hits = {(row["method"], row["bits"]): _hits(row, results["test_images"]) for row in results["rows"] if row["hits"]}
    lines = []
    for ours, other in LIKE:
        cells = [_difference(hits.get((ours, str(bits))), hits.get((other, str(bits)))) for bits in ALL_BITS]
        if any(cells):
            lines.append([ours, other, *cells])
    return "qtoolkit less the other tool, points", ["qtoolkit", "other tool", *map(str, ALL_BITS)], lines


def _hits(row: Mapping[str, Any], count: int) -> Tensor:
    return unpacked(row["hits"], count)


def _difference(of: Tensor | None, to: Tensor | None) -> str:
    return "" if of is None or to is None else str(difference(of, to))


def page_lines(results: Mapping[str, Any], plot: str) -> Iterator[str]:
    """Return the part of the page."""
    versions = ", ".join(f"{name} {number}" for name, number in results["tools"].items())
    yield from ("", f"![Accuracy by method and bits]({plot})", "")
    title, names, lines = table(results)
    yield f"{title}. Made by {made_by(results)} ({results['cpu']}, torch {results['torch']}, {versions})."
    failures = [(line[1], line[-1]) for line in lines if line[-1]]
    for group in dict.fromkeys(line[0] for line in lines):
        cells = [line[1:-1] for line in lines if line[0] == group and any(line[2:-1])]
        yield from ("", *markdown_lines([group, *names[2:-1]], cells))
    if failures:
        yield from ("", "Without a figure:", "", *(f"- {name}: {why}" for name, why in failures))
    title, names, lines = beside(results)
    if lines:
        yield from ("", f"{title}, on the same images:", "", *markdown_lines(names, lines))
    yield ""


def tools() -> dict[str, str]:
    """Return the versions of the other tools."""
    found = {}
    for name in ("onnxruntime", "nncf"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    """Measure, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--quick", action="store_true", help="few images and few steps of reconstruction")
    parser.add_argument("--test-images", type=int, help="of 10,000; fewer give larger standard errors")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="write the tables of --out into this page, and measure nothing")
    args = parser.parse_args()
    if args.page is not None:
        results = json.loads(args.out.read_text())
        draw(results, METHODS, args.page.with_name("ptq.svg"))
        return write_part(args.page, BEGIN, END, list(page_lines(results, "ptq.svg")))
    if DATA is None:
        parser.error(MISSING)
    torch.set_num_threads(args.threads)
    show_all(run(args, DATA))
    return None


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure what the file of results lacks, and return all results."""
    settings = dict(QUICK if args.quick else FULL)
    settings["test_images"] = args.test_images or settings["test_images"]
    wanted = {(name, str(bits)): bits for name in args.only for bits in METHODS[name].bits}
    before = rows_before(args.out, settings)
    rows = [row for row in before if row["hits"] or (row["method"], row["bits"]) not in wanted]  # failures: once more
    done = {(row["method"], row["bits"]) for row in rows}
    missing = [(name, bits) for (name, column), bits in wanted.items() if (name, column) not in done]
    data = load(folder, settings["images"], settings["test_images"])
    network = Network(resnet20_of(folder), data.train[0], settings["steps"])
    results: dict[str, Any] = {
        **facts("cpu"),
        **settings,
        "commands": commands_of(args.out),
        "tools": tools(),
        "threads": args.threads,
        "float_hits": packed(hits_of(network.model, *data.test)),
    }
    bar = tqdm(missing, desc="methods")
    for name, bits in bar:
        bar.set_postfix_str(f"{name}, {bits}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.append(asdict(measure(name, bits, network, data.test)))
        write_rows(args.out, results, rows)
    return {**results, "rows": rows}


def show_all(results: Mapping[str, Any]) -> None:
    """Print the tables."""
    for title, names, lines in (table(results), beside(results)):
        show(Console(width=180), title, names, lines)


if __name__ == "__main__":
    main()
