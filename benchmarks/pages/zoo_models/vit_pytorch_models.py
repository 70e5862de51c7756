"""Vision transformers of vit-pytorch, two layers deep: one of each paper that the package implements as a whole model."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from benchmarks.pages.zoo_models.recipe import Entry, Recipe, floats, images, recipes_of

IMAGE = {"image_size": 32, "patch_size": 8}
SIZES = {"num_classes": 5, "dim": 32, "depth": 2, "heads": 2}
MLP = {"mlp_dim": 64, "dim_head": 16}
PLAIN = {**IMAGE, **SIZES, **MLP}
FRAMES = {"image_size": 32, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
VIDEO = {**FRAMES, **SIZES, **MLP}
SEQUENCE = {"seq_len": 32, "patch_size": 8, **SIZES, **MLP}
VOLUME = {"ndim": 3, "input_shape": (4, 16, 16), "patch_size": (2, 8, 8), **SIZES, **MLP}
STAGES = {"num_classes": 5, "dim": 16, "depth": (1, 1, 1, 1)}
CCT = {"embedding_dim": 32, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2, "num_classes": 5}
VIVIT = {**FRAMES, **MLP, "num_classes": 5, "dim": 32, "spatial_depth": 1, "temporal_depth": 1, "heads": 2}
FOUR_STAGES = {"num_classes": 5, "dim": (16, 32, 32, 64), "depth": (1, 1, 1, 1)}
TWINS = {f"s{n}_{key}": size for n in (1, 2, 3, 4) for key, size in (("emb_dim", 16 * n), ("depth", 1))}
CVT = {f"s{n}_{key}": size for n in (1, 2, 3) for key, size in (("emb_dim", 16 * n), ("depth", 1), ("heads", 1))}
# The class of each model, as module and name, the options of its constructor, and its input where that is no image.
MODELS: Mapping[str, tuple[Mapping[str, Any], Any]] = {
    "ats_vit.ViT": ({**PLAIN, "max_tokens_per_depth": (16, 8)}, None),
    "attn_residual_with_dca_simple_vit.SimpleViT": (PLAIN, None),
    "cait.CaiT": ({**PLAIN, "cls_depth": 1}, None),
    "cct.CCT": ({**CCT, "img_size": 32}, None),
    "cct_3d.CCT": ({**CCT, "img_size": 32, "num_frames": 4}, (2, 3, 4, 32, 32)),
    "cross_vit.CrossViT": (
        {"image_size": 48, "num_classes": 5, "sm_dim": 16, "lg_dim": 32, "lg_enc_depth": 1, "depth": 1},
        (2, 3, 48, 48),
    ),
    "crossformer.CrossFormer": (
        {
            "num_classes": 5,
            "dim": (32, 64, 64, 64),
            "depth": (1, 1, 1, 1),
            "global_window_size": (4, 2, 1, 1),
            "local_window_size": 1,
        },
        (2, 3, 64, 64),
    ),
    "cvt.CvT": ({**CVT, "num_classes": 5}, (2, 3, 64, 64)),
    "deepvit.DeepViT": (PLAIN, None),
    "jet_vit.JetViT": ({**PLAIN, "window_size": 2}, None),
    "jumbo_vit.JumboViT": (PLAIN, None),
    "learnable_memory_vit.ViT": (PLAIN, None),
    "levit.LeViT": (
        {"image_size": 64, "num_classes": 5, "dim": (32, 48, 64), "depth": 1, "heads": (2, 2, 2), "mlp_mult": 2},
        (2, 3, 64, 64),
    ),
    "look_vit.LookViT": (
        {"dim": 32, "image_size": 48, "num_classes": 5, "depth": 1, "heads": 2, "dim_head": 16, "cross_attn_heads": 2},
        (2, 3, 48, 48),
    ),
    "looped_vit.LoopedViT": (
        {
            **IMAGE,
            **MLP,
            "num_classes": 5,
            "dim": 32,
            "heads": 2,
            "pre_loop_depth": 1,
            "num_looped_blocks": 1,
            "post_loop_depth": 1,
            "loop_depth": 2,
        },
        None,
    ),
    "max_vit.MaxViT": ({"num_classes": 5, "dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 4}, (2, 3, 64, 64)),
    "max_vit_with_registers.MaxViT": (
        {"num_classes": 5, "dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 4},
        (2, 3, 64, 64),
    ),
    "mobile_vit.MobileViT": (
        {
            "image_size": (64, 64),
            "dims": [16, 24, 32],
            "channels": [8, 8, 16, 16, 16, 16, 24, 24, 32, 32, 48],
            "num_classes": 5,
            "depths": (1, 1, 1),
        },
        (2, 3, 64, 64),
    ),
    "nest.NesT": (
        {
            "image_size": 32,
            "patch_size": 4,
            "num_classes": 5,
            "dim": 16,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
            "dim_head": 8,
        },
        None,
    ),
    "parallel_vit.ViT": (PLAIN, None),
    "pit.PiT": ({**PLAIN, "image_size": 48, "depth": (1, 1)}, (2, 3, 48, 48)),
    "regionvit.RegionViT": ({**FOUR_STAGES, "window_size": 2}, (2, 3, 64, 64)),
    "rvt.RvT": (PLAIN, None),
    "scalable_vit.ScalableViT": (
        {**STAGES, "heads": (1, 1, 2, 2), "reduction_factor": (8, 4, 2, 1), "window_size": (8, 4, None, None)},
        (2, 3, 64, 64),
    ),
    "sep_vit.SepViT": ({**STAGES, "heads": (1, 1, 2, 2), "dim_head": 8}, (1, 3, 224, 224)),
    "simple_flash_attn_vit.SimpleViT": (PLAIN, None),
    "simple_uvit.SimpleUViT": (PLAIN, None),
    "simple_vit.SimpleViT": (PLAIN, None),
    "simple_vit_1d.SimpleViT": (SEQUENCE, (2, 3, 32)),
    "simple_vit_3d.SimpleViT": (VIDEO, (2, 3, 4, 32, 32)),
    "simple_vit_attn_residual.SimpleViTAttnResidual": (PLAIN, None),
    "simple_vit_orthog_residual_update.SimpleViT": (PLAIN, None),
    "simple_vit_with_fft.SimpleViT": ({**PLAIN, "freq_patch_size": 8}, None),
    "simple_vit_with_hyper_connections.SimpleViT": ({**PLAIN, "num_residual_streams": 2}, None),
    "simple_vit_with_patch_dropout.SimpleViT": (PLAIN, None),
    "simple_vit_with_qk_norm.SimpleViT": (PLAIN, None),
    "simple_vit_with_register_tokens.SimpleViT": (PLAIN, None),
    "simple_vit_with_sparse_gating.SimpleViTWithSparseGating": (PLAIN, None),
    "simple_vit_with_value_residual.SimpleViT": (PLAIN, None),
    "t2t.T2TViT": ({"image_size": 32, **SIZES, **MLP}, None),
    "twins_svt.TwinsSVT": (
        {
            **TWINS,
            "num_classes": 5,
            **{f"s{n}_local_patch_size": 2 for n in (1, 2, 3)},
            "s1_global_k": 4,
            "s2_global_k": 2,
            "s3_global_k": 2,
            "s4_global_k": 1,
            "s4_local_patch_size": 1,
        },
        (2, 3, 64, 64),
    ),
    "vit.ViT": (PLAIN, None),
    "vit_1d.ViT": (SEQUENCE, (2, 3, 32)),
    "vit_3d.ViT": (VIDEO, (2, 3, 4, 32, 32)),
    "vit_5.ViT": (PLAIN, None),
    "vit_detpool.ViTDetPool": (PLAIN, None),
    "vit_for_small_dataset.ViT": (PLAIN, None),
    "vit_nd.ViTND": (VOLUME, (2, 3, 4, 16, 16)),
    "vit_nd_pope.ViTND": (VOLUME, (2, 3, 4, 16, 16)),
    "vit_nd_rotary.ViTND": (VOLUME, (2, 3, 4, 16, 16)),
    "vit_with_decorr.ViT": (PLAIN, None),
    "vit_with_keel_post_ln.ViT": (PLAIN, None),
    "vit_with_patch_dropout.ViT": (PLAIN, None),
    "vit_with_patch_merger.ViT": (PLAIN, None),
    "vivit.ViViT": (VIVIT, (2, 3, 4, 32, 32)),
    "vivit_with_moss.ViViT": (VIVIT, (2, 3, 4, 32, 32)),
    "xcit.XCiT": ({**PLAIN, "cls_depth": 1}, None),
}


def _start_gammas(model: nn.Module) -> None:
    """Set gammas of 0 to 1: with 0, later layers get constants until gamma is trained."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d) and not norm.weight.any():
            nn.init.ones_(norm.weight)


