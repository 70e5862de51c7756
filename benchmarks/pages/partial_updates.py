"""What a training of some output channels costs and gives: networks on CIFAR-10, shares of the channels, several seeds.

python -m benchmarks.pages.partial_updates                 trains what is missing, writes the results, prints them
python -m benchmarks.pages.partial_updates --network transformer --bits 4 --shares 1 0.25 --seeds 0
python -m benchmarks.pages.partial_updates --shares 1 --epochs 0.8     all weights, in the time of fewer steps
python -m benchmarks.pages.partial_updates --shares 1 --only "torch.ao, learnable" Brevitas     other tools
python -m benchmarks.pages.partial_updates --times         times the steps of what has been trained, after all trainings
python -m benchmarks.pages.partial_updates --page docs/design/trainings.md     writes the tables and plots into the page

Each training starts from float weights: those of shared/data, or those that are trained here first and kept with the
checkpoints. Scales are learned ("lsq"); the first and the last layer have eight bits. Images are cropped and flipped at
random; the accuracy is that on the 10,000 test images. A training that was ended goes on after its last whole epoch
(--checkpoints), and one with a result is not repeated. Seeds take turns. Times are measured apart, in one run: all that is
trained of a network in some bits takes a step in turn.
"""

import argparse
import itertools
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import qtoolkit as qt
from benchmarks.measure import ROOF, Case, Pace, measure
from benchmarks.pages.stored import rows_before, write_part, write_rows
from benchmarks.real_data import DATA, MISSING
from benchmarks.report import markdown_lines, show
from benchmarks.training.algorithms import PEERS, build
from benchmarks.training.cifar import CALIBRATION, Data, Run, Schedule, accuracy, load
from benchmarks.training.cifar_networks import NETWORKS
from benchmarks.training.sweep import add_options, checkpoints_of, images_of, lines_of, mean_and_spread, train_all

RESULTS = Path(__file__).parents[1] / "results" / "partial_updates.json"
SUBJECTS = ("lsq", *PEERS)
SEEDS, BITS, SHARES, RULES = (0, 1, 2), (4,), (1, 0.5, 0.25, 0.1, 0.05, 0), ("magnitude", "rotation")
BEGIN, END = "<!-- begin: benchmarks/pages/partial_updates.py -->", "<!-- end -->"


Step = tuple[str, int, str, float]


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        bits: Of weights and activations.
        share: Of the output channels that a step updates.
        by: How they are chosen.
        seed: Of the order and the crops of the images.
        epochs: How long.
        network: A name in NETWORKS.
        subject: What is trained: a name in SUBJECTS.
    """

    bits: int
    share: float
    by: str
    seed: int
    epochs: float
    network: str = "resnet20"
    subject: str = SUBJECTS[0]

    @property
    def name(self) -> str:
        """The name of its checkpoint."""
        return re.sub(r"[^\w.]+", "-", "_".join(map(str, asdict(self).values())))

    @property
    def step(self) -> Step:
        """That on which the time of a step depends."""
        return self.network, self.bits, self.subject, self.share

    @property
    def line(self) -> tuple[object, ...]:
        """What it shares with the other seeds of its line of its network's table, in the order of the lines."""
        return -self.bits, SUBJECTS.index(self.subject), -self.epochs, RULES.index(self.by), -self.share


@dataclass(frozen=True)
class Row:
    """What a training gave.

    Attributes:
        training: The training.
        calibrated: The accuracy before it, in percent.
        trained: The accuracy after it.
    """

    training: Training
    calibrated: float
    trained: float

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Row":
        """Return a row of a file."""
        return Row(**{**row, "training": Training(**row["training"])})


def run_of(training: Training, float_model: nn.Module, data: Data, checkpoints: Path) -> Run:
    """Return a training from a float model."""
    torch.manual_seed(training.seed)
    batches = data.train[0][:CALIBRATION].split(64)
    model = build(training.subject, deepcopy(float_model).train(), batches, training.bits)
    of_share = {"share": training.share, "by": training.by, **NETWORKS[training.network].fine_tuned}
    schedule = Schedule(len(data.train[1]), training.epochs, **of_share)
    return Run(model, data, schedule, training.seed, checkpoints / f"{training.name}.pt")


