"""Quantize without tracing: replace a model's layers, compare ranges, find the worst layer, export PTQ, finetune, export QAT.

On a CIFAR-10 ResNet-20, and on one that leaves early where it is sure, by a branch on values that no tracer takes: of that one
a file is written for each way. Needs the files of shared/data: python examples/auto_replace.py --data ../shared/data
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from cifar10_resnet20 import ResNet20, accuracy, load_images, load_model, logits_of, logits_of_file
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import qtoolkit as qt

BACKEND = "tensorrt10"
METHODS = ("max", "percentile", "mse", "entropy")
# A layer and the batch norm behind it are one layer on the target: eager mode has to be told.
CHAINS = [["conv1", "bn1"]] + [
    [f"layer{stage}.{block}.conv{i}", f"layer{stage}.{block}.bn{i}"]
    for stage in (1, 2, 3)
    for block in (0, 1, 2)
    for i in (1, 2)
]


class EarlyExit(ResNet20):
    """ResNet-20 with a second head after its second stage; where that is sure of all images, the third stage is left out."""

    threshold: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.exit = nn.Linear(32, 10)
        self.register_buffer("threshold", torch.tensor(torch.inf))

    def features(self, x: Tensor) -> Tensor:
        """Return what both heads start from."""
        return self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        early = self.exit(y.mean((2, 3)))
        sure = early.amax(1, keepdim=True) > self.threshold
        if sure.all():  # a branch on values
            return early
        return torch.where(sure, early, self.linear(self.layer3(y).mean((2, 3))))


def load_early_exit(data: Path, share: float = 0.3, count: int | None = None) -> EarlyExit:
    """Return the network with a second head, fitted by least squares on train images and sure of a share of them."""
    model = EarlyExit().eval()
    model.load_state_dict(load_model(data).state_dict(), strict=False)
    x, y = load_images(data, "train", count)
    with torch.no_grad():
        batches = tqdm(x.split(100), desc="features", leave=False)
        means = torch.cat([model.features(batch).mean((2, 3)) for batch in batches])
        inputs = torch.cat([means, torch.ones(len(means), 1)], 1)
        solution = torch.linalg.lstsq(inputs, 10 * F.one_hot(y, 10).float()).solution  # as large as logits
        model.exit.weight.copy_(solution[:-1].T)
        model.exit.bias.copy_(solution[-1])
        model.threshold.copy_(model.exit(means).amax(1).quantile(1 - share))
    return model


@dataclass(frozen=True)
class Images:
    """What the steps run on."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    @property
    def calibration(self) -> list[Tensor]:
        """Batches for ranges and for the sensitivity."""
        return list(self.train[:512].split(64))


@dataclass
class Result:
    """Figures of one model; accuracies in percent of the test images, or of those that take a file's way."""

    name: str
    float_accuracy: float
    methods: Mapping[str, float]
    sensitivity: qt.debug.Sensitivity
    accuracies: dict[str, float] = field(default_factory=dict)
    runtime: dict[str, float] = field(default_factory=dict)
    exports: dict[str, qt.ExportResult] = field(default_factory=dict)


def load(data: Path, train: int | None = None, test: int | None = None) -> Images:
    """Return the images, or the first of each split."""
    return Images(*load_images(data, "train", train), *load_images(data, "test", test))


def mapping_of(method: str) -> qt.QConfigMapping:
    """Return the backend's config, with ranges of activations by a method."""
    default = qt.backends[BACKEND].qconfig
    if method == "max":
        return qt.QConfigMapping().set_global(default)
    activation = replace(default.activation, observer="histogram", observer_args={"method": method})
    return qt.QConfigMapping().set_global(replace(default, activation=activation))


def quantized(model: nn.Module, mapping: qt.QConfigMapping, images: Images) -> nn.Module:
    """Return a model with replaced layers and ranges, in eval mode; its batch norms train on in training mode."""
    fused = qt.fuse_modules(model.train(), CHAINS)
    replaced = qt.quant_modules.replace(fused, mapping, backend=BACKEND).eval()
    qt.calibrate(replaced, images.calibration)
    return replaced


def error_of(model: nn.Module, images: Tensor, expected: Tensor) -> float:
    """Return the mean squared difference of a model's logits from those expected."""
    return F.mse_loss(logits_of(model, images, "error"), expected).item()


