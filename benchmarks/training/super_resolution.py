"""FSRCNN x2 in few bits: the float weights, the patches, the quantized model, its training and its PSNR on Set5."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import qtoolkit as qt
from benchmarks.export_models import FSRCNN

CALIBRATION = 128  # patches
BORDER = 2  # pixels of the Y plane that PSNR leaves out at each side
TRAINING_BORDER = 4  # pixels of a crop that the loss leaves out: the padding of layers reaches them


@dataclass(frozen=True)
class Schedule:
    """How a model is trained: Adam with a learning rate that falls from `rate` to 0 along a cosine.

    Attributes:
        steps: The number of steps.
        batch: Patches in a step.
        crop: The size of the random crop of the patches, in pixels of low resolution.
        rate: The learning rate at the start.
        scale_rate: The same for learned scales, where a step is a share of the scale.
    """

    steps: int
    batch: int
    crop: int
    rate: float
    scale_rate: float


@dataclass(frozen=True)
class Data:
    """Images in [0, 1]: training patches (n, 3, h, w) of low and high resolution, and pairs of test images (3, h, w)."""

    low: Tensor
    high: Tensor
    test: Sequence[tuple[Tensor, Tensor]]

    @property
    def calibration(self) -> Sequence[Tensor]:
        """Batches of patches for ranges."""
        return self.low[:CALIBRATION].split(16)


def load(folder: Path, test_images: int) -> Data:
    """Return all training patches and the first test images."""
    with np.load(folder / "sr_train_x2_ycc.npz") as archive:
        low, high = (torch.from_numpy(archive[name]).float() / 255 for name in ("lr", "hr"))
    with np.load(folder / "set5_x2_ycc.npz") as archive:
        names = [name.removeprefix("lr_") for name in archive.files if name.startswith("lr_")][:test_images]
        pairs = [
            tuple(torch.from_numpy(archive[f"{end}_{name}"]).float() / 255 for end in ("lr", "hr")) for name in names
        ]
    return Data(low, high, [(one, two) for one, two in pairs])


def float_model(folder: Path) -> nn.Module:
    """Return the float model in eval mode."""
    model = FSRCNN()
    model.load_state_dict(torch.load(folder / "fsrcnn_x2.pt", weights_only=True))
    return model.eval()


def quantized(model: nn.Module, data: Data, qconfig: qt.QConfig, backend: str) -> nn.Module:
    """Return a model prepared with a config and calibrated; the first and the last layer have at least eight bits."""
    mapping = qt.QConfigMapping().set_global(qconfig)
    target = replace(qt.backends[backend], end_bits=8)
    prepared = qt.prepare(model, data.low[:1], backend=target, qconfig_mapping=mapping)
    qt.calibrate(prepared, data.calibration, progress=False)
    return prepared


def train(
    model: nn.Module, data: Data, schedule: Schedule, seed: int, progress: Callable[[int], object], share: float = 1.0
) -> nn.Module:
    """Train a model, or a copy of a float model, on the patches of high resolution; return it in eval mode.

    `share` is that of `qtoolkit.tuning.PartialUpdates`; 1 trains whole weights.
    """
    model = (model if qt.quantizers_of(model) else copy.deepcopy(model)).train()
    generator = torch.Generator().manual_seed(seed)
    groups = qt.parameter_groups(model, lr=schedule.rate, weight_decay=0.0, scale_lr=schedule.scale_rate)
    optimizer = torch.optim.Adam(groups)
    updates = qt.tuning.PartialUpdates(model, optimizer, share) if share < 1 else None
    falling = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / schedule.steps)) / 2
    )
    for _ in range(schedule.steps):
        low, high = _crops(data, schedule, generator)
        optimizer.zero_grad()
        _error(model(low), high).backward()
        optimizer.step()
        falling.step()
        if updates is not None:
            updates.step()
        progress(1)
    if updates is not None:
        updates.finish()
    return model.eval()


def _error(image: Tensor, target: Tensor) -> Tensor:
    inside = slice(TRAINING_BORDER, -TRAINING_BORDER)
    return (image - target)[..., inside, inside].square().mean()


def _crops(data: Data, schedule: Schedule, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a crop of random patches, mirrored and turned at random."""
    index = torch.randint(len(data.low), (schedule.batch,), generator=generator)
    places = data.low.shape[-1] - schedule.crop + 1
    top, left = torch.randint(places, (2,), generator=generator).tolist()
    turns, mirrored = torch.randint(4, (1,), generator=generator), torch.randint(2, (1,), generator=generator)
    crops = []
    for images, factor in ((data.low, 1), (data.high, 2)):
        rows, columns = (slice(factor * at, factor * (at + schedule.crop)) for at in (top, left))
        crop = torch.rot90(images[index][..., rows, columns], int(turns), (2, 3))
        crops.append((crop.flip(-1) if int(mirrored) else crop).contiguous())
    return crops[0], crops[1]


@torch.no_grad()
def psnr(model: nn.Module, data: Data) -> Mapping[str, float]:
    """Return the PSNR in dB, the mean over the test images: of the Y plane without its border, and of all planes."""
    values = [_psnr_of(model(low[None])[0], high) for low, high in data.test]
    return {name: sum(value[name] for value in values) / len(values) for name in ("y", "planes")}


def _psnr_of(image: Tensor, target: Tensor) -> Mapping[str, float]:
    error = (image - target).square()
    inside = slice(BORDER, -BORDER)
    return {"y": _decibels(error[0, inside, inside]), "planes": _decibels(error)}


def _decibels(error: Tensor) -> float:
    return float(-10 * torch.log10(error.mean()))
