"""Recurrent cells with quantized weights, input and state, and what they share with the layers of `recurrent`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.nn.inputs import inner_quantizer, is_active
from qtoolkit.nn.module import Quantizer, QuantModule, quantized
from qtoolkit.quantizers.weights import weight_quantizer


class QuantRecurrent(QuantModule):
    """A recurrent layer or cell with a quantizer for each weight, for its input and for the state that it multiplies.

    Args:
        *args: As torch's own class takes them.
        weight_spec: Spec of the weights, or None; axis 0 is the row of a gate.
        input_spec: Spec of the input, or None.
        activation_spec: Spec of the state, and of what goes from layer to layer inside, or None.
        **kwargs: As torch's own class takes them.

    Attributes:
        QUANTIZE_HIDDEN: Whether `activation_spec` is obeyed. A subclass with False keeps the state in float, and a layer of
            many steps in its one fused kernel.
        input_quantizer: Quantizer of the input where no graph pass inserts one, or None.
    """

    KIND = "recurrent"
    QUANTIZE_HIDDEN: ClassVar[bool] = True

    input_quantizer: Quantizer | None

    def __init__(
        self,
        *args: Any,
        weight_spec: QuantSpec | None = None,
        input_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        name = type(self).__name__
        self.add_quantizers(weight_spec, name, activation_spec)
        self.input_quantizer = inner_quantizer(input_spec, f"{name}.input_quantizer", self)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Put the quantizers in, with the ranges of the weights."""
        _own_lists(self)
        self.input_quantizer = None
        for inner in self.inner():
            spec = activation if self.QUANTIZE_HIDDEN else None
            setattr(self, inner, inner_quantizer(spec, f"{name}.{inner}", self))
        for quantizer, tensor in self._weights().items():
            wanted = None if weight is None else weight_quantizer(tensor, weight, name, name=f"{name}.{quantizer}")
            setattr(self, quantizer, wanted)

    def to_float(self) -> nn.Module:
        """Return the float module with the same parameters."""
        layer = super().to_float()
        _own_lists(layer)
        return layer

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of what it holds beyond the float module."""
        return ("input_quantizer", *self.inner(), *self._weights())

    def quantized_weights(self) -> Mapping[str, tuple[Quantizer, Tensor]]:
        """Return the weights' quantizers with the weights."""
        pairs = ((name, getattr(self, name), tensor) for name, tensor in self._weights().items())
        return {name: (quantizer, tensor) for name, quantizer, tensor in pairs if quantizer is not None}

    def inner(self) -> tuple[str, ...]:
        """Return the names of the quantizers besides those of weights and input."""
        raise NotImplementedError

    def forward_fp32(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module in float, as torch's own class does."""
        return super().forward(*args, **kwargs)

    def quantized_weight(self, parameter: str) -> Tensor:
        """Return one of the weights through its quantizer."""
        return quantized(getattr(self, f"{parameter}_quantizer"), getattr(self, parameter))  # type: ignore[no-any-return]

    def with_quantized_weights(self) -> nn.Module:
        """Return a float module that computes with the quantized weights; this one where no quantizer of them is on."""
        active = [name for name, quantizer in self.weight_quantizers().items() if is_active(quantizer)]
        if not active:
            return self
        layer = self.to_float()
        for name in active:
            parameter = name.removesuffix("_quantizer")
            delattr(layer, parameter)
            setattr(layer, parameter, self.quantized_weight(parameter))
        return layer

    def _weights(self) -> dict[str, Tensor]:
        parameters = self.named_parameters(recurse=False)
        return {f"{name}_quantizer": tensor for name, tensor in parameters if name.startswith("weight_")}


def _own_lists(module: nn.Module) -> None:
    """Give a module, which was adopted, lists of its own: torch's RNNs keep one of their weights in step with them."""
    vars(module).update({name: list(value) for name, value in vars(module).items() if isinstance(value, list)})


class QuantLSTMCell(QuantRecurrent, nn.LSTMCell):
    """torch.nn.LSTMCell with quantized weights and quantized operands of both matrix products; the cell state stays float.

    Attributes:
        weight_ih_quantizer: Quantizer of the weight of the input, or None.
        weight_hh_quantizer: Quantizer of the weight of the hidden state, or None.
        hidden_quantizer: Quantizer of the hidden state as it comes in, or None.

    Example:
        >>> cell = QuantLSTMCell(4, 3, weight_spec=qt.QuantSpec(axis=0))
        >>> h, c = cell(torch.zeros(2, 4))
        >>> h.shape, cell.weight_ih_quantizer.scale.shape
        (torch.Size([2, 3]), torch.Size([12]))
    """

    FLOAT = nn.LSTMCell

    hidden_quantizer: Quantizer | None

    def inner(self) -> tuple[str, ...]:
        """Return the names of the quantizers besides those of weights and input."""
        return ("hidden_quantizer",)

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Take one step; arguments and results as of torch.nn.LSTMCell."""
        state = None if hx is None else (quantized(self.hidden_quantizer, hx[0]), hx[1])
        return nn.LSTMCell.forward(self.with_quantized_weights(), quantized(self.input_quantizer, input), state)  # type: ignore[arg-type]


class QuantGRUCell(QuantRecurrent, nn.GRUCell):
    """torch.nn.GRUCell with quantized weights and quantized operands of both matrix products.

    The new state is blended from the quantized old one.

    Attributes:
        weight_ih_quantizer: Quantizer of the weight of the input, or None.
        weight_hh_quantizer: Quantizer of the weight of the hidden state, or None.
        hidden_quantizer: Quantizer of the hidden state as it comes in, or None.

    Example:
        >>> QuantGRUCell(4, 3, weight_spec=qt.QuantSpec(axis=0))(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    FLOAT = nn.GRUCell

    hidden_quantizer: Quantizer | None

    def inner(self) -> tuple[str, ...]:
        """Return the names of the quantizers besides those of weights and input."""
        return ("hidden_quantizer",)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Take one step; arguments and result as of torch.nn.GRUCell."""
        state = None if hx is None else quantized(self.hidden_quantizer, hx)
        return nn.GRUCell.forward(self.with_quantized_weights(), quantized(self.input_quantizer, input), state)  # type: ignore[arg-type]
