"""Kernels: ops between quantizers, computed in integers. Their inputs and outputs are the dequantized values.

A value on a grid determines its integer, so tensors keep the values, which every other op, hook and report can read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from qtoolkit.errors import with_article
from qtoolkit.integer import int8_product
from qtoolkit.model_state import attribute_kept
from qtoolkit.nn.layer_call import LayerCall
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.ops.layer import Geometry
from qtoolkit.ops.requantize import add_codes, centred_codes, requantize
from qtoolkit.ops.sums import Bounds, exact_sums, may_transform
from qtoolkit.quantizers.bias import bias_scale, codes_of
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.running import Run, running
from qtoolkit.unregistered import Unregistered


@dataclass(frozen=True)
class Side:
    """A quantizer at an input or the output of a kernel."""

    grid: Grid  # the quantizer, with one scale
    zero_point: int  # its zero point, read once: a kernel does not synchronize with the device

    @classmethod
    def of(cls, grid: Grid) -> "Side":
        """Return the side of a quantizer in its current state."""
        return cls(grid, 0 if grid.zero_point is None else int(grid.zero_point))

    @property
    def scale(self) -> Tensor:
        """The step of the grid, float32, 0-d."""
        return self.grid.scale.reshape(())

    @property
    def ends(self) -> tuple[int, int]:
        """The lowest and the highest integer, minus the zero point."""
        return self.grid.spec.qmin - self.zero_point, self.grid.spec.qmax - self.zero_point

    @property
    def unsigned_zero_point(self) -> int:
        """The zero point of the unsigned integers; 128 is added for signed ones."""
        return self.zero_point + (128 if self.grid.spec.qmin < 0 else 0)

    def rounded(
        self, x: Tensor, factor: Tensor | None, offset: Tensor | None = None, zero_code: int = 0, fused: bool = False
    ) -> Tensor:
        """Return the values on this grid to which a kernel rounds x; see `qtoolkit.ops.requantize.requantize`."""
        return requantize(x, factor, self.scale, *self.ends, offset, zero_code, fused)

    def clamped(self, codes: Tensor) -> Tensor:
        """Dequantize integers like a kernel, clamped to the range of the grid."""
        return (codes - self.zero_point).clamp(*self.ends) * self.scale

    def unsigned_codes(self, x: Tensor) -> Tensor:
        """Return the integers of values on the grid as uint8; 128 is added for signed grids."""
        codes = self.grid.codes(x)
        return codes if codes.dtype == torch.uint8 else codes.view(torch.uint8) ^ 128

    def centred(self, x: Tensor) -> Tensor:
        """Return the integers of values on the grid, minus the zero point, in float32."""
        return centred_codes(x, self.scale)


class Kernel(nn.Module):
    """Computes one op of the graph on the integers of its inputs; its output may have no quantizer."""

    NAME: ClassVar[str]  # the runtime's name of the op
    enabled: bool = True  # whether it computes on codes; otherwise the op computes in float
    inputs: tuple[Side, ...]  # the inputs' sides
    output: Side | None  # the output's side, or None

    def __init__(self, inputs: Sequence[Grid], output: Grid | None) -> None:
        super().__init__()
        self.inputs = tuple(Side.of(grid) for grid in inputs)  # no submodules here: they are elsewhere in the model
        self.output = None if output is None else Side.of(output)

    @property
    def active(self) -> bool:
        """Whether the op computes in integers: False if a quantizer is disabled, and in ONNX export."""
        if not self.enabled or running().for_onnx:
            return False
        return all(side.grid.quantizing for side in (*self.inputs, self.output) if side is not None)

    def refresh(self) -> None:
        """Compute the constants that depend only on scales and weights; call it after they change."""
        self.inputs = tuple(Side.of(side.grid) for side in self.inputs)
        self.output = None if self.output is None else Side.of(self.output.grid)

    def constant(self, name: str, value: Tensor | None) -> None:
        """Store a tensor that moves with the model but is not in its state dict."""
        self.register_buffer(name, value, persistent=False)


def output_of(kernel: Kernel) -> Side:
    """Return the quantizer of a kernel's output."""
    if kernel.output is None:
        raise TypeError(f"{with_article(kernel.NAME)} needs the quantizer of its output.")
    return kernel.output