def finetune(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train for one epoch at a hundredth of a usual rate; activations' ranges and batch norms' statistics stay as they are."""
    model.train()
    batches = list(torch.randperm(len(images)).split(64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches), eta_min=1e-5)
    phases = qt.tuning.QuantizationSchedule(model, freeze_batch_norm=0)
    for batch in tqdm(batches, desc="finetune", leave=False):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
        phases.step()
    model.eval()


def ways_of(model: nn.Module, images: Images) -> dict[str, Tensor]:
    """Return the test images that take each way through a model, by names for the ways."""
    if not isinstance(model, EarlyExit):
        return {"": torch.arange(len(images.test))}
    with torch.no_grad():
        batches = images.test.split(100)
        surest = torch.cat([model.exit(model.features(x).mean((2, 3))).amax(1) for x in batches])
    return {"_late": torch.arange(len(images.test)), "_early": (surest > model.threshold + 0.1).nonzero()[:, 0]}


def export(model: nn.Module, images: Images, out: Path, result: Result, step: str) -> None:
    """Write a file for each way through a model, with its codes verified, and run it on the images that take the way."""
    for way, chosen in ways_of(model, images).items():
        x, labels = images.test[chosen], images.test_labels[chosen]
        name = f"{step}{way}"
        result.exports[name] = qt.export_onnx(
            model,
            x[:64],
            out / f"{result.name}_{name}.onnx",
            input_names=["image"],
            dynamic_shapes=({0: "batch"},),
            exporter="torchscript" if way else "dynamo",  # "dynamo" takes no branch; "torchscript" the way that x takes
        )
        result.accuracies[name] = accuracy(logits_of(model, x, name), labels)
        result.runtime[name] = accuracy(logits_of_file(result.exports[name].path, x), labels)


def run(model: nn.Module, images: Images, out: Path, for_sensitivity: int = 256) -> Result:
    """Take one model all the way."""
    methods, replaced = {}, {}
    for method in METHODS:
        replaced[method] = quantized(model, mapping_of(method), images)
        methods[method] = accuracy(logits_of(replaced[method], images.test, method), images.test_labels)
    best = max(methods, key=lambda method: methods[method])
    some = images.train[:for_sensitivity]
    expected = logits_of(model.eval(), some, "float")
    found = qt.debug.sensitivity(replaced[best], lambda m: error_of(m, some, expected), higher_is_better=False)
    in_float = accuracy(logits_of(model, images.test, "float"), images.test_labels)
    result = Result(type(model).__name__, in_float, methods, found)
    final = quantized(model, found.to_qconfig_mapping(keep_float=1, base=mapping_of(best)), images)
    export(final, images, out, result, "ptq")
    finetune(final, images.train, images.train_labels)
    export(final, images, out, result, "qat")
    return result


def table_of_ranges(results: list[Result]) -> Table:
    """Return a table of what each way of choosing ranges gives."""
    table = Table(title="Accuracy in % after calibration on 512 images, by how ranges are chosen")
    for column in ("model", "float", *METHODS):
        table.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        table.add_row(
            result.name, f"{result.float_accuracy:.2f}", *(f"{result.methods[method]:.2f}" for method in METHODS)
        )
    return table


def table_of_files(results: list[Result]) -> Table:
    """Return a table of the exported files."""
    table = Table(title="Exported files: accuracy in onnxruntime, and codes that differ from it, of all compared")
    for column in ("file", "accuracy %", "onnxruntime %", "weight codes", "quantizers", "layers", "not on this way"):
        table.add_column(column, justify="left" if column == "file" else "right")
    for result in results:
        for step, export in result.exports.items():
            codes = export.verification
            if codes is None:
                raise RuntimeError(f"{export.path} was not verified.")
            counts = (codes.weight_codes, codes.quantizer_codes, codes.layer_codes)
            table.add_row(
                export.path.name,
                f"{result.accuracies[step]:.2f}",
                f"{result.runtime[step]:.2f}",
                *(f"{count.differing} / {count.compared:,}" for count in counts),
                f"{len(codes.unreached)} quantizers",
            )
    return table


def main() -> None:
    """Take both models all the way, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, default=Path("auto_replace"), help="the folder for the files")
    args = parser.parse_args()
    torch.manual_seed(0)
    images = load(args.data)
    results = [run(model, images, args.out) for model in (load_model(args.data), load_early_exit(args.data))]
    console = Console(width=130)
    console.print(table_of_ranges(results))
    for result in results:
        console.print(
            f"\n{result.name}: mean squared error of the logits with one layer alone quantized; the worst stays float"
        )
        console.print(str(result.sensitivity), highlight=False)
    console.print(table_of_files(results))


if __name__ == "__main__":
    main()
