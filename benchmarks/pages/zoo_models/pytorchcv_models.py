"""One small network of each family of pytorchcv that no other package of the zoo has."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from benchmarks.pages.zoo_models.recipe import Entry, Recipe, floats, images, recipes_of

# Names by the side of the input images.
FAMILIES: Mapping[int, str] = {
    32: "nin_cifar10 densenet40_k12_cifar10 densenet40_k12_bc_cifar10 preresnet20_cifar10 seresnet20_cifar10 "
    "resnext20_16x4d_cifar10 sepreresnet20_cifar10 pyramidnet110_a48_cifar10 diaresnet20_cifar10 diapreresnet20_cifar10 "
    "shakedropresnet20_cifar10 shakeshakeresnet20_2x16d_cifar10 resdropresnet20_cifar10 fractalnet_cifar10 "
    "rir_cifar10 ror3_56_cifar10 xdensenet40_2_k24_bc_cifar10 msdnet22_cifar10 resnet20_cifar10",
    224: "airnet50_1x64d_r16 airnext50_32x4d_r2 alexnetb bagnet9 bam_resnet18 cbam_resnet18 bninception channelnet "
    "condensenet74_c8_g8 darknet_tiny darknet_ref darts diracnet18v2 dicenet_wd5 espnetv2_wd2 fastseresnet101b fbnet_cb "
    "fdmobilenet_wd4 fishnet99 hardnet39ds ibn_resnet50 ibnb_resnet50 igcv3_wd4 irevnet301 isqrtcovresnet18 menet108_8x1_g3 "
    "mixnet_s mnasnet_small mobilenet_wd4 mobilenetb_wd4 mobilenetv2b_wd4 mobilenetv3_small_w7d20 nasnet_4a1056 "
    "octresnet10_ad2 peleenet preresnet18_wd4 proxylessnas_cpu regnetx002 resattnet56 resnesta18 resnet18_wd4 "
    "resneta10 resnetd50b revnet38 scnet50 seresnet10 senet16 sharesnet18 shufflenet_g1_wd4 shufflenetv2b_wd2 sknet50 "
    "sparsenet121 spnasnet sqnxt23_w1 sqnxt23v5_w1 squeezeresnet_v1_1 vovnet27s zfnet drnd22 dla34 diaresnet10 bagnet17 "
    "preresnet10 sepreresnet10 resnext14_16x4d",
}
SEGMENTERS = (
    "bisenet_resnet18_celebamaskhq cgnet_cityscapes ctxnet_cityscapes dabnet_cityscapes edanet_cityscapes "
    "enet_cityscapes erfnet_cityscapes esnet_cityscapes espcnet_cityscapes fastscnn_cityscapes "
    "fpenet_cityscapes lednet_cityscapes linknet_cityscapes segnet_cityscapes sqnet_cityscapes "
    "unet_cityscapes danet_resnetd50b_cityscapes icnet_resnetd50b_cityscapes pspnet_resnetd50b_voc "
    "fcn8sd_resnetd50b_voc"
)
OTHERS: Mapping[str, tuple[int, ...]] = {
    "centernet_resnet18_coco": (1, 3, 128, 128),
    "ibppose_coco": (2, 3, 64, 64),
    "lffd20x5s320v2_widerface": (1, 3, 128, 128),
    "lwopenpose2d_mobilenet_cmupan_coco": (1, 3, 64, 64),
    "lwopenpose3d_mobilenet_cmupan_coco": (1, 3, 64, 64),
    "prnet": (1, 3, 256, 256),
    "simplepose_resnet18_coco": (1, 3, 64, 64),
    "simplepose_mobile_resnet18_coco": (1, 3, 64, 64),
    "superpointnet": (1, 1, 64, 64),
}
# What is prepared of a model whose own forward loops over values.
PARTS: Mapping[str, tuple[str, ...]] = {"superpointnet": ("features", "detector.detector", "descriptor.head")}


def pytorchcv_recipes() -> Iterable[Recipe]:
    """Return a recipe for each network, or none if pytorchcv is not installed."""
    entries = {
        name: Entry(partial(_build, name, {}), partial(images, side))
        for side, names in FAMILIES.items()
        for name in names.split()
    }
    for name in SEGMENTERS.split():
        entries[name] = Entry(partial(_build, name, {"in_size": (64, 64)}), partial(images, 64))
    for name, shape in OTHERS.items():
        entries[name] = Entry(partial(_build, name, {}), floats(shape), {"parts": PARTS.get(name, ())})
    return recipes_of("pytorchcv", "pytorchcv.model_provider", entries)


def _build(name: str, options: Mapping[str, Any], provider: Any) -> Any:
    return provider.get_model(name, pretrained=False, **options)
