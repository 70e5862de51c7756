"""Every decoder of segmentation_models_pytorch, on small encoders of its families."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from benchmarks.pages.zoo_models.recipe import Entry, Recipe, images, recipes_of

SMALL = {"decoder_channels": (32, 16, 16, 8, 8)}
# Options of each decoder, so that it is small; its encoder is the smallest ResNet.
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "Unet": SMALL,
    "UnetPlusPlus": SMALL,
    "MAnet": {**SMALL, "decoder_pab_channels": 16},
    "Linknet": {},
    "FPN": {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32},
    "PSPNet": {"psp_out_channels": 32},
    "DeepLabV3": {"decoder_channels": 32},
    "DeepLabV3Plus": {"decoder_channels": 32},
    "PAN": {"decoder_channels": 16},
    "UPerNet": {"decoder_channels": 32},
    "Segformer": {"decoder_segmentation_channels": 32},
}
ENCODERS = (
    "mobilenet_v2 efficientnet-b0 mobileone_s0 mit_b0 timm-mobilenetv3_small_minimal_100 resnext50_32x4d "
    "se_resnet50 densenet121 dpn68 vgg11_bn xception inceptionv4 timm-res2net50_26w_4s timm-regnetx_002 "
    "timm-skresnet18 timm-gernet_s tu-ghostnet_050 tu-convnext_atto tu-hrnet_w18_small tu-lcnet_050 "
    "tu-repvit_m1"
)


def segmentation_recipes() -> Iterable[Recipe]:
    """Return a recipe for each decoder and for a Unet on each encoder, or none if the package is not installed."""
    of_decoders = {
        f"{kind.lower()}_resnet18": Entry(
            partial(_build, kind, "resnet18", DECODERS[kind]), partial(images, 64 if kind != "PAN" else 128)
        )
        for kind in DECODERS
    }
    side = {"xception": 96, "inceptionv4": 96}
    of_encoders = {
        f"unet_{encoder}": Entry(partial(_build, "Unet", encoder, {}), partial(images, side.get(encoder, 64)))
        for encoder in ENCODERS.split()
    }
    dpt = {"dpt_vit": Entry(partial(_build, "DPT", "tu-vit_tiny_patch16_224", {}), partial(images, 224))}
    return recipes_of(
        "segmentation_models_pytorch", "segmentation_models_pytorch", {**of_decoders, **of_encoders, **dpt}
    )


def _build(kind: str, encoder: str, options: Mapping[str, Any], smp: Any) -> Any:
    return getattr(smp, kind)(encoder_name=encoder, encoder_weights=None, classes=3, **options)
