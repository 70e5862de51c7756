"""The accuracy that each quantizer reaches in training: ResNet-20 on CIFAR-10, in 8 to 2 bits, over several seeds.

python benchmarks/accuracy.py                  trains what is missing, writes results/accuracy.json and prints the table
python benchmarks/accuracy.py --bits 4 --only lsq pact --seeds 0
python benchmarks/accuracy.py --images 50000 --epochs 30       the schedule of papers: hours of processor time for each training
python benchmarks/accuracy.py --page docs/accuracy.md          writes the table of the results into the page

Each training starts from the float weights of shared/data; the first and the last layer have eight bits, as in the papers.
Images are cropped and flipped at random; the accuracy is that on the 10,000 test images. A training that was ended goes on
after its last whole epoch (--checkpoints), and one with a result of the same schedule is not repeated. Seeds take turns, so
that an early end leaves every quantizer with as many seeds.
"""

import argparse
import itertools
import json
import shlex
import statistics
import sys
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
from tqdm import tqdm
from training.cifar import Data, Run, Schedule, accuracy, load, quantized

import qtoolkit as qt

RESULTS = Path(__file__).parent / "results" / "accuracy.json"
SEEDS, BITS = (0, 1, 2), (8, 4, 3, 2)
FULL, QUICK = Schedule(10_000, 3, 100, 0.02), Schedule(200, 1, 50, 0.02)
TEST_IMAGES, QUICK_TEST_IMAGES = 10_000, 100
BEGIN, END = "<!-- begin: benchmarks/accuracy.py -->", "<!-- end -->"

# Quantizer of activations, quantizer of weights: "lsq" where the first is for activations alone.
QUANTIZERS: Mapping[str, tuple[str, str]] = {
    "fixed": ("fixed", "fixed"),
    "lsq": ("lsq", "lsq"),
    "lsq_plus": ("lsq_plus", "lsq"),
    "pact": ("pact", "lsq"),
    "learned_range": ("learned_range", "lsq"),
    "dsq": ("dsq", "dsq"),
    "tqt": ("tqt", "tqt"),
    "dorefa": ("dorefa", "dorefa"),
    "apot": ("apot", "apot"),
    "qil": ("qil", "qil"),
}
AFFINE = ("lsq_plus", "learned_range")
POWERS_OF_TWO = ("tqt",)


@dataclass(frozen=True)
class Training:
    """One training: a name in QUANTIZERS, the bits of weights and activations, and the seed."""

    quantizer: str
    bits: int
    seed: int

    @property
    def qconfig(self) -> qt.QConfig:
        """The config of all layers.

        Raises:
            ValueError: The quantizer does not take these bits.
        """
        activation, weight = QUANTIZERS[self.quantizer]
        return qt.QConfig(_spec(activation, self.bits), replace(_spec(weight, self.bits), axis=0))

    def checkpoint(self, schedule: Schedule) -> str:
        """Return the name of its file."""
        return f"{self.quantizer}_{self.bits}_{self.seed}_{schedule.images}x{schedule.epochs}.pt"


@dataclass(frozen=True)
class Row:
    """What a training gave.

    Attributes:
        quantizer, bits, seed: The training.
        calibrated: The accuracy before it, in percent; None where there is none.
        trained: The accuracy after it.
        minutes: How long it took, without what an earlier run of this script had trained.
        failure: Why there is no figure.
    """

    quantizer: str
    bits: int
    seed: int
    calibrated: float | None = None
    trained: float | None = None
    minutes: float = 0.0
    failure: str = ""


def _spec(quantizer: str, bits: int) -> qt.QuantSpec:
    return qt.QuantSpec(
        bits=bits, quantizer=quantizer, symmetric=quantizer not in AFFINE, pow2_scale=quantizer in POWERS_OF_TWO
    )


def train(training: Training, folder: Path, data: Data, schedule: Schedule, checkpoints: Path) -> Row:
    """Train, or say why it cannot be."""
    row = Row(training.quantizer, training.bits, training.seed)
    torch.manual_seed(training.seed)
    try:
        model = quantized(folder, data, qconfig=training.qconfig)
    except ValueError as error:
        return replace(row, failure=str(error))
    before, start = accuracy(model, data), time.perf_counter()
    run = Run(model, data, schedule, training.seed, checkpoints / training.checkpoint(schedule))
    with tqdm(total=schedule.steps - run.step, desc=f"{training}", mininterval=5, leave=False) as bar:
        run.train(bar.update)
    minutes = (time.perf_counter() - start) / 60
    return replace(row, calibrated=before, trained=accuracy(model, data), minutes=minutes)