def takes_two(node: fx.Node, inputs: Sequence[Grid]) -> bool:
    """Return whether a call takes exactly two quantized tensors."""
    return len(inputs) == len(node.args) == 2 and not node.kwargs


@contextmanager
def in_float(model: nn.Module) -> Iterator[None]:
    """Let a model compute like its float form within a `with` block."""
    kernels = [module for module in model.modules() if isinstance(module, Kernel)]
    grids = [module for module in model.modules() if isinstance(module, Grid) and module.quantizes_as]
    with attribute_kept(kernels, "enabled"), attribute_kept(grids, "quantizes_as"):
        for kernel in kernels:
            kernel.enabled = False
        for grid in grids:
            grid.quantizes_as = None
        yield


class LayerKernel(Kernel):
    """Computes one call of a layer with a quantized weight. The layer owns and calls it."""

    # whether it returns floats, which the output quantizer (if there is one) quantizes
    TO_FLOAT: ClassVar[bool] = False

    codes: Tensor  # the codes of the weight, float32
    steps: Tensor  # the steps of the sums, shaped to broadcast over an output
    # the integers of the bias on the accumulator's grid, with its shape, in float64 if float32 cannot hold the sums; None
    # without a bias
    bias: Tensor | None
    bounds: Bounds
    # torch's kernel, with the weight packed for the last input shape; on a GPU, for the last call
    _int8: dict[torch.Size, int8_product.Int8Sums | None]
    _products: dict[tuple[torch.device, Geometry | None], int8_product.CodeSums | None]

    def __init__(self, layer: QuantWeighted, source: Grid, output: Grid | None, call: LayerCall) -> None:
        super().__init__([source], None if self.TO_FLOAT else output)
        self._layer, self._number = Unregistered(layer), call.number
        self.refresh()

    @property
    def layer(self) -> QuantWeighted:
        """The layer."""
        return self._layer.value

    @property
    def active(self) -> bool:
        """Whether the layer computes in integers: not if its quantizer or its weight quantizer is disabled."""
        return super().active and self.layer.weight_quantizer is not None and self.layer.weight_quantizer.quantizing

    @property
    def input_scale(self) -> Tensor:
        """The step of the input in the runtime, 0-d."""
        return self.inputs[0].scale

    def refresh(self) -> None:
        """Compute the constants for the layer's current weight, bias and scales."""
        super().refresh()
        layer, grid = self.layer, self.layer.weight_quantizer
        if not isinstance(grid, Grid):
            raise TypeError(f"a kernel needs a layer whose weight has a Grid, got {with_article(type(grid))}.")
        steps = bias_scale(self.input_scale, grid.scale)
        codes = grid.codes(layer.weight.detach()).float()
        self.constant("codes", codes)
        self.constant("steps", layer.along_channels(steps))
        positive, negative = (layer.sum_per_output(part.clamp(min=0)) for part in (codes, -codes))
        largest = max(-grid.spec.qmin, grid.spec.qmax)
        self.bounds, self._int8 = Bounds.of(positive, negative, *self.inputs[0].ends, largest), {}
        self._products = {}
        bias = None if layer.bias is None else codes_of(layer.bias.detach(), steps).double()
        if bias is not None and self.bounds.stay_exact_with(float(bias.abs().max())):
            bias = bias.float()
        self.constant("bias", None if bias is None else layer.along_channels(bias))

    def sums(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the exact sums of integer products, without the bias: integers in float32 or float64."""
        run, (source,) = running(), self.inputs
        int8 = self._int8_sums(run, x)
        by_product = self._sums_by_product(run, x, *args, **kwargs)
        if by_product is not None:
            y = by_product(source.grid.codes(x), source.grid.zero_point)
            return y if self.layer.returns_channels_last else y.contiguous()
        if int8 is not None and self.bounds.exact_in_float32:
            return int8(source.unsigned_codes(x), source.unsigned_zero_point)

        def product(codes: Tensor, weight: Tensor) -> Tensor:
            if int8 is not None and self.bounds.digit_bits > 0:  # digits are below 128
                return int8((codes + 128).to(torch.uint8), 128)
            return self.layer.compute(codes, weight, None, *args, **kwargs)

        transforms = may_transform(x, self.layer.OP_KIND.convolves)
        return exact_sums(product, source.centred(x), self.codes, self.bounds, transforms)

    def _int8_sums(self, run: Run, x: Tensor) -> int8_product.Int8Sums | None:
        """Return torch's int8 kernel of the layer; None if there is none, and in graphs, which cannot hold packed weights."""
        if run.compiled or not x.is_cpu or not x.numel() or x.dim() < self.codes.dim():
            return None
        if x.shape not in self._int8:
            self._int8 = {x.shape: int8_product.int8_sums(self.layer, self.codes, list(x.shape))}
        return self._int8[x.shape]

    def _sums_by_product(self, run: Run, x: Tensor, *args: object, **kwargs: object) -> int8_product.CodeSums | None:
        """Return the layer as a product of int8 matrices; None for other layers, on other devices, and in graphs."""
        weight = self.layer.weight_quantizer
        if run.compiled or weight is None or not int8_product.computes_on(x.device):
            return None
        geometry = self.layer.geometry(x, *args, **kwargs)
        if (x.device, geometry) not in self._products:
            specs = self.inputs[0].grid.spec, weight.spec
            self._products = {(x.device, geometry): int8_product.code_sums(*specs, geometry, self.bounds, self.codes)}
        return self._products[x.device, geometry]

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_int8": {}, "_products": {}}  # packed weights cannot be copied

    def sums_with_bias(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the exact sums including the bias: integers in float32 or float64."""
        sums = self.sums(x, *args, **kwargs)
        return sums if self.bias is None else sums + self.bias


class FloatOutput(LayerKernel):
    """f32(f32(sums) * f32(xs * ws)) + bias, in float32; activations and the following ops are float32 too."""

    NAME, TO_FLOAT = "int8 product", True
    float_bias: Tensor | None  # shaped to broadcast over an output

    def refresh(self) -> None:
        """Store the bias with the value in the file, where it is rounded to the accumulator's grid."""
        super().refresh()
        bias = self.layer.bias_in_sums(self.layer.bias, self.layer.layer_calls[self._number])
        self.constant("float_bias", None if bias is None else self.layer.along_channels(bias.detach()))

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the output in float."""
        y = self.sums(x, *args, **kwargs).float() * self.steps
        return y if self.float_bias is None else y + self.float_bias


class OpKernel(Kernel):
    """Computes a function, a method or a module without weights of this kind; it replaces a call in a graph.

    `replaces` is the name of the op in reports.
    """

    def __init__(
        self, op: Callable[..., Tensor], inputs: Sequence[Grid], output: Grid | None, kind: str, replaces: str
    ) -> None:
        super().__init__(inputs, output)
        self._op = Unregistered(op)
        self.kind, self.replaces = kind, replaces
        self.refresh()

    @property
    def op(self) -> Callable[..., Any]:
        """The function, method or module that it replaces."""
        return self._op.value

    @property
    def object_type(self) -> object:
        """The function or method that it replaces, or the type of the module."""
        return type(self.op) if isinstance(self.op, nn.Module) else self.op

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return the quantized output; the float output if quantization is disabled."""
        return self.compute(*args, **kwargs) if self.active else self.op(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the quantized output."""
        raise NotImplementedError


class SumKernel(OpKernel):
    """Computes a sum of two tensors by `qtoolkit.ops.requantize.add_codes`, with these of its options."""

    HOW: ClassVar[Mapping[str, object]] = {}
    AS_UNSIGNED: ClassVar[bool] = False  # whether signed codes are taken as unsigned ones

    def compute(self, x: Tensor, other: Tensor) -> Tensor:
        sides = (*self.inputs, output_of(self))
        a, b, y = ((s.scale, s.unsigned_zero_point if self.AS_UNSIGNED else s.zero_point) for s in sides)
        return add_codes(x, *a, other, *b, *y, *output_of(self).ends, **self.HOW)
