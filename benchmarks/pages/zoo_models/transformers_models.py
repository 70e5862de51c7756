"""Small models of transformers from their configs: text, speech, classification, segmentation, depth, detection.

`benchmarks/pages/zoo.py` and `tests/frameworks/test_hugging_face.py` take them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.pages.zoo_models.recipe import Entry, Recipe, recipes_of

WORDS = 99
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {"vocab_size": WORDS, **SIZES}
# Sizes under the names that GPT-2 and its like, or BART and its like, give them.
GPT = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**TEXT, "num_key_value_heads": 1}
BART = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
}
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
ALL_STAGES = ["stage1", *STAGES]
MOBILE_VIT = {
    "image_size": 64,
    "hidden_sizes": [16, 24, 32],
    "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
    "num_attention_heads": 2,
    "aspp_out_channels": 16,
}
CLIP_TEXT = {"vocab_size": WORDS, "projection_dim": 16, "max_position_embeddings": 12, "bos_token_id": 0}
PATCHES = {"image_size": 32, "patch_size": 8, **SIZES}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [1] * 4, "layer_type": "basic"}
CONVNEXT = {"hidden_sizes": [8, 16, 32, 64], "depths": [1] * 4}
WAVES = {
    **SIZES,
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
VIDEO = {**PATCHES, "num_frames": 4}
VIEW = "exporter='torchscript': 'dynamo' fails for the float model too (a view of the result of attention)"
EQUAL_SCORES = (
    "gradients clipped to norm 1: a larger step makes all scores equal, and runtimes then choose different ones"
)
OTHER_OPS = "prepared in eval mode: its forward has other ops in training mode"
Inputs = Callable[[], Mapping[str, Tensor]]


def images(size: int) -> Inputs:
    return lambda: {"pixel_values": torch.rand(2, 3, size, size)}


def video() -> Mapping[str, Tensor]:
    return {"pixel_values": torch.rand(2, 4, 3, 32, 32)}


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, WORDS - 1, (2, 12)), "attention_mask": torch.ones(2, 12, dtype=torch.long)}


def pairs() -> Mapping[str, Tensor]:
    return {**tokens(), "decoder_input_ids": torch.randint(1, WORDS - 1, (2, 6))}


def waves() -> Mapping[str, Tensor]:
    return {"input_values": torch.rand(2, 800)}


class Small(NamedTuple):
    """A small model.

    Attributes:
        model: The name of its class, or what builds it from transformers.
        config: What the name of its config begins with.
        inputs: Makes a batch.
        options: Of the config.
        training: Whether it is prepared in training mode; where not, its forward has other ops in it.
        note: A further remark for the table.
        exporter: The exporter of torch that writes the ONNX file.
        clip: Maximum norm of the gradients in the training step; None does not clip.
    """

    model: str | Callable[[Any], nn.Module]
    config: str
    inputs: Inputs
    options: Mapping[str, Any] = {}
    training: bool = True
    note: str = ""
    exporter: Literal["dynamo", "torchscript"] = "dynamo"
    clip: float | None = None

    def build(self, hf: Any) -> Any:
        """Build it from transformers."""
        if callable(self.model):
            return self.model(hf)
        model = getattr(hf, self.model)(getattr(hf, f"{self.config}Config")(**self.options))
        if "use_cache" in model.config:
            model.config.use_cache = False
        return model

    def entry(self) -> Entry:
        """Return it as an entry of the zoo."""
        note = "; ".join(filter(None, ("" if self.training else OTHER_OPS, self.note)))
        options = {"training": self.training, "note": note, "exporter": self.exporter, "clip": self.clip}
        return Entry(self.build, self.inputs, options)


def rt_detr(kind: str, hf: Any) -> Any:
    backbone = hf.RTDetrResNetConfig(**RESNET, out_features=STAGES)
    config = getattr(hf, f"{kind}Config")(encoder_in_channels=[16, 32, 64], backbone_config=backbone, **DETECTOR)
    return with_scores(getattr(hf, f"{kind}ForObjectDetection")(config))


def d_fine(hf: Any) -> Any:
    sizes = {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 16], "stage_mid_channels": [8] * 4}
    more = {"stage_out_channels": [16] * 4, "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4}
    backbone = hf.HGNetV2Config(**sizes, **more, hidden_sizes=[16] * 4, embedding_size=8, out_features=STAGES)
    config = hf.DFineConfig(encoder_in_channels=[16] * 3, backbone_config=backbone, **DETECTOR)
    return with_scores(hf.DFineForObjectDetection(config))


def with_scores(model: Any) -> Any:
    """Return a detector that does not choose among equal scores, as a new one does.

    All weights of their head are zeros in it, and its features vanish without statistics of batch norms.
    """
    nn.init.normal_(model.model.enc_score_head.weight)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for momentum in (1.0, norms[0].momentum):
        for norm in norms:
            norm.momentum = momentum
        if momentum == 1.0:
            model.train()(torch.rand(16, 3, 64, 64))
    return model


def detr(kind: str, hf: Any) -> Any:
    config = getattr(hf, f"{kind}Config")
    sizes = {name: size for name, size in DETECTOR.items() if name in config().to_dict()}
    backbone = hf.ResNetConfig(**RESNET, out_features=["stage4"])
    own = {"encoder_layers": 2, "backbone_config": backbone, "use_timm_backbone": False, "backbone": None}
    return getattr(hf, f"{kind}ForObjectDetection")(config(**{**sizes, **own, "use_pretrained_backbone": False}))


def depth_anything(hf: Any) -> Any:
    stages = {"out_features": ALL_STAGES, "reshape_hidden_states": False}
    backbone = hf.Dinov2Config(**{**SIZES, "num_hidden_layers": 4}, image_size=56, patch_size=14, **stages)
    sizes = {"reassemble_hidden_size": 32, "patch_size": 14, "neck_hidden_sizes": [8, 16, 32, 32]}
    more = {"fusion_hidden_size": 16, "head_in_channels": 16, "head_hidden_size": 8}
    return hf.DepthAnythingForDepthEstimation(hf.DepthAnythingConfig(**sizes, **more, backbone_config=backbone))


def upernet(hf: Any) -> Any:
    backbone = hf.ConvNextConfig(**CONVNEXT, out_features=ALL_STAGES)
    config = hf.UperNetConfig(backbone_config=backbone, hidden_size=16, pool_scales=[1, 2], use_auxiliary_head=False)
    return hf.UperNetForSemanticSegmentation(config)


def clip(hf: Any) -> Any:
    text, vision = {**SIZES, **CLIP_TEXT, "eos_token_id": WORDS - 1}, PATCHES
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def whisper_encoder(hf: Any) -> Any:
    layers = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    words = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(**layers, **words, num_mel_bins=16, max_source_positions=24)
    return hf.models.whisper.modeling_whisper.WhisperEncoder(config)


def t5_encoder(kind: str) -> Small:
    options = {"vocab_size": WORDS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return Small(f"{kind}EncoderModel", kind, tokens, options)


# The models that the tests take through both routes.
TESTED: Mapping[str, Small] = {
    "vit": Small("ViTForImageClassification", "ViT", images(32), PATCHES),
    "deit": Small("DeiTForImageClassification", "DeiT", images(32), PATCHES),
    "swin": Small("SwinForImageClassification", "Swin", images(32), SWIN, note=VIEW, exporter="torchscript"),
    "segformer": Small(
        "SegformerForSemanticSegmentation",
        "Segformer",
        images(64),
        {
            "depths": [1] * 4,
            "hidden_sizes": [16, 16, 32, 32],
            "decoder_hidden_size": 32,
            "num_attention_heads": [1, 1, 2, 2],
        },
    ),
    "mobilevit": Small("MobileViTForImageClassification", "MobileViT", images(64), MOBILE_VIT),
    "mobilevit_segments": Small("MobileViTForSemanticSegmentation", "MobileViT", images(64), MOBILE_VIT),
    "detr": Small(partial(detr, "Detr"), "Detr", images(64)),
    "rt_detr": Small(partial(rt_detr, "RTDetr"), "RTDetr", images(64), note=EQUAL_SCORES, clip=1.0),
    "rt_detr_v2": Small(partial(rt_detr, "RTDetrV2"), "RTDetrV2", images(64), note=EQUAL_SCORES, clip=1.0),
    "d_fine": Small(d_fine, "DFine", images(64), training=False),
    "depth_anything": Small(depth_anything, "DepthAnything", images(56)),
    "dinov2": Small(
        "Dinov2ForImageClassification", "Dinov2", images(56), {"image_size": 56, "patch_size": 14, **SIZES}
    ),
    "clip": Small(clip, "CLIP", lambda: {**tokens(), **images(32)()}),
    "clip_vision": Small("CLIPVisionModelWithProjection", "CLIPVision", images(32), PATCHES),
    "clip_text": Small(
        "CLIPTextModelWithProjection", "CLIPText", tokens, {**SIZES, **CLIP_TEXT, "eos_token_id": WORDS - 1}
    ),
    "bert": Small("BertForSequenceClassification", "Bert", tokens, TEXT),
    "t5_encoder": t5_encoder("T5"),
    "whisper_encoder": Small(whisper_encoder, "Whisper", lambda: {"input_features": torch.randn(2, 16, 48)}),
    "gpt2": Small("GPT2LMHeadModel", "GPT2", tokens, GPT),
    "llama": Small("LlamaForCausalLM", "Llama", tokens, LLAMA),
}


def _same(
    kinds: str, suffix: str, inputs: Inputs, options: Mapping[str, Any], training: bool = True
) -> dict[str, Small]:
    """Return models that differ in their class alone."""
    return {kind.lower(): Small(f"{kind}{suffix}", kind, inputs, options, training) for kind in kinds.split()}


LATER = {"max_position_embeddings": 64}  # positions of RoBERTa and its like begin behind the padding's
MORE: Mapping[str, Small] = {
    **_same(
        "Roberta Electra Ernie MegatronBert Nystromformer RoFormer Data2VecText", "Model", tokens, {**TEXT, **LATER}
    ),
    **_same("RemBert RobertaPreLayerNorm BigBird ConvBert Canine LayoutLM", "Model", tokens, {**TEXT, **LATER}),
    **_same("Deberta DebertaV2", "Model", tokens, {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    **_same("MPNet IBert Ernie4_5", "Model", tokens, {**TEXT, **LATER}),
    **_same(
        "Mistral Qwen2 Qwen3 Gemma Gemma2 Phi Phi3 StableLm Olmo Olmo2 Cohere Starcoder2 Granite SmolLM3 "
        "Glm Persimmon Helium Nemotron",
        "ForCausalLM",
        tokens,
        {**LLAMA, "head_dim": 16, "pad_token_id": 0},
    ),
    **_same("GPTNeoX Falcon OPT Bloom GPTBigCode Mpt", "ForCausalLM", tokens, TEXT),
    **_same("Bart Pegasus Marian MBart Blenderbot LED", "Model", pairs, {**BART, "pad_token_id": 0}),
    **_same("Beit ViTMSN Data2VecVision IJepa", "Model", images(32), PATCHES),
    **_same("SiglipVision AltCLIPVision ChineseCLIPVision", "Model", images(32), PATCHES),
    **_same("ConvNext ConvNextV2", "Model", images(64), CONVNEXT),
    "resnet": Small("ResNetModel", "ResNet", images(64), RESNET),
    "regnet": Small("RegNetModel", "RegNet", images(64), {**RESNET, "layer_type": "y", "groups_width": 8}),
    **_same(
        "Wav2Vec2 Hubert WavLM UniSpeech UniSpeechSat SEW Data2VecAudio Wav2Vec2Conformer",
        "Model",
        waves,
        WAVES,
        training=False,
    ),
    **_same("VideoMAE", "Model", video, VIDEO, training=False),
    **_same("Timesformer", "Model", video, VIDEO),
    **_same("M2M100", "Model", pairs, {**BART, "pad_token_id": 0}, training=False),
    "distilbert": Small(
        "DistilBertModel",
        "DistilBert",
        tokens,
        {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    ),
    "albert": Small("AlbertModel", "Albert", tokens, {**TEXT, "embedding_size": 16}),
    "mobilebert": Small(
        "MobileBertModel",
        "MobileBert",
        tokens,
        {**TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "squeezebert": Small("SqueezeBertModel", "SqueezeBert", tokens, {**TEXT, "embedding_size": 32}),
    "splinter": Small("SplinterModel", "Splinter", tokens, {**TEXT, "question_token_id": 3}),
    "esm": Small("EsmModel", "Esm", tokens, {**TEXT, **LATER, "mask_token_id": 4, "pad_token_id": 0}),
    "modernbert": Small("ModernBertModel", "ModernBert", tokens, {**TEXT, "pad_token_id": 0}),
    "codegen": Small("CodeGenForCausalLM", "CodeGen", tokens, {**GPT, "n_head": 4, "rotary_dim": 4}),
    "gptj": Small("GPTJForCausalLM", "GPTJ", tokens, {**GPT, "rotary_dim": 8}),
    "fnet": Small("FNetModel", "FNet", lambda: {"input_ids": tokens()["input_ids"]}, TEXT),
    "xlnet": Small(
        "XLNetModel",
        "XLNet",
        tokens,
        {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
        training=False,
    ),
    "funnel": Small(
        "FunnelModel",
        "Funnel",
        tokens,
        {"vocab_size": WORDS, "block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64},
    ),
    "umt5_encoder": t5_encoder("UMT5"),
    "mt5_encoder": t5_encoder("MT5"),
    "gpt_neo": Small(
        "GPTNeoForCausalLM",
        "GPTNeo",
        tokens,
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "mamba": Small("MambaForCausalLM", "Mamba", tokens, {**TEXT, "state_size": 4}, training=False),
    "swinv2": Small("Swinv2ForImageClassification", "Swinv2", images(32), SWIN),
    "swin2sr": Small(
        "Swin2SRForImageSuperResolution",
        "Swin2SR",
        images(16),
        {"image_size": 16, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4},
    ),
    "dinov2_with_registers": Small(
        "Dinov2WithRegistersModel", "Dinov2WithRegisters", images(56), {"image_size": 56, "patch_size": 14, **SIZES}
    ),
    "dinov3_vit": Small("DINOv3ViTModel", "DINOv3ViT", images(32), PATCHES),
    "dinov3_convnext": Small("DINOv3ConvNextModel", "DINOv3ConvNext", images(64), CONVNEXT),
    "mobilenet_v1": Small("MobileNetV1Model", "MobileNetV1", images(64), {"depth_multiplier": 0.25}),
    "mobilenet_v2": Small("MobileNetV2Model", "MobileNetV2", images(64), {"depth_multiplier": 0.25}),
    "mobilevitv2": Small("MobileViTV2Model", "MobileViTV2", images(64), {"image_size": 64, "width_multiplier": 0.25}),
    "efficientnet": Small(
        "EfficientNetModel",
        "EfficientNet",
        images(64),
        {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    ),
    "pvt": Small(
        "PvtModel",
        "Pvt",
        images(64),
        {"image_size": 64, "depths": [1] * 4, "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 1, 2, 2]},
    ),
    "levit": Small(
        "LevitForImageClassification",
        "Levit",
        images(64),
        {
            "image_size": 64,
            "hidden_sizes": [32, 32, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    "poolformer": Small(
        "PoolFormerModel", "PoolFormer", images(64), {"depths": [1] * 4, "hidden_sizes": [8, 16, 32, 32]}
    ),
    "focalnet": Small("FocalNetModel", "FocalNet", images(64), {"image_size": 64, "embed_dim": 16, "depths": [1] * 4}),
    "bit": Small(
        "BitModel",
        "Bit",
        images(64),
        {
            **RESNET,
            "layer_type": "preactivation",
            "embedding_size": 32,
            "hidden_sizes": [32, 32, 64, 64],
            "num_groups": 8,
        },
    ),
    "hiera": Small(
        "HieraModel",
        "Hiera",
        images(32),
        {
            "image_size": [32, 32],
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "query_stride": [2, 2],
            "num_query_pool": 1,
        },
    ),
    "glpn": Small(
        "GLPNForDepthEstimation",
        "GLPN",
        images(64),
        {
            "depths": [1] * 4,
            "hidden_sizes": [16, 16, 32, 32],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    "dpt": Small(
        "DPTForDepthEstimation",
        "DPT",
        images(32),
        {
            **PATCHES,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
        },
    ),
    "upernet": Small(upernet, "UperNet", images(64)),
    "yolos": Small(
        "YolosForObjectDetection", "Yolos", images(32), {**PATCHES, "image_size": [32, 32], "num_detection_tokens": 8}
    ),
    "conditional_detr": Small(partial(detr, "ConditionalDetr"), "ConditionalDetr", images(64)),
    "table_transformer": Small(partial(detr, "TableTransformer"), "TableTransformer", images(64)),
    "deformable_detr": Small(partial(detr, "DeformableDetr"), "DeformableDetr", images(64)),
    "audio_spectrogram": Small(
        "ASTModel",
        "AST",
        lambda: {"input_values": torch.rand(2, 64, 32)},
        {**SIZES, "patch_size": 16, "max_length": 64, "num_mel_bins": 32},
    ),
}
MODELS: Mapping[str, Small] = {**TESTED, **MORE}


def transformers_recipes() -> Iterable[Recipe]:
    """Return a recipe for each model, or none if transformers is not installed."""
    return recipes_of("transformers", "transformers", {name: small.entry() for name, small in MODELS.items()})
