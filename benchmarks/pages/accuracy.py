"""The accuracy that each quantizer reaches in training: ResNet-20 or ResNet-8 on CIFAR-10, in 8 to 2 bits, several seeds.

python -m benchmarks.pages.accuracy                  trains what is missing, writes results/accuracy.json and prints the table
python -m benchmarks.pages.accuracy --bits 4 --only lsq pact --seeds 0
python -m benchmarks.pages.accuracy --only lsq --bits 4 --forward float integer     whether both forwards train alike
python -m benchmarks.pages.accuracy --epochs 200 --teacher    hours of processor time for each training
python -m benchmarks.pages.accuracy --epochs 100 --only float lsq --bits 4 --seeds 0 --device cuda     on a GPU
python -m benchmarks.pages.accuracy --network resnet8 --bits 8 4     a small network that takes pixels of 0 to 255
python -m benchmarks.pages.accuracy --page docs/accuracy.md   writes the tables of the results, and their plots, into the page

Each training starts from the float weights of shared/data; those of ResNet-8, MLPerf Tiny's network, are trained here first
and kept with the checkpoints. The first and the last layer have eight bits, as in the papers.
Images are cropped and flipped at random; the accuracy is that on the 10,000 test images. A training that was ended goes on
after its last whole epoch (--checkpoints), and one with a result is not repeated. Seeds take turns, so that an early end
leaves every quantizer with as many seeds. Other tools are trained where they are installed (benchmarks/peers); on ResNet-8,
where --only names them.
"""

import argparse
import itertools
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks.pages.stored import rows_before, write_part
from benchmarks.real_data import DATA, MISSING
from benchmarks.report import markdown_lines, show
from benchmarks.training.accuracy_plot import draw
from benchmarks.training.algorithms import FLOAT, FLOAT_BITS, PEERS, SUBJECTS, bits_of, build
from benchmarks.training.cifar import CALIBRATION, OPTIMIZERS, Data, Run, Schedule, accuracy, load
from benchmarks.training.cifar_networks import NETWORKS
from benchmarks.training.sweep import add_options, checkpoints_of, images_of, lines_of, train_all

RESULTS = Path(__file__).parents[1] / "results" / "accuracy.json"
SEEDS, BITS = (0, 1, 2), (8, 4, 3, 2)
BEGIN, END = "<!-- begin: benchmarks/pages/accuracy.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        subject: What is trained: a name in SUBJECTS.
        bits: Of weights and activations.
        seed: Of the order and the crops of the images.
        epochs: How long.
        teacher: Whether it learns the float model's classes.
        forward: The option of `qtoolkit.prepare`.
        rate: The first learning rate.
        clip: The largest norm of the gradient; None for any.
        optimizer: A name in OPTIMIZERS.
        network: A name in NETWORKS.
        labels: Whether it learns the labels, which count as much as the float model's classes.
        decay: Of weights; None for the optimizer's.
    """

    subject: str
    bits: int
    seed: int
    epochs: int
    teacher: bool = False
    forward: str = "auto"
    rate: float = OPTIMIZERS["sgd"].rate
    clip: float | None = None
    optimizer: str = "sgd"
    network: str = "resnet20"
    labels: bool = True
    decay: float | None = None

    @property
    def name(self) -> str:
        """The name of its checkpoint."""
        return "_".join(re.sub(r"[^\w.-]+", "-", str(value)) for value in asdict(self).values())

    @property
    def options(self) -> tuple[object, ...]:
        """How it is trained, in the order of the lines of the table."""
        return (
            self.epochs,
            self.teacher,
            not self.labels,
            list(OPTIMIZERS).index(self.optimizer),
            self.rate,
            self.clip or 0,
            -1 if self.decay is None else self.decay,
        )

    @property
    def line(self) -> tuple[object, ...]:
        """What it shares with the other seeds of its line of its network's table, in the order of the lines."""
        return *self.options, -self.bits, SUBJECTS.index(self.subject), self.forward

    def schedule(self, images: int) -> Schedule:
        """Return how it is trained on this number of images."""
        kind = {"optimizer": self.optimizer, "labels": self.labels, "decay": self.decay}
        return Schedule(images, self.epochs, rate=self.rate, clip=self.clip, **kind)


