"""What all units share: the decision how a unit computes, made once and kept while its modules are as they were.

What a unit computes depends on its modules: their modes, hooks, types, parameters and quantizers. It is decided once, and holds
as long as the attributes of these modules are the same objects, which `Snapshot` compares in some microseconds. While no
decision holds, and where one op may not compute the unit, its ops are called one by one.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from qtoolkit._snapshot import Snapshot
from qtoolkit.nn import on_codes
from qtoolkit.nn.computed_weights import is_parametrized
from qtoolkit.nn.output_grid import Grid, GridNow, grid_of, quantized_by, why_quantizer_not_fused
from qtoolkit.quantizers.codes import TensorCodes, codes_of, codes_on
from qtoolkit.quantizers.recomputation import is_recomputing
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

WATCHING = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CHANGING = ("warned", "last_read_input")  # in training
IGNORED = frozenset({*CHANGING, *(name for name in vars(nn.Module()) if "hooks" in name and name not in WATCHING)})
"""Attributes on which it does not depend what a unit is."""

MOST_PLANS = 64
"""Of one unit, for inputs of different sizes."""

NOT_FOLLOWED = (None, None, False)
NOT_TRAINED = (None, None, None)


@dataclass(slots=True)
class Call:
    """A call of an op, for those after it."""

    shape: torch.Size  # the shape of the unit's first input
    dtype: torch.dtype
    constants: tuple[Any, ...]  # what may differ from call to call besides tensors
    # computes the op from the tensors that may differ. It returns nothing where its other arguments might too
    repeat: Callable[[Sequence[Tensor | None]], list[Tensor]]


Varying = tuple[tuple[Tensor | None, ...], tuple[Any, ...]]
"""What may differ from call to call: tensors, and `Call.constants`."""

Result = tuple[Tensor, TensorCodes | None]
"""The output of a unit, with its codes."""


@dataclass(slots=True)
class Plan:
    """How one op computes a unit for inputs of a kind."""

    quantizer: TensorQuantizer | None  # the output's quantizer in the op, if there is one
    output: GridNow  # the output's scale and grid
    call: Call | None = field(default=None, init=False)  # the last call

    def varying_output(self) -> Varying:
        """Return what the op is told about its output's grid besides the plan, in the order of OF_OUTPUT."""
        grid = grid_of(self.output)
        return (grid[0], grid[3]), (grid[4:],)

    def output_call(self, tensors: Sequence[Tensor | None], constants: Sequence[Any]) -> Grid:
        """Return the arguments of the op for its output's grid, of those that `varying_output` returns."""
        (start, zero_point), (of_codes,) = tensors, constants
        trained = self.output[1:3] if isinstance(self.output, tuple) else (None, None)
        return start, *trained, zero_point, *of_codes


P = TypeVar("P", bound=Plan)


