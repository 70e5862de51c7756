"""Draws docs/report.png: the report of a ResNet-20 for CIFAR-10, as Chromium shows it (`make browser` installs one).

python docs/report_picture.py [--data ../shared/data] [--folder FOLDER]    with --folder, the page is kept there
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

import qtoolkit as qt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from cifar10_resnet20 import load_images, load_model  # noqa: E402

from tests.browser import browser  # noqa: E402

PICTURE = Path(__file__).parent / "report.png"
WIDTH, HEIGHT = 1280, 1100
OP = "layer2.0.conv1"


def write_page(data: Path, folder: Path) -> Path:
    """Quantize the network after training, and write its report with all sections."""
    model = load_model(data)
    images, labels = load_images(data, "test", 1000)
    prepared = qt.prepare(model, images[:1], backend="onnxruntime")
    qt.calibrate(prepared, load_images(data, "train", 256)[0].split(64))

    def percent(m: nn.Module, images: Tensor = images, labels: Tensor = labels) -> float:
        with torch.no_grad():
            return float((m(images).argmax(1) == labels).float().mean()) * 100

    qt.debug.report(
        prepared,
        images[:64],
        folder / "report.html",
        float_model=model,
        accuracy=[
            {"model": "float", "top-1, 1,000 images": percent(model)},
            {"model": "int8", "top-1, 1,000 images": percent(prepared)},
        ],
        sensitivity=qt.debug.sensitivity(prepared, lambda m: percent(m, images[:256], labels[:256])),
        verification=qt.export_onnx(qt.convert(prepared), images[:8], folder / "model.onnx"),
        title="ResNet-20, CIFAR-10",
    )
    return folder / "report.html"


def draw(page: Path, picture: Path, op: str = OP) -> None:
    """Find an op, which unfolds its block and shows its details, and take the picture of the top of the page."""
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as shown:
        shown.open(page, width=WIDTH)
        shown.resize(WIDTH, HEIGHT)
        shown.evaluate(
            f"(f => {{f.value = '{op}'; f.dispatchEvent(new Event('input'))}})(document.getElementById('find'))"
        )
        shown.evaluate("scrollTo(0, 0)")
        shown.screenshot(picture)
    Image.open(picture).quantize(128).save(picture, optimize=True)


def main() -> None:
    """Write the report, and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        draw(write_page(options.data, options.folder or Path(folder)), PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main()
