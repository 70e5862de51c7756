"""A small detector without non-maximum suppression: its network, synthetic shapes, losses, training and COCO's AP.

The network has the parts of a YOLO26: C3 blocks with SiLU, a neck over two scales, a one-to-one head, which is deployed, and a
one-to-many head, which trains backbone and neck: the one-to-one head takes their features without gradients (A. Wang et al.,
YOLOv10, arXiv 2405.14458). Boxes are distances to four sides: numbers, or means of distributions over `bins` (DFL, X. Li et
al., arXiv 2006.04388). Both heads' targets are the boxes that fit best by score and overlap (C. Feng et al., TOOD, arXiv
2108.07755), `MANY` of them or one for each shape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss

import qtoolkit as qt
from examples.centernet import CLASSES, Scene, coco_ap, draw_scene

SIZE, STRIDES, MANY = 64, (8, 16), 8
DETECTIONS = 20  # in an image, of which most have one or two shapes
# The last convolutions of the head that is deployed, and all of the head that only trains.
LAST_LAYERS, TRAINING_HEAD = r"one_to_one\.(boxes|classes)\.\d\.2", "one_to_many"

# Of a head: distances to the sides of boxes, and logits of classes, each of all scales.
Maps = tuple[list[Tensor], list[Tensor]]


class Conv(nn.Sequential):
    """A convolution with batch norm and SiLU."""

    def __init__(self, inputs: int, outputs: int, size: int = 1, stride: int = 1) -> None:
        conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.SiLU(inplace=True))


class Bottleneck(nn.Sequential):
    """Two convolutions, to whose result the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__(Conv(width, width, 3), Conv(width, width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class C3(nn.Module):
    """Two branches, one of them with a bottleneck, behind each other in a convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.long, self.short = nn.Sequential(Conv(inputs, half), Bottleneck(half)), Conv(inputs, half)
        self.join = Conv(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat([self.long(x), self.short(x)], 1))


class Head(nn.Module):
    """Distances to the sides of boxes (n, 4 * bins, h, w), and logits of classes (n, classes, h, w), of each scale.

    They are outputs of their own: a concat would put numbers of different ranges on one grid.
    """

    def __init__(self, widths: Sequence[int], bins: int, inner: int = 24) -> None:
        super().__init__()
        self.boxes = nn.ModuleList(self._branch(width, inner, 4 * bins) for width in widths)
        self.classes = nn.ModuleList(self._branch(width, inner, len(CLASSES)) for width in widths)
        for boxes, classes in zip(self.boxes, self.classes, strict=True):
            nn.init.constant_(boxes[2].bias, 1.0)
            nn.init.constant_(classes[2].bias, -4.0)

    @staticmethod
    def _branch(width: int, inner: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(Conv(width, inner, 3), Conv(inner, inner, 3), nn.Conv2d(inner, outputs, 1))

    def forward(self, features: Sequence[Tensor]) -> Maps:
        boxes = [branch(x) for x, branch in zip(features, self.boxes, strict=True)]
        return boxes, [branch(x) for x, branch in zip(features, self.classes, strict=True)]


class Detector(nn.Module):
    """Maps images to the maps of the one-to-many and the one-to-one head."""

    def __init__(self, bins: int = 1, width: int = 16) -> None:
        super().__init__()
        widths = 4 * width, 6 * width
        self.stem = nn.Sequential(Conv(3, width, 3, 2), Conv(width, 2 * width, 3, 2), C3(2 * width, 2 * width))
        self.fine = nn.Sequential(Conv(2 * width, widths[0], 3, 2), C3(widths[0], widths[0]))
        self.coarse = nn.Sequential(Conv(widths[0], widths[1], 3, 2), C3(widths[1], widths[1]))
        self.up = nn.Upsample(scale_factor=2)
        self.neck_fine = C3(sum(widths), widths[0])
        self.down = Conv(widths[0], widths[0], 3, 2)
        self.neck_coarse = C3(sum(widths), widths[1])
        self.one_to_many, self.one_to_one = Head(widths, bins), Head(widths, bins)

    def forward(self, x: Tensor) -> tuple[Maps, Maps]:
        fine = self.fine(self.stem(x))
        coarse = self.coarse(fine)
        fine = self.neck_fine(torch.cat([self.up(coarse), fine], 1))
        coarse = self.neck_coarse(torch.cat([self.down(fine), coarse], 1))
        return self.one_to_many([fine, coarse]), self.one_to_one([fine.detach(), coarse.detach()])


class Deployed(nn.Module):
    """A detector without the head that only trains: torch's exporters leave out what nobody takes."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> Maps:
        return self.detector(x)[1]


# ---- boxes


def places() -> tuple[Tensor, Tensor]:
    """Return the centers (places, 2) of the maps in pixels, and their strides (places, 1)."""
    centers, strides = [], []
    for stride in STRIDES:
        along = (torch.arange(SIZE // stride) + 0.5) * stride
        ys, xs = torch.meshgrid(along, along, indexing="ij")
        centers.append(torch.stack([xs, ys], 2).reshape(-1, 2))
        strides.append(torch.full((len(centers[-1]), 1), float(stride)))
    return torch.cat(centers), torch.cat(strides)


class Decoded(NamedTuple):
    """What maps say: boxes (n, places, 4) in pixels, logits of classes, and logits of distances (n, places, 4, bins)."""

    boxes: Tensor
    logits: Tensor
    distances: Tensor


def decoded(maps: Maps) -> Decoded:
    """Return the boxes and logits of a head's maps."""
    sides, logits = (torch.cat([each.flatten(2) for each in part], 2).transpose(1, 2) for part in maps)
    distances = sides.unflatten(2, (4, -1))
    bins = distances.size(3)
    mean = distances.squeeze(3) if bins == 1 else distances.softmax(3) @ torch.arange(bins, dtype=sides.dtype)
    centers, strides = places()
    boxes = torch.cat([centers - mean[..., :2] * strides, centers + mean[..., 2:] * strides], 2)
    return Decoded(boxes, logits, distances)


def overlaps(one: Tensor, two: Tensor) -> Tensor:
    """Return the IoU (n, m, places) of boxes (n, m, 4) with boxes (n, places, 4)."""
    low = torch.maximum(one[:, :, None, :2], two[:, None, :, :2])
    high = torch.minimum(one[:, :, None, 2:], two[:, None, :, 2:])
    inside = (high - low).clamp(min=0).prod(3)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(2) for boxes in (one, two)]
    return inside / (areas[0][:, :, None] + areas[1][:, None] - inside + 1e-9)


# ---- data


@dataclass(frozen=True)
class Data:
    """Images (n, 3, SIZE, SIZE), their boxes (n, most, 4) and classes (n, most), which are -1 where there is no shape."""

    images: Tensor
    boxes: Tensor
    labels: Tensor
    scenes: Sequence[Scene]

    @staticmethod
    def drawn(count: int, seed: int) -> "Data":
        """Draw images."""
        rng = np.random.default_rng(seed)
        scenes = [draw_scene(SIZE, rng) for _ in range(count)]
        boxes = nn.utils.rnn.pad_sequence([scene.boxes for scene in scenes], batch_first=True)
        labels = nn.utils.rnn.pad_sequence([scene.labels for scene in scenes], batch_first=True, padding_value=-1)
        return Data(torch.stack([scene.image for scene in scenes]), boxes, labels, scenes)


# ---- training


class Targets(NamedTuple):
    """What a head shall give at each place: a box, scores of the classes, and the weight of the place in the boxes' loss."""

    boxes: Tensor
    scores: Tensor
    weights: Tensor


@torch.no_grad()
def targets_of(found: Decoded, boxes: Tensor, labels: Tensor, most: int) -> Targets:
    """Give each shape the `most` places inside of it whose score and overlap are best."""
    centers, _ = places()
    there = labels >= 0
    kinds = labels.clamp(min=0)
    sides = torch.cat([centers - boxes[:, :, None, :2], boxes[:, :, None, 2:] - centers], 3)
    inside = (sides.amin(3) > 0) & there[:, :, None]
    iou = overlaps(boxes, found.boxes) * inside
    scores = found.logits.sigmoid().transpose(1, 2).gather(1, kinds[:, :, None].expand_as(iou))
    fit = (scores.sqrt() * iou**6 + 1e-12) * inside
    best = torch.zeros_like(inside).scatter(2, fit.topk(most, 2).indices, value=True) & inside
    best &= iou >= torch.where(best, iou, -1).amax(1, keepdim=True)  # a place is of one shape
    fit = fit * best
    share = fit / (fit.amax(2, keepdim=True) + 1e-12) * (iou * best).amax(2, keepdim=True)
    weights, shape = share.max(1)
    wanted = boxes.gather(1, shape[:, :, None].expand(-1, -1, 4))
    classes = F.one_hot(kinds.gather(1, shape), len(CLASSES)) * weights[:, :, None]
    return Targets(wanted, classes, weights)


def loss_of_head(maps: Maps, boxes: Tensor, labels: Tensor, most: int) -> Tensor:
    """Return the loss of one head: cross entropy of classes, GIoU of boxes, and of their distances L1 or that of DFL."""
    found = decoded(maps)
    target = targets_of(found, boxes, labels, most)
    count = target.scores.sum().clamp(min=1)
    classes = F.binary_cross_entropy_with_logits(found.logits, target.scores, reduction="sum")
    taken = target.weights > 0
    weights = target.weights[taken]
    giou = (generalized_box_iou_loss(found.boxes[taken], target.boxes[taken]) * weights).sum()
    centers, strides = (each.expand(len(boxes), -1, -1)[taken] for each in places())
    wanted = torch.cat([centers - target.boxes[taken][:, :2], target.boxes[taken][:, 2:] - centers], 1) / strides
    sides = (_side_loss(found.distances[taken], wanted).mean(1) * weights).sum()
    return (classes + 5 * giou + sides) / count


def _side_loss(distances: Tensor, wanted: Tensor) -> Tensor:
    """Return for distances (places, 4, bins) the loss of each: L1 of numbers, the cross entropy of two bins of others."""
    bins = distances.size(2)
    if bins == 1:
        return (distances.squeeze(2) - wanted).abs()
    wanted = wanted.clamp(0, bins - 1.01)
    low = wanted.long()
    above = wanted - low
    log = distances.log_softmax(2)
    of_low, of_high = (-log.gather(2, (low + more)[..., None]).squeeze(2) for more in (0, 1))
    return of_low * (1 - above) + of_high * above


@dataclass(frozen=True)
class Schedule:
    """AdamW with a learning rate that rises for a tenth of the steps, and then falls along a cosine."""

    steps: int
    batch: int
    rate: float
    scale_rate: float = 1e-3


def train(
    model: nn.Module,
    data: Data,
    schedule: Schedule,
    seed: int,
    progress: Callable[[int], object],
    teacher: Callable[[Tensor, tuple[Maps, Maps]], Tensor] | None = None,
) -> nn.Module:
    """Train a model on both heads' losses, and that of `teacher` for images and the model's output; return it in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    groups = qt.parameter_groups(model, lr=schedule.rate, weight_decay=1e-4, scale_lr=schedule.scale_rate)
    optimizer = torch.optim.AdamW(groups)
    warm = max(1, schedule.steps // 10)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (1 + math.cos(math.pi * step / schedule.steps)) / 2)
    )
    model.train()
    for _ in range(schedule.steps):
        chosen = torch.randint(len(data.images), (schedule.batch,), generator=generator)
        images, boxes, labels = data.images[chosen], data.boxes[chosen], data.labels[chosen]
        many, one = output = model(images)
        loss = loss_of_head(many, boxes, labels, MANY) + loss_of_head(one, boxes, labels, 1)
        if teacher is not None:
            loss = loss + teacher(images, output)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        rate.step()
        progress(1)
    return model.eval()


# ---- average precision


class Precision(NamedTuple):
    """COCO's AP in percent: the mean over IoU 0.50 to 0.95, and at 0.50."""

    mean: float
    at_half: float


@torch.no_grad()
def average_precision(model: nn.Module, data: Data, batch: int = 50) -> Precision:
    """Return the AP of the one-to-one head: its best places, without a suppression of others."""
    found = []
    for start in range(0, len(data.images), batch):
        result = decoded(model(data.images[start : start + batch])[1])
        scores, index = result.logits.sigmoid().flatten(1).topk(DETECTIONS)
        place, labels = index // len(CLASSES), index % len(CLASSES)
        boxes = result.boxes.gather(1, place[:, :, None].expand(-1, -1, 4))
        found += zip(boxes, labels, scores, strict=True)
    return Precision(*coco_ap(found, data.scenes)[:2])
