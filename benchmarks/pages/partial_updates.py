"""What a training of some output channels costs and gives: ResNet-20 on CIFAR-10, shares of the channels, several seeds.

python -m benchmarks.pages.partial_updates                 trains what is missing, writes the results, prints them
python -m benchmarks.pages.partial_updates --bits 4 --shares 1 0.25 --seeds 0 --images 10000
python -m benchmarks.pages.partial_updates --page docs/design/trainings.md     writes the table and the plot into the page

Each training starts from the float weights of shared/data, with learned scales ("lsq"); the first and the last layer have
eight bits. Images are cropped and flipped at random; the accuracy is that on the 10,000 test images. The time of a step is
processor time, of one thread. A training that was ended goes on after its last whole epoch (--checkpoints), and one with a
result is not repeated. Seeds take turns.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks.pages.stored import rows_before, write_part
from benchmarks.real_data import DATA, MISSING
from benchmarks.report import markdown_lines, show
from benchmarks.training.algorithms import build
from benchmarks.training.cifar import CALIBRATION, Data, Run, Schedule, accuracy, load
from benchmarks.training.cifar_networks import NETWORKS
from benchmarks.training.sweep import add_options, checkpoints_of, images_of, lines_of, mean_and_spread, train_all

RESULTS = Path(__file__).parents[1] / "results" / "partial_updates.json"
NETWORK, SUBJECT = "resnet20", "lsq"
SEEDS, BITS, SHARES, RULES = (0, 1, 2), (4,), (1, 0.5, 0.25, 0.1, 0.05, 0), ("magnitude", "rotation")
BEGIN, END = "<!-- begin: benchmarks/pages/partial_updates.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        bits: Of weights and activations.
        share: Of the output channels that a step updates.
        by: How they are chosen.
        seed: Of the order and the crops of the images.
        epochs: How long.
    """

    bits: int
    share: float
    by: str
    seed: int
    epochs: int

    @property
    def name(self) -> str:
        """The name of its checkpoint."""
        return "_".join(map(str, asdict(self).values()))

    @property
    def line(self) -> tuple[object, ...]:
        """What it shares with the other seeds of its line of the table, in the order of the lines."""
        return self.epochs, -self.bits, RULES.index(self.by), -self.share


@dataclass(frozen=True)
class Row:
    """What a training gave.

    Attributes:
        training: The training.
        calibrated: The accuracy before it, in percent.
        trained: The accuracy after it.
        milliseconds: The processor time of a step.
    """

    training: Training
    calibrated: float
    trained: float
    milliseconds: float

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Row":
        """Return a row of a file."""
        return Row(**{**row, "training": Training(**row["training"])})


def train(training: Training, float_model: nn.Module, data: Data, checkpoints: Path) -> Row:
    """Train from a float model."""
    torch.manual_seed(training.seed)
    batches = data.train[0][:CALIBRATION].split(64)
    model = build(SUBJECT, deepcopy(float_model).train(), batches, training.bits, "auto")
    before = accuracy(model, data)
    schedule = Schedule(len(data.train[1]), training.epochs, share=training.share, by=training.by)
    run = Run(model, data, schedule, training.seed, checkpoints / f"{training.name}.pt")
    first, start = run.step, time.process_time()
    run.train(training.name)
    milliseconds = 1e3 * (time.process_time() - start) / max(run.step - first, 1)
    return Row(training, before, accuracy(model, data), milliseconds)


