"""Small networks of spandrel: super-resolution, denoising, restoration."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from benchmarks.pages.zoo_models.recipe import Entry, Recipe, floats, recipes_of

ATTENTION = {"img_size": 16, "window_size": 4, "depths": [2, 2], "embed_dim": 16, "num_heads": [2, 2], "upscale": 2}
DIRECT = {"upsampler": "pixelshuffledirect"}
UNET = {"in_nc": 3, "out_nc": 3, "nc": [8, 16, 16, 32], "nb": 1}
RGB = (2, 3, 16, 16)
LARGER = (2, 3, 64, 64)
# The constructor's options of each network, and the shapes of its inputs.
NETWORKS: Mapping[str, tuple[Mapping[str, Any], *tuple[tuple[int, ...], ...]]] = {
    "SwinIR": ({**ATTENTION, **DIRECT}, (2, 3, 16, 16)),
    "SPAN": ({"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 16, "upscale": 2}, (2, 3, 16, 16)),
    "ATD": ({**ATTENTION, **DIRECT, "category_size": 64, "num_tokens": 8, "convffn_kernel_size": 3}, RGB),
    "CRAFT": (
        {
            "window_size": 8,
            "embed_dim": 32,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "split_size_0": 2,
            "split_size_1": 8,
            "upscale": 2,
        },
        RGB,
    ),
    "Compact": ({"num_feat": 16, "num_conv": 4, "upscale": 2}, RGB),
    "DAT": (
        {
            "img_size": 16,
            "embed_dim": 64,
            "split_size": [2, 4],
            "depth": [2],
            "num_heads": [2],
            "expansion_factor": 2.0,
        },
        RGB,
    ),
    "DCTLSA": ({"nf": 20, "upscale": 2, "num_head": 2}, RGB),
    "DITN": ({"dim": 12, "ITL_blocks": 1, "SAL_blocks": 1, "upscale": 2}, RGB),
    "DRCT": ({**ATTENTION, "upsampler": "pixelshuffle", "gc": 8}, RGB),
    "DRUNet": (UNET, LARGER),
    "DnCNN": ({"in_nc": 3, "out_nc": 3, "nc": 16, "nb": 5}, RGB),
    "ESRGAN": ({"num_filters": 16, "num_blocks": 2, "scale": 2}, RGB),
    "FBCNN": ({"nb": 1}, LARGER),
    "FDAT": ({"embed_dim": 24, "num_groups": 1, "depth_per_group": 2, "num_heads": 2, "mid_dim": 16}, RGB),
    "FFTformer": ({"dim": 8, "num_blocks": [1, 1, 1], "num_refinement_blocks": 1}, LARGER),
    "GRL": (
        {
            "img_size": 16,
            "embed_dim": 16,
            "upscale": 2,
            "upsampler": "pixelshuffledirect",
            "depths": [1, 1],
            "num_heads_window": [1, 1],
            "num_heads_stripe": [1, 1],
            "window_size": 4,
            "stripe_size": [4, 4],
        },
        RGB,
    ),
    "HAT": ({**ATTENTION, "compress_ratio": 2, "squeeze_factor": 4, "num_feat": 16}, RGB),
    "HVICIDNet": ({"channels": [12, 12, 24, 48], "heads": [1, 2, 4, 8]}, LARGER),
    "LaMa": ({"in_nc": 4}, LARGER, (2, 1, 64, 64)),
    "MixDehazeNet": ({"embed_dims": [8, 16, 32, 16, 8]}, LARGER),
    "MoESR": ({"dim": 16, "n_blocks": 1, "n_block": 1, "scale": 2}, RGB),
    "MoSR": ({"n_block": 2, "dim": 16, "upscale": 2}, RGB),
    "NAFNet": ({"width": 8, "enc_blk_nums": [1, 1], "dec_blk_nums": [1, 1]}, RGB),
    "OmniSR": ({"num_feat": 16, "up_scale": 2}, RGB),
    "PLKSR": ({"dim": 16, "n_blocks": 2, "upscaling_factor": 2}, RGB),
    "PLKSR.RealPLKSR": ({"dim": 16, "n_blocks": 2, "upscaling_factor": 2, "dysample": True}, RGB),
    "RCAN": ({"scale": 2, "n_resgroups": 2, "n_resblocks": 2, "n_feats": 16, "reduction": 4}, RGB),
    "RGT": ({"img_size": 16, "embed_dim": 64, "depth": [2], "num_heads": [2], "split_size": [4, 4]}, RGB),
    "RealCUGAN.UpCunet2x": ({}, LARGER),
    "RealCUGAN.UpCunet4x": ({}, LARGER),
    "RetinexFormer": ({"n_feat": 8, "stage": 1}, LARGER),
    "SAFMN": ({"dim": 16, "n_blocks": 2, "upscaling_factor": 2}, RGB),
    "SAFMNBCIE": ({"dim": 16, "n_blocks": 2, "num_layers": 1}, RGB),
    "SCUNet": ({"config": [1, 1, 1, 1, 1, 1, 1], "dim": 64, "input_resolution": 64}, LARGER),
    "SeemoRe": ({"num_experts": 2, "num_layers": 2, "embedding_dim": 16, "scale": 2}, (1, 3, 16, 16)),
    "SwiftSRGAN": ({"num_channels": 16, "num_blocks": 2, "upscale_factor": 2}, RGB),
    "Swin2SR": ({**ATTENTION, **DIRECT}, RGB),
    "Uformer": ({"img_size": 128, "embed_dim": 8, "depths": [1] * 9, "num_heads": [1] * 9}, (2, 3, 128, 128)),
    "KBNet.KBNet_s": (
        {
            "width": 8,
            "middle_blk_num": 1,
            "enc_blk_nums": [1, 1, 1, 1],
            "dec_blk_nums": [1, 1, 1, 1],
            "lightweight": True,
        },
        LARGER,
    ),
    "MMRealSR": (
        {
            "num_in_ch": 3,
            "num_out_ch": 3,
            "num_feat": 16,
            "num_block": 1,
            "num_grow_ch": 8,
            "num_feats": [8, 8, 16, 16],
        },
        LARGER,
    ),
}
OTHER_OPS = "prepared in eval mode: its forward has other ops in training mode"
NOTES = {
    "SPAN": "Conv3XC replaced by the convolution that it computes in eval mode: it assigns weights in forward",
    "ATD": "torch cannot export the sort between the parts",
}
# Parts around an op that neither exporter of torch writes, as their errors advise.
OF_ATD = [f"layers.{i}.residual_group.layers.{j}" for i in (0, 1) for j in (0, 1)]
PARTS = {
    "ATD": (
        *(f"{layer}.{part}" for layer in OF_ATD for part in ("attn_atd", "attn_win", "convffn")),
        *("conv_first", "layers.0.conv", "layers.1.conv", "conv_after_body", "upsample"),
    )
}
# Leaf modules, as the error of `convert` advises: in eval mode Python chooses experts by values.
SKIPPED = {"SeemoRe": ("*.moe_layer",)}


def spandrel_recipes() -> Iterable[Recipe]:
    """Return a recipe for each network, or none if spandrel is not installed."""
    for name, (options, *shapes) in NETWORKS.items():
        module, _, kind = name.partition(".")
        note: dict[str, Any] = {"note": NOTES[name]} if name in NOTES else {}
        note |= {"skip": SKIPPED[name]} if name in SKIPPED else {}
        note |= {"parts": PARTS[name]} if name in PARTS else {}
        note |= {"training": False, "note": OTHER_OPS} if module in ("PLKSR", "RGT") else {}
        entry = Entry(partial(_build, kind or module, options), floats(*shapes), note)
        yield from recipes_of("spandrel", f"spandrel.architectures.{module}", {(kind or module).lower(): entry})


def _build(kind: str, options: Mapping[str, Any], module: Any) -> Any:
    model = getattr(module, kind)(**options)
    for parent in list(model.modules()):
        for child, part in parent.named_children():
            if type(part).__name__ == "Conv3XC":
                part.update_params()
                setattr(parent, child, part.eval_conv.requires_grad_())
    return model
