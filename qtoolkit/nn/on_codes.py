"""Layers in training on the codes of their inputs: what they keep for backward, and how they compute."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from qtoolkit.errors import check_known, with_article
from qtoolkit.nn.hooks import has_hooks, is_transformed
from qtoolkit.ops.layer import Geometry, WeightGrid, quant_layer, quant_weight
from qtoolkit.ops.recording import is_recorded
from qtoolkit.ops.sums import is_exact
from qtoolkit.quantizers.capability import NO_CODES
from qtoolkit.quantizers.handed_over import codes_of, raw_of
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

if TYPE_CHECKING:
    from qtoolkit.nn.weighted import QuantWeighted

HAS_INT8 = is_exact()
NO_KERNEL = "no int8 kernel"
MOST_IMAGE_CHANNELS = 4
# "auto" computes on codes where that is faster: int8 kernels save time for each product, and preparing the weight for them
# costs as much as 256 positions save, besides what a call costs. Measured by benchmarks/small_layers.py.
POSITIONS_OF_WEIGHT = 256
PRODUCTS_OF_CALL = 2**25
MOST_POSITIONS = 2048
MOST_TERMS = 2**31 // (255 * 128)  # of a sum of products of 8-bit codes that fits in int32 for certain


@dataclass(frozen=True)
class TrainingArithmetic:
    """How a forward in training computes a layer, and what it keeps of the input for backward.

    Attributes:
        forward: "float": in float. "integer": on the codes of input and weight. "auto": on codes where torch has exact int8
            kernels for the layer on this processor, and its input has `least_positions` at least.
        save: "codes": codes of the input, a byte or less an element. "float": the input itself.

    Raises:
        ValueError: A value is not known.
    """

    FORWARDS: ClassVar[tuple[str, ...]] = ("auto", "float", "integer")
    SAVES: ClassVar[tuple[str, ...]] = ("codes", "float")

    forward: str = "auto"
    save: str = "codes"

    def __post_init__(self) -> None:
        check_known("forward", self.forward, self.FORWARDS)
        check_known("save", self.save, self.SAVES)


DEFAULT = TrainingArithmetic()
PLAIN = TrainingArithmetic("float", "float")  # torch's own ops and fake quantization, which can be differentiated twice


@dataclass(frozen=True)
class Source:
    """Where the values of a tensor come from.

    Attributes:
        quantizer: The quantizer on whose grid they lie.
        dropouts: The dropouts behind it: a schedule may change their probabilities, which were 0, at any time.
    """

    quantizer: Quantizer
    dropouts: tuple[nn.Module, ...] = ()

    def now(self) -> Quantizer | None:
        """Return the quantizer; None while a dropout moves the values off its grid."""
        return None if any(dropout.training and dropout.p for dropout in self.dropouts) else self.quantizer


class TrainsOnCodes:
    """A module that `qtoolkit.nn.set_training_arithmetic` sets.

    Attributes:
        training_arithmetic: How a forward in training computes, and what it keeps for backward (see `qtoolkit.prepare`).
    """

    training_arithmetic: TrainingArithmetic = DEFAULT


def run(
    layer: "QuantWeighted",
    x: Tensor,
    factor: Tensor | None,
    bias: Tensor | None,
    args: Any,
    kwargs: Any,
    call: int = 0,
) -> Tensor | None:
    """Compute a layer in one op that keeps codes for backward; None where the layer's plain computation holds."""
    wanted = layer.training_arithmetic
    if not torch.is_grad_enabled() or is_recorded():
        return None
    geometry = layer.geometry(x, *args, **kwargs)
    if geometry is None:
        return None
    integer = computes_on_codes(layer, x, geometry)
    if not integer and wanted.save == "float":
        return None
    codes = codes_of(x, layer.source_of(call), channels_last=integer)
    if codes is None:
        return None
    grid = weight_grid(layer, factor)
    if grid is None:
        return None
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layer.weight.dtype
    bias = layer.bias_in_sums(bias, call)  # after the weight's range, on whose steps it lies
    last = integer and layer.returns_channels_last and has_kernel_type(x)
    memory_format = torch.channels_last if last else None
    raw = raw_of(x) if autocast == x.dtype and reads_image(layer, x, geometry) else None
    if raw is None and not integer and copies_weight(layer, x):
        x, codes = x.contiguous(), replace(codes, codes=codes.codes.contiguous())
    return quant_layer(x, codes, layer.weight, grid, geometry, bias, factor, integer, autocast, memory_format, raw)


def copies_weight(layer: "QuantWeighted", x: Tensor) -> bool:
    """Return whether torch would copy a weight into the memory format of an image that is smaller than it."""
    in_rows = layer.weight.is_contiguous(memory_format=torch.channels_last) if layer.weight.dim() == 4 else True
    return not in_rows and x.numel() < layer.weight.numel() and not x.is_contiguous()


def reads_image(layer: "QuantWeighted", x: Tensor, geometry: Geometry) -> bool:
    """Return whether a layer reads a tensor with so few channels that its gradient takes the CPU longer than the weight's."""
    is_plain = bool(geometry.stride) and not geometry.transposed and geometry.groups == 1
    return is_plain and x.is_cpu and x.size(1) <= MOST_IMAGE_CHANNELS and not has_hooks(layer)


def quantized_weight(layer: "QuantWeighted", factor: Tensor | None) -> Tensor | None:
    """Compute a layer's weight in one op, whose backward reads it once; None where the quantizer itself does it.

    Gradients are those of layers that keep codes, bit for bit.
    """
    if not torch.is_grad_enabled() or is_recorded() or is_transformed():
        return None
    grid = weight_grid(layer, factor)
    return None if grid is None else quant_weight(layer.weight, grid, factor, *layer.weight_groups())


