"""Networks that are trained, with random weights, and their batches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.export_models import FSRCNN

CLASSES = 1000


@dataclass(frozen=True)
class Network:
    """A network and the batches it is trained on.

    Attributes:
        title: Its name in tables.
        build: Takes the height of its images; returns the float model.
        size: The height and width of its images.
        quick_size: The same for a first impression.
        upscale: The factor between image and target of a super-resolution network; None for a classifier.
    """

    title: str
    build: Callable[[int], nn.Module]
    size: int
    quick_size: int
    upscale: int | None = None

    def model(self, device: str, size: int) -> nn.Module:
        """Return the float model in training mode for images of a height, the same at each call.

        Its batch norms have the statistics of a batch: tools that calibrate in eval mode then see activations of usual ranges.
        """
        torch.manual_seed(0)
        model = self.build(size).to(device).train()
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            model(self.batch(2, device, size)[0])
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        return model

    def batch(self, count: int, device: str, size: int) -> tuple[Tensor, Tensor]:
        """Return images and targets, the same at each call."""
        generator = torch.Generator().manual_seed(1)
        if self.upscale is None:
            x = torch.randn(count, 3, size, size, generator=generator)
            return x.to(device), torch.randint(CLASSES, (count,), generator=generator).to(device)
        target = torch.rand(count, 3, self.upscale * size, self.upscale * size, generator=generator)
        return F.avg_pool2d(target, self.upscale).to(device), target.to(device)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of an output and its target."""
        return F.cross_entropy if self.upscale is None else F.mse_loss


def _torchvision(name: str, size: int) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)


def _vit(size: int) -> nn.Module:
    import timm

    # torch's own layer norm: AIMET refuses other types.
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=size, norm_layer=nn.LayerNorm)


NETWORKS = {
    "resnet18": Network("ResNet-18", partial(_torchvision, "resnet18"), 224, 64),
    "resnet50": Network("ResNet-50", partial(_torchvision, "resnet50"), 224, 64),
    "mobilenet_v2": Network("MobileNetV2", partial(_torchvision, "mobilenet_v2"), 224, 64),
    "fsrcnn": Network("FSRCNN x2", lambda size: FSRCNN(), 96, 24, upscale=2),
    "vit": Network("ViT-Ti/16", _vit, 224, 64),
}
