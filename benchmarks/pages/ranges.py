"""Range search in a model of 100 quantizers: qtoolkit's methods beside those of `qtoolkit.compat`, on the same activations.

python -m benchmarks.pages.ranges                  prints the table
python -m benchmarks.pages.ranges --quantizers 20  fewer quantizers
python -m benchmarks.pages.ranges --json FILE      writes the figures too

Each quantizer has counted one batch of activations, half of them after a ReLU. What is timed is the choice of all ranges from
the counts, as `calibrate` does it at its end. The searches of `qtoolkit.compat` (percentile and mse are pytorch-quantization's
own, entropy is `search_range` with its candidates) run on the first few quantizers; their seconds are for as many as ours.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import qtoolkit as qt
from benchmarks.measure import sample
from qtoolkit.compat.pytorch_quantization.calib import HistogramCalibrator

METHODS = ("percentile", "mse", "l2", "entropy")
LEGACY = ("percentile", "mse", "entropy")
LEGACY_COUNT = 3
SHAPE = (8, 64, 28, 28)
CHANNELS = 64
GOAL = 1.0  # seconds, per tensor


@dataclass(frozen=True)
class Row:
    """Seconds to choose the ranges of all quantizers by one method: ours for a tensor and for its channels, and the old way."""

    method: str
    per_tensor: float
    per_channel: float
    legacy: float | None


def activations(count: int) -> list[Tensor]:
    """Return one batch for each quantizer, from a fixed seed: normal values of some width, every other one after a ReLU."""
    torch.manual_seed(0)
    batches = [torch.randn(SHAPE) * (1 + i % 7) for i in range(min(count, 8))]
    return [torch.relu(batches[i % 8]) if i % 2 else batches[i % 8] for i in range(count)]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the least of three times."""
    return min(sample(work) for _ in range(3))


def ours(method: str, axis: int | None, batches: Sequence[Tensor]) -> float:
    """Return the seconds that TensorQuantizers take for their ranges."""
    spec = qt.QuantSpec(axis=axis, observer="histogram", observer_args={"method": method})
    quantizers = [qt.TensorQuantizer(spec, CHANNELS if axis is not None else None) for _ in batches]
    for quantizer, x in zip(quantizers, batches, strict=True):
        quantizer.observer(x)
    return seconds_of(lambda: [quantizer.load_observed() for quantizer in quantizers])


def legacy(method: str, batches: Sequence[Tensor]) -> float:
    """Return the seconds that `qtoolkit.compat`'s search would take for all, from those for a few."""
    calibrators = []
    for x in batches[:LEGACY_COUNT]:
        calibrators.append(HistogramCalibrator(8, None, False))
        calibrators[-1].collect(x)
    spent = seconds_of(lambda: [calibrator.compute_amax(method) for calibrator in calibrators])
    return spent * len(batches) / len(calibrators)


def main() -> None:
    """Run, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantizers", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = activations(args.quantizers)
    rows = [
        Row(m, ours(m, None, batches), ours(m, 1, batches), legacy(m, batches) if m in LEGACY else None)
        for m in METHODS
    ]
    table = Table(title=f"seconds for the ranges of {args.quantizers} quantizers; goal, per tensor: {GOAL:g} s")
    for column in ("method", "per tensor", f"{CHANNELS} channels", "qtoolkit.compat's search", "ratio"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        old = ("", "") if row.legacy is None else (f"{row.legacy:.3f}", f"{row.legacy / row.per_tensor:.1f}")
        table.add_row(row.method, f"{row.per_tensor:.3f}", f"{row.per_channel:.2f}", *old)
    Console().print(table)
    if args.json is not None:
        args.json.write_text(
            json.dumps({"quantizers": args.quantizers, "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
