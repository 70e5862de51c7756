"""LSTM and GRU, step by step and in float. A call starts with the states that the model passes, and keeps no state.

LiteRT's ops for whole layers keep their states between calls of the interpreter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from qtoolkit.export.tflite.flatbuffer import TensorInFile
from qtoolkit.export.tflite.moves import joined, part, place, stacked
from qtoolkit.export.tflite.ops import TfliteOp

State = tuple[TensorInFile, ...]  # the hidden state (n, hidden), of an LSTM the cell state too


@dataclass(frozen=True)
class _Weights:
    """The weights and biases of one direction of a layer, in the form of torch's cells."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None


# Takes the products of input and gate weights (n, gates * hidden) and the state, and returns the next state.
Step = Callable[[TfliteOp, TensorInFile, State, _Weights], State]


def lstm_step(op: TfliteOp, gates: TensorInFile, state: State, weights: _Weights) -> State:
    """Add a step of an LSTM: c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c')."""
    hidden, cell = state
    both = op.step("ADD", [gates, _product(op, hidden, weights.hh, weights.bias_hh)], gates)
    i, f, g, o = _parts(op, both, 4)
    i, f, o = (op.step("LOGISTIC", [gate], gate) for gate in (i, f, o))
    kept, new = op.step("MUL", [f, cell], f), op.step("MUL", [i, op.step("TANH", [g], g)], i)
    cell = op.step("ADD", [kept, new], kept)
    return op.step("MUL", [o, op.step("TANH", [cell], cell)], o), cell


def gru_step(op: TfliteOp, gates: TensorInFile, state: State, weights: _Weights) -> State:
    """Add a step of a GRU: n = tanh(n_x + sigmoid(r) n_h), h' = n + sigmoid(z) (h - n)."""
    (hidden,) = state
    of_input, of_state = (_parts(op, x, 3) for x in (gates, _product(op, hidden, weights.hh, weights.bias_hh)))
    sums = (op.step("ADD", [a, b], a) for a, b in zip(of_input[:2], of_state[:2], strict=True))
    r, z = (op.step("LOGISTIC", [gate], gate) for gate in sums)
    gated = op.step("ADD", [of_input[2], op.step("MUL", [r, of_state[2]], r)], r)
    n = op.step("TANH", [gated], gated)
    return (op.step("ADD", [n, op.step("MUL", [z, op.step("SUB", [hidden, n], hidden)], z)], n),)


def cell(step: Step) -> Callable[[TfliteOp], TensorInFile | State]:
    """Return the kernel of a cell, which computes one step."""

    def emit(op: TfliteOp) -> TensorInFile | State:
        given = [op.args[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh")]
        weights = _Weights(*(op.stored(node) for node in given if node is not None))
        state = tuple(op.plain(op.value(node)) for node in _nodes(op.args["hx"]))
        found = step(op, _product(op, op.plain(op.value("input")), weights.ih, weights.bias_ih), state, weights)
        return found if isinstance(op.args["hx"], list | tuple) else found[0]

    return emit


def layer(step: Step) -> Callable[[TfliteOp], tuple[TensorInFile, ...]]:
    """Return the kernel of a layer, which computes all steps, layers and directions."""

    def emit(op: TfliteOp) -> tuple[TensorInFile, ...]:
        x, firsts = op.plain(op.value("input")), [op.plain(op.value(node)) for node in _nodes(op.args["hx"])]
        x = _swapped(op, x) if op.args["batch_first"] else x
        directions = 2 if op.args["bidirectional"] else 1
        weights, ends = _weights(op), list[State]()
        for _ in range(op.args["num_layers"]):
            outputs = []
            for reverse in range(directions):
                first = tuple(place(op, state, 0, len(ends)) for state in firsts)
                steps, end = _run(op, step, x, first, weights[len(ends)], bool(reverse))
                outputs.append(steps)
                ends.append(end)
            x = outputs[0] if directions == 1 else joined(op, outputs, 2)
        x = _swapped(op, x) if op.args["batch_first"] else x
        return x, *(stacked(op, parts) for parts in zip(*ends, strict=True))

    return emit


def _weights(op: TfliteOp) -> list[_Weights]:
    """Return the weights of each direction of each layer, in the order of the states."""
    if "params" not in op.args:
        raise ValueError(f"export_litert: {op.node.name!r} takes packed sequences; export it for padded sequences.")
    params = [op.stored(node) for node in op.args["params"]]
    count = op.args["num_layers"] * (2 if op.args["bidirectional"] else 1)
    each = 4 if op.args["has_biases"] else 2
    if len(params) != each * count:
        raise ValueError(
            f"export_litert: {op.node.name!r} has proj_size; set proj_size=0, and add a Linear after the layer."
        )
    return [_Weights(*params[i : i + each]) for i in range(0, len(params), each)]


def _run(
    op: TfliteOp, step: Step, x: TensorInFile, state: State, weights: _Weights, backwards: bool
) -> tuple[TensorInFile, State]:
    """Add all steps of one direction of a layer, and return its outputs (steps, n, hidden) and its last state."""
    gates, outputs = _product(op, x, weights.ih, weights.bias_ih), []
    for i in range(x.shape[0]):
        state = step(op, place(op, gates, 0, x.shape[0] - 1 - i if backwards else i), state, weights)
        outputs.append(state[0])
    return stacked(op, outputs[::-1] if backwards else outputs), state


def _nodes(hx: fx.Node | Sequence[fx.Node]) -> Sequence[fx.Node]:
    return hx if isinstance(hx, list | tuple) else (hx,)


def _product(op: TfliteOp, x: TensorInFile, weight: Tensor, bias: Tensor | None) -> TensorInFile:
    """Add a linear layer in float."""
    tensors = [op.constant(t.float().numpy(), f"{op.name}.weight") for t in (weight, bias) if t is not None]
    like = x.moved((*x.shape[:-1], len(weight)), x.order)
    return op.step("FULLY_CONNECTED", [x, *tensors], like, keepNumDims=len(x.shape) > 2)


def _parts(op: TfliteOp, x: TensorInFile, count: int) -> list[TensorInFile]:
    """Split the gates."""
    size = x.shape[1] // count
    return [part(op, x, 1, i * size, size) for i in range(count)]


def _swapped(op: TfliteOp, x: TensorInFile) -> TensorInFile:
    """Exchange the dimensions of steps and samples."""
    return op.plain(TensorInFile(x.tensor, (x.shape[1], x.shape[0], x.shape[2]), (1, 0, 2)))
