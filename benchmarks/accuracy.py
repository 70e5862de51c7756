"""The accuracy that each quantizer reaches in training: ResNet-20 on CIFAR-10, in 8 to 2 bits, over several seeds.

python benchmarks/accuracy.py                  trains what is missing, writes results/accuracy.json and prints the table
python benchmarks/accuracy.py --bits 4 --only lsq pact --seeds 0
python benchmarks/accuracy.py --only lsq --bits 4 --forward float integer     whether both forwards train alike
python benchmarks/accuracy.py --epochs 200 --teacher    hours of processor time for each training
python benchmarks/accuracy.py --page docs/accuracy.md   writes the table of the results, and its plot, into the page

Each training starts from the float weights of shared/data; the first and the last layer have eight bits, as in the papers.
Images are cropped and flipped at random; the accuracy is that on the 10,000 test images. A training that was ended goes on
after its last whole epoch (--checkpoints), and one with a result is not repeated. Seeds take turns, so that an early end
leaves every quantizer with as many seeds. Other tools are trained where they are installed (benchmarks/peers).
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from export_models import resnet20_of
from real_data import DATA, MISSING
from report import facts, markdown_lines, show
from rich.console import Console
from stored import commands_of, rows_before, write_part, write_rows
from tqdm import tqdm
from training.accuracy_plot import draw
from training.algorithms import FLOAT, SUBJECTS, bits_of, build
from training.cifar import CALIBRATION, Data, Run, Schedule, accuracy, load

RESULTS = Path(__file__).parent / "results" / "accuracy.json"
SEEDS, BITS, RATE = (0, 1, 2), (8, 4, 3, 2), 0.01
IMAGES, QUICK_IMAGES = 50_000, 200
TEST_IMAGES, QUICK_TEST_IMAGES = 10_000, 100
BEGIN, END = "<!-- begin: benchmarks/accuracy.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        subject: What is trained: a name in SUBJECTS.
        bits: Of weights and activations.
        seed: Of the order and the crops of the images.
        epochs: How long.
        teacher: Whether the float model's classes count as much as the labels.
        forward: The option of `qtoolkit.prepare`.
        rate: The first learning rate.
        clip: The largest norm of the gradient; None for any.
    """

    subject: str
    bits: int
    seed: int
    epochs: int
    teacher: bool = False
    forward: str = "auto"
    rate: float = RATE
    clip: float | None = None

    @property
    def name(self) -> str:
        """The name of its checkpoint."""
        return "_".join(str(value).replace(", ", "-") for value in asdict(self).values())

    @property
    def line(self) -> tuple[object, ...]:
        """What it shares with the other seeds of its line of the table, in the order of the lines."""
        schedule = self.epochs, self.teacher, self.rate, self.clip or 0
        return *schedule, -self.bits, SUBJECTS.index(self.subject), self.forward

    def schedule(self, images: int) -> Schedule:
        """Return how it is trained on this number of images."""
        return Schedule(images, self.epochs, rate=self.rate, clip=self.clip)


@dataclass(frozen=True)
class Row:
    """What a training gave.

    Attributes:
        training: The training.
        calibrated: The accuracy before it, in percent; None where there is none.
        trained: The accuracy after it.
        minutes: How long it took, without what an earlier run of this script had trained.
        failure: Why there is no figure.
    """

    training: Training
    calibrated: float | None = None
    trained: float | None = None
    minutes: float = 0.0
    failure: str = ""

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Row":
        """Return a row of a file."""
        return Row(**{**row, "training": Training(**row["training"])})


def train(training: Training, folder: Path, data: Data, schedule: Schedule, checkpoints: Path) -> Row:
    """Train, or say why it cannot be."""
    row = Row(training)
    torch.manual_seed(training.seed)
    batches = data.train[0][:CALIBRATION].split(64)
    try:
        model = build(training.subject, resnet20_of(folder).train(), batches, training.bits, training.forward)
    except (ValueError, ModuleNotFoundError) as error:
        return replace(row, failure=str(error))
    teacher = resnet20_of(folder) if training.teacher else None
    before, start = accuracy(model, data), time.perf_counter()
    run = Run(model, data, schedule, training.seed, checkpoints / f"{training.name}.pt", teacher)
    with tqdm(total=schedule.steps - run.step, desc=training.name, mininterval=5, leave=False) as bar:
        run.train(bar.update)
    minutes = (time.perf_counter() - start) / 60
    return replace(row, calibrated=before, trained=accuracy(model, data), minutes=minutes)


def train_missing(
    missing: Sequence[Training], rows: list[Row], folder: Path, images: Mapping[str, int], args: argparse.Namespace
) -> None:
    """Add the rows of the trainings to the others, and write the file of results after each."""
    data = load(folder, images["train"], images["test"])
    results: dict[str, Any] = {
        **facts("cpu"),
        "commands": commands_of(args.out),
        "threads": args.threads,
        "images": images,
        "batch": Schedule.batch,
        "float_weights": accuracy(resnet20_of(folder), data),
    }
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    for training in tqdm(missing, desc="trainings"):
        rows.append(train(training, folder, data, training.schedule(images["train"]), args.checkpoints))
        write_rows(args.out, results, [asdict(row) for row in rows])


