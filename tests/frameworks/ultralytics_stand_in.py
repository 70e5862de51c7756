"""A stand-in for the package ultralytics: a detector and a trainer as its are, in the names that the integration imports.

`tests/frameworks/test_ultralytics.py` needs the package; what a change of qtoolkit breaks there breaks with this one too.
"""

import copy
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

NAMES = (
    "ultralytics", "ultralytics.nn", "ultralytics.nn.modules", "ultralytics.nn.modules.head", "ultralytics.nn.tasks",
    "ultralytics.utils", "ultralytics.utils.torch_utils",
)  # fmt: skip
OF_MODULES = "ultralytics.nn.modules"


class Conv(nn.Module):
    """A convolution with its batch norm and activation."""

    __module__ = OF_MODULES
    f: int | list[int] = -1
    i = 0

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn, self.act = nn.BatchNorm2d(outputs), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Detect(nn.Module):
    """A head: a dict of the results of its layers in training mode; in eval mode boxes too, which it decodes by a layer."""

    __module__ = OF_MODULES
    end2end = export = dynamic = False

    def __init__(self, channels: tuple[int, ...], nc: int, bins: int = 4) -> None:
        super().__init__()
        self.nc, self.bins = nc, bins
        self.cv2 = nn.ModuleList(nn.Sequential(Conv(c, 8), nn.Conv2d(8, 4 * bins, 1)) for c in channels)
        self.cv3 = nn.ModuleList(nn.Sequential(Conv(c, 8), nn.Conv2d(8, nc, 1)) for c in channels)
        self.dfl = nn.Conv2d(bins, 1, 1, bias=False).requires_grad_(False)

    def forward(self, x: list[Tensor]) -> Any:
        results: dict[str, Any] = {
            "boxes": torch.cat([layer(y).flatten(2) for layer, y in zip(self.cv2, x, strict=True)], 2),
            "scores": torch.cat([layer(y).flatten(2) for layer, y in zip(self.cv3, x, strict=True)], 2),
            "feats": x,
        }
        if self.training:
            return results
        boxes = self._inference(results)
        return boxes if self.export else (boxes, results)

    def _inference(self, results: dict[str, Any]) -> Tensor:
        b, _, n = results["boxes"].shape
        distances = self.dfl(results["boxes"].view(b, 4, self.bins, n).transpose(2, 1).softmax(1)).view(b, 4, n)
        return torch.cat([distances, results["scores"].sigmoid()], 1)


# The other heads, of which it has the names alone.
HEADS = ("Classify", "OBB", "OBB26", "Pose", "Pose26", "RTDETRDecoder", "Segment", "Segment26", "v10Detect")
globals().update({name: type(name, (nn.Module,), {"__module__": OF_MODULES}) for name in HEADS})


class DetectionModel(nn.Module):
    """A detector of two scales, which runs its layers one by one."""

    __module__ = "ultralytics.nn.tasks"

    def __init__(self, nc: int = 2) -> None:
        super().__init__()
        layers = Conv(3, 8, 2), Conv(8, 16, 2), Conv(16, 16, 2), Detect((16, 16), nc)
        for i, layer in enumerate(layers):
            layer.i, layer.f = i, [1, 2] if i == 3 else -1
        self.model, self.save = nn.Sequential(*layers), [1, 2]
        self.yaml, self.names, self.stride = {"channels": 3}, dict(enumerate("ab")), torch.tensor([4.0, 8.0])

    def forward(self, x: Any) -> Any:
        """Return a loss of a batch, or the results of images."""
        if isinstance(x, dict):
            return self(x["img"])["scores"].sub(x["cls"].view(-1, 1, 1)).square().mean()
        y: list[Any] = []
        for layer in self.model:
            if layer.f != -1:
                x = y[layer.f] if isinstance(layer.f, int) else [x if j == -1 else y[j] for j in layer.f]
            x = layer(x)
            y.append(x if layer.i in self.save else None)
        return x


def guess_model_task(model: nn.Module) -> str:
    return "detect"


def unwrap_model(model: nn.Module) -> nn.Module:
    return model


class Loader(list[Any]):
    """Batches, which are drawn anew."""

    resets = 0

    def reset(self) -> None:
        self.resets += 1


class DetectionTrainer:
    """Trains a model that it builds itself, and takes an average of its weights as the checkpoint."""

    steps = 4

    def __init__(self, weights: nn.Module | None) -> None:
        self.weights, self.data, self.losses = weights, {"nc": 2}, list[float]()

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
        model = DetectionModel()
        model.load_state_dict(weights.state_dict())
        return model

    def build_optimizer(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        norms = [p for name, p in named if ".bn." in name or name.endswith("bias")]
        others = [p for name, p in named if all(p is not each for each in norms)]
        groups = [
            {"params": others, "param_group": "weight"},
            {"params": norms, "param_group": "bn", "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.05, weight_decay=0.01)

    def _build_train_pipeline(self) -> None:
        images = torch.rand(2, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        self.train_loader = Loader({"img": batch, "cls": torch.arange(4) % 2} for batch in images)
        self.optimizer = self.build_optimizer(self.model)

    def preprocess_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def train(self) -> None:
        self.model = self.get_model(None, self.weights).train()
        self._build_train_pipeline()
        self.ema = copy.deepcopy(self.model).eval()
        for _ in range(self.steps):
            for batch in map(self.preprocess_batch, self.train_loader):
                self.optimizer.zero_grad()
                loss = self.model(batch)
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
            average = zip(self.ema.state_dict().values(), self.model.state_dict().values(), strict=True)
            for mean, value in average:
                if mean.is_floating_point():
                    mean.mul_(0.5).add_(value.detach(), alpha=0.5)


class Detector(SimpleNamespace):
    """As YOLO: it knows the trainer of its task."""

    task = "detect"
    task_map: ClassVar = {"detect": {"trainer": DetectionTrainer}}


def modules() -> Iterator[tuple[str, Any]]:
    """Yield this module under each of the names that the integration imports from."""
    return ((name, sys.modules[__name__]) for name in NAMES)
