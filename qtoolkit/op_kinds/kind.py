"""A row of the table of op kinds: the names of a kind in every vocabulary, and the facts that passes ask for."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, fx, nn

# Arguments that are data, by position, each with its keyword names; () is a position that is no data.
Operands = tuple[tuple[str, ...], ...]

ONE: Operands = (("input", "x"),)
TWO: Operands = (("input",), ("other", "mat2"))
WEIGHTED: Operands = (("input", "x"), ("weight",))
ATTENTION: Operands = (("query",), ("key",), ("value",))
Read = Callable[[int, str, object], object]  # returns an argument of an op by its position, its name and its default
End = float | tuple[int, str, object]  # a number, or the argument that gives it, as `Read` takes it


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
    """Return a function that finds the bounds of an op in its arguments; an argument that is None leaves out its bound."""
    ends = {"low": low, "high": high, "slope": slope}

    def of_arguments(read: Read) -> Bounds:
        found = {name: read(*end) if isinstance(end, tuple) else end for name, end in ends.items()}
        return Bounds(**{name: _number(value) for name, value in found.items() if value is not None})

    return of_arguments


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


@dataclass(frozen=True)
class Form:
    """One way in which ops of a kind appear in a graph."""

    # module types. They take their data as the arguments in `operands`, except weights, which they own
    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Callable[..., object], ...] = ()  # functions and operators, in-place ones too
    methods: tuple[str, ...] = ()  # names of tensor methods, in-place ones too
    operands: Operands = ONE  # the arguments that are data
    rest: bool = False  # whether all arguments after the last operand are data too (torch.einsum)
    # the positions of its output tensors in the tuple that it returns; () where it returns the tensor itself. Attention
    # weights, and the states of a recurrent layer after all steps, are not among them
    items: tuple[int, ...] = ()
    # returns the name of the kind from a node's arguments, where the op alone does not tell it
    refine: Callable[[fx.Node], str] | None = None
    # returns what a piecewise linear activation computes, from its arguments
    bounds: Callable[[Read], Bounds] | None = None
    passes_at_bounds: bool = False  # the gradient at a bound is that inside of it, as in torch.clamp; otherwise it is 0


@dataclass(frozen=True)
class OpKind:
    """One kind of op: its names in every vocabulary, and every flag that a pass asks for."""

    name: str  # the name, as a Backend's roles and reports have it
    # how its ops appear in a torch.fx graph. Kinds without forms are found by the `refine` of another kind's form
    forms: tuple[Form, ...] = ()
    # the ONNX ops of the kind. Of an op that several kinds name, attributes and constant inputs decide
    # (`qtoolkit.export.files.kinds`)
    onnx: tuple[str, ...] = ()
    # the ops of aten, in graphs of torch.export, of kinds that passes over those graphs ask for
    aten: tuple[str, ...] = ()
    # functions of one tensor, as which ops that compute the same are recognized (`qtoolkit.graph.passes.recognize`)
    recognized: tuple[Callable[..., Tensor], ...] = ()
    # the output holds values of the input, and zeros: reshapes, slices, max pools, padding with zero
    moves: bool = False
    # the output may share the memory of the input, though the op does not always move values alone
    may_view: bool = False
    rearranges: bool = False  # the output holds all values of the input
    returns_input: bool = False  # the output is the input in eval mode
    concatenates: bool = False  # the output holds the values of all inputs, which are several tensors
    activation: bool = False  # computed as one op with the op before it, on targets that can
    clips: bool = False  # clips its input to constant bounds
    layer: bool = False  # a layer with one weight and output channels: a batch norm after it can be folded into it
    convolves: bool = False  # a layer that is a convolution, transposed ones too
    transposed: bool = False  # a layer that is a transposed convolution
    has_weight: bool = False  # a module of this kind owns weights
    weight_argument: bool = False  # a function of this kind can take a weight as an argument
    # computes matrix products. Targets compute these in integers even if their output is not quantized
    multiplies: bool = False
    of_two_matrices: bool = False  # a matrix product of two tensors
    fuses_add: bool = False  # targets with `residual_add="identity"` compute this op and an add after it as one
    elementwise: bool = False  # arithmetic on each element of one tensor, or of two
    sums: bool = False  # adds or subtracts two tensors
    adds: bool = False  # adds two tensors: a residual add
    elementwise_product: bool = False  # multiplies two tensors element by element
    with_constant: bool = False  # one of its two operands is a constant, which is not quantized
    never_negative: bool = False  # the output is never negative
    keeps_sign: bool = False  # the output is never negative if no input is
    # a positive factor of each channel of the input is the factor of the same channel of the output
    homogeneous: bool = False
    smooth: bool = False  # a small change of the input makes a small change of the output
    takes_maxima: bool = False  # the largest of some values
    means_over_dims: bool = False  # a mean over the dimensions that an argument names
    pads_with_zero: bool = False  # padding with zero, which is on every grid
    pads_off_grid: bool = False  # padding with another constant
    normalizes: bool = False  # a positive factor of the input changes nothing, up to eps
    normalizes_batches: bool = False  # a batch norm
    normalizes_scores: bool = False  # a softmax, as in attention
    holds_softmax: bool = False  # an attention as one op without weights: its softmax is inside of it
    is_sigmoid: bool = False
    has_sigmoid_gate: bool = False  # the product of its input and the sigmoid of it
    keeps_state: bool = False  # a recurrent layer
    takes_indices: bool = False  # the input holds indices, which have no range
    one_tensor: bool = True  # returns one tensor, not several

    @property
    def is_plain_layer(self) -> bool:
        """Whether it is a layer that is no transposed convolution."""
        return self.layer and not self.transposed

    @property
    def is_relu(self) -> bool:
        """Whether it clips at zero alone."""
        return self.clips and self.homogeneous

    @property
    def copies_channels(self) -> bool:
        """Whether all values of the output are values of the input, of the same channel."""
        return self.moves and self.homogeneous and not (self.pads_with_zero or self.takes_maxima or self.returns_input)

    def __str__(self) -> str:
        return self.name


def belongs_to_layer(kind: OpKind) -> bool:
    """Return whether targets compute an op after a layer as part of it, or drop it."""
    return kind.normalizes_batches or kind.returns_input
