"""Layers in training on quantized inputs: what they keep for backward, and how they compute."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeGuard, get_args

import torch
from torch import Tensor, nn

from qtoolkit.errors import check_known, with_article
from qtoolkit.nn import refusals
from qtoolkit.nn.hooks import has_hooks, is_watched
from qtoolkit.nn.layer_call import Source
from qtoolkit.ops.layer import Geometry, WeightGrid, quant_layer, quant_weight
from qtoolkit.ops.sums import has_int8_product, is_exact
from qtoolkit.quantizers.capability import NO_CODES, Capability
from qtoolkit.quantizers.codes import TensorCodes, codes_of
from qtoolkit.quantizers.in_ops import weight_grid as of_quantizer
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.running import Run
from qtoolkit.verdicts import Cause, Refusal

if TYPE_CHECKING:
    from qtoolkit.nn.projection import Projection
    from qtoolkit.nn.weighted import QuantWeighted

    Layer: TypeAlias = QuantWeighted | Projection
Arithmetic = Literal["auto", "float", "integer"]
Saved = Literal["codes", "float"]
HAS_INT8 = is_exact()
AS_ASKED = Refusal(Cause.AS_ASKED, "as asked")
NO_INT8 = Refusal(Cause.NO_KERNEL, "no int8 kernel")
ON_GPU = Refusal(Cause.NO_KERNEL, "the default on CUDA")
UNSIGNED = Refusal(Cause.WEIGHT_CODES, "its weight is unsigned")
MAY_OVERFLOW = Refusal(Cause.NO_KERNEL, "its sums may exceed int32")
MOST_IMAGE_CHANNELS = 4
# "auto" computes on codes where that is faster: int8 kernels save time for each product, and preparing the weight for them
# costs as much as 256 positions save, besides what a call costs. Measured by benchmarks/pages/small_layers.py.
POSITIONS_OF_WEIGHT = 256
PRODUCTS_OF_CALL = 2**25
MOST_POSITIONS = 2048
MOST_TERMS = 2**31 // (255 * 128)  # of a sum of products of 8-bit integers that fits in int32 for certain


@dataclass(frozen=True)
class TrainingArithmetic:
    """How a forward in training computes a layer, and what it keeps of the input for backward.

    Attributes:
        forward: "float": in float. "integer": in integers. "auto": in integers where torch has exact int8 kernels for
            the layer on this processor, and its input has `least_positions` at least; in float on a GPU.
        save: `"codes"`: the input as integers, a byte or less an element. `"float"`: the input itself.

    Raises:
        ValueError: A value is not known.

    Example:
        >>> TrainingArithmetic(forward="integer", save="float")
        TrainingArithmetic(forward='integer', save='float')
    """

    FORWARDS: ClassVar[tuple[str, ...]] = get_args(Arithmetic)
    SAVES: ClassVar[tuple[str, ...]] = get_args(Saved)

    forward: Arithmetic = "auto"
    save: Saved = "codes"

    def __post_init__(self) -> None:
        check_known("training_arithmetic", self.forward, self.FORWARDS)
        check_known("save", self.save, self.SAVES)


DEFAULT = TrainingArithmetic()
PLAIN = TrainingArithmetic("float", "float")  # torch's own ops and fake quantization, which can be differentiated twice


class TrainsOnCodes:
    """A module that `qtoolkit.nn.set_training_arithmetic` sets.

    Attributes:
        training_arithmetic: How a forward in training computes, and what it keeps for backward (see `qtoolkit.prepare`).
    """

    training_arithmetic: TrainingArithmetic = DEFAULT


class TakesCodes(TrainsOnCodes):
    """One whose inputs a graph may quantize."""

    input_quantizer: Quantizer | None

    def input_sources(self) -> Sequence[Source | None]:
        """Return the sources of its inputs to which a graph has linked it; None for inputs that may have any values."""
        raise NotImplementedError

    def unlink(self) -> None:
        """Take inputs for any values: the graph does not call the module any more."""
        raise NotImplementedError

    def computes_by(self) -> list[nn.Module]:
        """Return the modules beside it on which it depends how it computes in training."""
        sources = (source for source in dict.fromkeys(self.input_sources()) if source is not None)
        return [module for source in sources for module in source.modules()]


def set_training_arithmetic(
    model: nn.Module,
    arithmetic: Arithmetic = "auto",
    save: Saved = "codes",
) -> None:
    """Set how a prepared or replaced model computes in training, at any time.

    With arithmetic="float" and save="float" training calls torch's own ops and fake quantization alone, which can be
    differentiated twice.

    Args:
        model: The result of `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`, or a part of it, for its layers: the
            ops between the layers of a traced model follow the setting of the whole model.
        arithmetic: How convolutions, linear layers and products of two activations compute whose operands are on
            integer grids. "float": in float. "integer": in integers, with exact sums. "auto": in integers where torch
            has exact int8 kernels for the op on this processor and its input is large enough for them to be faster
            (`benchmarks/pages/small_layers.py`), else in float, as always on a GPU. In any case gradients are the
            straight-through ones.
        save: The form in which such an op keeps its operands for backward. `"codes"`: integers, a byte an element, half a byte
            for at most 4 bits. `"float"`: the values.

    Raises:
        ValueError: A value is not known.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), backend="tensorrt")
        >>> set_training_arithmetic(prepared, "float")
        >>> prepared.get_submodule("0").training_arithmetic
        TrainingArithmetic(forward='float', save='codes')
    """
    of_each = TrainingArithmetic(arithmetic, save)
    for module in model.modules():
        if isinstance(module, TrainsOnCodes):
            module.training_arithmetic = of_each


def compute(
    run: Run,
    layer: "Layer",
    x: Tensor,
    source: Callable[[], Quantizer | None],
    factor: Tensor | None,
    bias: Callable[[], Tensor | None],
    args: Any,
    kwargs: Any,
    input_codes: TensorCodes | None = None,
) -> Tensor | None:
    """Compute a layer in one op that keeps integers for backward; None where the layer's plain computation holds.

    `source` returns the quantizer of x, if there is one; `input_codes` are the integers that came with x. `bias` is
    called when the weight has its range, which gives the steps of the bias.
    """
    wanted = layer.training_arithmetic
    if not torch.is_grad_enabled() or run.recorded:
        return None
    geometry = layer.geometry(x, *args, **kwargs)
    if geometry is None:
        return None
    integer = computes_on_codes(layer, x, geometry)
    if not integer and wanted.save == "float":
        return None
    found = codes_of(run, x, source(), integer, input_codes)
    if found is None or found.codes is None:
        return None
    codes = found.as_codes(found.codes)
    grid = layer.weight_grid(run, factor)
    if grid is None:
        return None
    dtype, memory_format = computed_type(layer.weight, x), computed_format(layer, x, integer)
    in_sums = bias()
    raw = found.raw_of(run, x) if dtype == x.dtype and reads_image(layer, x, geometry) else None
    if raw is None and not integer and copies_weight(run, layer, x):
        x = x.contiguous()
        codes = found.of(x) if found.packed else replace(codes, codes=codes.codes.contiguous())
    types, updated = (dtype, memory_format), layer.updated_channels
    return quant_layer(x, codes, layer.weight, grid, geometry, in_sums, factor, integer, *types, raw, updated)


def computed_type(weight: Tensor, x: Tensor) -> torch.dtype:
    """Return the type in which a layer of a weight computes: autocast's, or the weight's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def computed_format(layer: "Layer", x: Tensor, integer: bool) -> torch.memory_format | None:
    """Return the memory format of a layer's output; None for the format of torch's layer."""
    return torch.channels_last if integer and layer.returns_channels_last and has_kernel_type(x) else None


