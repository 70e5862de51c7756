"""MLPerf Tiny's ResNet-8 in LiteRT: trained in float, quantized after the training and in it, W8A8 and W4A8.

python examples/mlperf_tiny.py --data ../shared/data      needs the files of shared/data; an hour on one core

The float network is trained on the 50,000 images as JPEG, with the labels and the classes of a trained ResNet-20; an ended
training goes on at its last epoch (--checkpoints). Each quantized file has int8 codes at both ends. Its accuracy is that in
LiteRT on the 10,000 test images as JPEG, and on those 1,000 of them whose exact pixels, MLPerf Tiny's, are there. The last
column compares all codes on the way with the model's, in LiteRT with the delegate XNNPACK.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the images, and a training that goes on where it was stopped

from benchmarks.export_models import MEAN, STD, resnet20_of  # noqa: E402
from benchmarks.training.cifar import Data, Run, Schedule, accuracy, load, trained_float  # noqa: E402

BN_EPS = 1e-3  # Keras' default
SEED, BATCH, CALIBRATION = 0, 128, 512
EPOCHS, QAT_EPOCHS = 120, 2
IMAGES = 50_000, 10_000, 1_000  # to train on, to test on, and with exact pixels
FOLDER = Path("build/mlperf_tiny")  # of files and checkpoints
ENDS = ("conv", "linear")  # the first and the last layer, which have weights of eight bits


class Stack(nn.Module):
    """Two convolutions and a shortcut, which has a convolution without batch norm where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.halves = stride == 2
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=0 if self.halves else 1)
        self.bn1 = nn.BatchNorm2d(width, BN_EPS)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width, BN_EPS)
        self.shortcut = nn.Conv2d(width_in, width, 1, stride) if self.halves else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations (n, width, height / stride, width / stride)."""
        # TensorFlow's "same" padding: for an even size, stride 2 and kernel 3 it is one pixel at the end.
        padded = F.pad(x, (0, 1, 0, 1)) if self.halves else x
        y = F.relu(self.bn1(self.conv1(padded)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet8(nn.Module):
    """The image classification network of MLPerf Tiny (Banbury et al., arXiv 2106.07597), which takes pixels of 0 to 255."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16, BN_EPS)
        self.stacks = nn.Sequential(Stack(16, 16, 1), Stack(16, 32, 2), Stack(32, 64, 2))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, 10) of images (n, 3, 32, 32)."""
        x = self.stacks(F.relu(self.bn(self.conv(x))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


@dataclass(frozen=True)
class Row:
    """A file of LiteRT; accuracies in percent.

    Attributes:
        name: How its model was made.
        simulated: The accuracy of the model in PyTorch.
        accuracy: The accuracy of the file on the same test images.
        exact: The accuracy of the file on the exact pixels.
        bytes: The size of the file.
        milliseconds: The latency of an image, with the delegate and one thread.
        differing: How many codes on the way differ from the model's; None of the float file.
        compared: How many codes are compared.
    """

    name: str
    simulated: float
    accuracy: float
    exact: float
    bytes: int
    milliseconds: float
    differing: int | None = None
    compared: int = 0


# ---- images and training


def exact_pixels(data: Path, count: int) -> tuple[Tensor, Tensor]:
    """Return the first test images (count, 3, 32, 32) of the lossless set, of 0 to 255, and their labels."""
    with np.load(data / "cifar10_lossless.npz") as archive:
        pixels, labels = archive["test_x"][:count], archive["test_y"][:count]
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float(), torch.from_numpy(labels).long()


def softened(folder: Path, data: Data, checkpoints: Path) -> Data:
    """Return the images with probabilities instead of labels: half the label, half a trained ResNet-20's classes."""
    images, labels = data.train
    path = checkpoints / f"classes_{len(images)}.pt"
    if not path.exists():
        torch.save(classes_of(resnet20_of(folder), images), path)
    return replace(data, train=(images, (torch.load(path, weights_only=True) + F.one_hot(labels, 10)) / 2))


