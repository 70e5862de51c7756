"""The functions of pytorch_quantization.cuda_ext; here they accept tensors on any device, not only CUDA."""

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.compat.pytorch_quantization import tensor_quant


@torch.no_grad()
def fake_tensor_quant(
    inputs: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Return `tensor_quant.fake_tensor_quant` of the arguments, without a gradient."""
    return tensor_quant.fake_tensor_quant(inputs, amax, num_bits, unsigned, narrow_range)


@torch.no_grad()
def fake_tensor_quant_(
    inputs: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> None:
    """Write `fake_tensor_quant` of the arguments to the input."""
    inputs.copy_(fake_tensor_quant(inputs, amax, num_bits, unsigned, narrow_range))


def fake_tensor_quant_with_axis(
    inputs: Tensor, amax: Tensor, axis: int, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Return `fake_tensor_quant` with one range for each index of an axis; amax has as many elements, in any shape.

    Example:
        >>> fake_tensor_quant_with_axis(torch.tensor([[0.3, 2.0]]), torch.tensor([1.0, 4.0]), 1, 3)
        tensor([[0.3333, 2.6667]])
    """
    shape = [-1 if d == axis % inputs.dim() else 1 for d in range(inputs.dim())]
    return fake_tensor_quant(inputs, amax.reshape(shape), num_bits, unsigned, narrow_range)


@torch.no_grad()
def fake_e4m3fy(inputs: Tensor) -> Tensor:
    """Return the inputs rounded to the float format E4M3; larger values saturate at 448."""
    return ops.fake_quant_float(inputs, inputs.new_ones(()), "e4m3")
