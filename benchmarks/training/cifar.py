"""Training of a network on CIFAR-10: the images, the schedule, the checkpoints and the accuracy."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import qtoolkit as qt
from benchmarks.export_models import MEAN, jpeg_images, jpeg_pixels
from qtoolkit.quantizers.first_steps import LAST_STEP

PADDING = 4  # pixels around an image before the random crop
CALIBRATION = 512  # images
CHOSEN_AFTER = 40  # steps, PartialUpdates chooses the channels again: the paper's 4,096 images


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its usual options.

    Attributes:
        build: Takes the groups of parameters.
        rate: The first learning rate.
        scale_share: That of learned scales, as a share of `rate`.
        weight_decay: Of weights alone.
    """

    build: Callable[..., torch.optim.Optimizer]
    rate: float
    scale_share: float
    weight_decay: float


OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(partial(torch.optim.SGD, momentum=0.9), 0.01, 1.0, 1e-4),
    "adam": Optimizer(torch.optim.AdamW, 1e-3, 0.1, 1e-2),  # the share of docs/training.md
}


@dataclass(frozen=True)
class Schedule:
    """How a model is trained: each learning rate falls from its first value (`rate` for weights) to 0 along a cosine.

    Where the norm of the gradient, over all parameters, is above `clip`, it is scaled down to it. Without `labels` a teacher's
    classes alone are learned. Weights decay by `decay`, or as the optimizer's do; learned scales begin with the optimizer's
    share of `rate`, or with `scale_share`. With `bfloat16` the model computes under autocast, in about half the time where the
    processor has instructions for it. `share` and `by` are those of `qtoolkit.tuning.PartialUpdates`; 1 trains whole weights.
    """

    images: int
    epochs: float
    batch: int = 100
    rate: float = OPTIMIZERS["sgd"].rate
    clip: float | None = None
    optimizer: str = "sgd"
    labels: bool = True
    decay: float | None = None
    scale_share: float | None = None
    bfloat16: bool = False
    share: float = 1.0
    by: str = "magnitude"

    @property
    def steps(self) -> int:
        """The number of steps."""
        return round(self.epochs * (self.images // self.batch))


@dataclass(frozen=True)
class Data:
    """Images and their labels.

    Attributes:
        train: Images (n, 3, 32, 32) and labels (n), or probabilities of the classes (n, 10).
        test: Images and labels.
        border: What is around an image before the random crop: the mean pixel (3), in the units of the images.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    border: Tensor

    @property
    def device(self) -> torch.device:
        """The device on which models are trained."""
        return self.border.device


def load(folder: Path, train: int, test: int, raw: bool = False, device: str = "cpu") -> Data:
    """Return the first images of both splits on a device, normalised, or with pixels of 0 to 255 if `raw`."""
    images, border = (jpeg_pixels, 255 * MEAN) if raw else (jpeg_images, torch.zeros(3))
    trained, tested = images(folder, "train", train), images(folder, "test", test)
    return Data(_on(device, trained), _on(device, tested), border.to(device))


def _on(device: str, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    images, labels = part
    return images.to(device), labels.to(device)


class Run:
    """A training with a seed, which goes on where its checkpoint ends; a teacher's classes count as the labels do.

    On a GPU a step is recorded as a CUDA graph, if `recorded`: where kernels are short, Python takes most of its time.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        schedule: Schedule,
        seed: int,
        checkpoint: Path,
        teacher: nn.Module | None = None,
        recorded: bool = True,
    ) -> None:
        self.recorded = recorded and data.device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.model = model.train().to(data.device, memory_format=torch.channels_last)  # 12 % less time on a CPU
        self.data, self.schedule, self.checkpoint = data, schedule, checkpoint
        self.teacher = qt.tuning.Distillation(model, teacher) if teacher is not None else None
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0
        kind = OPTIMIZERS[schedule.optimizer]
        scale_rate = schedule.rate * (kind.scale_share if schedule.scale_share is None else schedule.scale_share)
        decay = kind.weight_decay if schedule.decay is None else schedule.decay
        groups = qt.parameter_groups(model, schedule.rate, decay, scale_lr=scale_rate)
        self.rates = [group["lr"] for group in groups]
        self.optimizer = kind.build(groups) if data.device.type == "cpu" else _without_waiting(kind, groups, data)
        self.updates = None
        if schedule.share < 1:
            self.updates = qt.tuning.PartialUpdates(model, self.optimizer, schedule.share, CHOSEN_AFTER, schedule.by)
        if checkpoint.exists():
            self._load(torch.load(checkpoint, map_location=data.device, weights_only=True))

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.updates is not None:
            self.updates.load_state_dict(state["updates"])
        self.generator.set_state(state["generator"].cpu())
        self.step = state["step"]

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": None if self.updates is None else self.updates.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
        }
        fresh = self.checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.checkpoint)

    def train(self, title: str) -> None:
        """Train to the end of the schedule, with a checkpoint after each epoch."""
        seconds = 5 if sys.stderr.isatty() else 60  # between the lines of progress: few of them in a log
        pace = {"mininterval": seconds, "maxinterval": seconds, "ncols": 100}
        with tqdm(initial=self.step, total=self.schedule.steps, desc=title, leave=False, **pace) as bar, self._stream():
            first = self.step
            while self.step < self.schedule.steps:
                for images, labels in self._epoch():
                    # Behind the steps in which quantizers observe their inputs, which a graph would do to its end.
                    if self.recorded and self.graph is None and self.step - first == LAST_STEP + 1:
                        self._record(images, labels)
                    self._train_on(images, labels)
                    bar.update()
                    if self.step == self.schedule.steps:
                        break
                self._save()

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """Train on a stream of its own, as torch asks for it where steps are recorded."""
        if not self.recorded:
            yield
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    def _epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images and labels of each step. On a GPU all are cropped at once: a step copies nothing to it."""
        order = torch.randperm(self.schedule.images, generator=self.generator)
        steps = order[: len(order) // self.schedule.batch * self.schedule.batch].split(self.schedule.batch)
        drawn = [crops(len(index), self.generator) for index in steps]
        together = len(steps) if self.data.device.type == "cuda" else 1
        for first in range(0, len(steps), together):
            of = slice(first, first + together)
            index = torch.cat(steps[of]).to(self.data.device)
            images, labels = (part[index] for part in self.data.train)
            images = augmented(images, self.data.border, torch.cat(drawn[of], 1).to(self.data.device))
            yield from zip(images.split(self.schedule.batch), labels.split(self.schedule.batch), strict=True)

    def _record(self, images: Tensor, labels: Tensor) -> None:
        self.batch, self.graph = (images.clone(), labels.clone()), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            self.update(*self.batch)

    def _train_on(self, images: Tensor, labels: Tensor) -> None:
        falling = 1 + math.cos(math.pi * self.step / self.schedule.steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * falling / 2)
            else:
                group["lr"] = rate * falling / 2
        if self.graph is None:
            self.update(images, labels)
        else:
            for kept, new in zip(self.batch, (images, labels), strict=True):
                kept.copy_(new)
            self.graph.replay()
        self.step += 1
        if self.updates is not None:
            self.updates.step()

    def update(self, images: Tensor, labels: Tensor) -> None:
        """Compute a step on images, with the present learning rates."""
        self.optimizer.zero_grad()
        with torch.autocast(self.data.device.type, torch.bfloat16, enabled=self.schedule.bfloat16):
            logits = self.model(images)
        logits = logits.float()
        losses = [F.cross_entropy(logits, labels)] if self.schedule.labels else []
        losses += [] if self.teacher is None else [self.teacher(images, logits)]
        loss = torch.stack(losses).sum()
        loss.backward()
        if self.schedule.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.clip)
        self.optimizer.step()


def _without_waiting(kind: Optimizer, groups: Sequence[dict[str, Any]], data: Data) -> torch.optim.Optimizer:
    """Return an optimizer whose steps can be recorded: learning rates are tensors, which its kernels read."""
    return kind.build([{**group, "lr": torch.tensor(group["lr"], device=data.device)} for group in groups], fused=True)


def trained_float(model: nn.Module, data: Data, schedule: Schedule, seed: int, checkpoint: Path) -> nn.Module:
    """Return a float model, trained, in eval mode; a checkpoint keeps it, and a training that was ended goes on there."""
    Run(model, data, schedule, seed, checkpoint).train(f"float {type(model).__name__}")
    return model.eval()


def crops(count: int, generator: torch.Generator) -> Tensor:
    """Draw random crops: the first row, the first column, and whether (1) the image is mirrored, each (count)."""
    corners = torch.randint(2 * PADDING + 1, (2, count), generator=generator)
    return torch.cat((corners, (torch.rand(1, count, generator=generator) < 0.5).long()))


def augmented(images: Tensor, border: Tensor, crops: Tensor) -> Tensor:
    """Return crops of the padded images."""
    size, count = images.shape[-1], len(images)
    padded = border[:, None, None].expand(count, -1, *(size + 2 * PADDING,) * 2).contiguous()
    padded[..., PADDING:-PADDING, PADDING:-PADDING] = images
    top, left, mirrored = crops
    places = torch.arange(size, device=images.device)
    columns = torch.where(mirrored[:, None] == 1, places.flip(0), places) + left[:, None]
    rows, image = places + top[:, None], torch.arange(count, device=images.device)
    # An index before and behind a slice puts channels last.
    cropped = padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return cropped.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the top-1 accuracy on the test images in percent."""
    was_training = model.training
    model.eval()
    hits = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(*(part.split(250) for part in data.test), strict=True)
    )
    model.train(was_training)
    return 100 * hits / len(data.test[1])
