"""From a float CNN to a verified int8 (and int4) ONNX model, on the handwritten digits that ship with scikit-learn.

Float training, post-training quantization, quantization-aware training with learned scales, conversion, export, and the
comparison of every integer code with onnxruntime: python examples/digits.py
"""

import argparse
import copy
import random
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import qtoolkit as qt


class Net(nn.Module):
    """A small residual network with an upsampling stage: convolutions, pooling, an add, a transposed convolution."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(2)
        self.up, self.bn3 = nn.ConvTranspose2d(width, width, 2, stride=2, bias=False), nn.BatchNorm2d(width)
        self.head = nn.Linear(width * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        x = F.relu(self.bn3(self.up(self.pool(x))))
        return self.head(torch.flatten(F.avg_pool2d(x, 4), 1))


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return train and test images (n, 1, 8, 8) in [0, 1], and their labels."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]
    parts = train_test_split(images, digits.target, test_size=0.3, random_state=0, stratify=digits.target)
    x_train, x_test, y_train, y_test = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
    return x_train, y_train.long(), x_test, y_test.long()


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    lr: float,
    what: str,
    phases: qt.tuning.QuantizationSchedule | None = None,
) -> None:
    """Train as any model is trained; of a quantized one, the phases go on with the optimizer's steps."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    steps = epochs * len(range(0, len(x), 64))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in tqdm(range(epochs), desc=what, leave=False):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
            if phases is not None:
                phases.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return top-1 accuracy in percent."""
    return 100 * (model.eval()(x).argmax(1) == y).float().mean().item()


def accuracy_of_file(path: Path, x: Tensor, y: Tensor) -> float:
    """Return the top-1 accuracy of an ONNX file in onnxruntime, in percent."""
    session = onnxruntime.InferenceSession(str(path))
    (logits,) = session.run(None, {"image": x.numpy()})
    return 100 * float((logits.argmax(1) == y.numpy()).mean())


def mapping_of(bits: int) -> qt.QConfigMapping:
    """Return W<bits>A<bits> with learned scales; the first and last layer keep 8 bits, as is usual."""
    inner = qt.QConfig(
        activation=qt.QuantSpec(bits=bits, signed=False, symmetric=False, quantizer="lsq"),
        weight=qt.QuantSpec(bits=bits, axis=0, quantizer="lsq"),
    )
    ends = qt.QConfig(
        activation=qt.QuantSpec(bits=8, signed=False, symmetric=False, quantizer="lsq"),
        weight=qt.QuantSpec(bits=8, axis=0, quantizer="lsq"),
    )
    return qt.QConfigMapping().set_global(inner).set_module_name("stem", ends).set_module_name("head", ends)


def main() -> None:
    """Run everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30, help="epochs of float training")
    parser.add_argument("--qat-epochs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("model.onnx"), help="the W8A8 model; W4A4 goes beside it")
    args = parser.parse_args()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

    x, y, x_test, y_test = load_data()
    model = Net()
    train(model, x, y, args.epochs, 0.1, "float")
    float_accuracy = accuracy(model, x_test, y_test)

    table = Table(title=f"scikit-learn digits, {len(x_test)} test images, accuracy in %")
    for column in (
        "",
        "float",
        "PTQ",
        "QAT",
        "onnxruntime",
        "file KiB",
        "codes that differ",
    ):
        table.add_column(column, justify="right")
    for bits in (8, 4):
        prepared = qt.prepare(model.train(), (x[:1],), backend="onnxruntime", qconfig_mapping=mapping_of(bits))
        qt.calibrate(prepared, x.split(64))
        ptq_accuracy = accuracy(copy.deepcopy(prepared), x_test, y_test)
        last_third = args.qat_epochs * len(x.split(64)) * 2 // 3
        phases = qt.tuning.QuantizationSchedule(prepared, freeze_ranges=last_third, freeze_batch_norm=last_third)
        train(prepared, x, y, args.qat_epochs, 0.01, f"QAT W{bits}A{bits}", phases)
        path = args.out if bits == 8 else args.out.with_stem(f"{args.out.stem}_w{bits}a{bits}")
        # What onnxruntime's integer kernels compute; `verify` compares every code end to end, and `check` wants none to differ.
        integer = qt.convert(prepared, arithmetic="integer")
        result = qt.export_onnx(
            integer, (x_test,), path, input_names=["image"], output_names=["logits"], dynamic_shapes=({0: "batch"},)
        )
        found = qt.export.verify(integer, (x_test,), path)
        found.check()
        codes = found.runtimes["onnxruntime"].codes
        table.add_row(
            f"W{bits}A{bits}",
            *(f"{a:.2f}" for a in (float_accuracy, ptq_accuracy, accuracy(integer, x_test, y_test))),
            f"{accuracy_of_file(path, x_test, y_test):.2f}",
            f"{result.bytes / 1024:.1f}",
            f"{codes.differing} of {codes.compared:,}",
        )
    Console(width=120).print(table)
    print(f"The models: {args.out} and {args.out.with_stem(args.out.stem + '_w4a4')}")


if __name__ == "__main__":
    main()
