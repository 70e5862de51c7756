"""CenterNet with transposed convolutions: train on synthetic shapes, quantize for TensorRT, compare, draw, export, check.

The network of "Objects as Points" (arXiv 1904.07850) on torchvision's ResNet-50: a convolution 2048 -> 256, three transposed
convolutions with batch norm and ReLU, and a head each for the heat map (hm), the boxes' sizes (wh) and the centers' offsets
(reg). The shapes are drawn as they are needed, so nothing is downloaded: python examples/centernet.py

It prints every quantized layer from the worst on (cosine and SQNR of its own, accumulated, of its weight), how many of
onnxruntime's codes differ, and COCO's AP of the float and the int8 model (docs/centernet.md has the figures). It fails, with
a sentence and exit code 1, where a layer's own cosine is not above 0.99, where the int8 model's AP is more than a point
below or above the float model's, or where the float model has learned too little for that to say anything. The folder
`--out` keeps the trained weights (a second run with the same options does not train again), the drawing and the ONNX file.
"""

import argparse
import dataclasses
import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
import torchvision
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import qtoolkit as qt

CLASSES = ("rectangle", "ellipse", "triangle")
STRIDE = 4
LEAST_COSINE = 0.99
MOST_LOST = 1.0


class CenterNet(nn.Module):
    """Backbone, upsampler, three heads; maps a batch (n, 3, h, w) to hm, wh and reg of (n, c, h / 4, w / 4)."""

    def __init__(self, backbone: str = "resnet50", width: int = 256, classes: int = len(CLASSES)) -> None:
        super().__init__()
        resnet = torchvision.models.get_model(backbone, weights=None, zero_init_residual=True)
        self.backbone = nn.Sequential(*list(resnet.children())[:-2])
        self.reduce = nn.Sequential(nn.Conv2d(resnet.fc.in_features, width, 3, padding=1), nn.ReLU(inplace=True))
        self.upsample = nn.Sequential(*(layer for _ in range(3) for layer in self._double(width)))
        self.hm, self.wh, self.reg = (self._head(width, out) for out in (classes, 2, 2))
        nn.init.constant_(self.hm[2].bias, -2.19)  # the logit of 0.1, as in the paper's code

    @staticmethod
    def _double(width: int) -> tuple[nn.Module, ...]:
        up = nn.ConvTranspose2d(width, width, 4, stride=2, padding=1, bias=False)
        return up, nn.BatchNorm2d(width), nn.ReLU(inplace=True)

    @staticmethod
    def _head(width: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(width, 64, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(64, out, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.upsample(self.reduce(self.backbone(x)))
        return self.hm(x), self.wh(x), self.reg(x)


# ---- synthetic shapes with known boxes


@dataclasses.dataclass(frozen=True)
class Scene:
    """An image (3, size, size), and its boxes (n, 4), as x0, y0, x1, y1 in pixels, with their classes (n)."""

    image: Tensor
    boxes: Tensor
    labels: Tensor


def draw_scene(size: int, rng: np.random.Generator) -> Scene:
    """Draw shapes of random colors on noise; centers keep apart, so that none hides another."""
    image = rng.normal(0, 0.15, (3, size, size)).astype(np.float32)
    image += np.float32(rng.normal(0, 0.3, (3, 1, 1)))
    ys, xs = np.mgrid[:size, :size].astype(np.float32) + 0.5
    boxes, labels = [], []
    for _ in range(max(1, round(6 * (size / 128) ** 2))):
        w, h = rng.uniform(16, 40, 2)
        x, y = rng.uniform(w / 2, size - w / 2), rng.uniform(h / 2, size - h / 2)
        if any(abs(x - (b[0] + b[2]) / 2) < 42 and abs(y - (b[1] + b[3]) / 2) < 42 for b in boxes):
            continue
        label = int(rng.integers(len(CLASSES)))
        inside = _covers(label, (xs - x) / w * 2, (ys - y) / h * 2)
        color = rng.uniform(0.7, 1.6, 3) * rng.choice((-1, 1), 3)
        image[:, inside] = color[:, None] + rng.normal(0, 0.1, (3, int(inside.sum())))
        boxes.append((x - w / 2, y - h / 2, x + w / 2, y + h / 2))
        labels.append(label)
    return Scene(torch.from_numpy(image), torch.tensor(boxes, dtype=torch.float32), torch.tensor(labels))


def _covers(label: int, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    box = (np.abs(u) <= 1) & (np.abs(v) <= 1)
    if label == 0:
        return box
    return u**2 + v**2 <= 1 if label == 1 else box & (np.abs(u) <= (v + 1) / 2)


# ---- training


@dataclasses.dataclass(frozen=True)
class Targets:
    """What the heads shall give: a heat map with a Gaussian at each center; size and offset there."""

    heat: Tensor
    size: Tensor
    offset: Tensor
    centers: Tensor


def targets_of(scenes: list[Scene]) -> Targets:
    """Build the training targets of a batch."""
    side = scenes[0].image.size(1) // STRIDE
    heat = torch.zeros(len(scenes), len(CLASSES), side, side)
    size, offset = torch.zeros(2, len(scenes), 2, side, side).unbind()
    ys, xs = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    for i, scene in enumerate(scenes):
        for box, label in zip(scene.boxes / STRIDE, scene.labels, strict=True):
            center, extent = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
            x, y = (min(int(c), side - 1) for c in center)
            sigma = float(extent.min()) / 6
            blob = torch.exp(-((xs - x) ** 2 + (ys - y) ** 2) / (2 * sigma**2))
            heat[i, label] = torch.maximum(heat[i, label], blob)
            size[i, :, y, x] = extent
            offset[i, :, y, x] = center - torch.tensor([x, y])
    return Targets(heat, size, offset, (heat.amax(1, keepdim=True) == 1).float())


def loss_of(outputs: tuple[Tensor, Tensor, Tensor], t: Targets) -> Tensor:
    """Penalty-reduced focal loss on the heat map, L1 on sizes and offsets at the centers (equations 1 to 4)."""
    hm, wh, reg = outputs
    count = t.centers.sum().clamp(min=1)
    p = hm.sigmoid().clamp(1e-4, 1 - 1e-4)
    hit = t.heat == 1
    focal = torch.where(hit, (1 - p) ** 2 * p.log(), (1 - t.heat) ** 4 * p**2 * (1 - p).log())
    lengths = ((wh - t.size).abs() * t.centers).sum() * 0.1 + ((reg - t.offset).abs() * t.centers).sum()
    return (lengths - focal.sum()) / count


def train(model: nn.Module, steps: int, size: int, batch: int, rate: float, seed: int, what: str) -> None:
    """Train on fresh scenes, with warm-up and a cosine schedule."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    model.train()
    for _ in (bar := tqdm(range(steps), desc=what, leave=False)):
        scenes = [draw_scene(size, rng) for _ in range(batch)]
        loss = loss_of(model(torch.stack([s.image for s in scenes])), targets_of(scenes))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()


# ---- detection


@torch.no_grad()
def detect(model: nn.Module, images: Tensor, most: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes (n, most, 4), classes and scores (n, most): the peaks of the heat map."""
    hm, wh, reg = model(images)
    heat = hm.sigmoid()
    heat = heat * (F.max_pool2d(heat, 3, 1, 1) == heat)
    n, classes, side, _ = heat.shape
    scores, index = heat.flatten(1).topk(min(most, classes * side * side))
    labels, place = index // (side * side), index % (side * side)
    size, offset = (t.flatten(2).gather(2, place[:, None].expand(n, 2, -1)).transpose(1, 2) for t in (wh, reg))
    center = torch.stack([place % side, place // side], 2) + offset
    return torch.cat([center - size / 2, center + size / 2], 2) * STRIDE, labels, scores


def average_precision(model: nn.Module, scenes: list[Scene], batch: int, what: str) -> float:
    """Return COCO's AP, averaged over IoU 0.50 to 0.95, in percent."""
    found = []
    for start in tqdm(range(0, len(scenes), batch), desc=what, leave=False):
        images = torch.stack([s.image for s in scenes[start : start + batch]])
        found += zip(*detect(model, images), strict=True)
    return coco_ap(found, scenes)[0]


def coco_ap(found: Sequence[tuple[Tensor, Tensor, Tensor]], scenes: Sequence[Scene]) -> list[float]:
    """Return COCO's figures for boxes, classes and scores of each image, in percent: AP over IoU 0.50 to 0.95, at 0.50, ..."""
    lines = []
    for i, (boxes, labels, scores) in enumerate(found):
        rows = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2], scores[:, None], labels[:, None] + 1.0], 1)
        lines.append(torch.cat([torch.full((len(rows), 1), i + 1.0), rows], 1))
    with redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth = _coco(scenes)
        result = COCOeval(truth, truth.loadRes(torch.cat(lines).double().numpy()), "bbox")
        result.evaluate()
        result.accumulate()
        result.summarize()
    return [100 * float(figure) for figure in result.stats]


def _coco(scenes: Sequence[Scene]) -> COCO:
    annotations = []
    for i, scene in enumerate(scenes):
        for box, label in zip(scene.boxes.tolist(), scene.labels.tolist(), strict=True):
            x0, y0, x1, y1 = box
            extent = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "iscrowd": 0}
            annotations.append({"id": len(annotations) + 1, "image_id": i + 1, "category_id": label + 1, **extent})
    coco = COCO()
    coco.dataset = {
        "images": [{"id": i + 1} for i in range(len(scenes))],
        "categories": [{"id": i + 1, "name": name} for i, name in enumerate(CLASSES)],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco


# ---- quantization


def config() -> qt.QConfigMapping:
    """Activations by histogram, per tensor; weights per output channel, which of a transposed convolution is axis 1."""
    activation = qt.QuantSpec(observer="histogram")
    return (
        qt.QConfigMapping()
        .set_global(qt.QConfig(activation, qt.QuantSpec(axis=0)))
        .set_object_type(nn.ConvTranspose2d, qt.QConfig(activation, qt.QuantSpec(axis=1)))
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """What `quantize` has made and measured."""

    converted: nn.Module
    comparison: qt.debug.Comparison
    export: qt.export.ExportResult


def quantize(model: CenterNet, size: int, calibration: int, out: Path) -> Result:
    """Prepare for TensorRT, calibrate, convert, compare per layer, draw, export and check in onnxruntime."""
    rng = np.random.default_rng(1)
    images = torch.stack([draw_scene(size, rng).image for _ in range(calibration)])
    prepared = qt.prepare(model.eval(), (images[:1],), backend="tensorrt10", qconfig_mapping=config())
    qt.calibrate(prepared, images.split(2))
    converted = qt.convert(prepared)
    comparison = qt.debug.compare(model, converted, images[:1])
    qt.debug.draw(converted, out / "centernet.svg")
    names = {"input_names": ["image"], "output_names": ["hm", "wh", "reg"]}
    return Result(converted, comparison, qt.export_onnx(converted, (images[:1],), out / "centernet.onnx", **names))


def trained(args: argparse.Namespace) -> CenterNet:
    """Return the float model, trained or as an earlier run with the same options has left it."""
    torch.manual_seed(0)
    model = CenterNet(args.backbone, args.width)
    options = (args.backbone, args.width, args.train_size, args.steps, args.batch, args.rate)
    weights = args.out / f"{'_'.join(map(str, options))}.pt"
    if weights.exists():
        print(f"The float model is the one of an earlier run: {weights}")
        model.load_state_dict(torch.load(weights, weights_only=True))
        return model
    args.out.mkdir(parents=True, exist_ok=True)
    train(model, args.steps, args.train_size, args.batch, args.rate, 0, "train in float")
    torch.save(model.state_dict(), weights)
    return model


def run(args: argparse.Namespace) -> tuple[Result, float, float]:
    """Train (or load) the float model, quantize it, and return the result with both models' AP."""
    model = trained(args).eval()
    result = quantize(model, args.size, args.calibration, args.out)
    rng = np.random.default_rng(2)
    scenes = [draw_scene(args.size, rng) for _ in range(args.images)]
    batch = max(1, 8 * 128 * 128 // args.size**2)
    return result, *(average_precision(m, scenes, batch, w) for m, w in ((model, "float"), (result.converted, "int8")))


def faults(result: Result, float_ap: float, int8_ap: float, least_ap: float) -> list[str]:
    """Return a sentence for each promise that does not hold."""
    found = [
        f"The layer {layer.name} alone has a cosine of {layer.own.cosine:.4f}, which must be above {LEAST_COSINE}."
        for layer in result.comparison.layers
        if not layer.own.cosine > LEAST_COSINE
    ]
    if not abs(float_ap - int8_ap) <= MOST_LOST:
        found.append(
            f"The int8 model's AP is {int8_ap:.2f}, more than {MOST_LOST} from the float model's {float_ap:.2f}."
        )
    if not float_ap >= least_ap:
        found.append(
            f"The float model's AP is {float_ap:.2f}, below {least_ap}: it has learned too little; add --steps."
        )
    return found


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backbone", default="resnet50", help="a ResNet of torchvision")
    parser.add_argument("--width", type=int, default=256, help="channels of the upsampler")
    parser.add_argument("--size", type=int, default=512, help="input for quantization and evaluation, pixels")
    parser.add_argument("--train-size", type=int, default=128, help="input for training, pixels")
    parser.add_argument("--steps", type=int, default=800, help="training steps")
    parser.add_argument("--batch", type=int, default=4, help="images a training step")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--calibration", type=int, default=8, help="calibration images")
    parser.add_argument("--images", type=int, default=20, help="test images")
    parser.add_argument("--least-ap", type=float, default=10, help="of the float model; below it AP says too little")
    parser.add_argument("--out", type=Path, default=Path("centernet"), help="folder for weights, drawing and ONNX file")
    return parser.parse_args(words)


def main() -> None:
    """Print the layers from the worst on, the export's check, and both models' AP; fail where a promise does not hold."""
    args = arguments()
    result, float_ap, int8_ap = run(args)
    print(result.comparison)
    print(result.export)
    table = Table(title=f"CenterNet {args.backbone}, {args.size}x{args.size}, {args.images} images of shapes")
    for column in ("model", "AP (0.50:0.95), %"):
        table.add_column(column)
    table.add_row("float", f"{float_ap:.2f}")
    table.add_row("int8", f"{int8_ap:.2f}")
    Console(width=120).print(table)
    if found := faults(result, float_ap, int8_ap, args.least_ap):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
