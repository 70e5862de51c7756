"""Small networks of torchaudio: speech recognition, source separation, synthesis and speech quality."""

from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.pages.zoo_models.recipe import Entry, Recipe, floats, recipes_of

WAVE = floats((2, 800))
WAV2VEC2 = {
    "extractor_mode": "group_norm",
    "extractor_conv_layer_config": [(16, 10, 5), (16, 4, 4)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 32,
    "encoder_projection_dropout": 0.0,
    "encoder_pos_conv_kernel": 16,
    "encoder_pos_conv_groups": 2,
    "encoder_num_layers": 2,
    "encoder_num_heads": 2,
    "encoder_attention_dropout": 0.0,
    "encoder_ff_interm_features": 64,
    "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.0,
    "encoder_layer_norm_first": False,
    "encoder_layer_drop": 0.0,
    "aux_num_out": 8,
}
LAYER_NORM = {"extractor_mode": "layer_norm", "encoder_layer_norm_first": True, "extractor_conv_bias": True}
WAVLM = {**WAV2VEC2, "encoder_num_buckets": 32, "encoder_max_distance": 64}
CONV_TASNET = {
    "enc_num_feats": 32,
    "msk_num_feats": 16,
    "msk_num_hidden_feats": 32,
    "msk_num_layers": 2,
    "msk_num_stacks": 2,
}
WAVERNN = {
    "upsample_scales": [2, 2, 2],
    "n_classes": 16,
    "hop_length": 8,
    "n_res_block": 2,
    "n_rnn": 32,
    "n_fc": 32,
    "n_freq": 16,
    "n_hidden": 16,
    "n_output": 16,
}
TACOTRON2 = {
    "n_mels": 16,
    "n_symbol": 20,
    "symbol_embedding_dim": 16,
    "encoder_embedding_dim": 16,
    "decoder_rnn_dim": 32,
    "attention_rnn_dim": 32,
    "attention_hidden_dim": 16,
    "prenet_dim": 16,
    "postnet_embedding_dim": 16,
}
# Parts of networks with an op that neither exporter of torch writes, as their errors advise.
ENCODERS = [
    f"{encoder}.{layer}" for encoder, layers in (("freq_encoder", 5), ("time_encoder", 4)) for layer in range(layers)
]
DECODERS = [f"freq_decoder.{layer}" for layer in range(5)] + [f"time_decoder.{layer}" for layer in range(1, 5)]
HDEMUCS = {
    "parts": (*ENCODERS, *DECODERS),
    # It holds values of 1e-9: sigmoids of -20, of which onnxruntime's have an error of 1e-7.
    "off": ("freq_encoder.4.activation_quantizers.truediv_[14]",),
    "note": "torch cannot export the complex numbers between the parts; two quantizers are off",
}
TACOTRON2_PARTS = {
    "parts": (
        *(f"encoder.convolutions.{layer}" for layer in range(3)),
        *("decoder.prenet", "decoder.attention_layer", "postnet"),
    ),
    "note": "torch cannot export unsafe_chunk in the LSTM cells between the parts",
}


def _frames() -> tuple[Any, ...]:
    return torch.rand(2, 24, 16), torch.tensor([24, 24])


def _text() -> tuple[Any, ...]:
    return torch.randint(20, (2, 10)), torch.tensor([10, 10]), torch.rand(2, 16, 12), torch.tensor([12, 12])


MODELS = {
    "conformer": Entry(lambda a: a.Conformer(16, 2, 32, 2, 7), _frames),
    "conv_tasnet": Entry(lambda a: a.ConvTasNet(**CONV_TASNET), floats((2, 1, 800))),
    "deepspeech": Entry(lambda a: a.DeepSpeech(16, 32, 8), floats((2, 1, 24, 16))),
    "emformer": Entry(
        lambda a: a.Emformer(16, 2, 32, 2, 4, right_context_length=1),
        lambda: (torch.rand(2, 9, 16), torch.tensor([9, 9])),
    ),
    "hdemucs": Entry(lambda a: a.HDemucs(["a", "b"], channels=8, depth=5), floats((1, 2, 8192)), HDEMUCS),
    "tacotron2": Entry(lambda a: a.Tacotron2(**TACOTRON2), _text, TACOTRON2_PARTS),
    "wav2letter": Entry(lambda a: a.Wav2Letter(8, "mfcc", 16), floats((2, 16, 80))),
    "wavernn": Entry(lambda a: a.WaveRNN(**WAVERNN), floats((2, 1, 8 * 8), (2, 1, 16, 12))),
    "wav2vec2": Entry(lambda a: a.wav2vec2_model(**WAV2VEC2), WAVE),
    "wav2vec2_layer_norm": Entry(lambda a: a.wav2vec2_model(**{**WAV2VEC2, **LAYER_NORM}), WAVE),
    "wavlm": Entry(lambda a: a.wavlm_model(**WAVLM), WAVE),
    "squim_objective": Entry(lambda a: a.squim_objective_model(16, 16, 16, 2, 32, 2, "LSTM", 16), WAVE),
}


def torchaudio_recipes() -> Iterable[Recipe]:
    """Return a recipe for each network, or none if torchaudio is not installed."""
    return recipes_of("torchaudio", "torchaudio.models", MODELS)