def _compute_attention_by_ops(model: nn.Module) -> None:
    """Let a model compute attention as it does on devices without FlexAttention, which torch cannot train on the CPU."""
    import_module("vit_pytorch.vit_nd_masking").flex_attention_supported = lambda device: False  # type: ignore[attr-defined]


# What is changed of a model once it is built, and the note that says so.
GAMMAS = (_start_gammas, "gammas of 0 set to 1: with 0, later layers get constants until gamma is trained")
BY_OPS = (_compute_attention_by_ops, "attention without FlexAttention: torch has no backward for it on the CPU")
CHANGES: Mapping[str, tuple[Callable[[nn.Module], None], str]] = {
    "levit.LeViT": GAMMAS,
    **{f"{module}.ViTND": BY_OPS for module in ("vit_nd", "vit_nd_pope", "vit_nd_rotary")},
}
SAMPLING = "torch cannot export the random numbers between the parts"
PARTS: Mapping[str, tuple[str, ...]] = {
    "ats_vit.ViT": (
        *("to_patch_embedding", "transformer.layers.0.0", "transformer.layers.0.1"),
        *("transformer.layers.1.0.to_qkv", "transformer.layers.1.0.to_out", "transformer.layers.1.1", "mlp_head"),
    )
}


def vit_pytorch_recipes() -> Iterable[Recipe]:
    """Return a recipe for each model, or none if vit-pytorch is not installed."""
    for name, (options, shape) in MODELS.items():
        module, _, kind = name.partition(".")
        change, note = CHANGES.get(name, (None, SAMPLING if name in PARTS else ""))
        inputs = floats(shape) if shape else partial(images, 32)
        entry = Entry(partial(_build, kind, options, change), inputs, {"note": note, "parts": PARTS.get(name, ())})
        yield from recipes_of("vit_pytorch", f"vit_pytorch.{module}", {name: entry})


def _build(kind: str, options: Mapping[str, Any], change: Callable[[nn.Module], None] | None, module: Any) -> Any:
    model = getattr(module, kind)(**options)
    if change is not None:
        change(model)
    return model