class Decided(Generic[P]):
    """A unit of a prepared model, and how one op computes it for each kind of input.

    `root` is the model, or the block of it in which the unit runs; `names` has the names of its modules there, that of its
    quantizer last. None stands for those that there are not.
    """

    VARYING: ClassVar[tuple[str, ...]]
    """The names of the op's tensors that may differ from call to call."""

    def __init__(self, root: nn.Module, names: Sequence[str | None]) -> None:
        self.root, self.names = ref(root), tuple(names)
        self.snapshot: Snapshot | None = None
        self.modules: tuple[Any, ...] = ()  # the modules, as they were when it was last decided
        # the plans for kinds of inputs; None where one op may not compute the unit
        self.plans: dict[Hashable, P | None] = {}
        self.last: P | None = None  # the plan of the last call of the op

    def look(self) -> None:
        """Take the modules as they are now, if that may be other ones than before."""
        # A recomputation of gradient checkpointing does what the forward before it did.
        if self.snapshot is not None and (self.snapshot.holds() or is_recomputing()):
            return
        self.modules = self.modules_now()
        names = [name for name in self.names if name is not None]
        self.snapshot, self.plans, self.last = snapshot_of(self.model(), names), {}, None

    def model(self) -> nn.Module:
        """Return the model."""
        model = self.root()
        if model is None:
            raise RuntimeError("the model of this code does not exist any more.")
        return model

    def modules_now(self) -> tuple[Any, ...]:
        """Return the modules, as compiled code asks for them."""
        model = self.model()
        return tuple(None if name is None else model.get_submodule(name) for name in self.names)

    def by_op(self, x: Tensor, *others: Any) -> Result | None:
        """Return the unit's output with its codes, computed by one op of its inputs; None where it may not be."""
        plan = self.last
        if plan is not None and (result := self._again(plan, x, *others)) is not None:
            return result
        plan = self.plan_of(x, *others)
        return None if plan is None else self.compute(plan, x, *others)

    def _again(self, plan: P, x: Tensor, *others: Any) -> Result | None:
        """Return what `compute` does by the call that the plan had last; None if this is another one."""
        call = plan.call
        if call is None or call.dtype is not x.dtype or call.shape != x.shape:
            return None
        varying = self._varying(plan, x, *others)
        if varying is None or varying[1] != call.constants:
            return None
        results = call.repeat(varying[0])
        return self.output(plan, *results) if results else None

    def plan_of(self, x: Tensor, *others: Any) -> P | None:
        """Return the plan for inputs; None where one op may not compute the unit."""
        kind = self.kind_of(x, *others)
        if kind is None:
            return None
        if kind not in self.plans:
            if len(self.plans) == MOST_PLANS:
                self.plans.clear()
            self.plans[kind] = self._planned(x, *others)
        return self.plans[kind]

    def compute(self, plan: P, x: Tensor, *others: Any) -> Result | None:
        """Compute the unit by the op, and keep the call; None if x has no codes."""
        self.last = plan
        result = self._again(plan, x, *others)
        varying = None if result is not None else self._varying(plan, x, *others)
        if varying is None:
            return result
        call: Any = self._bound(plan, *varying)
        plan.call = Call(x.shape, x.dtype, varying[1], call.call)
        return self.output(plan, *call.call(varying[0]))

    def kind_of(self, x: Tensor, *others: Any) -> Hashable:
        """Return on what a plan depends besides the modules; None where there is none."""
        raise NotImplementedError

    def _planned(self, x: Tensor, *others: Any) -> P | None:
        """Ask the modules for the plan."""
        raise NotImplementedError

    def _varying(self, plan: P, x: Tensor, *others: Any) -> Varying | None:
        """Return what the op is told besides what the plan says; None if x has no codes."""
        raise NotImplementedError

    def _bound(self, plan: P, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> Any:
        """Return the op with all its arguments."""
        raise NotImplementedError

    def quantizer_in_op(self) -> TensorQuantizer | None:
        """Return the quantizer if the op may compute what it does now; None where it must be called, or there is none."""
        quantizer = self.modules[-1]
        return quantizer if quantizer is not None and why_quantizer_not_fused(quantizer) is None else None

    def output(self, plan: P, y: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Result:
        """Return the output of the unit, y, with its codes, which are empty where it has none."""
        quantizer = self.modules[-1]
        if quantizer is not plan.quantizer:
            return quantized_by(quantizer, y)
        if quantizer is None or not quantizer.capability.codes:
            return y, None
        return y, codes_on(scale, zero_point, quantizer, y, codes)


def snapshot_of(root: nn.Module, names: Sequence[str]) -> Snapshot:
    """Return the attributes of submodules now, and of the quantizers on which it depends how they compute."""
    modules = [root.get_submodule(name) for name in names]
    seen = [*modules, *(each for m in modules if isinstance(m, on_codes.TakesCodes) for each in m.computes_by())]
    holders = [root.get_submodule(parent)._modules for parent in {p for name in names for p in names_around(name)}]
    return Snapshot((*seen, *holders), IGNORED)


def names_around(name: str) -> list[str]:
    """Return the names of the modules on the way to a submodule, with "" for the model."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


# ---- what may be one op


def layer_is_plain(layer: Any) -> bool:
    """Return whether an op may compute a layer, and quantize its weight, as its modules are now."""
    if layer.integer_kernel is not None or layer.input_quantizer is not None or is_parametrized(layer):
        return False
    parameters = (p for p in (layer.weight, layer.bias) if p is not None)
    return gives_ready_grid(layer.weight_quantizer) and all(type(p) is nn.Parameter for p in parameters)


def gives_ready_grid(quantizer: Any) -> bool:
    """Return whether an op may quantize a weight in its quantizer's place, with a grid that it has."""
    return on_codes.gives_grid(quantizer) and quantizer.ready and not quantizer.stopping


class LayerArguments(NamedTuple):
    """What an op is told about a layer, for inputs of a kind, in its order."""

    # the weight's scale and grid, and the range that it follows; None where they are computed at each call
    grid: tuple[Grid, Grid] | None
    geometry: tuple[Any, ...]  # what the layer computes, and whether on codes
    computed: tuple[Any, ...]  # the type and the memory format of its output
    like: Tensor  # a tensor of the output's shape, without memory
    # whether the scale of the input is trained by what the input was before it was quantized, if that is known
    takes_raw: bool

    def varying(
        self, layer: Any, x: Tensor, known: TensorCodes | None, factor: Callable[[], Tensor | None], name: str | None
    ) -> Varying | None:
        """Return what the op is told besides the plan, in the order of OF_LAYER; None if x has no codes.

        `factor` returns what multiplies the output channels of the weight before it is quantized, or None.
        """
        codes = codes_of(x, layer.source, bool(self.geometry[-1]), known)
        if codes is None:
            return None
        grid, _ = self.grid or _weight_grid_now(layer, factor(), name)
        of_input = codes.codes, codes.scale, codes.zero_point, grid[0], grid[3]
        raw = codes.raw_of(x) if self.takes_raw else None
        if raw is None:
            return (x, *of_input, None, None), (codes.qmin, codes.qmax, grid[4:], 1.0)
        return (x.detach(), *of_input, raw.values, raw.scale), (codes.qmin, codes.qmax, grid[4:], raw.grad_factor)

    def call(
        self, layer: Any, tensors: Sequence[Tensor | None], constants: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the first arguments of the op, up to the bias, and the last ones, of those that `varying` returns."""
        x, codes, scale, zero_of_input, start, zero_point, *raw = tensors
        qmin, qmax, of_codes, raw_factor = constants
        grid, followed = self.grid or (NOT_TRAINED, NOT_FOLLOWED)
        of_x = x, codes, scale, zero_of_input, qmin, qmax
        of_weight = layer.weight, start, *grid[1:3], zero_point, *of_codes
        first = (*of_x, *of_weight, *self.geometry, *followed, *self.computed, layer.bias)
        return first, (*raw, raw_factor)


def layer_arguments(layer: Any, x: Tensor) -> LayerArguments | None:
    """Return what an op is told about a layer of an input like x; None where it may not compute it."""
    g = layer.geometry(x)
    if g is None:
        return None
    integer = on_codes.computes_on_codes(layer, x, g)
    if not integer and (layer.training_arithmetic.save == "float" or on_codes.copies_weight(layer, x)):
        return None
    layer.check_input(x)
    try:
        with torch.no_grad():  # gradient checkpointing counts the tensors that a forward saves
            like = layer.compute(x.to("meta"), layer.weight.to("meta"), None)
    except RuntimeError:  # the input does not fit: the layer has a clearer error
        return None
    sizes = (g.stride, g.padding, g.dilation, g.output_padding, g.transposed, g.groups)
    dtype = on_codes.computed_type(layer.weight, x)
    computed = dtype, on_codes.computed_format(layer, x, integer)
    takes_raw = dtype == x.dtype and on_codes.reads_image(layer, x, g)
    return LayerArguments(grid_of_weight(layer), (*sizes, integer), computed, like, takes_raw)


def kind_of_inputs(weight: Tensor | None, x: Tensor) -> tuple[Hashable, ...] | None:
    """Return on what it depends, besides the modules, how an op computes a layer of a parameter; None without that."""
    if weight is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, weight.dtype, on_codes.computed_type(weight, x)


OF_LAYER = ("x", "codes", "x_scale", "x_zero_point", "start", "zero_point", "raw", "raw_scale")
OF_OUTPUT = ("y_start", "y_zero_point")
"""The names of tensors that may differ from call to call."""


# ---- scales and grids


def grid_of_weight(layer: Any) -> tuple[Grid, Grid] | None:
    """Return the scale and the grid of a weight, and the range that the op sets."""
    quantizer = layer.weight_quantizer
    start = quantizer.kind.start(quantizer)
    followed = _followed(layer) if quantizer.training and quantizer.follows else NOT_FOLLOWED
    if start is None or followed is None:
        return None
    spec, factor = quantizer.spec, quantizer.kind.grad_factor(quantizer, layer.weight)
    axis = None if spec.axis is None else spec.axis % layer.weight.dim()
    of_codes = (spec.qmin, spec.qmax, axis, quantizer.group, spec.block_size, factor)
    return (*start, quantizer._zero_point, *of_codes), followed


def _followed(layer: Any) -> Grid | None:
    """Return the range that the op sets to that of a weight, and the grid with it; None where the quantizer sets it."""
    quantizer, bn = layer.weight_quantizer, layer.batch_norm
    spec, observer, scale = quantizer.spec, quantizer.observer, quantizer._scale
    along_outputs = spec.axis is not None and spec.axis % layer.weight.dim() == 0 == layer.OUTPUT_AXIS
    plain = along_outputs and spec.symmetric and spec.group_size is None and not layer.weight_groups()[0]
    others = (observer.lo, observer.hi, *(() if bn is None else (bn.weight, bn.running_var)))
    if not plain or any(t is not None and (t.dtype, t.device) != (scale.dtype, scale.device) for t in others):
        return None
    return observer.lo, observer.hi, spec.pow2_scale


def _weight_grid_now(layer: Any, factor: Tensor | None, name: str | None) -> tuple[Grid, Grid]:
    """Return the scale and the grid of a weight whose quantizer makes them anew at each call."""
    grid = layer.weight_grid(factor)
    if grid is None:
        raise RuntimeError(f"the weight quantizer of {name!r} changed while its layer ran.")
    of_codes = (grid.qmin, grid.qmax, grid.axis, grid.group, grid.block_size, grid.grad_factor)
    return (grid.scale, None, None, grid.zero_point, *of_codes), NOT_FOLLOWED
