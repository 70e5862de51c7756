"""LSTM and GRU with quantized weights, input and state, in torch's fused kernel if possible, otherwise step by step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from qtoolkit.nn.layers.cells import QuantRecurrent
from qtoolkit.nn.module import is_active, quantized

State = tuple[Tensor, ...]
Hidden = Tensor | tuple[Tensor, ...]  # a state as torch's class takes it
Step = Callable[[Tensor, State], State]


class QuantRNNBase(QuantRecurrent):
    """The base class of `QuantLSTM` and `QuantGRU`.

    With a float state (`activation_spec=None`, or QUANTIZE_HIDDEN = False) or with its quantizers off, one call of torch's
    fused kernel computes all layers and steps. A quantized state is rounded at each step, so a loop calls torch's fused
    cell. Export unrolls the loop; the example input gives the number of steps.

    Padding in a PackedSequence is neither observed nor quantized. The output is not quantized.
    """

    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int
    check_forward_args: Any
    permute_hidden: Any

    def activation_quantizer_names(self) -> tuple[str, ...]:
        kinds = ("hidden", "projection") if self.proj_size else ("hidden",)
        between = [f"input_quantizer_l{layer}" for layer in range(1, self.num_layers)]
        return (*between, *(f"{kind}_quantizer_{key}" for key in self.keys() for kind in kinds))

    def keys(self) -> list[str]:
        """Return the suffixes of the parameters' names, one per layer and direction, in the order of the states."""
        return [key for layer in range(self.num_layers) for key in self._directions(layer)]

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Compute all layers and steps; arguments and results are as in torch's class."""
        x = self._quantize_input(input)
        if any(is_active(getattr(self, name)) for name in self.activation_quantizer_names()):
            return self.by_steps(x, hx)
        return self.FLOAT.forward(self.with_quantized_weights(), x, hx)

    def by_steps(self, x: Tensor | PackedSequence, hx: Hidden | None) -> Any:
        """Compute all layers step by step; x is already quantized."""
        if isinstance(x, PackedSequence):
            return self._packed(x, hx)
        return self.forward_fp32(x, hx) if _is_refused(x, self.batch_first) else self._padded(x, hx)

    def _quantize_input(self, input: Tensor | PackedSequence) -> Any:
        if self.input_quantizer is None or not isinstance(input, PackedSequence):
            return quantized(self.input_quantizer, input)
        return PackedSequence(self.input_quantizer(input.data), *input[1:])

    # ---- packed and padded batches

    def _packed(self, x: PackedSequence, hx: Hidden | None) -> tuple[PackedSequence, Hidden]:
        data, sizes, order, back = x
        hx = None if hx is None else self.permute_hidden(hx, order)
        self._check(data, hx, sizes)
        state = self._state(hx, data, int(sizes[0]))
        y, state = self._layers(data, lambda values: torch.split(values, sizes.tolist()), torch.cat, state)
        return PackedSequence(y, sizes, order, back), self.permute_hidden(self._result(state), back)

    def _padded(self, x: Tensor, hx: Hidden | None) -> tuple[Tensor, Hidden]:
        batched = x.dim() == 3
        if not batched:
            x = x.unsqueeze(0 if self.batch_first else 1)
            hx = None if hx is None else self._result(tuple(part.unsqueeze(1) for part in _parts(hx)))
        self._check(x, hx, None)
        x = x.transpose(0, 1) if self.batch_first else x
        y, state = self._layers(x, torch.unbind, torch.stack, self._state(hx, x, x.size(1)))
        if not batched:
            return y.squeeze(1), self._result(tuple(part.squeeze(1) for part in state))
        return y.transpose(0, 1) if self.batch_first else y, self._result(state)

    def _check(self, x: Tensor, hx: Hidden | None, sizes: Tensor | None) -> None:
        """Raise torch's own errors for shapes that do not fit."""
        batch = int(sizes[0]) if sizes is not None else x.size(0 if self.batch_first else 1)
        self.check_forward_args(x, self._result(self._state(hx, x, batch)), sizes)

    def _state(self, hx: Hidden | None, x: Tensor, batch: int) -> State:
        if hx is not None:
            return _parts(hx)
        count = self.num_layers * (2 if self.bidirectional else 1)
        return tuple(x.new_zeros(count, batch, size) for size in self._state_sizes())

    # ---- layers

    def _layers(
        self,
        x: Tensor,
        steps_of: Callable[[Tensor], Sequence[Tensor]],
        join: Callable[[list[Tensor]], Tensor],
        state: State,
    ) -> tuple[Tensor, State]:
        """Compute all layers; `steps_of` splits an input into time steps, and `join` joins them."""
        ends: list[State] = []
        for layer in range(self.num_layers):
            steps, outputs = steps_of(self._between(x, layer)), []
            for key in self._directions(layer):
                first = tuple(part[len(ends)] for part in state)
                run = _backwards if key.endswith("reverse") else _forwards
                values, end = run(self._step(key), steps, first)
                outputs.append(join(values))
                ends.append(end)
            x = torch.cat(outputs, -1)
        return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))

    def _between(self, x: Tensor, layer: int) -> Tensor:
        """Return the input of a layer."""
        if layer == 0:
            return x
        dropped = F.dropout(x, self.dropout, self.training)
        return quantized(getattr(self, f"input_quantizer_l{layer}"), dropped)  # type: ignore[no-any-return]

    def _directions(self, layer: int) -> tuple[str, ...]:
        """Return the suffixes of a layer's parameter names, one per direction."""
        return (f"l{layer}", f"l{layer}_reverse") if self.bidirectional else (f"l{layer}",)

    def biases(self, key: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the biases of one direction of a layer."""
        return (getattr(self, f"bias_ih_{key}"), getattr(self, f"bias_hh_{key}")) if self.bias else (None, None)

    def _products(self, key: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the quantized weights and the biases of one direction of a layer."""
        weights = self.quantized_weight(f"weight_ih_{key}"), self.quantized_weight(f"weight_hh_{key}")
        return *weights, *self.biases(key)

    # ---- for subclasses to implement

    def _step(self, key: str) -> Step:
        """Return the step of one direction of a layer: (input, state) -> next state, with the output as its first tensor."""
        raise NotImplementedError

    def _state_sizes(self) -> tuple[int, ...]:
        """Return the number of features of each tensor in the state."""
        raise NotImplementedError

    def _result(self, state: State) -> Hidden:
        """Return a state in the form that torch's class returns."""
        raise NotImplementedError


class QuantLSTM(QuantRNNBase, nn.LSTM):
    """torch.nn.LSTM with quantized weights and quantized operands of all matrix products; the cell state stays float.

    Attributes:
        weight_ih_l0_quantizer: Quantizer of that weight, or None; likewise for each weight, `weight_hr_l0` included.
        input_quantizer_l1: Quantizer of the input of layer 1, or None; likewise for each layer but the first.
        hidden_quantizer_l0: Quantizer of the hidden state of layer 0, or None; likewise for each layer and direction
            (`hidden_quantizer_l0_reverse`).
        projection_quantizer_l0: With proj_size, quantizer of the input of the projection, or None; likewise.

    Example:
        >>> layer = QuantLSTM(4, 3, num_layers=2, weight_spec=qt.QuantSpec(axis=0))
        >>> y, (h, c) = layer(torch.zeros(7, 2, 4))
        >>> y.shape, h.shape, layer.weight_hh_l1_quantizer.scale.shape
        (torch.Size([7, 2, 3]), torch.Size([2, 2, 3]), torch.Size([12]))
    """

    FLOAT = nn.LSTM

    def _step(self, key: str) -> Step:
        products, hidden = self._products(key), getattr(self, f"hidden_quantizer_{key}")
        if not self.proj_size:
            return lambda x, state: torch.lstm_cell(x, (quantized(hidden, state[0]), state[1]), *products)
        to_project = getattr(self, f"projection_quantizer_{key}")
        projection = self.quantized_weight(f"weight_hr_{key}")

        def step(x: Tensor, state: State) -> State:
            h, c = _lstm_cell(x, quantized(hidden, state[0]), state[1], *products)
            return F.linear(quantized(to_project, h), projection), c

        return step

    def _state_sizes(self) -> tuple[int, ...]:
        return self.proj_size or self.hidden_size, self.hidden_size

    def _result(self, state: State) -> Hidden:
        return state


class QuantGRU(QuantRNNBase, nn.GRU):
    """torch.nn.GRU with quantized weights and quantized operands of all matrix products.

    If the state is quantized, each new state is interpolated from the quantized old state. It has the quantizers of
    `QuantLSTM`, without a projection.
    """

    FLOAT = nn.GRU

    def _step(self, key: str) -> Step:
        products, hidden = self._products(key), getattr(self, f"hidden_quantizer_{key}")
        return lambda x, state: (torch.gru_cell(x, quantized(hidden, state[0]), *products),)

    def _state_sizes(self) -> tuple[int, ...]:
        return (self.hidden_size,)

    def _result(self, state: State) -> Hidden:
        return state[0]


def _is_refused(x: Tensor, batch_first: bool) -> bool:
    """Return whether torch's class raises an error for an input's number of dimensions, or for zero steps."""
    return x.dim() not in (2, 3) or x.size(1 if batch_first and x.dim() == 3 else 0) == 0


def _parts(hx: Hidden) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _forwards(step: Step, steps: Sequence[Tensor], state: State) -> tuple[list[Tensor], State]:
    """Return the output of each step, and the state at the end of each sequence; sequences are sorted, longest first."""
    outputs, ended = [], []
    for x in steps:
        if x.size(0) < state[0].size(0):
            ended.append(tuple(part[x.size(0) :] for part in state))
            state = tuple(part[: x.size(0)] for part in state)
        state = step(x, state)
        outputs.append(state[0])
    return outputs, tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))


def _backwards(step: Step, steps: Sequence[Tensor], first: State) -> tuple[list[Tensor], State]:
    """Return the output of each step and the state at the first step, running backwards from each sequence's end."""
    outputs, state = [], tuple(part[: steps[-1].size(0)] for part in first)
    for x in reversed(steps):
        before = state[0].size(0)
        if x.size(0) > before:
            state = tuple(torch.cat([a, b[before : x.size(0)]]) for a, b in zip(state, first, strict=True))
        state = step(x, state)
        outputs.append(state[0])
    return outputs[::-1], state


def _lstm_cell(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return one step of an LSTM with a projected state, which torch.lstm_cell does not support."""
    i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c
