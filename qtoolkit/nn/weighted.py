"""What all layers with one quantized weight share: batch norm, folding, and the road from float and back."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.nn import batch_norm
from qtoolkit.nn.batch_norm import LinkedBatchNorm
from qtoolkit.nn.module import Quantizer, QuantModule, quantized
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.quantizers.weights import weight_quantizer


class QuantWeighted(QuantModule):
    """A layer with a weight that is fake-quantized in forward; mixed into torch's own class.

    With a batch norm linked, the weight is quantized as it will be once that one is folded: in eval mode the layer computes
    exactly what the converted model does; in training mode by one of the strategies of `qtoolkit.nn.batch_norm`.

    Args:
        *args: As torch's own class takes them.
        weight_spec: Spec of the weight, or None for a float weight.
        input_spec: Spec of the input, or None for an input that stays as it is.
        **kwargs: As torch's own class takes them.

    Raises:
        ValueError: A spec does not fit, or `input_spec` is one for the indices that an embedding takes.

    Attributes:
        weight_quantizer: Quantizer of the weight (a Grid once converted), or None.
        input_quantizer: Quantizer of the input where no graph pass inserts one, or None.
    """

    weight: Any  # a Parameter, and a Parameter or None; torch's own classes declare them each in its way
    bias: Any
    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | None
    _batch_norm: tuple[LinkedBatchNorm, ...]
    _holds_batch_norm: bool  # linked or folded

    def __init__(
        self, *args: Any, weight_spec: QuantSpec | None = None, input_spec: QuantSpec | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        name = type(self).__name__
        self.add_quantizers(weight_spec, name)
        if input_spec is not None and self.KIND == "embedding":
            raise ValueError(
                f"{name}: input_spec must be None: its inputs are indices, which have no range to quantize."
            )
        if input_spec is not None:
            self.input_quantizer = TensorQuantizer(input_spec, name=f"{name}.input_quantizer").to(self.weight.device)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Put the weight's quantizer in, with the range of the weight."""
        self._batch_norm, self._holds_batch_norm = (), False
        self.input_quantizer = None
        self.weight_quantizer = None
        if weight is not None:
            self.weight_quantizer = weight_quantizer(self.weight, weight, name, self.scale_groups(weight.axis))

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of what it holds beyond the float layer."""
        return ("weight_quantizer", "input_quantizer", "_batch_norm", "_holds_batch_norm")

    def quantized_weights(self) -> Mapping[str, tuple[Quantizer, Tensor]]:
        """Return the weight's quantizer with the weight as it is quantized."""
        return {name: (quantizer, self.effective_weight()) for name, quantizer in self.weight_quantizers().items()}

    def weight_quantizers(self) -> Mapping[str, Quantizer]:
        """Return the weight's quantizer."""
        return {} if self.weight_quantizer is None else {"weight_quantizer": self.weight_quantizer}

    # ---- batch norm

    @property
    def batch_norm(self) -> LinkedBatchNorm | None:
        """The batch norm that follows and will be folded, or None. It stays where it is in the model."""
        return self._batch_norm[0] if self._batch_norm else None

    def link_batch_norm(self, bn: LinkedBatchNorm) -> None:
        """Quantize the weight as it will be once this batch norm is folded."""
        self._holds_batch_norm = True
        self._batch_norm = (bn,)  # in a tuple, so that its parameters keep their one name in the state dict
        self.reset_weight_range()

    def replace_batch_norm(self, bn: nn.Module, name: str) -> LinkedBatchNorm:
        """Link to another batch norm, of this dotted name, instead; return it as LinkedBatchNorm."""
        (old,) = self._batch_norm
        new = batch_norm.linked(bn, old.strategy, name)
        new.frozen = old.frozen
        self._batch_norm = (new,)
        return new

    def fold_batch_norm(self, bn: nn.Module) -> None:
        """Put a batch norm's eval-mode scaling and shift into weight and bias; the caller removes it."""
        factor = batch_norm.factor_of(bn).detach()
        weight = self.scale_output_channels(self.weight.detach(), factor)
        bias = batch_norm.folded_bias(bn, self.bias, factor).detach()
        self.weight = nn.Parameter(weight, self.weight.requires_grad)
        self.bias = nn.Parameter(bias, self.weight.requires_grad)
        self._batch_norm, self._holds_batch_norm = (), True

    # ---- forward

    def effective_weight(self) -> Tensor:
        """Return the weight as it is quantized in eval mode: with the linked batch norm's factor, where that is not 0."""
        if self.batch_norm is None:
            return self.weight  # type: ignore[no-any-return]  # a Parameter
        return self.scale_output_channels(self.weight, batch_norm.divisor_of(self.batch_norm))

    def quantize_weight(self, weight: Tensor) -> Tensor:
        """Return a weight through the weight's quantizer."""
        return quantized(self.weight_quantizer, weight)  # type: ignore[no-any-return]  # a Tensor, as its argument

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer with its quantized input and weight; further arguments as torch's layer takes them."""
        self.check_input(input)
        x = quantized(self.input_quantizer, input)
        bn = self.batch_norm
        if bn is None:
            return self.compute(x, self.quantize_weight(self.weight), self.bias, *args, **kwargs)
        return batch_norm.forward_with(self, bn, partial(self._compute_with, x, args, kwargs))

    def forward_fp32(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer in float, without quantizers (and without the batch norm, as the float layer does)."""
        return self.compute(input, self.weight, self.bias, *args, **kwargs)

    def _compute_with(
        self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return self.compute(x, weight, bias, *args, **kwargs)

    # ---- what a kind of layer has to say

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the float layer with this weight and bias."""
        raise NotImplementedError

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError where a batch norm after the layer has other channels than the layer, for this input."""

    def channels(self) -> int:
        """Return the number of output channels, which a batch norm after the layer has to have."""
        return int(self.weight.size(0))

    def scale_output_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Multiply each output channel of a weight by its factor."""
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))

    def along_channels(self, values: Tensor) -> Tensor:
        """Shape one value per output channel to broadcast over an output."""
        return values.reshape(-1, *[1] * (self.weight.dim() - 2))

    def scale_groups(self, axis: int | None) -> int:
        """Return the `group` argument of ops on the weight with scales along an axis."""
        return 1