@torch.no_grad()
def classes_of(teacher: nn.Module, images: Tensor) -> Tensor:
    """Return the probabilities (n, 10) that a teacher gives images of 0 to 255: the mean of each image and its mirror."""
    teacher = teacher.to(memory_format=torch.channels_last)

    def probabilities(pixels: Tensor) -> Tensor:
        x = (pixels / 255 - MEAN[:, None, None]) / STD[:, None, None]
        return teacher(x.contiguous(memory_format=torch.channels_last)).float().softmax(1)

    with torch.autocast("cpu", torch.bfloat16):
        return torch.cat([(probabilities(x) + probabilities(x.flip(-1))) / 2 for x in images.split(250)])


def train_float(data: Data, epochs: int, checkpoints: Path) -> nn.Module:
    """Return the float network, trained, in eval mode."""
    torch.manual_seed(SEED)
    schedule = Schedule(len(data.train[1]), epochs, BATCH, rate=0.1, decay=2e-4, bfloat16=True)
    return trained_float(ResNet8(), data, schedule, SEED, checkpoints / f"resnet8_float_{epochs}.pt")


# ---- quantization


def mapping_of(bits: int) -> qt.QConfigMapping:
    """Return LiteRT's config with learned scales and these bits in the weights of all layers but the first and the last.

    Pixels keep the grid of steps of 1 that calibration gives them.
    """
    default = qt.backends["litert"].qconfig
    weight = replace(default.weight, quantizer="lsq")
    activation = replace(default.activation, quantizer="lsq_plus")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, replace(weight, bits=bits)))
    for name, inputs in zip(ENDS, (default.activation, activation), strict=True):
        mapping.set_module_name(name, qt.QConfig(inputs, weight))
    return mapping


def calibrated(model: nn.Module, data: Data, mapping: qt.QConfigMapping | None = None) -> nn.Module:
    """Return the model with quantizers and their ranges: for QAT in train mode, else for a quantization after training."""
    images = data.train[0][:CALIBRATION]
    prepared = qt.prepare(model, (images[:1],), backend="litert", qconfig_mapping=mapping)
    qt.calibrate(prepared, images.split(64), progress=False)
    return prepared


def train_quantized(model: nn.Module, data: Data, bits: int, epochs: tuple[int, int], checkpoints: Path) -> nn.Module:
    """Return the quantized network, trained after so many epochs in float, in eval mode."""
    prepared = calibrated(model.train(), data, mapping_of(bits))
    of_float, own = epochs
    schedule = Schedule(len(data.train[1]), own, BATCH)
    Run(prepared, data, schedule, SEED, checkpoints / f"resnet8_{of_float}_w{bits}a8_{own}.pt").train(f"W{bits}A8")
    model.eval()
    return prepared.eval()


# ---- files


def write_float(prepared: nn.Module, example: Tensor, path: Path) -> None:
    """Write the float model as a file of LiteRT."""
    converted = qt.convert(prepared)
    with qt.disable_quantization(converted):
        qt.export_litert(converted, example, path, verify=False)


