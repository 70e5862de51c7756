"""Quantized values that differ in LiteRT's files, their size and their latency.

python -m benchmarks.pages.litert          prints the table (some minutes)
python -m benchmarks.pages.litert --quick  small networks alone
python -m benchmarks.pages.litert --json FILE  writes the figures too
python -m benchmarks.pages.litert --peers  size, latency and accuracy beside litert-quantizer, which must be installed
python -m benchmarks.pages.litert --peers --checkpoints build/mlperf_tiny  as trained by examples/mlperf_tiny.py (an hour)

ResNet-20 has the weights and images of shared/data, and FSRCNN its trained weights; both are left out if these are missing. The
others have random weights, and batch norms with the statistics of two batches. All values of the reference kernels, which round
twice after sums, are compared with the model in float arithmetic and in `qtoolkit.convert(arithmetic="integer",
runtime="litert")`. All values of the delegate XNNPACK are compared with `qtoolkit.convert(arithmetic="integer")`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import qtoolkit as qt
from benchmarks.export_models import ROOT, fsrcnn, jpeg_images, resnet20_of
from benchmarks.pages.codes import with_statistics
from benchmarks.pages.litert_files import FLOAT, OURS, THEIRS, quantized_by_theirs, write_files
from benchmarks.real_data import DATA

sys.path.insert(0, str(ROOT / "examples"))

import mlperf_tiny
from mlperf_tiny import (
    CALIBRATION,
    ResNet8,
    accuracy_of_file,
    load_all,
    milliseconds,
)

LABELS = {FLOAT: FLOAT, **{tool: f"{tool}, post-training W8A8" for tool in (OURS, THEIRS)}}
PEERS = "ResNet-8", "MobileNetV1 0.25", "mobilenetv2_100"  # networks with random weights in the table of --peers


class MobileNetV1(nn.Module):
    """MLPerf Tiny's network for images of 96 x 96 pixels: MobileNetV1 with a quarter of the channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32, 32, 64, 64, 128, 128, 128, 128, 128, 128, 256, 256)
        strides = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
        layers = [*_with_norm(nn.Conv2d(3, 8, 3, 2, 1, bias=False))]
        for i, stride in enumerate(strides):
            a, b = widths[i], widths[i + 1]
            layers += [*_with_norm(nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False))]
            layers += [*_with_norm(nn.Conv2d(a, b, 1, bias=False))]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of two classes."""
        return torch.softmax(self.head(torch.flatten(F.avg_pool2d(self.layers(x), 3), 1)), 1)


def _with_norm(layer: nn.Conv2d) -> tuple[nn.Module, ...]:
    return layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU()


@dataclass(frozen=True)
class Row:
    """One network in LiteRT. Shares of quantized values: end to end ("all"), and from the runtime's own values ("begun")."""

    network: str
    codes: int
    reference_all: float
    reference_begun: float
    integer_codes: int
    delegate_all: float
    delegate_begun: float
    steps: int
    layers_in_float: int
    bytes: int
    milliseconds: float


def random_networks(quick: bool) -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """Return name, network, calibration data and inputs of each network with random weights."""
    made: dict[str, tuple[Callable[[], nn.Module], int]] = {
        "ResNet-8": (ResNet8, 32),
        "MobileNetV1 0.25": (MobileNetV1, 96),
    }
    if not quick:
        made["mobilenetv2_100"] = (lambda: timm.create_model("mobilenetv2_100", pretrained=False), 96)
        made["efficientnet_lite0"] = (lambda: timm.create_model("efficientnet_lite0", pretrained=False), 96)
    for name, (make, size) in made.items():
        torch.manual_seed(0)
        x = torch.randn(4, 3, size, size)
        yield name, with_statistics(make(), x), torch.randn(32, 3, size, size), x


def networks(data: Path | None, quick: bool) -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """Return name, network, calibration data and inputs of each."""
    if data is not None:
        calibration, test = jpeg_images(data, "train", 256)[0], jpeg_images(data, "test", 50)[0]
        yield "ResNet-20, CIFAR-10", resnet20_of(data), calibration, test
        subject = fsrcnn(data, quick=True)
        yield subject.name, subject.model, torch.cat([*subject.calibration]), subject.example
    yield from random_networks(quick)


@dataclass(frozen=True)
class Peer:
    """A file beside others of its network.

    Attributes:
        network: The network.
        file: How its file was made.
        bytes: Its size.
        milliseconds: Its latency.
        accuracy: On the 10,000 test images, in percent; None with random weights.
    """

    network: str
    file: str
    bytes: int
    milliseconds: float
    accuracy: float | None = None


def peers_of(name: str, model: nn.Module, calibration: Tensor, test: tuple[Tensor, Tensor] | None) -> Iterator[Peer]:
    """Yield the files of a network: in float, and quantized after training by both tools."""
    with tempfile.TemporaryDirectory() as folder:
        paths, _ = write_files(model, calibration[:1], calibration.split(64), Path(folder))
        for file, path in paths.items():
            yield peer_of(name, LABELS[file], path, test)


