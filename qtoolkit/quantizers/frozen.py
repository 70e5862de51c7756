"""Grid: the quantizer of a converted model, with a fixed scale."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.config.formats import BLOCKS, LARGEST
from qtoolkit.ops.recording import is_written_to_file
from qtoolkit.quantizers.capability import NO_CODES, Capability
from qtoolkit.quantizers.kinds.dynamic import of_blocks, of_tokens
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.spec_ops import fake_quant, float_codes, float_values, typed_scale
from qtoolkit.running import running
from qtoolkit.unregistered import Unregistered

QuantizesAs = Callable[[Tensor, Tensor, Tensor | None, int, int], Tensor]
SMALLEST_CODES = {
    True: (torch.int8, torch.int16),
    False: (torch.uint8, torch.uint16),
}


def code_dtype(qmin: int, qmax: int) -> torch.dtype:
    """Return the smallest integer dtype that holds [qmin, qmax].

    Example:
        >>> code_dtype(-8, 7), code_dtype(0, 255), code_dtype(0, 256)
        (torch.int8, torch.uint8, torch.uint16)
    """
    narrow, wide = SMALLEST_CODES[qmin < 0]
    fits = torch.iinfo(narrow).min <= qmin and qmax <= torch.iinfo(narrow).max
    return narrow if fits else wide


def check_scale(name: str, scale: Tensor, spec: QuantSpec) -> None:
    """Raise ValueError unless every scale is positive and finite, also in its type. Synchronizes with the device."""
    bad = ~(torch.isfinite(scale) & (scale > 0))
    if bool(bad.any()):
        value = float(scale[bad].flatten()[0])
        raise ValueError(
            f"quantizer {name!r}: scale must be positive and finite, got {value} ({int(bad.sum())} of {scale.numel()}); "
            f"calibrate it on data without NaN or infinities."
        )
    if spec.scale_dtype == "float16" and bool(scale.half().isinf().any()):
        raise ValueError(
            f"quantizer {name!r}: scale must be at most 65,504, the largest number of float16, got {float(scale.max()):g}; "
            f"divide the tensor that it quantizes, or give its layer scale_dtype='float32' in the QConfigMapping."
        )


class Grid(Quantizer):
    """Quantize and dequantize with a fixed scale. `qtoolkit.convert` replaces each TensorQuantizer by a Grid.

    Args:
        scale: Positive, finite step sizes, float32 or float64: one element, or one per channel or group. It is
            rounded to the type that the spec says.
        zero_point: The zero points, stored as floats, of the scale's shape; None for a symmetric spec.
        spec: Range of integers and channel axis.
        group: Groups of dimension 0 (see `qtoolkit.ops`).
        name: The quantizer's name in error messages.
        of_weight: Whether it quantizes a weight.
        inserted: Whether a graph pass inserted it as a node of its own.
        shape: A function that shapes a weight before it is rounded, or None (see `QuantizerKind.shape`).

    Attributes:
        quantizing: Whether forward quantizes; otherwise it returns its input (see `qtoolkit.disable_quantization`).
        shape: The function that shapes a weight, as given. The export exchanges it for the shaped weight while it writes a
            file.
        quantizes_as: How a runtime quantizes floats, of x, scale, zero point, qmin and qmax, where it rounds otherwise than
            `fake_quant`; else None.

    Raises:
        ValueError: A scale is zero, negative, NaN or infinite.

    Example:
        >>> grid = Grid(torch.tensor(0.5), None, QuantSpec())
        >>> grid(torch.tensor([0.3, 100.0])), grid.codes(torch.tensor([0.3, 100.0]))
        (tensor([ 0.5000, 63.5000]), tensor([  1, 127], dtype=torch.int8))
    """

    scale: Tensor
    zero_point: Tensor | None
    shape: nn.Module | None
    quantizes_as: QuantizesAs | None = None
    _kernel: Unregistered[Any] | None = None  # that computes values of this grid; a submodule of its layer or op

    def __init__(
        self,
        scale: Tensor,
        zero_point: Tensor | None,
        spec: QuantSpec,
        group: int = 1,
        *,
        name: str = "Grid",
        of_weight: bool = False,
        inserted: bool = False,
        shape: nn.Module | None = None,
    ) -> None:
        super().__init__(spec, group, name, of_weight=of_weight, inserted=inserted)
        check_scale(name, scale, spec)
        self.register_buffer("scale", typed_scale(spec, scale))
        self.register_buffer("zero_point", zero_point)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Return the grid's values nearest to x; x itself where an integer kernel has computed these values."""
        if not self.quantizing or (self._kernel is not None and self._kernel.value.active):
            return x
        if self.quantizes_as is not None and not running().for_onnx:
            return self.quantizes_as(x, self.scale, self.zero_point, self.spec.qmin, self.spec.qmax)
        x = x if self.shape is None else self.shape(x)
        if self.stored_in_uint8 and is_written_to_file():
            return self.in_uint8(x, self.spec)
        return fake_quant(self.spec, x, self.scale, self.zero_point, self.group, self.spec.block_size)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.spec.scale_dtype == "float16":
            self.scale = typed_scale(self.spec, self.scale)

    def computed_by(self, kernel: Any) -> None:
        """Take inputs as they are where a `qtoolkit.integer.kernels.Kernel`, while active, returns values on this grid."""
        self._kernel = Unregistered(kernel)

    def codes(self, x: Tensor) -> Tensor:
        """Return x as integers; for a small float format, the places of its numbers (`spec_ops.float_codes`).

        Raises:
            ValueError: The format has no integers.
        """
        spec, x = self.spec, x if self.shape is None else self.shape(x)
        if spec.element in LARGEST:
            return float_codes(spec, x, self.scale, self.group)
        if spec.format != "int":
            raise ValueError(f"Grid.codes: format={spec.format!r} has no integers; call the grid for its values.")
        grid = (spec.qmin, spec.qmax, spec.axis, self.group, spec.block_size)
        return ops.quantize(x, self.scale, self.zero_point, *grid, code_dtype(spec.qmin, spec.qmax))

    def values(self, codes: Tensor) -> Tensor:
        """Return the values of integers."""
        spec = self.spec
        if spec.element in LARGEST:
            return float_values(spec, codes, self.scale, self.group)
        grid = (spec.axis, self.group, spec.block_size)
        return ops.dequantize(codes, self.scale, self.zero_point, *grid, self.scale.dtype)


