"""Inference time of a converted model by arithmetic, against the float model's, interleaved in one run.

OMP_NUM_THREADS=1 python -m benchmarks.pages.integer               prints the table
OMP_NUM_THREADS=1 python -m benchmarks.pages.integer --json FILE   writes the figures too

Networks of torchvision with random weights, 224x224, in eval mode without gradients, for the backend onnxruntime. Each
figure is the least of the rounds, in which the three models take turns.
"""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

import qtoolkit as qt
from benchmarks.measure import Pace, sample, take_turns
from qtoolkit.ops.sums import is_exact

NETWORKS = ("resnet18", "resnet50", "mobilenet_v2")


@dataclass(frozen=True)
class Row:
    """Milliseconds of one forward, of the float model, of the float simulation and of integer arithmetic."""

    network: str
    batch: int
    float_model: float
    simulation: float
    integer: float


def milliseconds(models: Mapping[str, nn.Module], x: Tensor, rounds: int) -> dict[str, float]:
    """Return the least time of each model, after one run that does not count."""
    with torch.no_grad():
        times = take_turns(
            {name: partial(sample, partial(model, x)) for name, model in models.items()}, Pace(rounds + 1, math.inf)
        )
    return {name: 1e3 * min(taken[1:]) for name, taken in times.items()}


def row_of(network: str, batch: int, rounds: int) -> Row:
    """Measure one network."""
    torch.manual_seed(0)
    model, x = torchvision.models.get_model(network, weights=None).eval(), torch.randn(batch, 3, 224, 224)
    prepared = qt.prepare(model, (x,), backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    forms = {
        "float_model": model,
        "simulation": qt.convert(prepared),
        "integer": qt.convert(prepared, arithmetic="integer"),
    }
    return Row(network, batch, **milliseconds(forms, x, rounds))


def main() -> None:
    """Run, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [(network, batch) for network in NETWORKS for batch in (1, 8)]
    rows = [row_of(*case, args.rounds) for case in tqdm(cases, desc="networks")]
    int8 = "used" if is_exact() else "missing or not exact"
    table = Table(title=f"{torch.get_num_threads()} threads; torch's int8 kernels: {int8}; ratios to the float model")
    for column in ("network", "batch", "float model, ms", "float simulation", "integer arithmetic"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for row in rows:
        ratios = (f"{value / row.float_model:.2f}" for value in (row.simulation, row.integer))
        table.add_row(row.network, str(row.batch), f"{row.float_model:.1f}", *ratios)
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
