"""Networks of ultralytics: each of its generations, tasks and heads at its smallest scale."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from benchmarks.pages.zoo_models.recipe import Entry, Recipe, images, recipes_of

DETECTORS = (
    "yolov8n yolov9t yolov10n yolo11n yolo12n yolo26n yolov3-tiny yolov5n yolov6n yolov8n-p2 yolov8n-p6 "
    "yolov8n-ghost rtdetr-l"
)
# The class of each task's networks, with the names of networks.
TASKS = {
    "DetectionModel": DETECTORS.split(),
    "SegmentationModel": ("yolov8n-seg", "yolo11n-seg", "yolo26n-seg"),
    "PoseModel": ("yolov8n-pose", "yolo11n-pose", "yolo26n-pose"),
    "OBBModel": ("yolov8n-obb", "yolo11n-obb", "yolo26n-obb"),
    "ClassificationModel": ("yolov8n-cls", "yolo11n-cls", "yolo26n-cls", "yolov8n-cls-resnet50"),
}
OF_DECODER = {"note": "prepared in eval mode: its decoder computes boxes in eval mode only", "training": False}


def ultralytics_recipes() -> Iterable[Recipe]:
    """Return a recipe for each network, or none if ultralytics is not installed."""
    entries = {
        name: Entry(partial(_build, kind, name), partial(images, 64), OF_DECODER if name.startswith("rtdetr") else {})
        for kind, names in TASKS.items()
        for name in names
    }
    return recipes_of("ultralytics", "ultralytics.nn.tasks", entries)


def _build(kind: str, name: str, tasks: Any) -> Any:
    if name.startswith("rtdetr"):
        kind = "RTDETRDetectionModel"
    return getattr(tasks, kind)(f"{name}.yaml", verbose=False)
