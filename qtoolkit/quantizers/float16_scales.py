"""Warnings about scales of float16, and the scales that no file can have."""

from typing import TYPE_CHECKING

import torch

from qtoolkit.errors import some, warn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

LEAST = 2.0**-14


def warn_of_raised(quantizers: "Mapping[str, TensorQuantizer]", what: str) -> None:
    """Warn, in the name of a function, of scales that are raised to the least one of float16."""
    raised = []
    for name, quantizer in quantizers.items():
        if not (quantizer.float16 and quantizer.ready) or quantizer._scale.is_meta:
            continue
        with torch.no_grad():
            count = int((quantizer.kind.grid(quantizer)[0].abs() < LEAST).sum())
        raised += [f"{name!r} ({count} of {quantizer.scale.numel()})"] if count else []
    if raised:
        warn(
            f"{what}: scales below 2**-14, the smallest number of 11 bits in float16, are raised to it, so that their tensors "
            f"use fewer integers: {some(raised)}. If these are not channels of zeros, scale the tensors up, or give their "
            f"layers scale_dtype='float32' in the QConfigMapping.",
        )


def warn_of_other_type(saved: str, own: str) -> None:
    """Warn that a state dict is of a training with scales of another type. Python shows it once, not for each quantizer."""
    effect = "are rounded to that type where they are read" if own == "float16" else "are not rounded"
    warn(
        f"load_state_dict: the state dict is of a training with scale_dtype={saved!r}, and the model has scale_dtype={own!r}: "
        f"its scales {effect}, and some quantized weights and activations differ from that training's; evaluate the model, or "
        f"train on.",
    )
