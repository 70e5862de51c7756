"""An int8 classifier of handwritten digits, packaged by AOTInductor for the C++ program beside this file.

Writes model.pt2 and the test images, and prints their classes: python examples/cpp_inference/package.py --out build/cpp
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (n, 1, 8, 8) in [0, 1] and labels to train with, and those to test with."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float()[:, None] / 16, torch.from_numpy(digits.target).long()
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def trained(images: Tensor, labels: Tensor) -> nn.Module:
    """Return a small float network, in eval mode."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(6):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def package(converted: nn.Module, images: Tensor, path: Path) -> None:
    """Compile a converted model for batches of any size, into one file."""
    batch = {0: torch.export.Dim("batch", max=4096)}
    program = torch.export.export(converted, (images[:2],), dynamic_shapes=(batch,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def main() -> None:
    """Train, quantize, package, and print the classes in Python."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arithmetic", choices=("integer", "float"), default="integer", help="see docs/runtimes.md")
    parser.add_argument("--out", type=Path, default=Path("build/cpp"), help="the folder of model.pt2 and images.pt")
    args = parser.parse_args()
    torch.manual_seed(0)

    images, labels, test_images, test_labels = load_data()
    prepared = qt.prepare(trained(images, labels), images[:1], backend="onnxruntime")
    qt.calibrate(prepared, images.split(200), progress=False)
    converted = qt.convert(prepared, arithmetic=args.arithmetic)

    args.out.mkdir(parents=True, exist_ok=True)
    package(converted, images, args.out / "model.pt2")
    torch.save(test_images.clone(), args.out / "images.pt")
    with torch.no_grad():
        classes = converted(test_images).argmax(1)
    print(f"{100 * (classes == test_labels).float().mean():.1f} % of {len(classes)} test images are correct.")
    print("classes:", *classes.tolist())


if __name__ == "__main__":
    main()
