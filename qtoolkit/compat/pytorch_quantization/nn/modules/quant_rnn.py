"""LSTM and its cell with quantized operands, with pytorch-quantization's names, numerics and defaults."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit import nn as qnn
from qtoolkit.compat.pytorch_quantization.descriptor import QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW
from qtoolkit.compat.pytorch_quantization.nn.modules.export_form import fx_leaf
from qtoolkit.compat.pytorch_quantization.nn.modules.layers import QuantLayer
from qtoolkit.compat.pytorch_quantization.nn.modules.mixins import QuantMixin, take_quant_desc
from qtoolkit.nn.layers.recurrent import State, Step


def _split(quantizer: nn.Module, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices after their concatenation was quantized."""
    both = quantizer(torch.cat([first, second], 1))
    return both[:, : first.size(1)], both[:, first.size(1) :]


class QuantLSTM(QuantLayer, qnn.QuantLSTM):  # type: ignore[misc]  # quantizers follow from descriptors, not from specs
    """torch.nn.LSTM with quantizers of cat([x, h], 1) and of cat([w_ih, w_hh], 1) for each layer and direction.

    They are `_input_quantizers` and `_weight_quantizers`, in the order of torch's states. Each step is computed separately,
    unless all quantizers are disabled; `qtoolkit.nn.QuantLSTM` can use the fused kernel for all steps.

    It takes the arguments of torch.nn.LSTM, `quant_desc_input` of inputs and hidden states, and `quant_desc_weight`, by default
    with a range for each row. Raises ValueError: proj_size is not 0.

    Example:
        >>> y, (h, c) = QuantLSTM(4, 3, bidirectional=True)(torch.zeros(7, 2, 4))
        >>> y.shape, h.shape
        (torch.Size([7, 2, 6]), torch.Size([2, 2, 3]))
    """

    default_quant_desc_weight = QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        of_input, of_weight = take_quant_desc(type(self), kwargs)
        nn.LSTM.__init__(self, *args, **kwargs)
        if self.proj_size:
            raise ValueError(
                f"QuantLSTM: proj_size is not supported and must be 0, got {self.proj_size}; qtoolkit.nn.QuantLSTM quantizes "
                f"projections."
            )
        self.init_quantizer(of_input, of_weight, len(self.keys()))

    @fx_leaf
    def forward(self, input: Any, hx: Any = None) -> Any:
        """Compute all layers and steps, with the arguments and results of torch.nn.LSTM."""
        quantizers = (*self._input_quantizers, *self._weight_quantizers)
        # Scripts may replace the quantizers by their own modules.
        active = any(getattr(quantizer, "active", True) for quantizer in quantizers)
        return self.by_steps(input, hx) if active else self.forward_fp32(input, hx)

    def _between(self, x: Tensor, layer: int) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if layer else x

    def _step(self, key: str) -> Step:
        number = self.keys().index(key)
        quantizer, of_weight = self._input_quantizers[number], self._weight_quantizers[number]
        weights = _split(of_weight, getattr(self, f"weight_ih_{key}"), getattr(self, f"weight_hh_{key}"))
        biases = self.biases(key)

        def step(x: Tensor, state: State) -> State:
            x, h = _split(quantizer, x, state[0])
            return torch.lstm_cell(x, (h, state[1]), *weights, *biases)

        return step


class QuantLSTMCell(QuantMixin, nn.LSTMCell):
    """torch.nn.LSTMCell with quantizers of cat([x, h], 1) and of cat([w_ih, w_hh], 1).

    It takes the arguments of torch.nn.LSTMCell, and the descriptors of `QuantLSTM`.

    Example:
        >>> h, c = QuantLSTMCell(4, 3)(torch.zeros(2, 4))
        >>> h.shape
        torch.Size([2, 3])
    """

    default_quant_desc_weight = QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        descs = take_quant_desc(type(self), kwargs)
        super().__init__(*args, **kwargs)
        self.init_quantizer(*descs)

    @fx_leaf
    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Compute one step, with the arguments and results of torch.nn.LSTMCell."""
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        zeros = x.new_zeros(x.size(0), self.hidden_size)
        h, c = (zeros, zeros) if hx is None else hx if batched else (hx[0].unsqueeze(0), hx[1].unsqueeze(0))
        x, h = _split(self._input_quantizer, x, h)
        weights = _split(self._weight_quantizer, self.weight_ih, self.weight_hh)
        h, c = torch.lstm_cell(x, (h, c), *weights, self.bias_ih, self.bias_hh)
        return (h, c) if batched else (h.squeeze(0), c.squeeze(0))


LSTM, LSTMCell = QuantLSTM, QuantLSTMCell
