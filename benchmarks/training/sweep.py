"""What benchmarks that train many models on CIFAR-10 share: their options, and the loop over what is not trained yet."""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.pages.stored import commands_of, write_rows
from benchmarks.report import facts
from benchmarks.training.cifar import Schedule

IMAGES, QUICK_IMAGES = {"train": 50_000, "test": 10_000}, {"train": 200, "test": 100}


def add_options(parser: argparse.ArgumentParser, checkpoints: Path, out: Path) -> None:
    """Add the options of all these benchmarks; checkpoints and out are the defaults of two of them."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--images", type=int, default=IMAGES["train"], help="how many train; needs an --out of its own")
    parser.add_argument("--quick", action="store_true", help="few images")
    parser.add_argument("--checkpoints", type=Path, default=checkpoints)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument(
        "--page", type=Path, default=None, help="write the tables of --out into this page, and train nothing"
    )


def images_of(args: argparse.Namespace) -> Mapping[str, int]:
    """Return the numbers of images, of both splits."""
    return QUICK_IMAGES if args.quick else {**IMAGES, "train": args.images}


def checkpoints_of(args: argparse.Namespace) -> Path:
    """Return the folder of checkpoints, which is made; those of fewer images are apart."""
    few, folder = images_of(args)["train"], args.checkpoints
    folder = folder if few == IMAGES["train"] else folder / str(few)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def lines_of(rows: Iterable[Any]) -> list[list[Any]]:
    """Return the rows of each line of a table, in the order of `row.training.line`: of one training with several seeds."""
    ordered = sorted(rows, key=lambda row: row.training.line)
    return [list(of) for _, of in itertools.groupby(ordered, key=lambda row: row.training.line)]


def mean_and_spread(values: Sequence[float]) -> tuple[str, str]:
    """Return the mean of several seeds, and how far the best is from the worst, as a table has them."""
    return f"{statistics.mean(values):.2f}", f"{max(values) - min(values):.2f}"


def train_all(
    missing: Sequence[Any], rows: list[Any], train: Callable[[Any], Any], float_weights: Any, args: argparse.Namespace
) -> None:
    """Add the rows of trainings to the others, and write the file of results after each.

    Args:
        missing: The trainings, which `train` takes.
        rows: The rows so far, dataclasses as `train` returns them.
        train: Trains, and returns the row.
        float_weights: The accuracies that trainings start from, as the file keeps them.
        args: The options.
    """
    results = {
        **facts("cpu"),
        "commands": commands_of(args.out),
        "threads": args.threads,
        "images": images_of(args),
        "batch": Schedule.batch,
        "float_weights": float_weights,
    }
    for training in tqdm(missing, desc="trainings"):
        rows.append(train(training))
        write_rows(args.out, results, [asdict(row) for row in rows])
