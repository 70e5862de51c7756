"""A data set of Ultralytics that a test draws: a circle or a square in each image."""

import random
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = 64


def draw(folder: Path, task: str, count: int = 64) -> str:
    """Draw as many images for training and for validation, with labels of a task. Return what `data=` takes."""
    numbers = random.Random(0)
    for split in ("train", "val"):
        for number in range(count):
            is_square, side = number % 2, numbers.randint(24, 40)
            x, y = numbers.randint(0, SIZE - side), numbers.randint(0, SIZE - side)
            image = Image.new("RGB", (SIZE, SIZE))
            pen = ImageDraw.Draw(image)
            (pen.rectangle if is_square else pen.ellipse)((x, y, x + side, y + side), fill="white")
            name = f"{split}/{'square' if is_square else 'circle'}" if task == "classify" else f"images/{split}"
            (folder / name).mkdir(parents=True, exist_ok=True)
            image.save(folder / name / f"{number}.png")
            labels = folder / f"labels/{split}/{number}.txt"
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text(f"{is_square} {label(task, x / SIZE, y / SIZE, side / SIZE)}\n")
    if task == "classify":
        return str(folder)
    file = folder / "data.yaml"
    keypoints = "kpt_shape: [4, 3]\n" if task == "pose" else ""
    file.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [circle, square]\n{keypoints}")
    return str(file)


def label(task: str, x: float, y: float, side: float) -> str:
    box = (x + side / 2, y + side / 2, side, side)
    corners = [(x, y), (x + side, y), (x + side, y + side), (x, y + side)]
    numbers = {
        "detect": box,
        "classify": (),
        "segment": sum(corners, ()),
        "obb": sum(corners, ()),
        "pose": (*box, *(number for corner in corners for number in (*corner, 2))),
    }
    return " ".join(map(str, numbers[task]))
