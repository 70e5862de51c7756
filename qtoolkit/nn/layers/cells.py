"""Recurrent cells with quantized weights, input and state, and the base class that they share with recurrent layers."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.nn.module import QuantModule, activation_quantizer, is_active, quantized
from qtoolkit.quantizers.quantizer import Quantizer


class QuantRecurrent(QuantModule):
    """A recurrent layer or cell with a quantizer for each weight, for its input and for the state that it multiplies.

    Args:
        *args: Arguments of torch's class.
        weight_spec: Spec of the weights, or None; axis 0 is the row of a gate.
        input_spec: Spec of the input, or None.
        activation_spec: Spec of the state, and of the tensors between layers, or None.
        **kwargs: Keyword arguments of torch's class.

    Attributes:
        QUANTIZE_HIDDEN: Whether `activation_spec` applies. With False the state stays float, and a layer computes all its
            steps in one fused kernel.
        input_quantizer: Quantizer of the input, or None (a graph pass inserts it as a node of its own instead).

    Example:
        >>> layer = qt.nn.QuantLSTM(4, 3, weight_spec=qt.QuantSpec(axis=0))
        >>> isinstance(layer, QuantRecurrent), list(qt.quantizers_of(layer))
        (True, ['weight_ih_l0_quantizer', 'weight_hh_l0_quantizer'])
    """

    KIND = "recurrent"
    QUANTIZE_HIDDEN: ClassVar[bool] = True

    input_quantizer: Quantizer | None

    def __init__(
        self,
        *args: object,
        weight_spec: QuantSpec | None = None,
        input_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        name = type(self).__name__
        self.add_quantizers(weight_spec, name, activation_spec)
        self.input_quantizer = activation_quantizer(input_spec, f"{name}.input_quantizer", self)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        _copy_lists(self)
        self.input_quantizer = None
        spec = activation if self.QUANTIZE_HIDDEN else None
        for attribute in self.activation_quantizer_names():
            setattr(self, attribute, activation_quantizer(spec, f"{name}.{attribute}", self))
        self.add_weight_quantizers(weight, name)

    def to_float(self) -> nn.Module:
        layer = super().to_float()
        _copy_lists(layer)
        return layer

    def own_attributes(self) -> tuple[str, ...]:
        return ("input_quantizer", *self.activation_quantizer_names(), *self.weights_to_quantize())

    def weights_to_quantize(self) -> Mapping[str, Tensor]:
        parameters = self.named_parameters(recurse=False)
        return {f"{name}_quantizer": tensor for name, tensor in parameters if name.startswith("weight_")}

    def activation_quantizer_names(self) -> tuple[str, ...]:
        """Return the attributes of the quantizers of the state, and of tensors between layers: a cell has one state."""
        return ("hidden_quantizer",)

    def quantized_weight(self, parameter: str) -> Tensor:
        """Return a weight quantized, given its parameter's name."""
        return quantized(getattr(self, f"{parameter}_quantizer"), getattr(self, parameter))  # type: ignore[no-any-return]

    def with_quantized_weights(self) -> nn.Module:
        """Return a float module with quantized weights, or this module if no weight quantizer is active."""
        active = [name for name, quantizer in self.weight_quantizers().items() if is_active(quantizer)]
        if not active:
            return self
        layer = self.to_float()
        for name in active:
            parameter = self.weight_name(name)
            delattr(layer, parameter)
            setattr(layer, parameter, self.quantized_weight(parameter))
        return layer


def _copy_lists(module: nn.Module) -> None:
    """Copy the lists of a shallow copy: torch's RNNs update their list of weights in place."""
    vars(module).update({name: list(value) for name, value in vars(module).items() if isinstance(value, list)})


class QuantLSTMCell(QuantRecurrent, nn.LSTMCell):
    """torch.nn.LSTMCell with quantized weights and quantized operands of both matrix products; the cell state stays float.

    Attributes:
        weight_ih_quantizer: Quantizer of the weight of the input, or None.
        weight_hh_quantizer: Quantizer of the weight of the hidden state, or None.
        hidden_quantizer: Quantizer of the hidden state before the step, or None.

    Example:
        >>> cell = QuantLSTMCell(4, 3, weight_spec=qt.QuantSpec(axis=0))
        >>> h, c = cell(torch.zeros(2, 4))
        >>> h.shape, cell.weight_ih_quantizer.scale.shape
        (torch.Size([2, 3]), torch.Size([12]))
    """

    FLOAT = nn.LSTMCell

    hidden_quantizer: Quantizer | None

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Take one step; arguments and results are as in torch.nn.LSTMCell."""
        state = None if hx is None else (quantized(self.hidden_quantizer, hx[0]), hx[1])
        return nn.LSTMCell.forward(self.with_quantized_weights(), quantized(self.input_quantizer, input), state)  # type: ignore[arg-type]


class QuantGRUCell(QuantRecurrent, nn.GRUCell):
    """torch.nn.GRUCell with quantized weights and quantized operands of both matrix products.

    The new state is interpolated from the quantized old state. It has the quantizers of `QuantLSTMCell`.
    """

    FLOAT = nn.GRUCell

    hidden_quantizer: Quantizer | None

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Take one step; arguments and result are as in torch.nn.GRUCell."""
        state = None if hx is None else quantized(self.hidden_quantizer, hx)
        return nn.GRUCell.forward(self.with_quantized_weights(), quantized(self.input_quantizer, input), state)  # type: ignore[arg-type]
