"""Post-training methods on a ResNet-20 with trained weights, on CIFAR-10."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests.data import DATA, needs_data
from tests.tuning.nets import prepared_on

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [needs_data, pytest.mark.data]
W4 = qt.QConfig(activation=None, weight=qt.QuantSpec(bits=4, axis=None))  # per tensor


def resnet20() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Return the network, 128 images to learn from, and 400 to test with their labels."""
    sys.path.insert(0, str(EXAMPLES))
    from cifar10_resnet20 import load_images, load_model

    return load_model(DATA), load_images(DATA, "train", 128)[0], *load_images(DATA, "test", 400)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


@pytest.mark.sweep
def test_learned_rounding_beats_rounding_to_nearest() -> None:
    model, train, images, labels = resnet20()
    batches = list(train.split(16))
    prepared = prepared_on(model, batches, W4)
    nearest = accuracy(prepared, images, labels)
    report = qt.tuning.reconstruct(prepared, batches, granularity="block", steps=60, learning_rate=3e-2, progress=False)
    names = [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in (0, 1, 2)]
    assert [unit.name for unit in report.units] == ["conv1", *names, "linear"]
    assert all(unit.after < unit.before for unit in report.units)
    # The same images: float 91.25 %, nearest 84.5 %, learned 90 %.
    assert accuracy(prepared, images, labels) > nearest + 0.03
    assert accuracy(qt.convert(copy.deepcopy(prepared)), images, labels) > nearest + 0.03


@pytest.mark.sweep
def test_qdrop_learns_four_bits_of_weights_and_activations() -> None:
    model, train, images, labels = resnet20()
    batches = list(train.split(16))
    activation = qt.QuantSpec(
        bits=4, signed=False, symmetric=False, observer="histogram", observer_args={"method": "mse"}
    )
    prepared = prepared_on(model, batches, qt.QConfig(activation, qt.QuantSpec(bits=4, axis=0)))
    nearest = accuracy(prepared, images, labels)
    qt.tuning.reconstruct(prepared, batches, "qdrop", steps=60, learning_rate=3e-2, progress=False)
    # The same images: float 91.25 %, nearest 83.25 %, learned 89.25 %.
    assert accuracy(prepared, images, labels) > nearest + 0.03
