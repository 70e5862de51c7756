"""QuantWeighted: the base class of layers with one quantized weight, with the batch norm that folds into it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.nn import batch_norm, on_codes
from qtoolkit.nn.batch_norm import LinkedBatchNorm
from qtoolkit.nn.computed_weights import bake, computing_once, mask
from qtoolkit.nn.module import QuantModule, activation_quantizer, quantized
from qtoolkit.nn.output_grid import quantized_for
from qtoolkit.ops.layer import Geometry, WeightGrid
from qtoolkit.processes import whole
from qtoolkit.quantizers.bias import bias_scale, enlarged, on_grid
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, has_own_forward
from qtoolkit.quantizers.weights import weight_quantizer


class QuantWeighted(QuantModule, on_codes.TakesCodes):
    """A layer whose forward fake-quantizes its weight; to be mixed into torch's class.

    With a linked batch norm, the weight is quantized as folding the batch norm would scale it. In eval mode the layer
    computes what the converted model does; in training mode it follows a strategy of `qtoolkit.nn.batch_norm`.

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
        integer_kernel: The `qtoolkit.integer.kernels.LayerKernel` that computes the layer on codes (see `qtoolkit.convert`), or
            None. Of a layer that a graph calls several times, a ModuleDict with that of each call.
        returns_channels_last: Whether a 2-d convolution returns images in channels_last where it computes on codes in training;
            otherwise in the memory format of its input.

    Example:
        >>> layer = qt.nn.QuantLinear(4, 2, weight_spec=qt.QuantSpec(bits=4, axis=0))
        >>> isinstance(layer, QuantWeighted), layer.weight_quantizer(layer.weight).unique().numel() <= 2 * 15
        (True, True)
    """

    OUTPUT_AXIS: ClassVar[int] = 0  # of the weight's dimensions, the one along which the output channels run

    weight: Any  # a Parameter, and a Parameter or None: torch's classes declare them differently
    bias: Any
    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | None
    integer_kernel: nn.Module | None
    returns_channels_last: bool = False
    _batch_norm: tuple[LinkedBatchNorm, ...] = ()
    _sums_over: tuple[on_codes.Source | None, ...] = ()
    _holds_batch_norm: bool  # linked or folded
    bias_is_corrected: bool = False  # by qtoolkit.tuning.bias_correction: it is no longer that of the float model

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
        self._batch_norm, self._holds_batch_norm = (), False
        self._sums_over, self._sources = (), ()
        self.integer_kernel = None
        self.input_quantizer = None
        self.weight_quantizer = None
        if weight is not None:
            self.weight_quantizer = weight_quantizer(self.weight, weight, name, self.scale_groups(weight.axis))

    def own_attributes(self) -> tuple[str, ...]:
        return (
            "weight_quantizer",
            "input_quantizer",
            "_batch_norm",
            "_holds_batch_norm",
            "_sums_over",
            "_sources",
            "training_arithmetic",
            "integer_kernel",
            "returns_channels_last",
            "bias_is_corrected",
        )

    def quantized_weights(self) -> Mapping[str, tuple[Quantizer, Tensor]]:
        return {name: (quantizer, self.effective_weight()) for name, quantizer in self.weight_quantizers().items()}

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return the weight, if a linked batch norm multiplies it."""
        return {} if self.batch_norm is None else {"weight_quantizer": self.weight}

    def weight_quantizers(self) -> Mapping[str, Quantizer]:
        return {} if self.weight_quantizer is None else {"weight_quantizer": self.weight_quantizer}

    # ---- batch norm

    @property
    def batch_norm(self) -> LinkedBatchNorm | None:
        """The batch norm after the layer, which conversion folds, or None. It keeps its place in the model."""
        return self._batch_norm[0] if self._batch_norm else None

    @property
    def takes_factor(self) -> bool:
        """Whether the weight's scales are in units of the weight, as the papers train them.

        The weight is quantized times the factor of a linked batch norm. Each training step scales of any value take the change
        of the factor: one for each output channel that of its own, one for all that of the root of the mean square.
        """
        quantizer, bn = self.weight_quantizer, self.batch_norm
        constant = bn is None or isinstance(bn, batch_norm.QuantFrozenBatchNorm)
        return not constant and isinstance(quantizer, TensorQuantizer) and quantizer.follows_factor

    def why_batch_norm_stays(self) -> str | None:
        """Return why no batch norm can be linked, or folded; None if one can."""
        quantizer = self.weight_quantizer
        if not isinstance(quantizer, TensorQuantizer) or quantizer.kind.KEEPS_SIZE:
            return None
        return f"quantizer={quantizer.spec.quantizer!r} gives all weights the size of 1"

    def depends_on(self) -> Sequence[nn.Module]:
        return self._batch_norm

    def link_batch_norm(self, bn: LinkedBatchNorm) -> None:
        """Quantize the weight as folding this batch norm scales it."""
        self._holds_batch_norm = True
        self._batch_norm = (bn,)  # in a tuple: as a submodule it would add its parameters to the state dict twice
        quantizer, along_outputs = self.weight_quantizer, self.scales_along_outputs()
        if isinstance(quantizer, TensorQuantizer) and quantizer.takes_any_scale and along_outputs:
            quantizer.follow_factor()
        self.reset_weight_range()

    def take_factor(self, frozen: bool = False) -> None:
        """Let scales in units of the weight take the factor of the present running statistics, with frozen ranges too."""
        bn = self.batch_norm
        if bn is not None and self.takes_factor and not bn.running_var.is_meta:
            batch_norm.take_factor(self, bn, bn.running_var, frozen=frozen)

    def reset_parameters(self) -> None:
        """Initialize weight and bias anew, as torch's class does, with the range of the new weight: learned scales too."""
        super().reset_parameters()  # type: ignore[misc]  # of torch's class
        if hasattr(self, "weight_quantizer"):  # torch's classes call this before there are quantizers
            self.bias_is_corrected = False
            self.reset_weight_range()

    def follow_weights(self) -> None:
        """Set the range as in the class above, after the scales have taken the factor of the running statistics."""
        self.take_factor()
        super().follow_weights()

    def replace_batch_norm(self, bn: nn.Module, name: str) -> LinkedBatchNorm:
        """Link to another batch norm, of this dotted name, instead; return it as LinkedBatchNorm."""
        (old,) = self._batch_norm
        new = batch_norm.linked(bn, old.strategy, name)
        new.frozen = old.frozen
        self._batch_norm = (new,)
        return new

    def fold_batch_norm(self, bn: nn.Module) -> None:
        """Fold a batch norm's running statistics, scale and shift into weight and bias; the caller removes the batch norm.

        A pruned weight stays pruned. Other weights that a hook or a parametrization computes become plain parameters.
        """
        masks = bake(self)
        factor = batch_norm.factor_of(bn).detach()
        weight = self.scale_output_channels(self.weight.detach(), factor)
        bias = batch_norm.folded_bias(bn, self.bias, factor).detach()
        dtype = self.weight.dtype  # a batch norm may be in float32 behind a layer in half precision
        self.weight = nn.Parameter(weight.to(dtype), self.weight.requires_grad)
        self.bias = nn.Parameter(bias.to(dtype), self.weight.requires_grad)
        self._batch_norm, self._holds_batch_norm = (), True
        mask(self, masks)

    # ---- bias

    def link_input(self, *sources: on_codes.Source | None) -> None:
        """Round the bias to the grid of the integer sums over this quantizer's codes, as the target does.

        With several, the source of each call's input, by the call's number. None stands for the quantizer of the layer's own,
        if it has one; without any, the target adds the bias in float.
        """
        self._sums_over = sources  # in a tuple: they are submodules elsewhere

    def unlink(self) -> None:
        """Take inputs for any values, and add the bias in float."""
        super().unlink()
        self._sums_over = (None,) if self._sums_over else ()

    def computes_by(self) -> list[nn.Module]:
        weight = self.weight_quantizer
        return [*([] if weight is None else weight.modules()), *super().computes_by()]

    def summed_input(self, call: int = 0) -> Quantizer | None:
        """Return the quantizer over whose codes the target sums in a call; None where it adds the bias in float."""
        source = on_codes.of_call(self._sums_over, call)
        return (None if source is None else source.quantizer) or (self.input_quantizer if self._sums_over else None)

    def sum_steps(self, call: int = 0) -> Tensor | None:
        """Return the steps of the integer sums of a call: one, or one per output channel. None without a linked input."""
        weight, source = self.weight_quantizer, self.summed_input(call)
        if source is None or weight is None or not (source.capability_now.codes and weight.capability_now.sums):
            return None
        if not self.scales_along_outputs():
            return None
        return bias_scale(source.scale, weight.scale)

    def scales_along_outputs(self) -> bool:
        """Return whether the weight has one scale, or one per output channel."""
        quantizer = self.weight_quantizer
        return quantizer is not None and on_codes.along_outputs(quantizer.spec, self.weight, self.OUTPUT_AXIS)

    def fit_bias(self) -> int:
        """Enlarge the scales of a converted layer's weight where the bias does not fit in int32; return how many."""
        grid, bias = self.weight_quantizer, self.bias
        if bias is None or not isinstance(grid, Grid):
            return 0
        before = grid.scale
        for call in range(len(self._sums_over)):
            source = self.summed_input(call)
            if source is not None and self.sum_steps(call) is not None:
                grid.scale = enlarged(grid.scale, source.scale, bias)
        return int((grid.scale > before).sum())

    def bias_in_sums(self, bias: Tensor | None, call: int = 0) -> Tensor | None:
        """Return a bias of the layer as the target adds it in a call: on the grid of its sums, if the input is linked."""
        steps = None if bias is None else self.sum_steps(call)
        converted = isinstance(self.weight_quantizer, Grid)
        return bias if bias is None or steps is None else on_grid(bias, steps, fits=converted)

    # ---- forward

    def effective_weight(self) -> Tensor:
        """Return the tensor that is quantized in eval mode: the weight, scaled by the linked batch norm's nonzero factors."""
        if self.batch_norm is None:
            return self.weight  # type: ignore[no-any-return]  # a Parameter
        return self.scale_output_channels(whole(self.weight), batch_norm.divisor_of(self.batch_norm))

    def weight_grid(self, factor: Tensor | None) -> WeightGrid | None:
        """Return the grid of the weight, its output channels multiplied by a factor, for an op that quantizes it."""
        return on_codes.weight_grid(self, partial(self._followed, factor))

    def quantize_weight(self, weight: Tensor) -> Tensor:
        """Return a weight quantized by the weight's quantizer."""
        return quantized(self.weight_quantizer, weight)  # type: ignore[no-any-return]  # a Tensor, as its argument

    def forward(
        self, input: Tensor, *args: Any, call: int = 0, known: TensorCodes | None = None, **kwargs: Any
    ) -> Tensor:
        """Apply the layer to its quantized input with its quantized weight; other arguments are those of torch's layer.

        `call` is the number of this call, where a graph has several of the layer on different grids: passes set it. `known` is
        what the code of a prepared model knows of the input.
        """
        self.check_input(input)
        kernel = self._kernel_of(call)
        if kernel is not None and kernel.active:
            return kernel(input, *args, **kwargs)  # type: ignore[no-any-return]  # a Tensor
        x, known = self._quantized(input, known)
        bn = self.batch_norm
        with computing_once(self):
            if bn is None:
                return self.run(x, None, self.bias, *args, call=call, known=known, **kwargs)
            return batch_norm.forward_with(self, bn, partial(self._call, x, known, args, kwargs))

    def _quantized(self, x: Tensor, known: TensorCodes | None) -> tuple[Tensor, TensorCodes | None]:
        """Return the quantized input and what is known of it."""
        if self.input_quantizer is None:
            return x, known
        return quantized_for(self.training_arithmetic, self.input_quantizer, x)

    def compute_by(self, kernel: nn.Module, call: int | None = None) -> None:
        """Compute the layer on codes by a kernel; of a layer that a graph calls several times, the call of this number."""
        if call is None:
            self.integer_kernel = kernel
            return
        kernels = self.integer_kernel if isinstance(self.integer_kernel, nn.ModuleDict) else nn.ModuleDict()
        kernels[str(call)] = kernel
        self.integer_kernel = kernels

    def kernels_of_calls(self) -> tuple[Any, ...]:
        """Return what computes the calls of the layer on codes."""
        kernels = self.integer_kernel
        if isinstance(kernels, nn.ModuleDict):
            return tuple(kernels.values())
        return () if kernels is None else (kernels,)

    def _kernel_of(self, call: int) -> Any:
        kernels = self.integer_kernel
        if not isinstance(kernels, nn.ModuleDict):
            return kernels
        return next((kernel for number, kernel in kernels.items() if number == str(call)), None)

    def run(
        self,
        x: Tensor,
        factor: Tensor | None,
        bias: Tensor | None,
        *args: Any,
        call: int = 0,
        known: TensorCodes | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the layer with its quantized weight, each output channel multiplied by a factor before it is quantized."""
        y = on_codes.run(self, x, factor, bias, args, kwargs, call, known)
        if y is not None:
            return y
        weight = on_codes.quantized_weight(self, factor)  # before the bias, whose grid takes the weight's scale
        if weight is None:
            weight = self._scaled_and_quantized(factor)
        bias = self.bias_in_sums(bias, call)
        if factor is not None:  # a batch norm may be in float32 behind a layer in half precision
            weight, bias = weight.to(self.weight.dtype), None if bias is None else bias.to(self.weight.dtype)
        return self.compute(x, weight, bias, *args, **kwargs)

    def _scaled_and_quantized(self, factor: Tensor | None) -> Tensor:
        """Return the weight, each output channel multiplied by a factor, quantized by its quantizer."""
        quantizer, scaled = self.weight_quantizer, self._scaled(self.weight, factor)
        if self.training or not isinstance(quantizer, TensorQuantizer) or has_own_forward(quantizer):
            return self.quantize_weight(scaled)
        y: Tensor = quantizer(scaled, range_of=self.effective_weight)
        return y

    def _scaled(self, weight: Tensor, factor: Tensor | None) -> Tensor:
        return weight if factor is None else self.scale_output_channels(weight, factor)

    def _followed(self, factor: Tensor | None) -> Tensor:
        """Return the tensor whose range one that follows the weight takes in this forward.

        In eval mode it is that of convert: a factor of zero leaves no range, and the bias is rounded in steps of the scale.
        """
        if not self.training:
            return self.effective_weight().detach()
        return self._scaled(self.weight.detach(), None if factor is None else factor.detach())

    def undivided(self, input: Tensor, known: TensorCodes | None = None) -> tuple[Tensor, Tensor]:
        """Return what `qtoolkit.nn.batch_norm.undivided` does, for an input of forward: for the linked batch norm."""
        self.check_input(input)
        x, known = self._quantized(input, known)
        compute = partial(self._call, x, known, (), {})
        with computing_once(self):
            return batch_norm.undivided(self, self._batch_norm[0], compute)

    def forward_fp32(self, input: Tensor, *args: Any, call: int = 0, **kwargs: Any) -> Tensor:
        """Compute the float layer: without quantizers and without the batch norm."""
        return self.compute(input, self.weight, self.bias, *args, **kwargs)

    def _call(
        self,
        x: Tensor,
        known: TensorCodes | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        factor: Tensor | None,
        bias: Tensor | None,
        with_quantized_weight: bool,
    ) -> Tensor:
        """Compute the layer for a strategy of batch norms."""
        if with_quantized_weight:
            return self.run(x, factor, bias, *args, known=known, **kwargs)
        return self.compute(x, self.weight, bias, *args, **kwargs)

    # ---- for subclasses to implement or override

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the float layer with this weight and bias."""
        raise NotImplementedError

    def geometry(self, x: Tensor, *args: Any, **kwargs: Any) -> Geometry | None:
        """Return what the layer computes from this input, for an op; None where only `compute` can."""
        return None

    @classmethod
    def has_geometry(cls) -> bool:
        """Return whether an op can compute such a layer."""
        return cls.geometry is not QuantWeighted.geometry

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError if, for this input, the batch norm normalizes another dimension than the layer's output channels."""

    def channels(self) -> int:
        """Return the number of output channels."""
        return int(self.weight.size(0))

    def sum_per_output(self, values: Tensor) -> Tensor:
        """Return the sum, for each output channel, of the elements of a tensor like the weight, in float64."""
        return values.flatten(1).sum(1, dtype=torch.float64)

    def scale_output_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Multiply each output channel of a weight by its factor."""
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))

    def along_channels(self, values: Tensor) -> Tensor:
        """Shape one value per output channel to broadcast over an output."""
        return values.reshape(-1, *[1] * (self.weight.dim() - 2))

    def weight_groups(self) -> tuple[bool, int]:
        """Return whether the weight is transposed, (in, out / groups, k...), and with how many groups."""
        return False, 1

    def scale_groups(self, axis: int | None) -> int:
        """Return the `group` argument of ops on the weight with scales along an axis."""
        return 1


def set_training_arithmetic(
    model: nn.Module,
    arithmetic: on_codes.Arithmetic = "auto",
    save: on_codes.Saved = "codes",
) -> None:
    """Set how a prepared or replaced model computes in training, at any time.

    With arithmetic="float" and save="float" training calls torch's own ops and fake quantization alone, which can be
    differentiated twice.

    Args:
        model: What `qtoolkit.prepare` or `qtoolkit.quant_modules.replace` returned, or a part of it, for the layers in it: the
            ops between the layers of a traced model follow the setting of the whole model.
        arithmetic: How convolutions, linear layers and products of two activations compute whose operands are on integer grids.
            "float": in float, on the values. "integer": on the codes, with exact sums. "auto": on the codes where torch has
            exact int8 kernels for the op on this processor and its input is large enough for them to be faster
            (`benchmarks/pages/small_layers.py`), else in float, as always on a GPU. In any case gradients are the
            straight-through ones.
        save: What such an op keeps of its operands for backward. "codes": a byte an element, half a byte for at most 4 bits.
            "float": the values.

    Raises:
        ValueError: A value is not known.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), backend="tensorrt")
        >>> set_training_arithmetic(prepared, "float")
        >>> prepared.get_submodule("0").training_arithmetic
        TrainingArithmetic(forward='float', save='codes')
    """
    of_each = on_codes.TrainingArithmetic(arithmetic, save)
    for module in model.modules():
        if isinstance(module, on_codes.TrainsOnCodes):
            module.training_arithmetic = of_each