def interpreter_of(path: Path, threads: int = 1) -> Any:
    """Return LiteRT's interpreter of a file, with the delegate XNNPACK."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=threads)
    interpreter.allocate_tensors()
    return interpreter


def accuracy_of_file(path: Path, images: Tensor, labels: Tensor) -> float:
    """Return the top-1 accuracy of a file on images, in percent."""
    interpreter = interpreter_of(path)
    (given,), (returned,) = interpreter.get_input_details(), interpreter.get_output_details()
    hits = 0
    for x, label in zip(images, labels, strict=True):
        interpreter.set_tensor(given["index"], as_given(channels_last(x), given))
        interpreter.invoke()
        hits += int(interpreter.get_tensor(returned["index"]).argmax()) == int(label)
    return 100 * hits / len(images)


def as_given(x: np.ndarray, given: dict[str, Any]) -> np.ndarray:
    """Return an image as floats, or as the codes that a file takes."""
    if given["dtype"] is np.float32:
        return x
    scale, zero_point = given["quantization"]
    return np.clip(np.rint(x / scale) + zero_point, -128, 127).astype(np.int8)


def channels_last(x: Tensor) -> np.ndarray:
    """Return an image as the input of a file."""
    return np.ascontiguousarray(x.numpy().transpose(1, 2, 0)[None])


def milliseconds(path: Path) -> float:
    """Return the median latency of a file for one image."""
    interpreter = interpreter_of(path)
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], np.zeros(detail["shape"], detail["dtype"]))
    times = []
    for _ in range(50):
        start = time.perf_counter()
        interpreter.invoke()
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


def row_of(name: str, simulated: float, path: Path, data: Data, exact: tuple[Tensor, Tensor]) -> Row:
    """Measure a file."""
    accuracies = accuracy_of_file(path, *data.test), accuracy_of_file(path, *exact)
    return Row(name, simulated, *accuracies, path.stat().st_size, milliseconds(path))


def quantized_row(name: str, prepared: nn.Module, data: Data, exact: tuple[Tensor, Tensor], folder: Path) -> Row:
    """Write a quantized model as a file, compare all codes on the exact pixels, and measure it.

    Raises:
        RuntimeError: The codes of the file are not those of the model.
    """
    example, path = data.test[0][:1], folder / f"{name.replace(' ', '_')}.tflite"
    qt.export_litert(prepared, example, path, io_type="int8", verify=False)
    integer = qt.convert(prepared, arithmetic="integer")  # as XNNPACK computes
    found = qt.export.verify(integer, exact[0], path, ("litert-xnnpack",), progress=False).runtimes["litert-xnnpack"]
    found.check()
    row = row_of(name, accuracy(prepared, data), path, data, exact)
    return replace(row, differing=found.codes.differing, compared=found.codes.compared)


def run(
    data: Data, exact: tuple[Tensor, Tensor], epochs: tuple[int, int], checkpoints: Path, out: Path
) -> Iterator[Row]:
    """Train in float and quantized for these epochs, and yield a row for each file."""
    model = train_float(data, epochs[0], checkpoints)
    prepared = calibrated(model, data)
    path = out / "float.tflite"
    write_float(prepared, data.test[0][:1], path)
    yield row_of("float", accuracy(model, data), path, data, exact)
    yield quantized_row("post-training W8A8", prepared, data, exact, out)
    for bits in (8, 4):
        prepared = train_quantized(model, data, bits, epochs, checkpoints)
        yield quantized_row(f"QAT W{bits}A8", prepared, data, exact, out)


def load_all(folder: Path, images: tuple[int, int, int], checkpoints: Path) -> tuple[Data, tuple[Tensor, Tensor]]:
    """Return images to train on, with softened labels, and to test on; and test images with exact pixels."""
    train, test, exact = images
    checkpoints.mkdir(parents=True, exist_ok=True)
    return softened(folder, load(folder, train, test, raw=True), checkpoints), exact_pixels(folder, exact)


def main() -> None:
    """Print a table of the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of the files")
    parser.add_argument("--checkpoints", type=Path, default=FOLDER, help="the folder of checkpoints")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of the float network")
    parser.add_argument("--qat-epochs", type=int, default=QAT_EPOCHS)
    parser.add_argument("--images", type=int, nargs=3, default=IMAGES, help="train, test, exact pixels")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data, exact = load_all(args.data, tuple(args.images), args.checkpoints)
    _, tested, with_exact = args.images
    title = f"MLPerf Tiny's ResNet-8, CIFAR-10: {tested:,} test images as JPEG, {with_exact:,} with exact pixels"
    table = Table(title=title)
    for column in ("model", "PyTorch %", "LiteRT %", "exact pixels %", "KiB", "ms", "codes that differ"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in run(data, exact, (args.epochs, args.qat_epochs), args.checkpoints, args.out):
        figures = f"{row.simulated:.2f}", f"{row.accuracy:.2f}", f"{row.exact:.2f}", f"{row.bytes / 1024:.0f}"
        codes = "" if row.differing is None else f"{row.differing} / {row.compared:,}"
        table.add_row(row.name, *figures, f"{row.milliseconds:.3f}", codes)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
