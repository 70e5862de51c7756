"""Small models of transformers: text, speech, classification, segmentation, depth and detection."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch

from zoo_models.recipe import Recipe, images

WORDS = 99
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
DETECTOR = {
    "encoder_hidden_dim": 32,
    "d_model": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_in_channels": [32, 32, 32],
    "num_queries": 10,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_labels": 5,
    "num_denoising": 0,
}
STAGES = ["stage2", "stage3", "stage4"]


def tokens() -> tuple[Any, ...]:
    """Return two sentences of 12 tokens."""
    return (torch.randint(1, WORDS, (2, 12)),)


def waves() -> tuple[Any, ...]:
    """Return two waves of 800 samples."""
    return (torch.rand(2, 800),)


class Small(NamedTuple):
    """A small model.

    Attributes:
        model: The name of its class; its config's is `config` with "Config".
        config: What the config's name begins with.
        inputs: Creates the arguments of its forward.
        options: Of the config.
        parts: Configs of its parts, each a name and options, by the option that takes it.
        training: Whether it is prepared in training mode; if not, the table says why.
        note: A further remark for the table.
        exporter: The exporter of torch that writes the ONNX file.
        clip: Maximum norm of the gradients in the training step; None does not clip.
    """

    model: str
    config: str
    inputs: Callable[[], tuple[Any, ...]]
    options: Mapping[str, Any]
    parts: Mapping[str, tuple[str, Mapping[str, Any]]] = {}
    training: bool = True
    note: str = ""
    exporter: Literal["dynamo", "torchscript"] = "dynamo"
    clip: float | None = None


VIEW = "exporter='torchscript': 'dynamo' fails for the float model too (a view of the result of attention)"
EQUAL_SCORES = (
    "gradients clipped to norm 1: after a larger step all scores are equal, and runtimes choose other ones of them"
)
OTHER_OPS = "prepared in eval mode: its forward has other ops in training mode"
RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 32, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": STAGES,
}
HGNET = {
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 16, 16],
    "stage_mid_channels": [8] * 4,
    "stage_out_channels": [16] * 4,
    "stage_num_blocks": [1] * 4,
    "stage_numb_of_layers": [1] * 4,
    "hidden_sizes": [16] * 4,
    "embedding_size": 8,
    "out_features": STAGES,
}
DINO = {
    **SIZES,
    "num_hidden_layers": 4,
    "image_size": 56,
    "patch_size": 14,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "reshape_hidden_states": False,
}
MODELS: Mapping[str, Small] = {
    "bert": Small("BertModel", "Bert", tokens, {"vocab_size": WORDS, **SIZES}),
    "llama": Small(
        "LlamaForCausalLM",
        "Llama",
        tokens,
        {"vocab_size": WORDS, "num_key_value_heads": 1, "use_cache": False, **SIZES},
    ),
    "gpt2": Small(
        "GPT2LMHeadModel",
        "GPT2",
        tokens,
        {
            "vocab_size": WORDS,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "t5_encoder": Small(
        "T5EncoderModel",
        "T5",
        tokens,
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    ),
    "wav2vec2": Small(
        "Wav2Vec2Model",
        "Wav2Vec2",
        waves,
        {
            "vocab_size": 32,
            "conv_dim": (16, 16),
            "conv_stride": (5, 4),
            "conv_kernel": (10, 4),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
            **SIZES,
        },
        training=False,
    ),
    "vit": Small("ViTForImageClassification", "ViT", partial(images, 32), {"image_size": 32, "patch_size": 8, **SIZES}),
    "swin": Small(
        "SwinForImageClassification",
        "Swin",
        partial(images, 32),
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
        note=VIEW,
        exporter="torchscript",
    ),
    "segformer": Small(
        "SegformerForSemanticSegmentation",
        "Segformer",
        partial(images, 64),
        {
            "depths": [1] * 4,
            "hidden_sizes": [16, 16, 32, 32],
            "decoder_hidden_size": 32,
            "num_attention_heads": [1, 1, 2, 2],
        },
    ),
    "depth_anything": Small(
        "DepthAnythingForDepthEstimation",
        "DepthAnything",
        partial(images, 56),
        {
            "reassemble_hidden_size": 32,
            "patch_size": 14,
            "neck_hidden_sizes": [8, 16, 32, 32],
            "fusion_hidden_size": 16,
            "head_in_channels": 16,
            "head_hidden_size": 8,
        },
        {"backbone_config": ("Dinov2", DINO)},
    ),
    "rt_detr": Small(
        "RTDetrForObjectDetection",
        "RTDetr",
        partial(images, 64),
        {"encoder_in_channels": [16, 32, 64], **DETECTOR},
        {"backbone_config": ("RTDetrResNet", RESNET)},
        note=EQUAL_SCORES,
        clip=1.0,
    ),
    "rt_detr_v2": Small(
        "RTDetrV2ForObjectDetection",
        "RTDetrV2",
        partial(images, 64),
        {"encoder_in_channels": [16, 32, 64], **DETECTOR},
        {"backbone_config": ("RTDetrResNet", RESNET)},
        note=EQUAL_SCORES,
        clip=1.0,
    ),
    "d_fine": Small(
        "DFineForObjectDetection",
        "DFine",
        partial(images, 64),
        {"encoder_in_channels": [16, 16, 16], **DETECTOR},
        {"backbone_config": ("HGNetV2", HGNET)},
        training=False,
    ),
}


def transformers_recipes() -> Iterable[Recipe]:
    """Return a recipe for each model, or none if transformers is not installed."""
    if find_spec("transformers") is None:
        return []
    return [_recipe(name, small) for name, small in MODELS.items()]


def _recipe(name: str, small: Small) -> Recipe:
    return Recipe(
        f"transformers/{name}",
        "transformers",
        partial(_build, small),
        small.inputs,
        note="; ".join(filter(None, ("" if small.training else OTHER_OPS, small.note))),
        exporter=small.exporter,
        clip=small.clip,
        training=small.training,
    )


def _build(small: Small) -> Any:
    import transformers

    def config(name: str, options: Mapping[str, Any]) -> Any:
        return getattr(transformers, f"{name}Config")(**options)

    parts = {option: config(*part) for option, part in small.parts.items()}
    model = getattr(transformers, small.model)(config(small.config, {**small.options, **parts}))
    for name, module in model.named_modules():
        if name.endswith("enc_score_head"):  # all zeros: the detector would choose among equal scores
            torch.nn.init.normal_(module.weight)
    return model