def weight_grid(layer: "QuantWeighted", factor: Tensor | None) -> WeightGrid | None:
    """Return the grid of a layer's weight for an op; None where only the quantizer's forward can put it there."""
    quantizer = layer.weight_quantizer
    if not isinstance(quantizer, TensorQuantizer):
        return None
    grid: WeightGrid | None = quantizer.weight_grid(layer.weight, partial(_scaled_weight, layer, factor))
    return grid


def _scaled_weight(layer: "QuantWeighted", factor: Tensor | None) -> Tensor:
    weight: Tensor = layer.weight.detach()
    return weight if factor is None else layer.scale_output_channels(weight, factor.detach())


def has_kernel_type(x: Tensor) -> bool:
    """Return whether torch's int8 kernels can compute a layer of a tensor: a float32 one on the CPU."""
    return x.dtype == torch.float32 and x.is_cpu


def computes_on_codes(layer: "QuantWeighted", x: Tensor, geometry: Geometry) -> bool:
    """Return whether a layer computes an input on codes in training, if it has some."""
    if not layer.training or not pays(layer, _positions(x, geometry)) or why_in_float(layer) is not None:
        return False
    return layer.training_arithmetic.forward == "integer" or (x.dtype == layer.weight.dtype and has_kernel_type(x))


def _positions(x: Tensor, geometry: Geometry) -> int:
    """Return how often a layer applies its weight: for each row of a linear layer, for each output pixel of a convolution.

    Of a transposed convolution, whose output pixels take a part of the weight each, it is the number of input pixels.
    """
    channels = x.size(1 if geometry.stride else -1)
    stride = () if geometry.transposed else geometry.stride
    return x.numel() // max(channels * math.prod(stride), 1)


def pays(layer: "QuantWeighted", positions: int) -> bool:
    """Return whether a layer computes on codes for so many positions: because it is faster, or as asked."""
    return layer.training_arithmetic.forward == "integer" or positions >= least_positions(layer)


def least_positions(layer: "QuantWeighted") -> int:
    """Return for how many positions at least "auto" computes a layer on codes; for fewer, float is faster."""
    of_call: int = math.ceil(PRODUCTS_OF_CALL / layer.weight.numel())
    return min(POSITIONS_OF_WEIGHT + of_call, MOST_POSITIONS)


def described(layer: "QuantWeighted") -> str:
    """Return how a layer computes in training and what it keeps for backward, in words; "" for one without an input grid."""
    if layer.OP_KIND.takes_indices or not isinstance(layer.weight_quantizer, TensorQuantizer):
        return ""
    no_codes = _why_no_codes(layer)
    if no_codes is not None:
        return f"float, keeps floats: {no_codes}"
    in_float = why_in_float(layer)
    is_auto = layer.training_arithmetic.forward == "auto"
    few = f" (float for fewer than {least_positions(layer):,} positions)" if is_auto else ""
    forward = f"on codes{few}" if in_float is None else f"float ({in_float})"
    return f"{forward}, keeps {'floats' if in_float and layer.training_arithmetic.save == 'float' else 'codes'}"


def why_not_on_codes(layer: "QuantWeighted") -> str | None:
    """Return why a layer does not compute on codes in training; None where it does."""
    return why_in_float(layer) or _why_no_codes(layer)


def _why_no_codes(layer: "QuantWeighted") -> str | None:
    """Return why a layer knows no codes of its inputs; None where it does."""
    quantizer, source = layer.weight_quantizer, layer.source
    if not layer.has_geometry():
        return f"no op computes {with_article(type(layer).FLOAT)} on codes"
    if quantizer is None or quantizer.capability.bits is None:
        return "its weight is not on a grid of integers"
    if source is None:
        return "its inputs are on no grid, or on several"
    if not source.capability.direct:
        return "its inputs are shaped before they are rounded, or have scales of their own"
    if not source.capability.codes:
        return "its inputs have no codes of one byte and one scale"
    return None if quantizer.capability.plain else _own_gradients(quantizer)


def _own_gradients(quantizer: Quantizer) -> str:
    return f"the gradients of its weight are those of {quantizer.spec.quantizer!r}"


def why_in_float(layer: "QuantWeighted") -> str | None:
    """Return why a layer computes in float in training; None where it computes on codes, if its input has codes."""
    forward = layer.training_arithmetic.forward
    if forward == "float":
        return "as asked"
    if forward == "auto" and not (HAS_INT8 and _has_kernel(layer) and has_kernel_type(layer.weight)):
        return NO_KERNEL
    return integer_obstacle(layer)


def _has_kernel(layer: "QuantWeighted") -> bool:
    """Return whether torch's int8 kernels compute a layer: a transposed convolution as one with stride 1 (csrc/sub_pixel.h)."""
    transposed, groups = layer.weight_groups()
    if not transposed:
        return layer.OP_KIND.layer
    dilation: Any = layer.dilation if layer.weight.dim() == 4 else ()
    return bool(dilation) and groups == 1 and max(dilation) == 1


def integer_obstacle(layer: "QuantWeighted") -> str | None:
    """Return why a layer cannot compute on codes; None where it can, if its input has codes."""
    quantizer = layer.weight_quantizer
    known = NO_CODES if quantizer is None else quantizer.capability
    if quantizer is None or not known.sums:
        return "its weight is not on a grid of integers of at most 8 bits"
    if not known.plain:
        return _own_gradients(quantizer)
    if known.zero_point:
        return "its weight has a zero point"
    if not known.signed:
        return "its weight has unsigned codes"
    if not layer.scales_along_outputs():
        return "its weight's scales do not run along its output channels"
    if layer.weight.numel() > MOST_TERMS * layer.channels():
        return "its sums may exceed int32"
    return None
