"""Models of benchmarks/pages/export.py with their data: inputs, calibration batches and, where there is data, accuracy."""

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A model to export.

    Attributes:
        name: Its name in tables.
        model: The float model, in eval mode.
        example: The input that is timed.
        calibration: The batches that give ranges, to both quantizers.
        measure: Takes a forward; returns the accuracy on real data, in `unit`. None without data.
        unit: What `measure` returns.
    """

    name: str
    model: nn.Module
    example: Tensor
    calibration: Sequence[Tensor]
    measure: Callable[[Forward], float] | None = None
    unit: str = ""


def bytes_of_file(path: Path) -> int:
    """Return the size of an ONNX file, with the weights that torch's exporter keeps in a file beside it."""
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*"))


class FSRCNN(nn.Module):
    """FSRCNN for a factor of 2; the layers have the names of the stored weights."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_extract, self.activation_1 = nn.Conv2d(3, 56, 5, padding=2), nn.PReLU(56)
        self.shrink, self.activation_2 = nn.Conv2d(56, 12, 1), nn.PReLU(12)
        self.map_1, self.map_2, self.map_3, self.map_4 = (nn.Conv2d(12, 12, 3, padding=1) for _ in range(4))
        self.activation_3 = nn.PReLU(12)
        self.expand, self.activation_4 = nn.Conv2d(12, 56, 1), nn.PReLU(56)
        self.deconv = nn.ConvTranspose2d(56, 3, 9, stride=2, padding=4, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of twice the size, in [0, 1]."""
        x = self.activation_2(self.shrink(self.activation_1(self.feature_extract(x))))
        x = self.activation_3(self.map_4(self.map_3(self.map_2(self.map_1(x)))))
        return torch.clamp(self.deconv(self.activation_4(self.expand(x))), 0, 1)


def resnet18(data: Path | None, quick: bool) -> Subject:
    import torchvision

    return random_weights("ResNet-18", torchvision.models.resnet18(weights=None), 96 if quick else 224)


def resnet50(data: Path | None, quick: bool) -> Subject:
    import torchvision

    return random_weights("ResNet-50", torchvision.models.resnet50(weights=None), 96 if quick else 224)


def mobilenet_v2(data: Path | None, quick: bool) -> Subject:
    import torchvision

    return random_weights("MobileNetV2", torchvision.models.mobilenet_v2(weights=None), 96 if quick else 224)


def vit(data: Path | None, quick: bool) -> Subject:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=96 if quick else 224)
    return random_weights("ViT-Ti/16", model, 96 if quick else 224)


def random_weights(name: str, model: nn.Module, size: int) -> Subject:
    """Return a model with random weights; its batch norms see some data, so that activations have usual ranges.

    Batch norms have a bias, as trained ones do: runtimes leave out the addition of one that is zero in the file.
    """
    random = torch.Generator().manual_seed(0)
    batches = torch.randn(4, 4, 3, size, size, generator=random)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.normal_(norm.bias, std=0.3, generator=random)
    model.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return Subject(name, model.eval(), batches[0, :1], list(batches[:2]))


def fsrcnn(data: Path | None, quick: bool) -> Subject:
    if data is None:
        return Subject("FSRCNN x2", FSRCNN().eval(), torch.rand(1, 3, 96, 96), [torch.rand(4, 3, 48, 48)])
    model = FSRCNN()
    model.load_state_dict(torch.load(data / "fsrcnn_x2.pt", weights_only=True))
    with np.load(data / "sr_train_x2_ycc.npz") as archive:
        patches = torch.from_numpy(archive["lr"][:32]).float() / 255
    with np.load(data / "set5_x2_ycc.npz") as archive:
        names = [name.removeprefix("lr_") for name in archive.files if name.startswith("lr_")][: 1 if quick else None]
        pairs = [[torch.from_numpy(archive[f"{end}_{name}"]).float() / 255 for end in ("lr", "hr")] for name in names]

    def psnr(forward: Forward) -> float:
        values = [_psnr(forward(low[None])[0], high) for low, high in pairs]
        return sum(values) / len(values)

    return Subject("FSRCNN x2", model.eval(), pairs[0][0][None], patches.split(8), psnr, "dB, Set5 Y")


def _psnr(image: Tensor, target: Tensor) -> float:
    error = (image[0] - target[0])[2:-2, 2:-2]  # the Y plane without its border
    return float(-10 * torch.log10((error**2).mean()))


def resnet20_of(data: Path | None) -> nn.Module:
    """Return ResNet-20 in eval mode, with the weights for JPEG images where there is data."""
    sys.path.insert(0, str(ROOT / "examples"))
    from cifar10_resnet20 import ResNet20

    model = ResNet20().eval()
    if data is not None:
        model.load_state_dict(torch.load(data / "resnet20_cifar10_jpeg.pt", weights_only=True))
    return model


def jpeg_pixels(data: Path, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Return the first images (count, 3, 32, 32) of CIFAR-10's "train" or "test" split, of 0 to 255, and their labels."""
    from PIL import Image

    with np.load(data / "cifar10_jpeg.npz") as archive:
        head, scan, offset = archive["header"].tobytes(), archive[f"{split}_scan"], archive[f"{split}_offset"]
        files = (io.BytesIO(head + scan[offset[i] : offset[i + 1]].tobytes()) for i in range(count))
        pixels = torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files]))
        labels = torch.from_numpy(archive[f"{split}_y"][:count]).long()
    return pixels.permute(0, 3, 1, 2).contiguous().float(), labels


def jpeg_images(data: Path, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Return the same images, normalised, and their labels."""
    pixels, labels = jpeg_pixels(data, split, count)
    return (pixels / 255 - MEAN[:, None, None]) / STD[:, None, None], labels


def resnet20(data: Path | None, quick: bool) -> Subject:
    model = resnet20_of(data)
    if data is None:
        return Subject("ResNet-20", model, torch.randn(1, 3, 32, 32), [torch.randn(64, 3, 32, 32)])
    calibration, _ = jpeg_images(data, "train", 256)
    test, labels = jpeg_images(data, "test", 200 if quick else 10_000)

    def accuracy(forward: Forward) -> float:
        hits = [F.one_hot(forward(x).argmax(1), 10)[:, y].diagonal().sum() for x, y in _batches(test, labels)]
        return 100 * float(torch.stack(hits).sum()) / len(test)

    return Subject("ResNet-20", model, test[:1], calibration.split(64), accuracy, "%, CIFAR-10")


def _batches(x: Tensor, y: Tensor) -> zip:  # type: ignore[type-arg]
    return zip(x.split(100), y.split(100), strict=True)


SUBJECTS: dict[str, Callable[[Path | None, bool], Subject]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "fsrcnn": fsrcnn,
    "vit": vit,
    "resnet20": resnet20,
}
