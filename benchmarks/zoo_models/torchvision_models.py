"""The models of torchvision: classification, segmentation, detection, optical flow, video."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from zoo_models.recipe import Recipe

BOX_PARTS = ("backbone", "rpn.head", "roi_heads.box_head", "roi_heads.box_predictor")
MASK_PARTS = (*BOX_PARTS, "roi_heads.mask_head", "roi_heads.mask_predictor")
KEYPOINT_PARTS = (*BOX_PARTS, "roi_heads.keypoint_head", "roi_heads.keypoint_predictor")
ONE_STAGE_PARTS = ("backbone", "head")
FLOW_PARTS = ("feature_encoder", "context_encoder", "update_block")

# Sides of the square images, by the beginning of a model's name; the longest that fits holds.
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
# One size or two of each family go through the export too: the longest step, that sizes differ in least.
EXPORTED = """
fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_resnet50_fpn_v2 fcos_resnet50_fpn keypointrcnn_resnet50_fpn
maskrcnn_resnet50_fpn retinanet_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large deeplabv3_mobilenet_v3_large
fcn_resnet50 lraspp_mobilenet_v3_large mc3_18 mvit_v1_b mvit_v2_s r2plus1d_18 r3d_18 s3d swin3d_t raft_large raft_small
quantized_googlenet quantized_mobilenet_v2 quantized_resnet18 quantized_shufflenet_v2_x0_5 alexnet convnext_tiny
densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 mobilenet_v2 mobilenet_v3_small
mobilenet_v3_large regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_0
swin_t swin_v2_t vgg11 vgg11_bn vit_b_16 vit_b_32 wide_resnet50_2
"""
# Few proposals, so that the heads compute little, and no threshold, so that random weights detect something.
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
    """Return a recipe for every model of torchvision; none where it is not installed."""
    if find_spec("torchvision") is None:
        return []
    from torchvision import models

    kinds = {models.detection: _detector, models.segmentation: _segmenter, models.video: _video}
    kinds |= {models.optical_flow: _flow, models.quantization: _classifier, models: _classifier}
    found = [make(name) for module, make in kinds.items() for name in models.list_models(module=module)]
    return [
        recipe if recipe.name.partition("/")[2] in EXPORTED.split() else _without_export(recipe) for recipe in found
    ]


def _without_export(recipe: Recipe) -> Recipe:
    return replace(recipe, export=False, note="export not run: another size of the family has it")


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
