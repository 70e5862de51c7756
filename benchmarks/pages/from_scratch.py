"""Training from random weights: a float model, and the same model quantized by default (W8A8, fixed scales) or by `lsq`.

python -m benchmarks.pages.from_scratch                     both networks, writes results/from_scratch.json and prints the table
python -m benchmarks.pages.from_scratch --only mnist --seeds 0 1 2
python -m benchmarks.pages.from_scratch --only resnet20 --trained float "W4A4, lsq" --seeds 0
python -m benchmarks.pages.from_scratch --page docs/accuracy.md  writes the table of the results into the page

A small network on MNIST (12,000 images, 3,000 for the test) and ResNet-20 on CIFAR-10, three epochs each: SGD with momentum, a
rate that falls from 0.1 along a cosine, random crops and flips. The quantized model is calibrated on four batches with the
weights and statistics that it begins with. The second accuracy is that with the statistics of batch norms estimated anew
after the training, from crops of 4,096 training images.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import qtoolkit as qt
from benchmarks.export_models import resnet20_of
from benchmarks.pages.stored import commands_of, made_by, rows_before, write_part, write_rows
from benchmarks.real_data import DATA, MISSING
from benchmarks.report import facts, markdown_lines, show
from benchmarks.training.cifar import Data, Run, Schedule, accuracy, augmented, crops, load

RESULTS = Path(__file__).parents[1] / "results" / "from_scratch.json"
BEGIN, END = "<!-- begin: benchmarks/pages/from_scratch.py -->", "<!-- end -->"
NAMES = ["network", "trained", "seeds", "mean, %", "spread", "to float", "re-estimated, %", "spread", "to float"]
ACCURACIES = "accuracy", "reestimated"
FLOAT = "float"


@dataclass(frozen=True)
class Quantized:
    """How a model is quantized and trained.

    Attributes:
        bits: Of activations and weights.
        quantizer: Of both.
        scale_share: The rate of learned scales as a multiple of that of weights.
        float_epochs: How many epochs it trains in float first; the ranges are set at their end.
    """

    bits: int
    quantizer: str = "lsq"
    scale_share: float = 1.0
    float_epochs: int = 0


QUANTIZED = {
    "W8A8": Quantized(8, "fixed"),
    "W8A8, lsq": Quantized(8),
    "W4A4, lsq": Quantized(4),
    "W4A4, lsq, scales at ten times the rate": Quantized(4, scale_share=10),
    "W4A4, lsq, the first epoch in float": Quantized(4, float_epochs=1),
    "W3A3, lsq": Quantized(3),
    "W3A3, lsq, scales at ten times the rate": Quantized(3, scale_share=10),
    "W3A3, lsq, the first epoch in float": Quantized(3, float_epochs=1),
}
TRAINED = (FLOAT, *QUANTIZED)
EPOCHS, RATE, IMAGES = 3, 0.1, {"mnist": (12_000, 3_000), "resnet20": (50_000, 10_000)}


def small_net() -> nn.Module:
    """Return three convolutions with batch norms, an average pool and a linear layer."""
    blocks = [
        (nn.Conv2d(ins, outs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outs), nn.ReLU())
        for ins, outs in ((1, 8), (8, 16), (16, 32))
    ]
    return nn.Sequential(*itertools.chain(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def digits(train: int, test: int) -> Data:
    """Return the first images of both splits, (n, 1, 28, 28) in [0, 1]."""
    stored = np.load(DATA / "mnist.npz") if DATA is not None else {}

    def part(split: str, count: int) -> tuple[Tensor, Tensor]:
        images, labels = (torch.from_numpy(stored[f"{split}_{name}"][:count]) for name in "xy")
        return images[:, None].float() / 255, labels.long()

    return Data(part("train", train), part("test", test), torch.zeros(1))


def quantized(how: Quantized, model: nn.Module, batches: Sequence[Tensor]) -> nn.Module:
    """Return a calibrated model."""
    mapping = None
    if how.quantizer != "fixed":
        activation = qt.QuantSpec(bits=how.bits, signed=False, symmetric=False, quantizer=how.quantizer)
        weight = qt.QuantSpec(bits=how.bits, axis=0, quantizer=how.quantizer)
        mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    prepared = qt.prepare(model, (batches[0][:2],), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared, batches, progress=False)
    return prepared


def trained(network: str, kind: str, seed: int, data: Data) -> dict[str, float]:
    """Return the accuracies of a training from random weights, in percent, under the names of ACCURACIES."""
    torch.manual_seed(seed)
    model = (small_net() if network == "mnist" else resnet20_of(None)).train()
    batches = data.train[0][:512].split(128)
    how = None if kind == FLOAT else QUANTIZED[kind]
    if how is not None:
        model = quantized(how, model, batches)
    images = len(data.train[0])
    share = None if how is None else how.scale_share
    schedule = Schedule(images, EPOCHS, batch=min(128, images // 4), rate=RATE, scale_share=share)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(model, data, schedule, seed, Path(folder) / "run.pt")
        if how is not None and how.float_epochs:
            phases = qt.tuning.QuantizationSchedule(model, observe=how.float_epochs * schedule.steps // EPOCHS)
            run.optimizer.register_step_post_hook(lambda *_: phases.step())
        run.train(f"{network} {kind} {seed}")
    as_trained = accuracy(model, data)
    count = min(4096, images)
    cropped = augmented(data.train[0][:count], data.border, crops(count, torch.Generator().manual_seed(seed)))
    qt.tuning.reestimate_batch_norm(model, cropped.split(schedule.batch), progress=False)
    return dict(zip(ACCURACIES, (as_trained, accuracy(model, data)), strict=True))


def rows_of(results: dict[str, Any], network: str, kind: str) -> list[dict[str, Any]]:
    """Return the rows of all seeds."""
    return [row for row in results["rows"] if (row["network"], row["trained"]) == (network, kind)]


def _figures(rows: Sequence[dict[str, Any]], of_float: Sequence[dict[str, Any]], name: str) -> tuple[str, str, str]:
    values = [row[name] for row in rows]
    mean = statistics.mean(values)
    drop = f"{mean - statistics.mean(row[name] for row in of_float):+.2f}" if of_float else ""
    return f"{mean:.2f}", f"{max(values) - min(values):.2f}", drop


def table(results: dict[str, Any]) -> list[list[str]]:
    """Return a line for each network and what is trained of it."""
    lines = []
    for network, kind in itertools.product(IMAGES, TRAINED):
        rows, of_float = (rows_of(results, network, of) for of in (kind, FLOAT))
        if rows:
            figures = itertools.chain.from_iterable(_figures(rows, of_float, name) for name in ACCURACIES)
            lines.append([network, kind, str(len(rows)), *figures])
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=IMAGES, default=list(IMAGES))
    parser.add_argument("--trained", nargs="+", choices=TRAINED, default=TRAINED)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few images")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=None, help="write the table of --out into this page")
    args = parser.parse_args(arguments)
    title = "From random weights, three epochs: accuracy on the test images"
    if args.page is not None:
        results = json.loads(args.out.read_text())
        lines = [f"{title}. {made_by(results)}", "", *markdown_lines(NAMES, table(results))]
        return write_part(args.page, BEGIN, END, lines)
    torch.set_num_threads(args.threads)
    if DATA is None:
        parser.error(MISSING)
    rows = rows_before(args.out, {"quick": args.quick})
    done = {(row["network"], row["trained"], row["seed"]) for row in rows}
    results = {**facts("cpu"), "commands": commands_of(args.out), "quick": args.quick}
    for network in args.only:
        sizes = (200, 100) if args.quick else IMAGES[network]
        data = digits(*sizes) if network == "mnist" else load(DATA, *sizes)
        for seed, kind in itertools.product(args.seeds, args.trained):
            if (network, kind, seed) not in done:
                found = trained(network, kind, seed, data)
                rows.append({"network": network, "trained": kind, "seed": seed, **found})
                write_rows(args.out, results, rows)
    show(Console(width=120), title, NAMES, table(json.loads(args.out.read_text())))
    return None


if __name__ == "__main__":
    main()
