"""Codes that differ in LiteRT's files, their size and their latency.

python benchmarks/litert.py               prints the table (some minutes)
python benchmarks/litert.py --quick       small networks alone
python benchmarks/litert.py --json FILE   writes the figures too
python benchmarks/litert.py --peers       ResNet-20 beside ai-edge-quantizer (0.10.0), which must be installed, instead

ResNet-20 has the real weights and images of shared/data, and FSRCNN its trained ones; both are left out where these are
missing. The others have random weights, and batch norms of two batches. With the reference kernels, which round twice behind
sums, all codes are compared with the model's in float arithmetic; with the delegate XNNPACK, with those of
`qtoolkit.convert(arithmetic="integer")`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
from codes import with_statistics
from export_models import fsrcnn, jpeg_images, resnet20_of
from real_data import DATA
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import qtoolkit as qt


class ResNet8(nn.Module):
    """MLPerf Tiny's network for images of 32 x 32 pixels: three stages of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16)
        self.stages = nn.ModuleList([Stage(16, 16, 1), Stage(16, 32, 2), Stage(32, 64, 2)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of ten classes."""
        x = torch.relu(self.first_norm(self.first(x)))
        for stage in self.stages:
            x = stage(x)
        return self.head(torch.flatten(F.avg_pool2d(x, 8), 1))


class Stage(nn.Module):
    """Two convolutions around a residual add."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of `out` channels."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.skip(x))


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
    """One network in LiteRT. Shares are of all codes, end to end ("all") and from the runtime's own codes ("begun")."""

    network: str
    codes: int
    reference_all: float
    reference_begun: float
    reference_ties: float
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


def milliseconds(path: Path) -> float:
    """Return the median latency of a file for one image, with the delegate and one thread."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], np.zeros(detail["shape"], detail["dtype"]))
    times = []
    for _ in range(50):
        start = time.perf_counter()
        interpreter.invoke()
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


def accuracy(path: Path, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that a file classifies rightly, with the delegate and one thread."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    (given,), (returned,) = interpreter.get_input_details(), interpreter.get_output_details()
    hits = 0
    for x, label in zip(images, labels, strict=True):
        interpreter.set_tensor(given["index"], as_given(channels_last(x), given))
        interpreter.invoke()
        hits += int(interpreter.get_tensor(returned["index"]).argmax()) == int(label)
    return hits / len(images)


def as_given(x: np.ndarray, given: dict[str, Any]) -> np.ndarray:
    """Return an image as floats, or as the codes that a file takes."""
    if given["dtype"] is np.float32:
        return x
    scale, zero_point = given["quantization"]
    return np.clip(np.rint(x / scale) + zero_point, -128, 127).astype(np.int8)


def channels_last(x: Tensor) -> np.ndarray:
    """Return an image as the input of a file."""
    return np.ascontiguousarray(x.numpy().transpose(1, 2, 0)[None])


def files_of_resnet20(data: Path, folder: Path, calibration: Tensor) -> dict[str, Path]:
    """Write ResNet-20 in float, by our calibration, and by ai-edge-quantizer's of the float file, with the same images."""
    from ai_edge_quantizer import quantizer, recipe

    prepared = qt.prepare(resnet20_of(data), calibration[:1], backend="litert")
    qt.calibrate(prepared, calibration.split(64), progress=False)
    paths = {name: folder / f"{name}.tflite" for name in ("float", "qtoolkit", "ai-edge-quantizer")}
    qt.export_litert(prepared, calibration[:1], paths["qtoolkit"], io_type="int8", verify=False)
    converted = qt.convert(prepared)
    with qt.disable_quantization(converted):
        qt.export_litert(converted, calibration[:1], paths["float"], verify=False)
    theirs = quantizer.Quantizer(str(paths["float"]))
    theirs.load_quantization_recipe(recipe.static_wi8_ai8())
    ranges = theirs.calibrate({"serving_default": [{"x": channels_last(x)} for x in calibration]})
    paths["ai-edge-quantizer"].write_bytes(theirs.quantize(ranges).quantized_model)
    return paths


def print_peers(data: Path, console: Console) -> None:
    """Print size, latency and accuracy of the files of ResNet-20, whose weights and images are real."""
    calibration = jpeg_images(data, "train", 256)[0]
    test = jpeg_images(data, "test", 10_000)
    table = Table("file", "KiB", "ms", "accuracy, CIFAR-10", title="ResNet-20, post-training")
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files_of_resnet20(data, Path(folder), calibration).items():
            size, latency = path.stat().st_size / 1024, milliseconds(path)
            table.add_row(name, f"{size:.0f}", f"{latency:.2f}", f"{accuracy(path, *test):.2%}")
    console.print(table)


def row_of(name: str, model: nn.Module, calibration: Tensor, x: Tensor) -> Row:
    """Quantize a network, write its file, and compare all codes."""
    prepared = qt.prepare(model, (x[:1],), backend="litert")
    qt.calibrate(prepared, calibration.split(32), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        result = qt.export_litert(prepared, x[:1], Path(folder) / "model.tflite", verify=False)
        latency = milliseconds(result.path)
        reference = qt.export.verify(qt.convert(prepared), x, result.path, ("litert",)).runtimes["litert"]
        integer = qt.convert(prepared, arithmetic="integer")
        delegate = qt.export.verify(integer, x, result.path, ("litert-xnnpack",)).runtimes["litert-xnnpack"]
    return Row(
        name,
        reference.codes.compared,
        reference.codes.share,
        reference.layer_codes.share,
        reference.layer_codes.ties / reference.layer_codes.compared,
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
    args = parser.parse_args()
    if args.peers and DATA is not None:
        print_peers(DATA, Console())
        return
    rows = [row_of(*network) for network in tqdm(networks(DATA, args.quick), desc="networks")]
    table = Table(title="LiteRT's files")
    columns = (
        "network", "codes", "reference: end to end", "layer by layer", "of these ties", "XNNPACK: end to end", "layer by layer",
        "steps", "in float", "KiB", "ms",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for r in rows:
        shares = (r.reference_all, r.reference_begun, r.reference_ties, r.delegate_all, r.delegate_begun)
        facts = (str(r.steps), str(r.layers_in_float), f"{r.bytes / 1024:.0f}", f"{r.milliseconds:.2f}")
        table.add_row(r.network, f"{r.codes:,}", *(f"{share:.1e}" for share in shares), *facts)
    Console(width=180).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
