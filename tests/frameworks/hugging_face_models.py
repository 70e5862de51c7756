"""Small models of Hugging Face with random weights, by name: how each is built, and what it takes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor

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
MOBILE_VIT = {
    "image_size": 64,
    "hidden_sizes": [16, 24, 32],
    "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
    "num_attention_heads": 2,
    "aspp_out_channels": 16,
}
CLIP_TEXT = {"vocab_size": WORDS, "projection_dim": 16, "max_position_embeddings": 12, "bos_token_id": 0}


class Small(NamedTuple):
    """A small model.

    Attributes:
        build: Builds it.
        inputs: Makes a batch.
        training: Whether it is prepared in training mode; where not, its forward has other ops in it.
    """

    build: Callable[[], Any]
    inputs: Callable[[], dict[str, Tensor]]
    training: bool = True


def images(size: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.rand(2, 3, size, size)}


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, WORDS - 1, (2, 12)), "attention_mask": torch.ones(2, 12, dtype=torch.long)}


def resnet(kind: type, stages: list[str]) -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [1] * 4}
    return kind(**sizes, layer_type="basic", out_features=stages)


def rt_detr(model: type, config: type) -> Any:
    backbone = resnet(hf.RTDetrResNetConfig, STAGES)
    return with_scores(model(config(encoder_in_channels=[16, 32, 64], backbone_config=backbone, **DETECTOR)))


def d_fine() -> Any:
    sizes = {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 16], "stage_mid_channels": [8] * 4}
    more = {"stage_out_channels": [16] * 4, "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4}
    backbone = hf.HGNetV2Config(**sizes, **more, hidden_sizes=[16] * 4, embedding_size=8, out_features=STAGES)
    config = hf.DFineConfig(encoder_in_channels=[16] * 3, backbone_config=backbone, **DETECTOR)
    return with_scores(hf.DFineForObjectDetection(config))


def with_scores(model: Any) -> Any:
    """Return a detector that does not choose among equal scores, as a new one does.

    All weights of their head are zeros in it, and its features vanish without statistics of batch norms.
    """
    torch.nn.init.normal_(model.model.enc_score_head.weight)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for momentum in (1.0, norms[0].momentum):
        for norm in norms:
            norm.momentum = momentum
        if momentum == 1.0:
            model.train()(torch.rand(16, 3, 64, 64))
    return model


def detr() -> Any:
    sizes = {name: size for name, size in DETECTOR.items() if name in hf.DetrConfig().to_dict()}
    backbone = resnet(hf.ResNetConfig, ["stage4"])
    own = {"encoder_layers": 2, "backbone_config": backbone, "use_timm_backbone": False, "backbone": None}
    return hf.DetrForObjectDetection(hf.DetrConfig(**{**sizes, **own, "use_pretrained_backbone": False}))


def depth_anything() -> Any:
    stages = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False}
    backbone = hf.Dinov2Config(**{**SIZES, "num_hidden_layers": 4}, image_size=56, patch_size=14, **stages)
    sizes = {"reassemble_hidden_size": 32, "patch_size": 14, "neck_hidden_sizes": [8, 16, 32, 32]}
    more = {"fusion_hidden_size": 16, "head_in_channels": 16, "head_hidden_size": 8}
    return hf.DepthAnythingForDepthEstimation(hf.DepthAnythingConfig(**sizes, **more, backbone_config=backbone))


def segformer() -> Any:
    sizes = {"depths": [1] * 4, "hidden_sizes": [16, 16, 32, 32], "decoder_hidden_size": 32}
    return hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**sizes, num_attention_heads=[1, 1, 2, 2]))


def swin() -> Any:
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2]}
    return hf.SwinForImageClassification(hf.SwinConfig(**sizes, window_size=4))


def clip() -> Any:
    text, vision = {**SIZES, **CLIP_TEXT, "eos_token_id": WORDS - 1}, {**SIZES, "image_size": 32, "patch_size": 8}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def whisper_encoder() -> Any:
    layers = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    words = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(**layers, **words, num_mel_bins=16, max_source_positions=24)
    return hf.models.whisper.modeling_whisper.WhisperEncoder(config)


def gpt2() -> Any:
    words = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**words, n_embd=32, n_layer=2, n_head=2))


MODELS: Mapping[str, Small] = {
    "vit": Small(lambda: hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, **SIZES)), images(32)),
    "deit": Small(
        lambda: hf.DeiTForImageClassification(hf.DeiTConfig(image_size=32, patch_size=8, **SIZES)), images(32)
    ),
    "swin": Small(swin, images(32)),
    "segformer": Small(segformer, images(64)),
    "mobilevit": Small(lambda: hf.MobileViTForImageClassification(hf.MobileViTConfig(**MOBILE_VIT)), images(64)),
    "mobilevit segments": Small(
        lambda: hf.MobileViTForSemanticSegmentation(hf.MobileViTConfig(**MOBILE_VIT)), images(64)
    ),
    "detr": Small(detr, images(64)),
    "rt_detr": Small(lambda: rt_detr(hf.RTDetrForObjectDetection, hf.RTDetrConfig), images(64)),
    "rt_detr_v2": Small(lambda: rt_detr(hf.RTDetrV2ForObjectDetection, hf.RTDetrV2Config), images(64)),
    "d_fine": Small(d_fine, images(64), training=False),
    "depth_anything": Small(depth_anything, images(56)),
    "dinov2": Small(
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(image_size=56, patch_size=14, **SIZES)), images(56)
    ),
    "clip": Small(clip, lambda: {**tokens(), **images(32)()}),
    "clip vision": Small(
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(image_size=32, patch_size=8, **SIZES)), images(32)
    ),
    "clip text": Small(
        lambda: hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**SIZES, **CLIP_TEXT, eos_token_id=WORDS - 1)), tokens
    ),
    "bert": Small(lambda: hf.BertForSequenceClassification(hf.BertConfig(vocab_size=WORDS, **SIZES)), tokens),
    "t5 encoder": Small(
        lambda: hf.T5EncoderModel(
            hf.T5Config(vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
        ),
        tokens,
    ),
    "whisper encoder": Small(whisper_encoder, lambda: {"input_features": torch.randn(2, 16, 48)}),
    "gpt2": Small(gpt2, tokens),
    "llama": Small(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SIZES)), tokens
    ),
}
