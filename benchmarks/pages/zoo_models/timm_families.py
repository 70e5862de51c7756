"""One small model of each family of timm, more of those that had defects, and small ones drawn by a seed."""

import random
import re
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.pages.zoo_models.recipe import Recipe, images

# Models of each family, by the side of its input images; 64 where the model supports it.
FAMILIES: Mapping[int, str] = {
    64: "convmixer_768_32 test_byobnet test_convnext cpubone_nano csatv2 cs3darknet_focus_s cspnext_tiny densenet121 dla46x_c "
    "dpn48b edgenext_xx_small test_efficientnet efficientvim_m1 efficientvit_b0 fasternet_t0 fastvit_t8 ghostnet_050 "
    "hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_t inception_next_atto lcnetv2_small lowformer_b0 test_mambaout "
    "mobileone_s0 mobileone_s1 mobileone_s2 mobileone_s3 mobileone_s4 tf_mobilenetv3_large_minimal_100 "
    "poolformerv2_s12 mobilenetv3_small_050 mobilevit_xxs nextvit_small test_nfnet pvt_v2_b0 rdnet_tiny regnetx_002 "
    "repghostnet_050 repvit_m1 res2next50 resnest14d test_resnet resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18 "
    "shvit_s1 skresnet18 starnet_s050 tresnet_m ese_vovnet19b_slim_dw xception41p davit_tiny focalnet_tiny_srf",
    160: "test_coatnet test_vit test_vit_relpos",
    224: "beit_base_patch16_224 cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 efficientformer_l1 "
    "efficientformerv2_s0 efficientvit_m0 gcvit_xxtiny hiera_tiny_224 levit_128s gmlp_ti16_224 mvitv2_tiny jx_nest_tiny "
    "pit_ti_224 sequencer2d_s swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 tiny_vit_5m_224 "
    "tnt_s_legacy_patch16_224 twins_svt_small visformer_tiny vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 "
    "xcit_nano_12_p8_224",
    240: "crossvit_tiny_240",
    256: "swinv2_tiny_window16_256 vit_tiny_patch16_dinov3_qkvb",
    299: "inception_v3 inception_v4 legacy_xception",
}
# Models whose names say that they are small are drawn from the rest.
SEED = 40
DRAWN = 80
SMALL = re.compile(
    r"(^|_)(test|atto|femto|pico|nano|tiny|xxtiny|mini|xxs|xs|xxsmall|xsmall|small|t|n|0[0-4]0|b0|t0|s0|m0|m1)(?=_|$)|18[dt]?$"
)
LARGEST = 256  # side of the input images of models that take one size alone
# These submodules enter autocast, or recreate a buffer if the size of the input changes.
SKIPS: Mapping[str, tuple[str, ...]] = {
    "efficientvit_b0": ("stages.*.blocks.*.context_module.main",),
    "convit_tiny": ("blocks.*.attn",),
}
# Models that need torch's older exporter, because the newer one fails for the float model too.
FIVE_DIMENSIONS = "exporter='torchscript': 'dynamo' fails for the float model too (attention with 5 dimensions)"
VIEW = "exporter='torchscript': 'dynamo' fails for the float model too (a view of the result of attention)"
OLDER_EXPORTER: Mapping[str, str] = {
    "hiera_tiny_224": FIVE_DIMENSIONS,
    "jx_nest_tiny": FIVE_DIMENSIONS,
    "twins_svt_small": FIVE_DIMENSIONS,
    "beit_base_patch16_224": VIEW,
    "test_vit_relpos": VIEW,
}
# Models whose gradients with random weights are so large that one step of SGD gives weights of 1e6.
CLIPPED: Mapping[str, str] = dict.fromkeys(
    ("coat_mini", "coat_tiny"), "gradients clipped to norm 1: random weights give large gradients"
)


def timm_recipes() -> Iterable[Recipe]:
    """Return a recipe for each family, or none if timm is not installed."""
    if find_spec("timm") is None:
        return []
    named = {name: side for side, names in FAMILIES.items() for name in names.split()}
    return [_recipe(name, side) for name, side in {**named, **drawn(named)}.items()]


def drawn(others: Iterable[str]) -> Mapping[str, int]:
    """Return small models that are drawn from timm's list without some others, and the sides of their images."""
    import timm

    configs = {name: timm.get_pretrained_cfg(name) for name in timm.list_models() if SMALL.search(name)}
    sides = {
        name: config.input_size[-1] if config.fixed_input_size else 64 for name, config in configs.items() if config
    }
    names = sorted(name for name in sides.keys() - set(others) if sides[name] <= LARGEST)
    return {name: sides[name] for name in random.Random(SEED).sample(names, DRAWN)}


def _recipe(name: str, side: int) -> Recipe:
    return Recipe(
        f"timm/{name}",
        "timm",
        partial(_build, name),
        partial(images, side),
        SKIPS.get(name, ()),
        note=OLDER_EXPORTER.get(name, CLIPPED.get(name, "")),
        exporter="torchscript" if name in OLDER_EXPORTER else "dynamo",
        clip=1.0 if name in CLIPPED else None,
    )


def _build(name: str) -> Any:
    import timm

    return timm.create_model(name, pretrained=False)