def rounding_of(model: nn.Module) -> QuantizesAs | None:
    """Return how the quantizers of a model in the arithmetic of a runtime round floats; None where they do as `fake_quant`."""
    grids = (module for module in model.modules() if isinstance(module, Grid))
    return next((grid.quantizes_as for grid in grids if grid.quantizes_as is not None), None)


class DynamicActivation(Quantizer):
    """The quantizer of an activation in a converted model whose scales are computed from each input.

    Integers are written as a composition of torch ops, which a file can have. It has the values of the op in training.
    """

    def _find_capability(self) -> Capability:
        return NO_CODES

    @property
    def why_no_export(self) -> str | None:
        """Why a file of ONNX cannot have it, a sentence; None if it can."""
        if self.spec.format == "int":
            return None
        return (
            f"its scales of {self.spec.format} are computed from each input, for which no QuantizeLinear is written; take "
            f"format='e4m3' without dynamic, or dynamic integers, for activations"
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.quantizing:
            return x
        if self.spec.format in BLOCKS:
            self.scale_shape(x)  # blocks that do not fit are an error
            return of_blocks(self.spec, x)
        return of_tokens(self.spec, x) if self.spec.format != "int" else self._of_tokens(x)

    def _of_tokens(self, x: Tensor) -> Tensor:
        spec, wide = self.spec, x.to(torch.promote_types(x.dtype, torch.float32))
        lo, hi = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
        largest = hi if spec.qmin >= 0 else torch.maximum(hi, -lo)
        width = largest if spec.symmetric else hi - lo
        steps = spec.qmax if spec.symmetric else spec.qmax - spec.qmin
        scale = torch.where(width == 0, 1.0, (width / steps).clamp(min=2.0**-126))
        zero_point = 0.0 if spec.symmetric else (spec.qmin - torch.round(lo / scale)).clamp(spec.qmin, spec.qmax)
        codes = (torch.round(wide / scale) + zero_point).clamp(spec.qmin, spec.qmax)
        return ((codes - zero_point) * scale).to(x.dtype)


class ShapedActivation(nn.Module):
    """The quantizer of an activation that is shaped (see `QuantizerKind.shape`) before it is rounded, in a converted model."""

    capability = capability_now = NO_CODES  # a Quantizer may become one

    def __init__(self, shape: nn.Module, grid: Grid) -> None:
        super().__init__()
        self.shape, self.grid = shape, grid

    @property
    def why_no_export(self) -> str | None:
        """Why a file of ONNX cannot have it, a sentence; None if it can."""
        reason: str | None = self.shape.why_no_export  # type: ignore[assignment]  # an attribute of a Shape
        return reason

    @property
    def inserted(self) -> bool:
        """Whether a graph pass inserted the quantizer as a node of its own."""
        return self.grid.inserted

    def forward(self, x: Tensor) -> Tensor:
        """Return the quantized tensor; x itself where quantization is off."""
        y: Tensor = self.grid(self.shape(x)) if self.grid.quantizing else x
        return y
