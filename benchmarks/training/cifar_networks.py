"""Networks that benchmarks train on CIFAR-10: what they take, and where their float weights come from."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.export_models import ROOT, resnet20_of
from benchmarks.training.cifar import Data, Schedule, trained_float
from benchmarks.training.mobilenet import float_mobilenet
from benchmarks.training.transformer import FINE_TUNED, float_transformer

EPOCHS, BATCH, RATE = 30, 128, 0.1  # of the float ResNet-8
SEED = 0


@dataclass(frozen=True)
class Network:
    """A network with 10 classes of images (n, 3, 32, 32).

    Attributes:
        title: Its name in tables.
        raw: Whether it takes pixels of 0 to 255; else they are normalised.
        float_model: Takes the folder of data, the images and the folder of checkpoints; returns the model with its float
            weights, in eval mode.
        with_peers: Whether other tools are trained on it where nobody says what to train.
        fine_tuned: How it is trained from these weights, where that is not the default: fields of Schedule.
    """

    title: str
    raw: bool
    float_model: Callable[[Path, Data, Path], nn.Module]
    with_peers: bool = False
    fine_tuned: Mapping[str, Any] = field(default_factory=dict)


def _stored_resnet20(folder: Path, data: Data, checkpoints: Path) -> nn.Module:
    return resnet20_of(folder)


def trained_resnet8(folder: Path, data: Data, checkpoints: Path) -> nn.Module:
    """Return ResNet-8, trained from random weights, or from where an earlier training was ended."""
    sys.path.insert(0, str(ROOT / "examples"))
    from mlperf_tiny import ResNet8

    torch.manual_seed(SEED)
    schedule = Schedule(len(data.train[1]), EPOCHS, BATCH, RATE)
    return trained_float(ResNet8(), data, schedule, SEED, checkpoints / "resnet8_float_weights.pt")


NETWORKS = {
    "resnet20": Network("ResNet-20", False, _stored_resnet20, with_peers=True),
    "resnet8": Network("ResNet-8 on raw pixels", True, trained_resnet8),
    "mobilenet": Network("MobileNetV2 for 32 x 32 pixels", False, lambda _, *of: float_mobilenet(*of)),
    "transformer": Network("ViT of 4 blocks", False, lambda _, *of: float_transformer(*of), fine_tuned=FINE_TUNED),
}
