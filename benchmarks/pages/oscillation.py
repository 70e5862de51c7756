"""Whether dampening and freezing of oscillating weights help: a MobileNetV2 on CIFAR-10, in 4 and 3 bits, over seeds.

python -m benchmarks.pages.oscillation                 trains what is missing, writes results/oscillation.json, prints the table
python -m benchmarks.pages.oscillation --bits 3 --only plain freezing --seeds 0
python -m benchmarks.pages.oscillation --page docs/design/trainings.md     writes the table of the results into the page

The float weights are trained first, and kept with the checkpoints. Each training starts from them, with learned scales
("lsq") from a histogram's range; the first and the last layer have eight bits. Images are cropped and flipped at random; the
accuracy is that on the 10,000 test images, as trained and with batch norms estimated anew. A training that was ended goes on
after its last whole epoch (--checkpoints), and one with a result is not repeated. Seeds take turns.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import qtoolkit as qt
from benchmarks.pages.stored import rows_before, write_part
from benchmarks.real_data import DATA, MISSING
from benchmarks.report import markdown_lines, show
from benchmarks.training.algorithms import FLOAT, bits_of, ends
from benchmarks.training.cifar import CALIBRATION, Data, Run, Schedule, accuracy, load
from benchmarks.training.mobilenet import float_mobilenet
from benchmarks.training.sweep import add_options, checkpoints_of, images_of, lines_of, mean_and_spread, train_all

RESULTS = Path(__file__).parents[1] / "results" / "oscillation.json"
REESTIMATION = 5000  # training images
# Of freezing: the thresholds and the momentum. The paper's authors', and docs/tuning.md's for a training of few steps.
FREEZING = {"freezing": ((0.1, 0.01), 0.001), "freezing, short": ((0.1, 0.05), 0.04)}
METHODS = (FLOAT, "plain", "dampening", *FREEZING)
SEEDS, BITS, EPOCHS, RATE = (0, 1, 2), (4, 3), 5, 0.01
BEGIN, END = "<!-- begin: benchmarks/pages/oscillation.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        method: What keeps weights from oscillating: one of METHODS.
        bits: Of weights and activations.
        seed: Of the order and the crops of the images.
        epochs: How long.
        rate: The first learning rate.
    """

    method: str
    bits: int
    seed: int
    epochs: int
    rate: float

    @property
    def name(self) -> str:
        """The name of its checkpoint."""
        return "_".join(map(str, asdict(self).values()))

    @property
    def line(self) -> tuple[object, ...]:
        """What it shares with the other seeds of its line of the table, in the order of the lines."""
        return self.epochs, self.rate, -self.bits, METHODS.index(self.method)


@dataclass(frozen=True)
class Row:
    """What a training gave.

    Attributes:
        training: The training.
        calibrated: The accuracy before it, in percent.
        trained: The accuracy after it.
        reestimated: The same with statistics of batch norms estimated again on training images.
        oscillating: The percentage of the weights with few bits that oscillate at the end.
        frozen: The percentage of weights that are frozen.
        minutes: How long it took, without what an earlier run of this script had trained.
    """

    training: Training
    calibrated: float
    trained: float
    reestimated: float
    oscillating: float
    frozen: float
    minutes: float

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Row":
        """Return a row of a file."""
        return Row(**{**row, "training": Training(**row["training"])})


