"""QuantWeighted: the base class of layers with one quantized weight."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.nn import batch_norm, on_codes
from qtoolkit.nn.batch_norm import LinkedBatchNorm
from qtoolkit.nn.computed_weights import computing_once
from qtoolkit.nn.folding import FoldsBatchNorm
from qtoolkit.nn.layer_call import LayerCall, Source
from qtoolkit.nn.layer_op import LayerOp, put_channels
from qtoolkit.nn.module import activation_quantizer, quantized
from qtoolkit.nn.output_grid import quantized_for
from qtoolkit.ops.layer import WeightGrid
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, has_own_forward
from qtoolkit.quantizers.weights import weight_quantizer
from qtoolkit.running import Run, running


class QuantWeighted(FoldsBatchNorm, on_codes.TakesCodes):
    """A layer whose forward fake-quantizes its weight; to be mixed into torch's class.

    With a linked batch norm, the weight is quantized as folding the batch norm would scale it. In eval mode the layer
    computes the same as the converted model; in training mode it follows a strategy of `qtoolkit.nn.batch_norm`.

    Args:
        *args: Arguments of torch's class.
        weight_spec: Spec of the weight; None leaves it in float.
        input_spec: Spec of the input; None leaves it unchanged.
        **kwargs: Keyword arguments of torch's class.

    Raises:
        ValueError: A spec does not fit, or an embedding, whose inputs are indices, has an `input_spec`.

    Attributes:
        weight_quantizer: Quantizer of the weight (a Grid after conversion), or None.
        input_quantizer: Quantizer of the input, or None (a graph pass inserts it as a node of its own instead).
        integer_kernel: The `qtoolkit.integer.kernels.LayerKernel` that computes it in integers (see `qtoolkit.convert`), or
            None. For a layer whose calls a graph numbers, the first call's; `LayerCall.kernel` finds the others.
        layer_calls: The properties of each call of the layer in a graph.
        returns_channels_last: Whether a 2-d convolution that trains in integers returns images in channels_last;
            otherwise in the memory format of its input.

    Example:
        >>> layer = qt.nn.QuantLinear(4, 2, weight_spec=qt.QuantSpec(bits=4, axis=0))
        >>> isinstance(layer, QuantWeighted), layer.weight_quantizer(layer.weight).unique().numel() <= 2 * 15
        (True, True)
    """

    UPDATED = ("updated_channels",)

    input_quantizer: Quantizer | None
    integer_kernel: nn.Module | None
    layer_calls: tuple[LayerCall, ...] = (LayerCall(),)
    returns_channels_last: bool = False
    bias_is_corrected: bool = False  # by qtoolkit.tuning.bias_correction: it differs from the float model's

    def __init__(
        self, *args: Any, weight_spec: QuantSpec | None = None, input_spec: QuantSpec | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        name = type(self).__name__
        self.add_quantizers(weight_spec, name)
        if input_spec is None:
            return
        if self.OP_KIND.takes_indices:
            raise ValueError(
                f"{name}: input_spec must be None: its inputs are indices, which have no range to quantize."
            )
        self.input_quantizer = activation_quantizer(input_spec, f"{name}.input_quantizer", self)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        self.add_updated_channels()
        self.integer_kernel = None
        self.input_quantizer = None
        self.weight_quantizer = None
        if weight is not None:
            self.weight_quantizer = weight_quantizer(self.weight, weight, name, self.scale_groups(weight.axis))

    def layers_of_weights(self) -> Mapping[str, LayerOp]:
        in_groups = self.OUTPUT_AXIS == 1 and self.weight_groups()[1] > 1  # the channels lie along two axes
        return {"weight": self} if self.has_geometry() and not in_groups else {}

    def update_channels(self, channels: Tensor | None) -> None:
        put_channels(self, *self.UPDATED, channels, self.weight.device)

    def own_attributes(self) -> tuple[str, ...]:
        quantizers = ("weight_quantizer", "input_quantizer", *(call.kernel_name for call in self.layer_calls))
        settings = ("training_arithmetic", "returns_channels_last", "bias_is_corrected")
        return (
            *quantizers,
            *settings,
            "layer_calls",
            *self.UPDATED,
            "_linked_batch_norm",
            "_holds_batch_norm",
            "_holds_batch_norm_before",
        )

    def quantized_weights(self) -> Mapping[str, tuple[Quantizer, Tensor]]:
        return {name: (quantizer, self.effective_weight()) for name, quantizer in self.weight_quantizers().items()}

    def weight_quantizers(self) -> Mapping[str, Quantizer]:
        return {} if self.weight_quantizer is None else {"weight_quantizer": self.weight_quantizer}

    def reset_parameters(self) -> None:
        """Initialize weight and bias anew, as torch's class does, with the range of the new weight: learned scales too."""
        super().reset_parameters()  # type: ignore[misc]  # of torch's class
        if hasattr(self, "weight_quantizer"):  # torch's classes call this before there are quantizers
            self.bias_is_corrected = False
            self.reset_weight_range()

    # ---- calls

    def input_sources(self) -> Sequence[Source | None]:
        return [source for call in self.layer_calls for source in (call.source, call.sums_over)]

    def unlink(self) -> None:
        """Take inputs for any values, and add the bias in float: the graph does not call the layer any more."""
        self.layer_calls = tuple(replace(call, source=None, sums_over=None) for call in self.layer_calls)

    def computes_by(self) -> list[nn.Module]:
        weight = self.weight_quantizer
        return [*([] if weight is None else weight.modules()), *super().computes_by()]

    @property
    def source(self) -> Quantizer | None:
        """The quantizer on whose grid the inputs lie, or None where that is not known; of several calls, the first's."""
        return self.source_at()

    def source_at(self, call: int = 0) -> Quantizer | None:
        """Return the quantizer on whose grid the input of a call lies, or None where that is not known."""
        return self.layer_calls[call].input_quantizer(self)

    @property
    def has_active_kernel(self) -> bool:
        """Whether an integer kernel computes a call of the layer."""
        kernels = (call.kernel(self) for call in self.layer_calls)
        return any(kernel is not None and kernel.active for kernel in kernels)

    def sum_steps(self, call: int = 0) -> Tensor | None:
        """Return the steps of the integer sums of a call; None where the target has none."""
        return self.layer_calls[call].sum_steps(self)

    def bias_in_sums(self, bias: Tensor | None, call: LayerCall | None = None) -> Tensor | None:
        """Return a bias as the target adds it in a call, by default the first: on the grid of its sums, if it has some."""
        return (call or self.layer_calls[0]).bias_in_sums(self, bias)

    def fit_bias(self) -> int:
        """Enlarge the scales of a converted layer's weight where the bias does not fit in int32; return how many."""
        grid = self.weight_quantizer
        if not isinstance(grid, Grid):
            return 0
        before = grid.scale
        for call in self.layer_calls:
            call.fit_bias(self, grid)
        return int((grid.scale > before).sum())

    # ---- forward

    def weight_grid(self, run: Run, factor: Tensor | None) -> WeightGrid | None:
        """Return the grid of the weight, its output channels multiplied by a factor, for an op that quantizes it."""
        return on_codes.weight_grid(run, self, partial(self._followed, factor))

    def quantize_weight(self, weight: Tensor) -> Tensor:
        """Return a weight quantized by the weight's quantizer."""
        return quantized(self.weight_quantizer, weight)  # type: ignore[no-any-return]  # a Tensor, as its argument

    def forward(
        self, input: Tensor, *args: Any, call: int = 0, input_codes: TensorCodes | None = None, **kwargs: Any
    ) -> Tensor:
        """Apply the layer to its quantized input with its quantized weight; other arguments are torch's.

        `call` is the number of this call, where a graph has several on different grids: passes set it. The forward of
        a prepared model passes `input_codes`.
        """
        self.check_input(input)
        this = self.layer_calls[call]
        kernel = this.kernel(self)
        if kernel is not None and kernel.active:
            return kernel(input, *args, **kwargs)  # type: ignore[no-any-return]  # a Tensor
        run = running()
        x, input_codes = self._quantized(run, input, input_codes)
        compute, bn = partial(self._run, run, this, x, input_codes, args, kwargs), self.batch_norm
        with computing_once(run, self):
            if bn is None:
                return compute(None, self.bias, True)
            return batch_norm.forward_with(run, self, bn, compute)

    def bn_scaled_output(
        self, run: Run, bn: LinkedBatchNorm, input: Tensor, input_codes: TensorCodes | None = None, call: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return `qtoolkit.nn.batch_norm.bn_scaled_output` for the linked batch norm, from arguments of forward."""
        self.check_input(input)
        x, input_codes = self._quantized(run, input, input_codes)
        compute = partial(self._run, run, self.layer_calls[call], x, input_codes, (), {})
        with computing_once(run, self):
            return batch_norm.bn_scaled_output(run, self, bn, compute)

    def forward_fp32(self, input: Tensor, *args: Any, call: int = 0, **kwargs: Any) -> Tensor:
        """Compute the float layer: without quantizers and without the batch norm. It takes the arguments of forward."""
        return self.compute(input, self.weight, self.bias, *args, **kwargs)

    def _quantized(self, run: Run, x: Tensor, input_codes: TensorCodes | None) -> tuple[Tensor, TensorCodes | None]:
        """Return the quantized input and its integers, where it has some."""
        if self.input_quantizer is None:
            return x, input_codes
        return quantized_for(run, self.training_arithmetic, self.input_quantizer, x)

    def _run(
        self,
        run: Run,
        call: LayerCall,
        x: Tensor,
        input_codes: TensorCodes | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        factor: Tensor | None,
        bias: Tensor | None,
        with_quantized_weight: bool,
    ) -> Tensor:
        """Compute a call with the weight, each output channel multiplied by a factor before it is quantized."""
        if not with_quantized_weight:
            return self.compute(x, self.updated_weight(self.weight), bias, *args, **kwargs)
        source, in_sums = partial(call.input_quantizer, self), partial(self.bias_in_sums, bias, call)
        y = on_codes.compute(run, self, x, source, factor, in_sums, args, kwargs, input_codes)
        if y is not None:
            return y
        weight = on_codes.quantized_weight(run, self, factor)  # before the bias, whose grid takes the weight's scale
        if weight is None:
            weight = self._scaled_and_quantized(factor)
        bias = in_sums()
        if factor is not None:  # a batch norm may be in float32 after a layer in half precision
            weight, bias = weight.to(self.weight.dtype), None if bias is None else bias.to(self.weight.dtype)
        return self.compute(x, weight, bias, *args, **kwargs)

    def _scaled_and_quantized(self, factor: Tensor | None) -> Tensor:
        """Return the weight, each output channel multiplied by a factor, quantized by its quantizer.

        Only the channels that are updated give gradients to the weight and to the scale.
        """
        quantizer, scaled = self.weight_quantizer, self._scaled(self.weight, factor)
        if self.training or not isinstance(quantizer, TensorQuantizer) or has_own_forward(quantizer):
            return self.updated_weight(self.quantize_weight(scaled))
        return self.updated_weight(quantizer(scaled, range_of=self.effective_weight))
