"""Whether training by the integer forward reaches the accuracy of the float forward: ResNet-20 in four bits on CIFAR-10.

python benchmarks/train_accuracy.py            trains three seeds by each forward, writes benchmarks/results/train_accuracy.json
python benchmarks/train_accuracy.py --quick    one epoch of few images, and few test images

Starts from the float weights of shared/data, with learned scales of four bits (eight in the first and the last layer); trains
on JPEG images with random crops and flips and measures the accuracy on all 10,000 test images. A run that was ended goes on
after its last whole epoch (--checkpoints). Seeds take turns, so that an early end leaves pairs.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from export_models import resnet20_of
from real_data import DATA, MISSING
from report import facts, show
from rich.console import Console
from tqdm import tqdm
from training.cifar import Data, Run, Schedule, accuracy, load, quantized
from training.tables import accuracy_tables

RESULTS = Path(__file__).parent / "results" / "train_accuracy.json"
FORWARDS = ("float", "integer")
SEEDS = (0, 1, 2)
FULL, QUICK = Schedule(10_000, 3, 100, 0.02), Schedule(200, 1, 50, 0.02)
TEST_IMAGES, QUICK_TEST_IMAGES = 10_000, 100


@dataclass(frozen=True)
class Row:
    """One training: its forward, its seed, the accuracy before and after it in percent, and the seconds of a step."""

    forward: str
    seed: int
    calibrated: float
    trained: float
    step_seconds: float


def train(folder: Path, data: Data, schedule: Schedule, forward: str, seed: int, checkpoints: Path) -> Row:
    """Train a model with a seed by a forward."""
    torch.manual_seed(seed)
    model = quantized(folder, data, forward)
    before = accuracy(model, data)
    run = Run(model, data, schedule, seed, checkpoints / f"{forward}_{seed}.pt")
    start, left = time.perf_counter(), schedule.steps - run.step
    with tqdm(total=left, desc=f"{forward}, seed {seed}", mininterval=5) as bar:
        run.train(bar.update)
    seconds = (time.perf_counter() - start) / max(left, 1)
    return Row(forward, seed, before, accuracy(model, data), seconds)


def write(
    out: Path, rows: Sequence[Row], schedule: Schedule, float_model: float, test_images: int
) -> dict[str, object]:
    """Write the results so far as JSON, and return them."""
    results = {
        **facts("cpu"),
        "threads": torch.get_num_threads(),
        "schedule": asdict(schedule),
        "test_images": test_images,
        "float_model": float_model,
        "rows": [asdict(row) for row in rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1))
    return results


def main() -> None:
    """Train, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/train_accuracy"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if DATA is None:
        parser.error(MISSING)
    schedule = QUICK if args.quick else FULL
    schedule = replace(schedule, epochs=args.epochs or schedule.epochs)
    test_images = QUICK_TEST_IMAGES if args.quick else TEST_IMAGES
    data = load(DATA, schedule.images, test_images)
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    float_model = accuracy(resnet20_of(DATA), data)
    rows: list[Row] = []
    for seed in args.seeds:
        for forward in FORWARDS:
            rows.append(train(DATA, data, schedule, forward, seed, args.checkpoints))
            results = write(args.out, rows, schedule, float_model, test_images)
    for title, names, cells in accuracy_tables(results):
        show(Console(width=120), title, names, cells)


if __name__ == "__main__":
    main()
