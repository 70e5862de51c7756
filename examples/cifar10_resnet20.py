"""Quantization of a CIFAR-10 ResNet-20, after training or with it (--steps), checked code by code in onnxruntime.

Needs the files of shared/data (real weights, real images): python examples/cifar10_resnet20.py --data ../shared/data
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import qtoolkit as qt

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """Two convolutions and a shortcut without weights."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.extra = (width - width_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.extra:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra))
        return F.relu(y + x)


class ResNet20(nn.Module):
    """ResNet-20 for 32x32 images (He et al., arXiv 1512.03385, section 4.2), with the weights' names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def load_model(data: Path) -> ResNet20:
    """Return the network with its trained weights, in eval mode."""
    model = ResNet20()
    model.load_state_dict(torch.load(data / "resnet20_cifar10.pt", weights_only=True))
    return model.eval()


def load_images(data: Path, split: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return normalised images (n, 3, 32, 32) and labels of the lossless set's "train" or "test" split."""
    with np.load(data / "cifar10_lossless.npz") as archive:
        pixels, labels = archive[f"{split}_x"][:count], archive[f"{split}_y"][:count]
    x = (torch.from_numpy(pixels).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return x.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long()


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor, what: str) -> Tensor:
    """Run a model over images."""
    return torch.cat([model(batch) for batch in tqdm(images.split(100), desc=what, leave=False)])


def logits_of_file(path: Path, images: Tensor) -> Tensor:
    """Run an ONNX file over images in onnxruntime, as users run it."""
    session = onnxruntime.InferenceSession(str(path))
    batches = tqdm(images.split(100), desc="onnxruntime", leave=False)
    return torch.cat([torch.from_numpy(session.run(None, {"image": b.numpy()})[0]) for b in batches])


@dataclass(frozen=True)
class Result:
    """Figures of one backend; accuracies in percent of the test images."""

    backend: str
    float_accuracy: float
    accuracy: float
    runtime_accuracy: float
    same_class: float
    verification: qt.export.Verification


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return top-1 accuracy in percent."""
    return 100 * (logits.argmax(1) == labels).float().mean().item()


def mapping_of(backend: str, bits: int) -> qt.QConfigMapping:
    """Return the backend's config with learned scales, and with these bits in all layers but the first and the last."""
    default = qt.backends[backend].qconfig
    activation, weight = (replace(spec, quantizer="lsq") for spec in (default.activation, default.weight))
    mapping = qt.QConfigMapping()
    mapping.set_global(qt.QConfig(replace(activation, bits=bits), replace(weight, bits=bits)))
    return mapping.set_module_name_regex("conv1|linear", qt.QConfig(activation, weight))


def finetune(prepared: nn.Module, teacher: nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    """Train with the labels and the float model's logits; the batch norms' statistics stay in the last third."""
    prepared.train()
    optimizer = torch.optim.SGD(qt.parameter_groups(prepared, lr=2e-3, weight_decay=1e-4), momentum=0.9)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    phases = qt.tuning.QuantizationSchedule(prepared, freeze_batch_norm=steps * 2 // 3)
    with qt.tuning.Distillation(prepared, teacher, temperature=2.0) as distillation:
        for _ in tqdm(range(steps), desc="finetune", leave=False):
            batch = torch.randint(len(images), (64,))
            optimizer.zero_grad()
            logits = prepared(images[batch])
            loss = F.cross_entropy(logits, labels[batch]) + distillation(images[batch], logits)
            loss.backward()
            optimizer.step()
            rates.step()
            phases.step()
    prepared.eval()


def run(data: Path, backend: str, out: Path, images: int | None = None, bits: int = 8, steps: int = 0) -> Result:
    """Quantize for a backend, train if asked to, export, and compare with onnxruntime on the test images."""
    model = load_model(data)
    x, y = load_images(data, "test", images)
    train, labels = load_images(data, "train")
    mapping = mapping_of(backend, bits) if steps else None
    prepared = qt.prepare(model.train(bool(steps)), (x[:1],), backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, train[:512].split(64))
    if steps:
        finetune(prepared, model, train, labels, steps)
    model.eval()
    converted = qt.convert(prepared)
    qt.export_onnx(converted, (x[:8],), out, input_names=["image"], dynamic_shapes=({0: "batch"},))
    ours, theirs = logits_of(converted, x, backend), logits_of_file(out, x)
    return Result(
        backend,
        accuracy(logits_of(model, x, "float"), y),
        accuracy(ours, y),
        accuracy(theirs, y),
        100 * (ours.argmax(1) == theirs.argmax(1)).float().mean().item(),
        qt.export.verify_onnx(converted, (x,), out),
    )


def main() -> None:
    """Print one table over two backends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, default=Path("resnet20.onnx"))
    parser.add_argument("--steps", type=int, default=0, help="training steps of quantization-aware training")
    parser.add_argument("--bits", type=int, default=4, help="of the inner layers, with --steps")
    args = parser.parse_args()
    bits = args.bits if args.steps else 8
    table = Table(title=f"CIFAR-10 ResNet-20, W{bits}A{bits}, 1,000 lossless test images")
    for column in (
        "backend",
        "float %",
        "QAT %" if args.steps else "PTQ %",
        "onnxruntime %",
        "same class %",
        "weight codes",
        "quantizers",
        "layers",
    ):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for backend in ("tensorrt10", "onnxruntime"):
        r = run(args.data, backend, args.out, bits=bits, steps=args.steps)
        v = r.verification
        figures = (f"{f:.2f}" for f in (r.float_accuracy, r.accuracy, r.runtime_accuracy, r.same_class))
        counts = (f"{c.differing} / {c.compared:,}" for c in (v.weight_codes, v.quantizer_codes, v.layer_codes))
        table.add_row(backend, *figures, *counts)
    Console(width=130).print(table)
    print("The last three columns: codes that differ from onnxruntime's, of all compared.")


if __name__ == "__main__":
    main()
