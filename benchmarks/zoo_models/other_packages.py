"""Detectors of ultralytics and super-resolution networks of spandrel, where somebody has installed these packages."""

from collections.abc import Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from zoo_models.recipe import Recipe, images

YOLOS = ("yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n")
NETWORKS = {
    "SwinIR": {
        "img_size": 16,
        "window_size": 4,
        "depths": [2, 2],
        "embed_dim": 16,
        "num_heads": [2, 2],
        "upscale": 2,
        "upsampler": "pixelshuffledirect",
    },
    "SPAN": {"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 16, "upscale": 2},
}
NOTES = {
    "SPAN": "its Conv3XC, which assign weights in forward, replaced by the convolutions that they compute in eval mode"
}
BOXES = "prepared in eval mode: its head computes boxes there alone"


def ultralytics_recipes() -> Iterable[Recipe]:
    """Return a recipe for the smallest model of each YOLO, or none if ultralytics is not installed."""
    if find_spec("ultralytics") is None:
        return []
    return [
        Recipe(f"ultralytics/{n}", "ultralytics", partial(_yolo, n), partial(images, 64), note=BOXES, training=False)
        for n in YOLOS
    ]


def spandrel_recipes() -> Iterable[Recipe]:
    """Return a recipe for each network of super-resolution, or none if spandrel is not installed."""
    if find_spec("spandrel") is None:
        return []
    return [
        Recipe(
            f"spandrel/{name.lower()}",
            "spandrel",
            partial(_super_resolution, name),
            partial(images, 16),
            note=NOTES.get(name, ""),
        )
        for name in NETWORKS
    ]


def _yolo(name: str) -> Any:
    return import_module("ultralytics.nn.tasks").DetectionModel(f"{name}.yaml", verbose=False)


def _super_resolution(name: str) -> Any:
    model = getattr(import_module(f"spandrel.architectures.{name}"), name)(**NETWORKS[name])
    for module in list(model.modules()):
        for child, part in module.named_children():
            if type(part).__name__ == "Conv3XC":
                part.update_params()
                setattr(module, child, part.eval_conv.requires_grad_())
    return model