@dataclass(frozen=True)
class Row:
    """What a training gave.

    Attributes:
        training: The training.
        calibrated: The accuracy before it, in percent; None where there is none.
        trained: The accuracy after it.
        minutes: How long it took, without what an earlier run of this script had trained.
        failure: Why there is no figure.
        device: Where it was trained, if not on a CPU.
        earlier: Whether the package has changed since in what this training depends on.
    """

    training: Training
    calibrated: float | None = None
    trained: float | None = None
    minutes: float = 0.0
    failure: str = ""
    device: str = ""
    earlier: bool = False

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Row":
        """Return a row of a file."""
        return Row(**{**row, "training": Training(**row["training"])})


def known_rows(rows: Sequence[Mapping[str, Any]], console: Console) -> list[Row]:
    """Return the rows of a file but those of subjects that are no longer trained, which are named on the console."""
    gone = Counter(row["training"]["subject"] for row in rows if row["training"]["subject"] not in SUBJECTS)
    if gone:
        names = ", ".join(f'"{subject}" ({count})' for subject, count in gone.items())
        console.print(f"Rows of subjects that no longer exist are left out: {names}.", soft_wrap=True)
    return [Row.of(row) for row in rows if row["training"]["subject"] not in gone]


def train(training: Training, float_model: nn.Module, data: Data, checkpoints: Path) -> Row:
    """Train from a float model, or say why it cannot be."""
    row = Row(training)
    torch.manual_seed(training.seed)
    batches = data.train[0][:CALIBRATION].split(64)
    try:
        model = build(training.subject, deepcopy(float_model).train(), batches, training.bits, training.forward)
    except (ValueError, ModuleNotFoundError) as error:
        return replace(row, failure=str(error))
    teacher = deepcopy(float_model) if training.teacher else None
    before, start = accuracy(model, data), time.perf_counter()
    schedule = training.schedule(len(data.train[1]))
    recorded = training.subject not in PEERS  # their layers read values of tensors, for which a step waits for the GPU
    checkpoint = checkpoints / f"{training.name}.pt"
    Run(model, data, schedule, training.seed, checkpoint, teacher, recorded).train(training.name)
    minutes = (time.perf_counter() - start) / 60
    device = "" if data.device.type == "cpu" else torch.cuda.get_device_name(data.device)
    return replace(row, calibrated=before, trained=accuracy(model, data), minutes=minutes, device=device)


def train_missing(missing: Sequence[Training], rows: list[Row], folder: Path, args: argparse.Namespace) -> None:
    """Add the rows of the trainings to the others, and write the file of results after each."""
    network, images, checkpoints = NETWORKS[args.network], images_of(args), checkpoints_of(args)
    data = load(folder, images["train"], images["test"], network.raw, args.device)
    float_model = network.float_model(folder, data, checkpoints).to(data.device)
    before = json.loads(args.out.read_text())["float_weights"] if args.out.exists() else {}
    float_weights = {**before, args.network: accuracy(float_model, data)}
    train_all(missing, rows, lambda training: train(training, float_model, data, checkpoints), float_weights, args)