def rows_before(out: Path, schedule: Schedule, test_images: int) -> list[Row]:
    """Return the results of a file that were made with the same schedule."""
    if not out.exists():
        return []
    found = json.loads(out.read_text())
    if found["schedule"] != asdict(schedule) or found["test_images"] != test_images:
        raise SystemExit(f"{out} has results of another schedule, {found['schedule']}; pass another file as --out.")
    return [Row(**row) for row in found["rows"]]


def table(results: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the names of columns and the lines: a line for each quantizer and number of bits."""
    schedule, float_model = results["schedule"], results["float_model"]
    title = (
        f"ResNet-20, CIFAR-10: accuracy on {results['test_images']:,} images, %; {schedule['epochs']} epochs of "
        f"{schedule['images']:,} images; float model {float_model:.2f}"
    )
    names = ["bits", "quantizer", "seeds", "calibrated", "mean", "spread", "to float", "minutes each", "remark"]
    return title, names, list(_lines([Row(**row) for row in results["rows"]], float_model))


def _lines(rows: Sequence[Row], float_model: float) -> Iterator[list[str]]:
    by_bits = sorted({row.bits for row in rows}, reverse=True)
    for bits, quantizer in itertools.product(by_bits, QUANTIZERS):
        of = [row for row in rows if (row.bits, row.quantizer) == (bits, quantizer)]
        trained = [row.trained for row in of if row.trained is not None]
        if not of:
            continue
        if not trained:
            yield [str(bits), quantizer, *[""] * 6, of[0].failure]
            continue
        mean = statistics.mean(trained)
        calibrated = statistics.mean(row.calibrated or 0 for row in of)
        minutes = statistics.mean(row.minutes for row in of)
        figures = f"{calibrated:.2f}", f"{mean:.2f}", f"{max(trained) - min(trained):.2f}", f"{mean - float_model:+.2f}"
        yield [str(bits), quantizer, str(len(trained)), *figures, f"{minutes:.1f}", ""]


def write_page(page: Path, results: Mapping[str, Any]) -> None:
    """Replace the part of a page between the marks by the table."""
    before, rest = page.read_text().split(BEGIN)
    title, names, lines = table(results)
    part = ["", f"{title}. Made by `{results['command']}` ({results['cpu']}, torch {results['torch']}).", ""]
    part += [*markdown_lines(names, lines), ""]
    page.write_text(before + BEGIN + "\n".join(part) + END + rest.split(END, 1)[1])


def main() -> None:
    """Train, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=QUANTIZERS, default=list(QUANTIZERS))
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--images", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one epoch of few images, and few test images")
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
    schedule = QUICK if args.quick else FULL
    schedule = replace(schedule, images=args.images or schedule.images, epochs=args.epochs or schedule.epochs)
    test_images = QUICK_TEST_IMAGES if args.quick else TEST_IMAGES
    rows = rows_before(args.out, schedule, test_images)
    done = {Training(row.quantizer, row.bits, row.seed) for row in rows}
    wanted = (Training(*of) for seed in args.seeds for of in itertools.product(args.only, args.bits, [seed]))
    missing = [training for training in wanted if training not in done]
    data = load(DATA, schedule.images, test_images)
    results: dict[str, Any] = {
        **facts("cpu"),
        "command": shlex.join(["python", *sys.argv]),
        "threads": args.threads,
        "schedule": asdict(schedule),
        "test_images": test_images,
        "float_model": accuracy(resnet20_of(DATA), data),
    }
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    for training in tqdm(missing, desc="trainings"):
        rows.append(train(training, DATA, data, schedule, args.checkpoints))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**results, "rows": [asdict(row) for row in rows]}, indent=1))
    show(Console(width=140), *table({**results, "rows": [asdict(row) for row in rows]}))
    return None


if __name__ == "__main__":
    main()