class Tracked(nn.Module):
    """A quantized model with what keeps its weights from oscillating, whose state is in the model's: a Run resumes both."""

    def __init__(self, model: nn.Module, method: str, steps: int) -> None:
        super().__init__()
        self.model, begin = model, steps // 4  # as the paper's authors do
        thresholds, momentum = FREEZING.get(method, (None, 0.001))
        self.freezing = qt.tuning.OscillationFreezing(model, steps, thresholds, momentum, begin)
        largest = 0.1 if method == "dampening" else 0.0
        self.dampening = qt.tuning.OscillationDampening(model, steps, largest, begin=begin)

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output."""
        y: Tensor = self.model(x)
        return y

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the gradient of the dampening loss before each step of an optimizer, and take a step after it."""
        if self.dampening.largest:
            optimizer.register_step_pre_hook(lambda *_: self.dampening().backward())
        optimizer.register_step_post_hook(lambda *_: self.step())

    def step(self) -> None:
        """Count a step of the optimizer."""
        self.freezing.step()
        self.dampening.step()

    def get_extra_state(self) -> dict[str, Any]:
        """Return what else the state dict holds."""
        return {"freezing": self.freezing.state_dict(), "dampening": self.dampening.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take what else a state dict holds."""
        self.freezing.load_state_dict(state["freezing"])
        self.dampening.load_state_dict(state["dampening"])


def quantized(model: nn.Module, bits: int, batches: Sequence[Tensor]) -> nn.Module:
    """Return a float model with learned scales, calibrated on batches; its first and last layers have eight bits."""
    few, eight = (qt.QuantSpec(bits=each, quantizer="lsq", observer="histogram") for each in (bits, 8))
    mapping = qt.QConfigMapping().set_global(qt.QConfig(few, replace(few, axis=0)))
    for name in ends(model):
        mapping.set_module_name(name, qt.QConfig(eight, replace(eight, axis=0)))
    prepared = qt.prepare(model, (batches[0][:2],), backend="academic", qconfig_mapping=mapping)
    qt.calibrate(prepared, batches, progress=False)
    return prepared


def train(training: Training, float_model: nn.Module, data: Data, checkpoints: Path) -> Row:
    """Train from a float model."""
    torch.manual_seed(training.seed)
    batches = data.train[0][:CALIBRATION].split(64)
    schedule = Schedule(len(data.train[1]), training.epochs, rate=training.rate)
    model = deepcopy(float_model).train()
    if training.method != FLOAT:
        model = Tracked(quantized(model, training.bits, batches), training.method, schedule.steps)
    calibrated, start = accuracy(model, data), time.perf_counter()
    run = Run(model, data, schedule, training.seed, checkpoints / f"{training.name}.pt")
    if isinstance(model, Tracked):
        model.join(run.optimizer)
    run.train(training.name)
    minutes, trained = (time.perf_counter() - start) / 60, accuracy(model, data)
    report = model.freezing.report() if isinstance(model, Tracked) else None
    oscillating, frozen = (100 * report.oscillating, 100 * report.frozen) if report else (0.0, 0.0)
    qt.tuning.reestimate_batch_norm(model, data.train[0][:REESTIMATION].split(100), progress=False)
    return Row(training, calibrated, trained, accuracy(model, data), oscillating, frozen, minutes)


def train_missing(missing: Sequence[Training], rows: list[Row], folder: Path, args: argparse.Namespace) -> None:
    """Add the rows of the trainings to the others, and write the file of results after each."""
    images, checkpoints = images_of(args), checkpoints_of(args)
    data = load(folder, images["train"], images["test"])
    model = float_mobilenet(data, checkpoints)
    train_all(missing, rows, lambda training: train(training, model, data, checkpoints), accuracy(model, data), args)


def table(results: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the names of columns and the lines: a line for each method, number of bits and schedule."""
    images = results["images"]
    title = (
        f"MobileNetV2 for 32 x 32 pixels, CIFAR-10: accuracy on {images['test']:,} images, in %; "
        f"epochs of {images['train']:,} images; the float model has {results['float_weights']:.2f} %"
    )
    names = ["epochs", "rate", "bits", "trained", "seeds", "calibrated", "mean", "spread"]
    names += ["statistics estimated again", "spread", "oscillating", "frozen", "minutes each"]
    return title, names, [_line(rows) for rows in lines_of(map(Row.of, results["rows"]))]


def _line(rows: Sequence[Row]) -> list[str]:
    training = rows[0].training
    head = [str(training.epochs), f"{training.rate:g}", str(training.bits), training.method, str(len(rows))]
    calibrated, oscillating, frozen, minutes = (
        statistics.mean(getattr(row, name) for row in rows)
        for name in ("calibrated", "oscillating", "frozen", "minutes")
    )
    shares = ["", ""] if training.method == FLOAT else [f"{oscillating:.2f} %", f"{frozen:.2f} %"]
    trained, anew = ([getattr(row, name) for row in rows] for name in ("trained", "reestimated"))
    return [*head, f"{calibrated:.2f}", *mean_and_spread(trained), *mean_and_spread(anew), *shares, f"{minutes:.1f}"]


def write_page(page: Path, results: Mapping[str, Any]) -> None:
    """Replace the part of a page between the marks by the table."""
    title, names, lines = table(results)
    made = f"{title}. {results['cpu']}, torch {results['torch']}; the commands are below the table."
    write_part(page, BEGIN, END, [made, "", *markdown_lines(names, lines), "", "```", *results["commands"], "```"])


def wanted(args: argparse.Namespace) -> Iterator[Training]:
    """Yield the trainings that the arguments ask for."""
    for seed, method in itertools.product(args.seeds, args.only):
        for bits in bits_of(method, args.bits):
            yield Training(method, bits, seed, args.epochs, args.rate)


def main() -> None:
    """Train, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--rate", type=float, default=RATE, help="the first learning rate")
    add_options(parser, Path("build/oscillation"), RESULTS)
    args = parser.parse_args()
    if args.page is not None:
        return write_page(args.page, json.loads(args.out.read_text()))
    torch.set_num_threads(args.threads)
    if DATA is None:
        parser.error(MISSING)
    rows = [Row.of(row) for row in rows_before(args.out, {"images": images_of(args)})]
    done = {row.training for row in rows}
    if missing := [training for training in wanted(args) if training not in done]:
        train_missing(missing, rows, DATA, args)
    show(Console(width=160), *table(json.loads(args.out.read_text())))
    return None


if __name__ == "__main__":
    main()