def copies_weight(run: Run, layer: "Layer", x: Tensor) -> bool:
    """Return whether torch would copy a weight into the memory format of an image that is smaller than it."""
    weight = layer.weight
    if weight.dim() != 4 or x.numel() >= weight.numel() or x.is_contiguous() or run.transformed:
        return False
    return not weight.is_contiguous(memory_format=torch.channels_last)


def reads_image(layer: "Layer", x: Tensor, geometry: Geometry) -> bool:
    """Return whether a layer reads a tensor with so few channels that its gradient takes the CPU longer than the weight's."""
    is_plain = bool(geometry.stride) and not geometry.transposed and geometry.groups == 1
    few = is_plain and x.is_cpu and x.size(1) <= MOST_IMAGE_CHANNELS
    return few and isinstance(layer, nn.Module) and not has_hooks(layer)


def quantized_weight(run: Run, layer: "Layer", factor: Tensor | None) -> Tensor | None:
    """Compute a layer's weight in one op, whose backward reads it once; None where the quantizer itself does it.

    Gradients are the same as of layers that keep integers, bit for bit.
    """
    if not torch.is_grad_enabled() or not run.own_ops:
        return None
    grid = layer.weight_grid(run, factor)
    return (
        None
        if grid is None
        else quant_weight(layer.weight, grid, factor, *layer.weight_groups(), layer.updated_channels)
    )


def weight_grid(run: Run, layer: "Layer", followed: Callable[[], Tensor]) -> WeightGrid | None:
    """Return the grid of a layer's weight for an op; None where only the quantizer's forward can put it there.

    `followed` returns the tensor that gives a range its values, if the range follows the weight.
    """
    quantizer = layer.weight_quantizer
    return of_quantizer(run, quantizer, layer.weight, followed) if gives_grid(quantizer) else None


def gives_grid(quantizer: Quantizer | None) -> TypeGuard[TensorQuantizer]:
    """Return whether an op may quantize a weight in its quantizer's place: no other op makes or takes its output.

    Hooks of all modules do not see the quantizers of weights, which are called in no step that an op computes.
    """
    if type(quantizer) is not TensorQuantizer or is_watched(quantizer):
        return False
    return quantizer.quantizing and quantizer.capability.plain and not quantizer.observing


def has_kernel_type(x: Tensor) -> bool:
    """Return whether torch's int8 kernels can compute a layer of a tensor: a float32 one on the CPU."""
    return x.dtype == torch.float32 and x.is_cpu


