"""The grid of a bias: the grid of the integer sums to which a runtime adds it."""

import torch
from torch import Tensor

from qtoolkit import ops

# Codes of a bias lie in [-LARGEST_CODE, LARGEST_CODE]: half of int32, so that a sum of products and the bias fit in it.
LARGEST_CODE = 2**30


def bias_scale(input_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """Return the steps of the integer sums of products of two tensors: one, or one per output channel; without gradients.

    Source: onnxruntime, core/optimizer/qdq_transformer/weight_bias_quantization.cc (the product is rounded to float32).
    """
    scale = input_scale.reshape(()) if input_scale.dim() else input_scale  # as few nodes as possible in exported graphs
    return scale * weight_scale


def on_grid(bias: Tensor, steps: Tensor, fits: bool = False) -> Tensor:
    """Return the multiples of some steps, float32, nearest to a bias; gradients pass straight through.

    Unless `fits`, larger steps are taken where values do not fit in int32; `qtoolkit.convert` enlarges the weight's scales
    there.
    """
    # `bias_on_grid` of csrc/unit/unit_scales.h is the same in a unit's op. Exporters record these ops, and have no such op.
    if not fits:
        steps = torch.maximum(steps, bias.detach().float().abs() / LARGEST_CODE)
    return ops.fake_quant(bias, steps, None, -LARGEST_CODE, LARGEST_CODE, _axis(steps))


def codes_of(bias: Tensor, steps: Tensor) -> Tensor:
    """Return a bias as int32 on the grid of these steps."""
    return ops.quantize(bias, steps, None, -LARGEST_CODE, LARGEST_CODE, _axis(steps), 1, 0, torch.int32)


def enlarged(weight_scale: Tensor, input_scale: Tensor, bias: Tensor) -> Tensor:
    """Return a weight's scales, enlarged so that the integers of a bias stay within LARGEST_CODE.

    Source: onnxruntime's quantization tool does the same (pull request 22020).
    """
    margin = 1 + 2**-20  # for the roundings of float32
    least = bias.detach().float().abs() * (margin / LARGEST_CODE) / input_scale.float()
    if weight_scale.numel() == 1:
        least = least.max()
    return torch.maximum(weight_scale, least.reshape(weight_scale.shape).to(weight_scale))


def _axis(steps: Tensor) -> int | None:
    return 0 if steps.numel() > 1 else None
