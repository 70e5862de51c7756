"""Bits for each layer of a CIFAR-10 ResNet-20: three estimates of what a layer's bits cost, and the front of accuracy and size.

Needs the files of shared/data: python examples/mixed_precision.py --data ../shared/data
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from cifar10_resnet20 import accuracy, load_images, load_model, logits_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

BITS = (2, 3, 4, 6, 8)
ACTIVATION = qt.QuantSpec(signed=False, symmetric=False, observer="histogram")
CHOICES = {f"w{bits}": qt.QConfig(ACTIVATION, qt.QuantSpec(bits=bits, axis=0, observer="histogram")) for bits in BITS}
ESTIMATES = ("measured", "hessian", "gradient")


@dataclass(frozen=True)
class Result:
    """What was found; accuracies in percent of the test images, after calibration without training.

    Attributes:
        float_accuracy: Of the float model.
        fronts: The front by each estimate, with accuracies.
        sizes: The size in bytes with the same choice for all layers but the first and the last.
        accuracies: For each of these, its accuracy ("uniform"), and that of what each estimate finds for its size.
    """

    float_accuracy: float
    fronts: Mapping[str, qt.tuning.mixed_precision.Front]
    sizes: Mapping[str, float]
    accuracies: Mapping[str, Mapping[str, float]]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def run(data: Path, images: int, test: int | None, points: int) -> Result:
    """Estimate the errors, search the fronts, and measure each of their points."""
    model = load_model(data)
    x, y = load_images(data, "train", images)
    x_test, y_test = load_images(data, "test", test)
    batches = list(zip(x.split(64), y.split(64), strict=True))

    def build(mapping: qt.QConfigMapping) -> nn.Module:
        prepared = qt.prepare(model, x[:1], backend="onnxruntime", qconfig_mapping=mapping)
        qt.calibrate(prepared, x.split(64))
        return prepared.eval()

    def score(mapping: qt.QConfigMapping) -> float:
        return accuracy(logits_of(build(mapping), x_test, "test"), y_test)

    expected = logits_of(model, x, "float")
    search = qt.tuning.mixed_precision.MixedPrecision(
        model, x[:1], CHOICES, backend="onnxruntime", fixed={"conv1": "w8", "linear": "w8"}
    )
    estimates = {
        "measured": lambda: search.measured_errors(
            build, lambda m: F.mse_loss(logits_of(m, x, "measure"), expected).item(), higher_is_better=False
        ),
        "hessian": lambda: search.hessian_errors(loss_of, batches),
        "gradient": lambda: search.gradient_errors(loss_of, batches),
    }
    errors = {name: estimates[name]() for name in ESTIMATES}
    fronts = {name: search.front(errors[name], "size", points).measured(score) for name in ESTIMATES}
    sizes, accuracies = {}, {}
    for choice in CHOICES:
        uniform = qt.QConfigMapping()
        chosen = {name: search.fixed.get(name, choice) for name in search.layers}
        for name in chosen:
            uniform.set_module_name(name, search.configs[name][chosen[name]])
        sizes[choice] = sum(search.costs["size"][name][chosen[name]] for name in chosen)
        accuracies[choice] = {"uniform": score(uniform)} | {
            name: score(search.solve(errors[name], size=sizes[choice]).to_qconfig_mapping()) for name in ESTIMATES
        }
    return Result(accuracy(logits_of(model, x_test, "test"), y_test), fronts, sizes, accuracies)


def main() -> None:
    """Print the fronts and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--images", type=int, default=256, help="training images for the estimates")
    parser.add_argument("--test", type=int, help="test images; by default all")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("mixed_precision"), help="the folder for the plots")
    args = parser.parse_args()
    torch.manual_seed(0)
    result = run(args.data, args.images, args.test, args.points)
    table = Table(
        title=f"ResNet-20 without training, at the same size: accuracy in % (float {result.float_accuracy:.2f})"
    )
    for column in ("size", "KiB", "uniform", *ESTIMATES):
        table.add_column(column, justify="left" if column == "size" else "right")
    for choice, found in result.accuracies.items():
        table.add_row(
            f"of {choice}", f"{result.sizes[choice] / 1024:.1f}", *(f"{score:.2f}" for score in found.values())
        )
    Console(width=100).print(table)
    for name, front in result.fronts.items():
        print(f"\n{name}: the front, drawn in {args.out / name}.svg\n{front}")
        front.plot(args.out / f"{name}.svg", "accuracy in %")


if __name__ == "__main__":
    main()