def train(training: Training, float_model: nn.Module, data: Data, checkpoints: Path) -> Row:
    """Train from a float model."""
    run = run_of(training, float_model, data, checkpoints)
    before = accuracy(run.model, data)  # of a training that goes on: where it was
    run.train(training.name)
    return Row(training, before, accuracy(run.model, data))


def times(trainings: Sequence[Training], float_model: nn.Module, data: Data) -> dict[Step, float]:
    """Return the time of a step of each, in turn, as a multiple of the time of the first's."""
    steps = {}
    for training in trainings:
        run = run_of(training, float_model, data, Path("none"))
        settled(run.model)
        steps[training] = partial(run.update, *(part[: run.schedule.batch] for part in data.train))
    first, *others = trainings
    work = {ROOF: steps[first], **{str(i): steps[training] for i, training in enumerate(others)}}
    row = measure(Case("", "", work), torch.get_num_threads(), Pace(12, 120.0))
    return {first.step: 1.0, **{training.step: row.ratios[str(i)] for i, training in enumerate(others)}}


def settled(model: nn.Module) -> None:
    """Bring a model behind the first steps, in which ranges follow the data."""
    if qt.quantizers_of(model):
        qt.freeze_ranges(model)


def by_network(results: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return the rows of each network that has any."""
    rows = [Row.of(row) for row in results["rows"]]
    found = {network: [row for row in rows if row.training.network == network] for network in NETWORKS}
    return {network: of for network, of in found.items() if of}


COLUMNS = (
    *("bits", "trained", "epochs", "share", "chosen by", "seeds", "calibrated", "mean", "spread"),
    *("vs. all weights", "step", "time"),
)


def table(results: Mapping[str, Any], network: str, rows: Sequence[Row]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the names of columns and the lines; times are relative to a training of all weights for an epoch."""
    steps = steps_of(results)
    title = (
        f"{NETWORKS[network].title}, CIFAR-10: accuracy in % on {results['images']['test']:,} test images, after epochs of "
        f"{results['images']['train']:,} images; the float model has {results['float_weights'][network]:.2f} %"
    )
    cells = []
    for line in lines_of(rows):
        t, trained = line[0].training, [row.trained for row in line]
        to_whole, step, length = "", "", ""
        if beside := of_all_weights(rows, t.bits):
            to_whole = f"{statistics.mean(trained) - statistics.mean(row.trained for row in beside):+.2f}"
        if (relative := steps.get(t.step)) is not None:
            step, length = f"{relative:.2f}", f"{relative * t.epochs:.2f}"
        rule = t.by if 0 < t.share < 1 else ""
        calibrated = statistics.mean(row.calibrated for row in line)
        figures = f"{calibrated:.2f}", *mean_and_spread(trained), to_whole, step, length
        cells.append(
            [f"W{t.bits}A{t.bits}", t.subject, f"{t.epochs:g}", f"{t.share:g}", rule, str(len(line)), *figures]
        )
    return title, list(COLUMNS), cells


def of_all_weights(rows: Sequence[Row], bits: int) -> list[Row]:
    """Return the trainings of all weights for one epoch, with each seed."""
    whole = Training(bits, 1.0, RULES[0], 0, 1.0)
    return [row for row in rows if replace(row.training, seed=0, network=whole.network) == whole]


def steps_of(results: Mapping[str, Any]) -> dict[Step, float]:
    """Return the times of steps that have been measured."""
    return {tuple(of): relative for *of, relative in results.get("steps", ())}


def draw(path: Path, rows: Sequence[Row], steps: Mapping[Step, float]) -> None:
    """Write the plot as SVG: accuracy against the time of a step, a line for each number of bits, rule and length."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "qtoolkit"  # the same file for the same results
    points: dict[str, list[tuple[float, float, str]]] = {}
    for line in lines_of(rows):
        t = line[0].training
        if t.step in steps:
            mean, ours = statistics.mean(row.trained for row in line), t.subject == SUBJECTS[0]
            length = f"{t.epochs:g} epoch{'s' * (t.epochs > 1)}"
            name = f"W{t.bits}A{t.bits}, {f'by {t.by}' if ours else t.subject}, {length}"
            shown = f"{t.share:g}" if ours else ""
            points.setdefault(name, []).append((steps[t.step], mean, shown))
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, of in points.items():
        axis.plot([x for x, _, _ in of], [y for _, y, _ in of], "o-" if of[0][2] else "x", label=name)
        for x, y, share in of:
            axis.annotate(share, (x, y), (4, -10), textcoords="offset points", fontsize="x-small")
    axis.set_xlabel("time of a step, as a multiple of that of a training of all weights")
    axis.set_ylabel("accuracy on the test images of CIFAR-10, %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="x-small")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_page(page: Path, results: Mapping[str, Any]) -> None:
    """Replace the part of a page between the marks by a table and a plot for each network."""
    lines = []
    for network, rows in by_network(results).items():
        title, names, cells = table(results, network, rows)
        picture = page.with_name(f"partial_updates_{network}.svg")
        draw(picture, rows, steps_of(results))
        shown = f"![Accuracy against the time of a step, for shares of the channels]({picture.name})"
        lines += [f"### {NETWORKS[network].title}", "", f"{title}.", "", shown, "", *markdown_lines(names, cells), ""]
    lines += [f"{results['cpu']}, torch {results['torch']}, one thread:", ""]
    write_part(page, BEGIN, END, [*lines, "```", *results["commands"], "```"])


def wanted(args: argparse.Namespace) -> Iterator[Training]:
    """Yield the trainings that the arguments ask for; trainings of no channels and of all channels have one rule."""
    for seed, subject, bits, share, by in itertools.product(args.seeds, args.only, args.bits, args.shares, args.by):
        if 0 < share < 1 or by == args.by[0]:
            yield Training(bits, float(share), by, seed, args.epochs, args.network, subject)


def time_all(rows: Sequence[Row], folder: Path, args: argparse.Namespace) -> None:
    """Add the times of steps to the file of results, of all that has rows."""
    results = json.loads(args.out.read_text())
    steps = steps_of(results)
    trained = sorted({row.training.step: row.training for row in rows}.values(), key=lambda t: (t.step[:2], t.line))
    for (network, bits), of in itertools.groupby(trained, lambda t: t.step[:2]):
        data = load(folder, images_of(args)["train"], 10, NETWORKS[network].raw)
        float_model = NETWORKS[network].float_model(folder, data, checkpoints_of(args))
        whole = Training(bits, 1.0, RULES[0], 0, 1.0, network)
        steps |= times([whole, *(t for t in of if t.step != whole.step)], float_model, data)
    write_rows(args.out, {**results, "steps": [[*step, relative] for step, relative in steps.items()]}, results["rows"])


def train_missing(missing: Sequence[Training], rows: list[Row], folder: Path, args: argparse.Namespace) -> None:
    """Add the rows of the trainings to the others, and write the file of results after each."""
    network, images, checkpoints = NETWORKS[args.network], images_of(args), checkpoints_of(args)
    data = load(folder, images["train"], images["test"], network.raw)
    float_model = network.float_model(folder, data, checkpoints)
    before = json.loads(args.out.read_text())["float_weights"] if args.out.exists() else {}
    float_weights = {**before, args.network: accuracy(float_model, data)}
    train_all(missing, rows, lambda t: train(t, float_model, data, checkpoints), float_weights, args)


def main() -> None:
    """Train, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=SUBJECTS[:1], metavar="SUBJECT")
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--by", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument(
        "--times", action="store_true", help="time the steps of what has been trained, and train nothing"
    )
    add_options(parser, Path("build/partial_updates"), RESULTS)
    args = parser.parse_args()
    if args.page is not None:
        return write_page(args.page, json.loads(args.out.read_text()))
    torch.set_num_threads(args.threads)
    if DATA is None:
        parser.error(MISSING)
    rows = [Row.of(row) for row in rows_before(args.out, {"images": dict(images_of(args))})]
    done = {row.training for row in rows}
    missing = [training for training in wanted(args) if training not in done]
    if args.times:
        time_all(rows, DATA, args)
    elif missing:
        train_missing(missing, rows, DATA, args)
    results = json.loads(args.out.read_text())
    for network, of_network in by_network(results).items():
        show(Console(width=160), *table(results, network, of_network))
    return None


if __name__ == "__main__":
    main()