def peer_of(name: str, file: str, path: Path, test: tuple[Tensor, Tensor] | None) -> Peer:
    """Measure a file."""
    measured = None if test is None else accuracy_of_file(path, *test)
    return Peer(name, file, path.stat().st_size, milliseconds(path), measured)


def peers_of_resnet8(data: Path, checkpoints: Path) -> Iterator[Peer]:
    """Yield the files of examples/mlperf_tiny.py, whose training goes on, and litert-quantizer's of its float file."""
    name, (images, exact) = "ResNet-8, CIFAR-10", load_all(data, mlperf_tiny.IMAGES, checkpoints)
    epochs = mlperf_tiny.EPOCHS, mlperf_tiny.QAT_EPOCHS
    with tempfile.TemporaryDirectory() as folder:
        for row in mlperf_tiny.run(images, exact, epochs, checkpoints, Path(folder)):
            file = FLOAT if row.name == FLOAT else f"qtoolkit, {row.name}"
            yield Peer(name, file, row.bytes, row.milliseconds, row.accuracy)
            if row.name == FLOAT:
                theirs = Path(folder) / "theirs.tflite"
                quantized_by_theirs(Path(folder) / "float.tflite", [images.train[0][:CALIBRATION]], theirs)
                yield peer_of(name, LABELS[THEIRS], theirs, images.test)


def all_peers(data: Path | None, checkpoints: Path | None) -> Iterator[Peer]:
    """Yield the files of all networks, beside litert-quantizer's."""
    if data is not None:
        calibration, test = jpeg_images(data, "train", 256)[0], jpeg_images(data, "test", 10_000)
        yield from peers_of("ResNet-20, CIFAR-10", resnet20_of(data), calibration, test)
    trained = data is not None and checkpoints is not None
    if trained:
        yield from peers_of_resnet8(data, checkpoints)
    for name, model, calibration, _ in random_networks(quick=False):
        if name in PEERS and not (trained and name == "ResNet-8"):
            yield from peers_of(name, model, calibration, None)


def print_peers(found: Iterable[Peer], console: Console) -> None:
    """Print size, latency and accuracy of files."""
    table = Table("network", "file", "KiB", "ms", "accuracy, %", title="Beside litert-quantizer")
    for peer in found:
        accuracy = "" if peer.accuracy is None else f"{peer.accuracy:.2f}"
        table.add_row(peer.network, peer.file, f"{peer.bytes / 1024:.0f}", f"{peer.milliseconds:.3f}", accuracy)
    console.print(table)


def row_of(name: str, model: nn.Module, calibration: Tensor, x: Tensor) -> Row:
    """Quantize a network, write its file, and compare all quantized values."""
    prepared = qt.prepare(model, (x[:1],), backend="litert")
    qt.calibrate(prepared, calibration.split(32), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        result = qt.export_litert(prepared, x[:1], Path(folder) / "model.tflite", verify=False)
        latency = milliseconds(result.path)
        reference = qt.export.verify(qt.convert(prepared), x, result.path, ("litert",)).runtimes["litert"]
        exact = qt.convert(prepared, arithmetic="integer", runtime="litert")
        kernels = qt.export.verify(exact, x, result.path, ("litert",)).runtimes["litert"]
        integer = qt.convert(prepared, arithmetic="integer")
        delegate = qt.export.verify(integer, x, result.path, ("litert-xnnpack",)).runtimes["litert-xnnpack"]
    return Row(
        name,
        reference.codes.compared,
        reference.codes.share,
        reference.layer_codes.share,
        kernels.codes.differing,
        delegate.codes.share,
        delegate.layer_codes.share,
        max(reference.layer_codes.steps, delegate.layer_codes.steps),
        len(result.float_layers),
        result.bytes,
        latency,
    )


def main() -> None:
    """Run, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--checkpoints", type=Path, help="of examples/mlperf_tiny.py, with --peers")
    args = parser.parse_args()
    if args.peers:
        return print_peers(tqdm(all_peers(DATA, args.checkpoints), desc="files"), Console(width=120))
    rows = [row_of(*network) for network in tqdm(networks(DATA, args.quick), desc="networks")]
    table = Table(title="LiteRT's files")
    columns = (
        "network", "values", "reference: end to end", "layer by layer", "in integers: values", "XNNPACK: end to end",
        "layer by layer", "steps", "in float", "KiB", "ms",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for r in rows:
        float_shares, delegate = (r.reference_all, r.reference_begun), (r.delegate_all, r.delegate_begun)
        facts = (str(r.steps), str(r.layers_in_float), f"{r.bytes / 1024:.0f}", f"{r.milliseconds:.2f}")
        table.add_row(
            r.network,
            f"{r.codes:,}",
            *map("{:.1e}".format, float_shares),
            str(r.integer_codes),
            *map("{:.1e}".format, delegate),
            *facts,
        )
    Console(width=180).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return None


if __name__ == "__main__":
    main()
