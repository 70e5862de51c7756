"""How much of the gradients that a backward pass multiplies is zero, and whether the zeros lie in blocks that it could skip.

python -m benchmarks.pages.gradient_sparsity    ResNet-20 on CIFAR-10, one batch; prints a table, writes the results

A value that a quantizer clips and a value that a ReLU sets to zero have no gradient. A batch norm in training mode subtracts
means from the gradient that it passes on, so that the gradient at the output of a convolution has no zeros left; with frozen
batch norms the zeros stay. A product can skip a block of zeros only: 16 channels are what one vector instruction computes.
"""

import argparse
import json
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from benchmarks.real_data import DATA, MISSING
from benchmarks.report import show
from benchmarks.training.algorithms import build
from benchmarks.training.cifar import CALIBRATION, load
from benchmarks.training.cifar_networks import NETWORKS

RESULTS = Path(__file__).parents[1] / "results" / "gradient_sparsity.json"
BLOCK = 16  # channels
COLUMNS = (
    "single values",
    f"{BLOCK} channels at a position",
    f"{BLOCK} channels at 4 positions",
    "all channels at a position",
)


def zeros(gradient: Tensor) -> dict[str, float]:
    """Return how many values of a gradient (n, c, h, w) are zero, and how many lie in blocks of zeros; shares of all."""
    zero = gradient == 0
    n, c, h, w = zero.shape
    blocks = zero.reshape(n, c // BLOCK, BLOCK, h, w).all(2)
    rows = blocks.reshape(n, c // BLOCK, h, w // 4, 4).all(4)
    shares = zero, blocks, rows, zero.all(1)
    return {column: float(share.float().mean()) for column, share in zip(COLUMNS, shares, strict=True)}


def measure(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the means over the 3x3 convolutions, of the gradients of their outputs, each weighted by its multiply-adds."""
    found: list[tuple[float, dict[str, float]]] = []

    def note(layer: nn.Conv2d, _: object, gradients: tuple[Tensor, ...]) -> None:
        macs = gradients[0][0].numel() * layer.weight[0].numel()
        found.append((macs, zeros(gradients[0])))

    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    handles = [layer.register_full_backward_hook(note) for layer in layers]
    F.cross_entropy(model(images), labels).backward()
    for handle in handles:
        handle.remove()
    if len(found) != len(layers):
        raise RuntimeError(f"hooks saw {len(found)} of {len(layers)} layers: a layer ran without its hooks.")
    whole = sum(macs for macs, _ in found)
    return {column: sum(macs * of[column] for macs, of in found) / whole for column in COLUMNS}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if DATA is None:
        parser.error(MISSING)
    torch.manual_seed(0)
    network = NETWORKS["resnet20"]
    data = load(DATA, max(args.images, CALIBRATION), args.images, network.raw)
    float_model = network.float_model(DATA, data, Path("build"))
    images, labels = (part[: args.images] for part in data.train)
    results: dict[str, dict[str, float]] = {}
    for bits in args.bits:
        build_model = partial(build, "lsq", batches=data.train[0][:CALIBRATION].split(64), bits=bits)
        for frozen in (False, True):
            model = build_model(deepcopy(float_model).train())
            if frozen:
                qt.freeze_batch_norm(model)
            name = f"W{bits}A{bits}, batch norms {'frozen' if frozen else 'in training mode'}"
            results[name] = measure(model, images, labels)
    args.out.write_text(
        json.dumps({"images": args.images, "torch": torch.__version__, "zeros": results}, indent=1) + "\n"
    )
    lines = [[name, *(f"{row[column]:.1%}" for column in COLUMNS)] for name, row in results.items()]
    title = f"ResNet-20, {args.images} images: zeros in the gradients of the outputs of the 3x3 convolutions"
    show(Console(width=160), title, ["", *COLUMNS], lines)


if __name__ == "__main__":
    main()