def table(results: Mapping[str, Any], rows: Sequence[Row]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the names of columns and the lines; times are relative to a training of all weights."""
    images = results["images"]
    title = (
        f"{NETWORKS[NETWORK].title}, CIFAR-10: accuracy in % on {images['test']:,} test images, after epochs of "
        f"{images['train']:,} images; the float model has {results['float_weights']:.2f} %"
    )
    whole = whole_of(rows)
    cells = []
    for line in lines_of(rows):
        t, trained = line[0].training, [row.trained for row in line]
        to_whole = step = ""
        if beside := whole.get((t.epochs, t.bits)):
            to_whole = f"{statistics.mean(trained) - statistics.mean(row.trained for row in beside):+.2f}"
            step = f"{median_of(line) / median_of(beside):.2f}"
        rule = t.by if 0 < t.share < 1 else ""
        calibrated = statistics.mean(row.calibrated for row in line)
        figures = f"{calibrated:.2f}", *mean_and_spread(trained), to_whole, step
        cells.append([str(t.epochs), f"W{t.bits}A{t.bits}", f"{t.share:g}", rule, str(len(line)), *figures])
    names = [
        "epochs",
        "bits",
        "share",
        "chosen by",
        "seeds",
        "calibrated",
        "mean",
        "spread",
        "vs. all weights",
        "step",
    ]
    return title, names, cells


def whole_of(rows: Sequence[Row]) -> dict[tuple[int, int], list[Row]]:
    """Return the trainings of whole weights, by epochs and bits."""
    lines = {line[0].training: line for line in lines_of(rows)}
    return {(t.epochs, t.bits): line for t, line in lines.items() if t.share == 1}


def median_of(line: Sequence[Row]) -> float:
    """Return the median time of a step over seeds."""
    return statistics.median(row.milliseconds for row in line)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write the plot as SVG: accuracy against the time of a step, a line for each number of bits and rule."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "qtoolkit"  # the same file for the same results
    whole = whole_of(rows)
    points: dict[str, list[tuple[float, float, float]]] = {}
    for line in lines_of(rows):
        t = line[0].training
        if (beside := whole.get((t.epochs, t.bits))) is not None:
            mean = statistics.mean(row.trained for row in line)
            name = f"W{t.bits}A{t.bits}, by {t.by}, {t.epochs} epoch{'s' * (t.epochs > 1)}"
            points.setdefault(name, []).append((median_of(line) / median_of(beside), mean, t.share))
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, of in points.items():
        axis.plot([x for x, _, _ in of], [y for _, y, _ in of], "o-", label=name)
        for x, y, share in of:
            axis.annotate(f"{share:g}", (x, y), (4, -10), textcoords="offset points", fontsize="x-small")
    axis.set_xlabel("time of a step, as a multiple of the training of whole weights")
    axis.set_ylabel("accuracy on the test images of CIFAR-10, %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_page(page: Path, results: Mapping[str, Any]) -> None:
    """Replace the part of a page between the marks by the table and the plot."""
    rows = [Row.of(row) for row in results["rows"]]
    title, names, cells = table(results, rows)
    picture = page.with_name("partial_updates.svg")
    draw(picture, rows)
    shown = f"![Accuracy against the time of a step, for shares of the channels]({picture.name})"
    lines = [f"{title}. {results['cpu']}, torch {results['torch']}.", "", shown, "", *markdown_lines(names, cells), ""]
    write_part(page, BEGIN, END, [*lines, "```", *results["commands"], "```"])


def wanted(args: argparse.Namespace) -> Iterator[Training]:
    """Yield the trainings that the arguments ask for; trainings of no channels and of all channels have one rule."""
    for seed, bits, share, by in itertools.product(args.seeds, args.bits, args.shares, args.by):
        if 0 < share < 1 or by == args.by[0]:
            yield Training(bits, float(share), by, seed, args.epochs)


def main() -> None:
    """Train, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--by", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--epochs", type=int, default=1)
    add_options(parser, Path("build/partial_updates"), RESULTS)
    args = parser.parse_args()
    if args.page is not None:
        return write_page(args.page, json.loads(args.out.read_text()))
    torch.set_num_threads(args.threads)
    if DATA is None:
        parser.error(MISSING)
    rows = [Row.of(row) for row in rows_before(args.out, {"images": dict(images_of(args))})]
    done = {row.training for row in rows}
    if missing := [training for training in wanted(args) if training not in done]:
        network, images, checkpoints = NETWORKS[NETWORK], images_of(args), checkpoints_of(args)
        data = load(DATA, images["train"], images["test"], network.raw)
        float_model = network.float_model(DATA, data, checkpoints)
        train_all(missing, rows, lambda t: train(t, float_model, data, checkpoints), accuracy(float_model, data), args)
    show(Console(width=160), *table(json.loads(args.out.read_text()), rows))
    return None


if __name__ == "__main__":
    main()
