"""What the table of op kinds says of each kind: its names in every vocabulary, and the facts that passes ask for."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx, nn

# Arguments that are data, by position, each with its keyword names; () is a position that is no data.
Operands = tuple[tuple[str, ...], ...]

ONE: Operands = (("input", "x"),)
TWO: Operands = (("input",), ("other", "mat2"))
WEIGHTED: Operands = (("input", "x"), ("weight",))
ATTENTION: Operands = (("query",), ("key",), ("value",))
Read = Callable[[int, str, Any], Any]  # returns an argument of an op by its position, its name and its default
End = float | tuple[int, str, Any]  # a number, or the argument that gives it, as `Read` takes it


class Bounds(NamedTuple):
    """A piecewise linear activation: v between the bounds, high above, low + slope * (v - low) below.

    A bound that is not a number, because the model computes it, is NaN.
    """

    low: float = -math.inf
    high: float = math.inf
    slope: float = 0.0

    @property
    def known(self) -> bool:
        """Whether all of them are numbers."""
        return not any(map(math.isnan, self))


def bounded(low: End = -math.inf, high: End = math.inf, slope: End = 0.0) -> Callable[[Read], Bounds]:
    """Return what finds the bounds of an op in its arguments; an argument that is None leaves out its bound."""
    ends = {"low": low, "high": high, "slope": slope}

    def of_arguments(read: Read) -> Bounds:
        """Return the bounds of one op."""
        found = {name: read(*end) if isinstance(end, tuple) else end for name, end in ends.items()}
        return Bounds(**{name: _number(value) for name, value in found.items() if value is not None})

    return of_arguments


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


@dataclass(frozen=True)
class Form:
    """One way in which ops of a kind appear in a graph.

    Attributes:
        modules: Module types. They take their data as the arguments in `operands`, except weights, which they own.
        functions: Functions and operators, in-place ones too.
        methods: Names of tensor methods, in-place ones too.
        operands: The arguments that are data.
        rest: Whether all arguments after the last operand are data too (torch.einsum).
        items: The positions of its output tensors in the tuple that it returns; () where it returns the tensor itself.
            Attention weights, and the states of a recurrent layer after all steps, are not among them.
        refine: Returns the name of the kind from a node's arguments, where the op alone does not tell it.
        bounds: Returns what a piecewise linear activation computes, from its arguments.
        passes_at_bounds: The gradient at a bound is that inside of it, as in torch.clamp; otherwise it is 0.
    """

    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    operands: Operands = ONE
    rest: bool = False
    items: tuple[int, ...] = ()
    refine: Callable[[fx.Node], str] | None = None
    bounds: Callable[[Read], Bounds] | None = None
    passes_at_bounds: bool = False


@dataclass(frozen=True)
class OpKind:
    """One kind of op: its names in every vocabulary, and every flag that a pass asks for.

    Attributes:
        name: The name, as a Backend's roles and reports have it.
        forms: How its ops appear in a torch.fx graph. Kinds without forms are found by the `refine` of another kind's form.
        onnx: The ONNX ops of the kind. Of an op that several kinds name, attributes and constant inputs decide
            (`qtoolkit.export.files.kinds`).
        aten: The ops of aten, in graphs of torch.export, of kinds that passes over those graphs ask for.
        moves: The output holds values of the input, and zeros: reshapes, slices, max pools, padding with zero.
        may_view: The output may share the memory of the input, though the op does not always move values alone.
        rearranges: The output holds all values of the input.
        returns_input: The output is the input in eval mode.
        concatenates: The output holds the values of all inputs, which are several tensors.
        activation: Computed as one op with the op before it, on targets that can.
        clips: Clips its input to constant bounds.
        layer: A layer with one weight and output channels: a batch norm after it can be folded into it.
        convolves: A layer that is a convolution, transposed ones too.
        transposed: A layer that is a transposed convolution.
        has_weight: A module of this kind owns weights.
        weight_argument: A function of this kind can take a weight as an argument.
        multiplies: Computes matrix products. Targets compute these in integers even if their output is not quantized.
        of_two_matrices: A matrix product of two tensors.
        fuses_add: Targets with `residual_add="identity"` compute this op and an add after it as one.
        sums: Adds or subtracts two tensors.
        adds: Adds two tensors: a residual add.
        elementwise_product: Multiplies two tensors element by element.
        with_constant: One of its two operands is a constant, which is not quantized.
        never_negative: The output is never negative.
        keeps_sign: The output is never negative if no input is.
        homogeneous: A positive factor of each channel of the input is the factor of the same channel of the output.
        smooth: A small change of the input makes a small change of the output.
        takes_maxima: A max pool.
        means_over_dims: A mean over the dimensions that an argument names.
        pads_with_zero: Padding with zero, which is on every grid.
        pads_off_grid: Padding with another constant.
        normalizes_batches: A batch norm.
        normalizes_scores: A softmax, as in attention.
        holds_softmax: An attention as one op without weights: its softmax is inside of it.
        is_sigmoid: A sigmoid.
        has_sigmoid_gate: The product of its input and the sigmoid of it.
        keeps_state: A recurrent layer.
        takes_indices: The input holds indices, which have no range.
        one_tensor: Returns one tensor, not several.
    """

    name: str
    forms: tuple[Form, ...] = ()
    onnx: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    moves: bool = False
    may_view: bool = False
    rearranges: bool = False
    returns_input: bool = False
    concatenates: bool = False
    activation: bool = False
    clips: bool = False
    layer: bool = False
    convolves: bool = False
    transposed: bool = False
    has_weight: bool = False
    weight_argument: bool = False
    multiplies: bool = False
    of_two_matrices: bool = False
    fuses_add: bool = False
    sums: bool = False
    adds: bool = False
    elementwise_product: bool = False
    with_constant: bool = False
    never_negative: bool = False
    keeps_sign: bool = False
    homogeneous: bool = False
    smooth: bool = False
    takes_maxima: bool = False
    means_over_dims: bool = False
    pads_with_zero: bool = False
    pads_off_grid: bool = False
    normalizes_batches: bool = False
    normalizes_scores: bool = False
    holds_softmax: bool = False
    is_sigmoid: bool = False
    has_sigmoid_gate: bool = False
    keeps_state: bool = False
    takes_indices: bool = False
    one_tensor: bool = True

    @property
    def is_plain_layer(self) -> bool:
        """Whether it is a layer that is no transposed convolution."""
        return self.layer and not self.transposed

    @property
    def is_relu(self) -> bool:
        """Whether it clips at zero alone."""
        return self.clips and self.homogeneous

    def __str__(self) -> str:
        return self.name


def returns_input(kind: OpKind) -> bool:
    """Return whether ops of a kind return their input in eval mode."""
    return kind.returns_input


def belongs_to_layer(kind: OpKind) -> bool:
    """Return whether targets compute an op behind a layer as part of it, or drop it."""
    return kind.normalizes_batches or kind.returns_input
