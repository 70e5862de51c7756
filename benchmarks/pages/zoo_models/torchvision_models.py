"""The models of torchvision: classification, segmentation, detection, optical flow, video."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.pages.zoo_models.recipe import Recipe

BOX_PARTS = ("backbone", "rpn.head", "roi_heads.box_head", "roi_heads.box_predictor")
MASK_PARTS = (*BOX_PARTS, "roi_heads.mask_head", "roi_heads.mask_predictor")
KEYPOINT_PARTS = (*BOX_PARTS, "roi_heads.keypoint_head", "roi_heads.keypoint_predictor")
ONE_STAGE_PARTS = ("backbone", "head")
FLOW_PARTS = ("feature_encoder", "context_encoder", "update_block")

# Sides of the square images by the prefix of a model's name; the longest prefix that matches applies.
SIDES = {
    "": 64,
    "inception_v3": 299,
    "quantized_inception_v3": 299,
    "vit_": 32,
    "vit_h_14": 28,
    "maxvit_t": 224,
    "swin_": 64,
}
CLASSIFIERS: Mapping[str, Mapping[str, Any]] = {
    "vit_": {"image_size": 32},
    "vit_h_14": {"image_size": 28},
    "inception_v3": {"init_weights": False},
    "googlenet": {"init_weights": False},
    "quantized_": {"quantize": False},
    "quantized_inception_v3": {"quantize": False, "init_weights": False},
    "quantized_googlenet": {"quantize": False, "init_weights": False},
}
# Few proposals, so that the heads are fast, and no threshold, so that models with random weights detect something.
TWO_STAGE = {
    "rpn_post_nms_top_n_test": 8,
    "rpn_post_nms_top_n_train": 8,
    "box_score_thresh": 0.0,
    "box_detections_per_img": 4,
}
SMALL_IMAGES = {"min_size": 96, "max_size": 96}
DETECTORS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "fasterrcnn_": (BOX_PARTS, {**TWO_STAGE, **SMALL_IMAGES}),
    "maskrcnn_": (MASK_PARTS, {**TWO_STAGE, **SMALL_IMAGES}),
    "keypointrcnn_": (KEYPOINT_PARTS, {**TWO_STAGE, **SMALL_IMAGES}),
    "fcos_": (ONE_STAGE_PARTS, SMALL_IMAGES),
    "retinanet_": (ONE_STAGE_PARTS, SMALL_IMAGES),
    "ssd300_": (ONE_STAGE_PARTS, {}),
    "ssdlite320_": (ONE_STAGE_PARTS, {}),
}


def torchvision_recipes() -> Iterable[Recipe]:
    """Return a recipe for every model of torchvision, or none if it is not installed."""
    if find_spec("torchvision") is None:
        return []
    from torchvision import models

    kinds = {models.detection: _detector, models.segmentation: _segmenter, models.video: _video}
    kinds |= {models.optical_flow: _flow, models.quantization: _classifier, models: _classifier}
    return [make(name) for module, make in kinds.items() for name in models.list_models(module=module)]


def _longest(table: Mapping[str, Any], name: str, default: Any) -> Any:
    fitting = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(fitting, key=len)] if fitting else default


def _built(name: str, **arguments: Any) -> Callable[[], Any]:
    from torchvision.models import get_model

    return partial(get_model, name, weights=None, **arguments)


def _images(*shape: int, count: int = 1) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(torch.rand(shape) for _ in range(count))


def _classifier(name: str) -> Recipe:
    side = _longest(SIDES, name, 64)
    arguments = _longest(CLASSIFIERS, name, {})
    family = "quantizable classification" if name.startswith("quantized_") else "classification"
    return Recipe(f"torchvision/{name}", family, _built(name, **arguments), _images(2, 3, side, side))


def _segmenter(name: str) -> Recipe:
    build = _built(name, weights_backbone=None)
    return Recipe(f"torchvision/{name}", "segmentation", build, _images(2, 3, 64, 64))


def _detector(name: str) -> Recipe:
    parts, arguments = _longest(DETECTORS, name, None)
    build = _built(name, weights_backbone=None, **arguments)
    side = 96 if "min_size" in arguments else 64
    inputs = lambda: ([torch.rand(3, side, side) for _ in range(2)],)  # noqa: E731
    return Recipe(f"torchvision/{name}", "detection", build, inputs, parts=parts)


def _flow(name: str) -> Recipe:
    parts = (*FLOW_PARTS, "mask_predictor") if name == "raft_large" else FLOW_PARTS
    return Recipe(f"torchvision/{name}", "optical flow", _built(name), _images(1, 3, 128, 128, count=2), parts=parts)


def _video(name: str) -> Recipe:
    frames, side = (16, 224) if name.startswith("mvit") else (8, 64)
    if name == "s3d":
        frames, side = 16, 224
    return Recipe(f"torchvision/{name}", "video", _built(name), _images(1, 3, frames, side, side))