def computes_on_codes(layer: "Layer", x: Tensor, geometry: Geometry) -> bool:
    """Return whether a layer computes an input in integers in training, if it is quantized."""
    if not layer.training or not pays(layer, _positions(x, geometry)) or refusal_to_compute(layer) is not None:
        return False
    return layer.training_arithmetic.forward == "integer" or (x.dtype == layer.weight.dtype and has_kernel_type(x))


def _positions(x: Tensor, geometry: Geometry) -> int:
    """Return how often a layer applies its weight: for each row of a linear layer, for each output pixel of a convolution.

    Of a transposed convolution, whose output pixels take a part of the weight each, it is the number of input pixels.
    """
    channels = x.size(1 if geometry.stride else -1)
    stride = () if geometry.transposed else geometry.stride
    return x.numel() // max(channels * math.prod(stride), 1)


def pays(layer: "Layer", positions: int) -> bool:
    """Return whether a layer computes in integers for so many positions: because it is faster, or as asked."""
    return layer.training_arithmetic.forward == "integer" or positions >= least_positions(layer)


def least_positions(layer: "Layer") -> int:
    """Return for how many positions at least "auto" computes a layer in integers; for fewer, float is faster."""
    of_call: int = math.ceil(PRODUCTS_OF_CALL / layer.weight.numel())
    return min(POSITIONS_OF_WEIGHT + of_call, MOST_POSITIONS)


def described(layer: "Layer", call: int = 0) -> tuple[str, Cause | None]:
    """Return how a call of a layer computes in training and what it keeps for backward, in words, and why not in integers.

    "" and None for a layer without an input grid.
    """
    if layer.OP_KIND.takes_indices or not isinstance(layer.weight_quantizer, TensorQuantizer):
        return "", None
    refusal = refusal_to_keep(layer, call)
    if refusal is not None:
        return f"float, saves floats: {refusal.text}", refusal.cause
    refusal, arithmetic = refusal_to_compute(layer), layer.training_arithmetic
    if refusal is not None:
        return f"float ({refusal.text}), saves {'floats' if arithmetic.save == 'float' else 'integers'}", refusal.cause
    few = f" (float for fewer than {least_positions(layer):,} positions)" if arithmetic.forward == "auto" else ""
    return f"{_kernel_of(layer)}{few}, saves integers", None


def _kernel_of(layer: Any) -> str:
    """Return the kernel that computes a layer in integers, in words; csrc/layer/integer_layer.cpp decides it."""
    if not layer.weight.is_cuda:
        return "int8 kernel"
    weight, transposed = layer.weight, layer.weight_groups()[0]
    is_product = torch.classes.qtoolkit.CodeSums.take(weight, transposed, getattr(layer, "groups", 1))
    return "int8 matrix product" if is_product and has_int8_product(weight.device) else "integers in float"


def refusal_to_keep(layer: "Layer", call: int = 0) -> Refusal | None:
    """Return why a call of a layer does not keep its input as integers for backward; None where it may."""
    if not layer.has_geometry():
        return Refusal(Cause.NO_KERNEL, f"there is no integer kernel for {with_article(type(layer).FLOAT)}")
    source, weight = layer.source_at(call), _of_weight(layer)
    refusal = refusals.of_inputs(None if source is None else source.capability)
    if refusal is not None:
        return refusal
    return refusals.NO_INTEGERS if weight.bits is None else _own_gradients(layer, weight)


def refusal_to_compute(layer: "Layer") -> Refusal | None:
    """Return why a layer computes in float in training; None where it computes in integers, if its input is quantized."""
    forward = layer.training_arithmetic.forward
    if forward == "float":
        return AS_ASKED
    if forward == "auto" and layer.weight.is_cuda:
        return ON_GPU
    if forward == "auto" and not (HAS_INT8 and _has_kernel(layer) and has_kernel_type(layer.weight)):
        return NO_INT8
    weight = _of_weight(layer)
    refusal = refusals.of_weight(layer, weight) or _own_gradients(layer, weight)
    if refusal is not None:
        return refusal
    if not weight.signed:
        return UNSIGNED
    return MAY_OVERFLOW if layer.weight.numel() > MOST_TERMS * layer.channels() else None


def _of_weight(layer: "Layer") -> Capability:
    quantizer = layer.weight_quantizer
    return NO_CODES if quantizer is None else quantizer.capability


def _own_gradients(layer: "Layer", weight: Capability) -> Refusal | None:
    if weight.plain or layer.weight_quantizer is None:
        return None
    name = layer.weight_quantizer.spec.quantizer
    return Refusal(Cause.WEIGHT_CODES, f"quantizer {name!r} has its own gradients of the weight")


def _has_kernel(layer: Any) -> bool:
    """Return whether torch's int8 kernels compute a layer: a transposed convolution as one with stride 1.

    csrc/layer/sub_pixel.h says how.
    """
    transposed, groups = layer.weight_groups()
    if not transposed:
        of_kind: bool = layer.OP_KIND.layer
        return of_kind
    dilation = layer.dilation if layer.weight.dim() == 4 else ()
    return bool(dilation) and groups == 1 and max(dilation) == 1