def by_network(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each network that has any."""
    found = {network: [row for row in rows if row.training.network == network] for network in NETWORKS}
    return {network: of for network, of in found.items() if of}


def table(results: Mapping[str, Any], network: str, rows: Sequence[Row]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the names of columns and the lines: a line for each quantizer, number of bits and schedule."""
    images = results["images"]
    title = (
        f"{NETWORKS[network].title}, CIFAR-10: accuracy on {images['test']:,} images, %; "
        f"epochs of {images['train']:,} images; float weights {results['float_weights'][network]:.2f}"
    )
    names = ["epochs", "teacher", "rate", "clip", "bits", "trained", "seeds"]
    names += ["calibrated", "mean", "spread", "to float", "minutes each", "remark"]
    return title, names, list(_lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    lines = lines_of(rows)
    float_models = _float_models(lines)
    for line in lines:
        training = line[0].training
        head = [str(training.epochs), _taught(training), _rate(replace(training, clip=None))]
        head += ["" if training.clip is None else f"{training.clip:g}", str(training.bits), _name(training)]
        if not (trained := _accuracies(line)):
            yield [*head, *[""] * 6, line[0].failure]
            continue
        mean = statistics.mean(trained)
        calibrated = statistics.mean(row.calibrated or 0 for row in line)
        drop = f"{mean - float_models[training.epochs]:+.2f}" if training.epochs in float_models else ""
        minutes = statistics.mean(row.minutes for row in line)
        figures = f"{calibrated:.2f}", f"{mean:.2f}", f"{_spread(line):.2f}", drop, f"{minutes:.1f}"
        yield [*head, str(len(trained)), *figures, _devices(line)]


def _devices(line: Sequence[Row]) -> str:
    """Return where the trainings of a line ran, if not all on a CPU."""
    seeds = Counter(row.device for row in line if row.device)
    return ", ".join(f"{count} on {device}" if count < len(line) else device for device, count in sorted(seeds.items()))


def _float_models(lines: Sequence[Sequence[Row]]) -> dict[int, float]:
    """Return the best mean accuracy of the float model by the number of epochs."""
    best: dict[int, float] = {}
    for line in lines:
        training, trained = line[0].training, [row.trained for row in line if row.trained is not None]
        if training.subject == FLOAT and trained:
            best[training.epochs] = max(best.get(training.epochs, 0.0), statistics.mean(trained))
    return best


def plotted(rows: Sequence[Row]) -> tuple[dict[tuple[str, int], list[float]], float | None]:
    """Return the accuracies of the shortest schedule, as it is by default, by subject and bits, and the float model's mean."""
    usual = Training(FLOAT, 0, 0, min(row.training.epochs for row in rows))
    found: dict[tuple[str, int], list[float]] = {}
    for row in sorted(rows, key=lambda row: row.training.line):
        training = row.training
        if row.trained is not None and training.options == usual.options and training.forward == usual.forward:
            found.setdefault((training.subject, training.bits), []).append(row.trained)
    of_float = [value for (subject, _), of in found.items() if subject == FLOAT for value in of]
    accuracies = {key: of for key, of in found.items() if key[0] != FLOAT}
    return accuracies, statistics.mean(of_float) if of_float else None


def write_page(page: Path, results: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Replace the part of a page between the marks by a table and a plot for each network."""
    lines = [f"{results['cpu']}, torch {results['torch']}.", ""]
    for network, of_network in by_network(rows).items():
        title, _, _ = table(results, network, [])
        picture = page.with_name(f"qat_{network}.svg")
        draw(picture, *plotted(of_network))
        shown = f"![Accuracy against bits, for each quantizer]({picture.name})"
        lines += [f"### {NETWORKS[network].title}", "", f"{title}.", "", shown, ""]
        lines += _tables_of_the_page(lines_of(of_network))
    write_part(page, BEGIN, END, lines)


def _tables_of_the_page(lines: Sequence[Sequence[Row]]) -> Iterator[str]:
    """Yield the tables of a network: its shortest schedule by bits, other schedules, and trainings of earlier code."""
    floats = _float_models(lines)
    of_today = [line for line in lines if not line[0].earlier]
    shortest = min(of_today, key=lambda line: line[0].training.options)[0].training
    usual = [line for line in of_today if line[0].training.options == shortest.options]
    others = [line for line in of_today if line not in usual and line[0].training.subject != FLOAT]
    how = f"Epochs: {shortest.epochs}; rate: {_rate(shortest)}."
    yield from (f"{how} In brackets: the difference from the float model after as many epochs.", "")
    yield from (*_by_bits(usual, floats), "")
    names = ("epochs", "teacher", "rate", "bits", "quantizer", "seeds", "mean", "spread", "to float")
    earlier = "Trained with an earlier state of the package (other learned scales of weights before a batch norm):"
    for title, of in (("Other schedules:", others), (earlier, [line for line in lines if line[0].earlier])):
        if of:
            yield from (title, "", *markdown_lines(names, [_schedule_line(line, floats) for line in of]), "")


def _by_bits(lines: Sequence[Sequence[Row]], floats: Mapping[int, float]) -> list[str]:
    """Return a table with a column for each number of bits."""
    columns = sorted({line[0].training.bits for line in lines if line[0].training.subject != FLOAT}, reverse=True)
    columns = columns or [FLOAT_BITS]
    found = {(_name(line[0].training), line[0].training.bits): line for line in lines}
    cells = []
    for name in dict.fromkeys(_name(line[0].training) for line in sorted(lines, key=lambda of: _order(of[0].training))):
        of = [found.get((name, FLOAT_BITS if name == FLOAT else bits), []) for bits in columns]
        seeds = sorted({len(line) for line in of if line})
        spread = max(_spread(line) for line in of if line)
        head = [name, " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))), f"{spread:.2f}"]
        cells.append([*head, *(_mean_to_float(line, floats) for line in of)])
    return markdown_lines(("quantizer", "seeds", "largest spread", *(f"{bits} bits" for bits in columns)), cells)


def _order(training: Training) -> tuple[int, str]:
    return SUBJECTS.index(training.subject), training.forward


def _schedule_line(line: Sequence[Row], floats: Mapping[int, float]) -> list[str]:
    training = line[0].training
    head = [str(training.epochs), _taught(training), _rate(training), str(training.bits), _name(training)]
    if not (trained := _accuracies(line)):
        return [*head, *[""] * 3, line[0].failure]
    mean, epochs = statistics.mean(trained), training.epochs
    drop = f"{mean - floats[epochs]:+.2f}" if epochs in floats else ""
    return [*head, str(len(trained)), f"{mean:.2f}", f"{_spread(line):.2f}", drop]


def _mean_to_float(line: Sequence[Row], floats: Mapping[int, float]) -> str:
    if not (trained := _accuracies(line)):
        return line[0].failure if line else ""
    mean, epochs = statistics.mean(trained), line[0].training.epochs
    drop = f" ({mean - floats[epochs]:+.2f})" if epochs in floats and line[0].training.subject != FLOAT else ""
    return f"{mean:.2f}{drop}"


def _accuracies(line: Sequence[Row]) -> list[float]:
    return [row.trained for row in line if row.trained is not None]


def _spread(line: Sequence[Row]) -> float:
    trained = _accuracies(line)
    return max(trained) - min(trained) if trained else 0.0


def _name(training: Training) -> str:
    return training.subject + ("" if training.forward == "auto" else f", {training.forward} forward")


def _taught(training: Training) -> str:
    return ("yes" if training.labels else "alone") if training.teacher else ""


def _rate(training: Training) -> str:
    """Return the rate, with everything that differs from the usual training."""
    extra = "" if training.optimizer == "sgd" else f", {training.optimizer}"
    extra += "" if training.decay is None else f", decay {training.decay:g}"
    return f"{training.rate:g}{extra}" + ("" if training.clip is None else f", clip {training.clip:g}")


def wanted(args: argparse.Namespace) -> Iterator[Training]:
    """Yield the trainings that the arguments ask for."""
    usual = [name for name in SUBJECTS if name not in PEERS or NETWORKS[args.network].with_peers]
    rate = OPTIMIZERS[args.optimizer].rate if args.rate is None else args.rate
    options = rate, args.clip, args.optimizer, args.network, args.teacher != "alone", args.decay
    for seed, subject in itertools.product(args.seeds, args.only or usual):
        for bits, forward in itertools.product(bits_of(subject, args.bits), args.forward):
            yield Training(subject, bits, seed, args.epochs, args.teacher is not None, forward, *options)


def main() -> None:
    """Train, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument(
        "--only", nargs="+", choices=SUBJECTS, default=None, help="what is trained (default: everything)"
    )
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--teacher",
        nargs="?",
        choices=("beside", "alone"),
        const="beside",
        help="learn the float model's classes, beside the labels (default) or alone",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--rate", type=float, default=None, help="the first learning rate (default: the optimizer's)")
    parser.add_argument("--decay", type=float, default=None, help="the decay of weights (default: the optimizer's)")
    parser.add_argument("--clip", type=float, default=None, help="the largest norm of the gradient (default: any)")
    parser.add_argument("--forward", nargs="+", choices=("auto", "float", "integer"), default=["auto"])
    parser.add_argument("--device", default="cpu", help="where models are trained: cpu, cuda")
    add_options(parser, Path("build/accuracy"), RESULTS)
    args = parser.parse_args()
    console = Console(width=160)
    if args.page is not None:
        results = json.loads(args.out.read_text())
        return write_page(args.page, results, known_rows(results["rows"], console))
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True  # all batches have one size; without a meaning on a CPU
    if DATA is None:
        parser.error(MISSING)
    rows = known_rows(rows_before(args.out, {"images": images_of(args)}), console)
    done = {row.training for row in rows}
    if missing := [training for training in wanted(args) if training not in done]:
        train_missing(missing, rows, DATA, args)
    results = json.loads(args.out.read_text())
    for network, of_network in by_network(rows).items():
        show(console, *table(results, network, of_network))
    return None


if __name__ == "__main__":
    main()