def table(results: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the names of columns and the lines: a line for each quantizer, number of bits and schedule."""
    images = results["images"]
    title = (
        f"ResNet-20, CIFAR-10: accuracy on {images['test']:,} images, %; epochs of {images['train']:,} images; "
        f"float weights {results['float_weights']:.2f}"
    )
    names = ["epochs", "teacher", "rate", "clip", "bits", "trained", "seeds"]
    names += ["calibrated", "mean", "spread", "to float", "minutes each", "remark"]
    return title, names, list(_lines([Row.of(row) for row in results["rows"]]))


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    ordered = sorted(rows, key=lambda row: row.training.line)
    lines = [list(of) for _, of in itertools.groupby(ordered, key=lambda row: row.training.line)]
    float_models = _float_models(lines)
    for line in lines:
        training = line[0].training
        name = training.subject + ("" if training.forward == "auto" else f", {training.forward} forward")
        head = [str(training.epochs), "yes" if training.teacher else "", f"{training.rate:g}"]
        head += ["" if training.clip is None else f"{training.clip:g}", str(training.bits), name]
        trained = [row.trained for row in line if row.trained is not None]
        if not trained:
            yield [*head, *[""] * 6, line[0].failure]
            continue
        mean = statistics.mean(trained)
        calibrated = statistics.mean(row.calibrated or 0 for row in line)
        drop = f"{mean - float_models[training.epochs]:+.2f}" if training.epochs in float_models else ""
        minutes = statistics.mean(row.minutes for row in line)
        spread = max(trained) - min(trained)
        figures = f"{calibrated:.2f}", f"{mean:.2f}", f"{spread:.2f}", drop, f"{minutes:.1f}"
        yield [*head, str(len(trained)), *figures, ""]


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
    usual = min(row.training.epochs for row in rows), False, RATE, None, "auto"
    found: dict[tuple[str, int], list[float]] = {}
    for row in sorted(rows, key=lambda row: row.training.line):
        training = row.training
        options = training.epochs, training.teacher, training.rate, training.clip, training.forward
        if row.trained is not None and options == usual:
            found.setdefault((training.subject, training.bits), []).append(row.trained)
    of_float = [value for (subject, _), of in found.items() if subject == FLOAT for value in of]
    accuracies = {key: of for key, of in found.items() if key[0] != FLOAT}
    return accuracies, statistics.mean(of_float) if of_float else None


def write_page(page: Path, results: Mapping[str, Any]) -> None:
    """Replace the part of a page between the marks by the table and the plot."""
    title, names, lines = table(results)
    made = f"{title}. {results['cpu']}, torch {results['torch']}; the commands are below the table."
    picture = page.with_name("qat.svg")
    accuracies, float_model = plotted([Row.of(row) for row in results["rows"]])
    draw(picture, accuracies, float_model)
    shown = f"![Accuracy against bits, for each quantizer]({picture.name})"
    commands = ["", "```", *results["commands"], "```"]
    write_part(page, BEGIN, END, [made, "", shown, "", *markdown_lines(names, lines), *commands])


def main() -> None:
    """Train, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--teacher", action="store_true", help="learn from the float model's classes too")
    parser.add_argument("--rate", type=float, default=RATE, help="the first learning rate")
    parser.add_argument("--clip", type=float, default=None, help="the largest norm of the gradient (default: any)")
    parser.add_argument("--forward", nargs="+", choices=("auto", "float", "integer"), default=["auto"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few images")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/accuracy"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--page", type=Path, default=None, help="write the table of --out into this page, and train nothing"
    )
    args = parser.parse_args()
    if args.page is not None:
        return write_page(args.page, json.loads(args.out.read_text()))
    torch.set_num_threads(args.threads)
    if DATA is None:
        parser.error(MISSING)
    images = {
        "train": QUICK_IMAGES if args.quick else IMAGES,
        "test": QUICK_TEST_IMAGES if args.quick else TEST_IMAGES,
    }
    rows = [Row.of(row) for row in rows_before(args.out, {"images": images})]
    done = {row.training for row in rows}
    wanted = (
        Training(subject, bits, seed, args.epochs, args.teacher, forward, args.rate, args.clip)
        for seed in args.seeds
        for subject in args.only
        for bits in bits_of(subject, args.bits)
        for forward in args.forward
    )
    if missing := [training for training in wanted if training not in done]:
        train_missing(missing, rows, DATA, images, args)
    show(Console(width=160), *table(json.loads(args.out.read_text())))
    return None


if __name__ == "__main__":
    main()
