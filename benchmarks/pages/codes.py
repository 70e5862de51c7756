"""How many quantized values differ between a model, in float and in integer arithmetic, and its file in a runtime.

python -m benchmarks.pages.codes               prints the table (about 5 minutes)
python -m benchmarks.pages.codes --quick       two small networks
python -m benchmarks.pages.codes --json FILE   writes the figures too

timm's networks have random weights, and batch norms with the statistics of two batches. ResNet-20 has the weights and images
of shared/data, and is left out if these are missing. Each file runs in the runtime at its default settings. All quantized
values are compared end to end, and layer by layer from the runtime's own values (`qtoolkit.export.verify`).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

import qtoolkit as qt
from benchmarks.real_data import DATA

ROOT = Path(__file__).parents[2]
NETWORKS = ("resnet18", "mobilenetv2_100", "regnety_002", "ghostnet_050", "efficientnet_lite0")
QUICK = ("resnet10t", "mobilenetv2_050")
RUNTIMES = ("onnxruntime", "openvino")


@dataclass(frozen=True)
class Row:
    """The quantized values of one network in one runtime: how many differ from the model's, and by how many steps.

    "begun": the differences that begin at a quantizer; the model computes its layer from the runtime's own values.
    """

    network: str
    runtime: str
    codes: int
    float_differing: int
    float_steps: int
    integer_differing: int
    integer_steps: int
    integer_begun: int
    begun_steps: int
    layers_in_float: int


def with_statistics(model: nn.Module, x: Tensor) -> nn.Module:
    """Return a model whose batch norms have seen two batches."""
    model.train()
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn_like(x))
    return model.eval()


def networks(names: tuple[str, ...], data: Path | None, size: int) -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """Return name, network, calibration data and inputs of each."""
    if data is not None:
        sys.path.insert(0, str(ROOT / "examples"))
        from cifar10_resnet20 import load_images, load_model

        yield (
            "ResNet-20, CIFAR-10",
            load_model(data),
            load_images(data, "train", 256)[0],
            load_images(data, "test", 50)[0],
        )
    for name in names:
        torch.manual_seed(0)
        x = torch.randn(4, 3, size, size)
        yield name, with_statistics(timm.create_model(name, pretrained=False), x), torch.randn_like(x), x


def rows_of(name: str, model: nn.Module, calibration: Tensor, x: Tensor) -> Iterator[Row]:
    """Quantize a network for each runtime, and compare both arithmetics with the file."""
    for runtime in RUNTIMES:
        prepared = qt.prepare(model, (x,), backend=runtime)
        qt.calibrate(prepared, calibration.split(64), progress=False)
        forms = [qt.convert(prepared), qt.convert(prepared, arithmetic="integer")]
        with tempfile.TemporaryDirectory() as folder:
            path = qt.export_onnx(forms[0], (x,), Path(folder) / "model.onnx", verify=False).path
            found = [qt.export.verify(form, (x,), path, runtimes=(runtime,)).runtimes[runtime] for form in forms]
        ours, integer = (result.codes for result in found)
        begun = found[1].layer_codes
        counts = (ours.differing, ours.steps, integer.differing, integer.steps, begun.differing, begun.steps)
        yield Row(name, found[0].runtime, ours.compared, *counts, len(found[0].float_layers))


def main() -> None:
    """Run, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = networks(QUICK, None, 64) if args.quick else networks(NETWORKS, DATA, 96)
    rows = [row for network in tqdm(chosen, desc="networks") for row in rows_of(*network)]
    table = Table(title="quantized values that differ")
    counted = ("float arithmetic", "integer arithmetic", "integer, layer by layer")
    for column in ("network", "runtime", "values", *counted, "layers in float"):
        table.add_column(column, justify="left" if column in ("network", "runtime") else "right")
    for r in rows:
        shares = (
            f"{count:,} ({count / r.codes:.1e}, {steps} steps)"
            for count, steps in (
                (r.float_differing, r.float_steps),
                (r.integer_differing, r.integer_steps),
                (r.integer_begun, r.begun_steps),
            )
        )
        table.add_row(r.network, r.runtime, f"{r.codes:,}", *shares, str(r.layers_in_float))
    Console(width=160).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
