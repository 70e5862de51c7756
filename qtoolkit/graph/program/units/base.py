"""The base of all units: the decision how a unit computes, made once and kept while its modules are as they were.

The computation of a unit depends on its modules: their modes, hooks, types, parameters and quantizers. It is decided
once, and holds as long as the attributes of these modules are the same objects, which `Snapshot` compares in some
microseconds. While no decision holds, and where one op may not compute the unit, its ops are called one by one.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from qtoolkit._snapshot import Snapshot
from qtoolkit.nn import on_codes
from qtoolkit.nn.output_grid import GridNow, OutputGrid, quantized_by
from qtoolkit.quantizers.codes import TensorCodes, codes_of, codes_on
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.running import Run

# Hooks of a call: an op that computes the module would not run them.
WATCHING = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What a quantizer notes in a training forward. A snapshot that compared it would not hold after such a step.
CHANGING = ("warned", "last_read_input")
# All other hooks are ignored too, as of state dicts, by the names that this version of torch gives a module.
IGNORED = frozenset({*CHANGING, *(name for name in vars(nn.Module()) if "hooks" in name and name not in WATCHING)})
"""Attributes that do not change a unit."""

OF_STEPS = frozenset({"watched", "count_of_steps"})
"""Attributes of quantizers that the step of an optimizer changes (see `TensorQuantizer.end_step`)."""

# Each size of an input makes a plan, which lives as long as the snapshot holds: images or texts of any size would fill the
# memory. Past this many all are dropped, since the plans for the sizes that still come are soon made again.
MOST_PLANS = 64
"""Of one unit, for inputs of different sizes."""

TRAINED_OF_OUTPUT = ("y_start", "y_ratio", "y_zero_point")
"""The tensors of an output's grid that may be trained."""

Fields = dict[str, Any]
"""Arguments of an op, by the names of the fields of its unit in the library."""

Varying = tuple[dict[str, Tensor | None], Fields]
"""The values that may differ from call to call: tensors, in one order, and numbers."""

Result = tuple[Tensor, TensorCodes | None]
"""The output of a unit, with its integers."""


@dataclass(slots=True)
class LastCall:
    """The last call of an op, for later ones."""

    numbers: Fields  # what may differ from call to call besides tensors
    # computes the op from the tensors that may differ. It returns nothing where its other arguments might too
    repeat: Callable[[list[Tensor | None]], list[Tensor]]


@dataclass(slots=True)
class UnitPlan:
    """How one op computes a unit for inputs of a kind."""

    quantizer: TensorQuantizer | None  # the output's quantizer in the op, if there is one
    output: GridNow  # the output's scale and grid
    fields: Fields  # the arguments of the op in each call, except an output's grid that is made at each call
    call: LastCall | None = field(default=None, init=False)  # the last call

    def __post_init__(self) -> None:
        if isinstance(self.output, OutputGrid):
            self.fields.update(_of_output(self.output))

    def with_output(self, tensors: dict[str, Tensor | None], numbers: Fields) -> Varying:
        """Return the values that vary, with the grid of an output that is made at each call."""
        if isinstance(self.output, OutputGrid):
            return tensors, numbers
        grid = _of_output(self.output())
        of_call = {name: grid.pop(name) for name in ("y_start", "y_zero_point")}
        return {**tensors, **of_call}, {**numbers, **grid}


def _of_output(grid: OutputGrid) -> Fields:
    return {f"y_{name}": value for name, value in grid._asdict().items()}


P = TypeVar("P", bound=UnitPlan)


class CachedFusedOp(Generic[P]):
    """A unit of a prepared model, and how one op computes it for each kind of input.

    `root` is the model, or the block of it in which the unit runs; `names` has the names of its modules there, its
    quantizer's last, None for a missing one.
    """

    KIND: ClassVar[Any]
    """The class of the library that holds the op's arguments (csrc/unit/unit.h)."""

    def __init__(self, root: nn.Module, names: Sequence[str | None]) -> None:
        self.root, self.names = ref(root), tuple(names)
        self.snapshot: Snapshot | None = None
        self.outside_steps: Snapshot | None = None  # the same without what the step of an optimizer changes
        self.modules: tuple[Any, ...] = ()  # the modules, as they were when it was last decided
        # the plans for kinds of inputs; None where one op may not compute the unit
        self.plans: dict[Hashable, P | None] = {}

    def refresh_if_modules_changed(self, run: Run) -> None:
        """Take the modules as they are now, if that may be other ones than before."""
        if self.snapshot is not None and self.snapshot.holds():
            return
        # Gradient checkpointing must compute again what the forward computed, also if an optimizer has stepped in between.
        if self.outside_steps is not None and run.recomputes and self.outside_steps.holds():
            return
        self.modules = self.modules_now()
        names = [name for name in self.names if name is not None]
        self.snapshot, self.plans = snapshot_of(self.model(), names), {}
        self.outside_steps = snapshot_of(self.model(), names, IGNORED | OF_STEPS)

    def model(self) -> nn.Module:
        """Return the model."""
        model = self.root()
        if model is None:
            raise RuntimeError("the model of this unit does not exist any more.")
        return model

    def modules_now(self) -> tuple[Any, ...]:
        """Return the modules, as a compiled forward asks for them."""
        model = self.model()
        return tuple(None if name is None else model.get_submodule(name) for name in self.names)

    def by_op(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Result | None:
        """Return the output of modules with its integers, computed by one op of their inputs; None where it may not be."""
        plan = self.plan_of(run, modules, x, *others)
        results = None if plan is None else self.results_of(run, plan, modules, x, *others)
        return None if plan is None or results is None else self.output(run, plan, modules[-1], *results)

    def plan_of(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> P | None:
        """Return the plan for inputs; None where one op may not compute the unit."""
        kind = self.kind_of(run, modules, x, *others)
        if kind is None:
            return None
        if kind not in self.plans:
            if len(self.plans) == MOST_PLANS:
                self.plans.clear()
            self.plans[kind] = self._planned(run, modules, x, *others)
        return self.plans[kind]

    def results_of(self, run: Run, plan: P, modules: tuple[Any, ...], x: Tensor, *others: Any) -> list[Tensor] | None:
        """Return the results of the op, and keep the call; None if x has no integers."""
        # Asked once: a grid that is made at each call saves tensors, and gradient checkpointing counts them.
        varying = self._varying(run, plan, modules, x, *others)
        if varying is None:
            return None
        tensors, numbers = varying
        values, call = [*tensors.values()], plan.call
        results = None if call is None or call.numbers != numbers else call.repeat(values)
        if not results:
            fields = {**plan.fields, **numbers, **tensors}
            fields["learned"] = any(t is not None and t.requires_grad for t in map(fields.get, TRAINED_OF_OUTPUT))
            call = plan.call = LastCall(numbers, made(self.KIND, fields, list(tensors)).call)
            results = call.repeat(values)
        return results

    def kind_of(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Hashable:
        """Return the values on which a plan depends besides the modules; None without a plan."""
        raise NotImplementedError

    def _planned(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> P | None:
        """Ask the modules for the plan."""
        raise NotImplementedError

    def _varying(self, run: Run, plan: P, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Varying | None:
        """Return the op's arguments that the plan does not hold; None if x has no integers."""
        raise NotImplementedError

    def output(self, run: Run, plan: P, quantizer: Any, y: Tensor, *grid: Tensor) -> Result:
        """Return the output of the unit, y, with its integers; `quantizer` is its quantizer.

        `grid` are the integers, empty where it has none, their scale, and their zero point if they have one.
        """
        if quantizer is not plan.quantizer:  # the op does not compute it
            return quantized_by(run, quantizer, y)
        if quantizer is None or not quantizer.capability.codes:
            return y, None
        codes, scale, *zero_point = grid
        return y, codes_on(run, scale, zero_point[0] if zero_point else None, quantizer, y, codes)


def made(kind: Any, fields: Fields, varying: list[str]) -> Any:
    """Return a unit of the library, to be called with the tensors of these names."""
    return kind({name: _of_python(value) for name, value in fields.items()}, varying)


def _of_python(value: Any) -> Any:
    """Return a value with numbers of Python in place of numpy's, which modules may have and torch's objects do not take."""
    if isinstance(value, tuple | list):
        return tuple(map(_of_python, value))
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool | int | float) else value


def snapshot_of(root: nn.Module, names: Sequence[str], ignored: frozenset[str] = IGNORED) -> Snapshot:
    """Return the attributes of submodules now, and of the quantizers on which it depends how they compute."""
    modules = [root.get_submodule(name) for name in names]
    seen = [*modules, *(each for m in modules if isinstance(m, on_codes.TakesCodes) for each in m.computes_by())]
    holders = [root.get_submodule(parent)._modules for parent in {p for name in names for p in names_around(name)}]
    return Snapshot((*seen, *holders), ignored)


def names_around(name: str) -> list[str]:
    """Return the names of the modules on the way to a submodule, with "" for the model."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


# ---- what an op is told about a layer


@dataclass(slots=True, frozen=True)
class LayerArguments:
    """The arguments of an op for a layer, for inputs of a kind."""

    # the weight's scale and grid, and the range that the op sets; None where they are made at each call
    grid: Fields | None
    others: Fields  # the parameters, what the layer computes, and how
    like: Tensor  # a tensor of the output's shape, without memory
    # whether the scale of the input is trained by what the input was before it was quantized, if that is known
    takes_raw: bool

    @property
    def fields(self) -> Fields:
        """The arguments of the op in each call."""
        return {**self.others, **(MADE_AT_EACH_CALL if self.grid is None else self.grid)}

    def varying(
        self,
        run: Run,
        layer: Any,
        call: int,
        x: Tensor,
        input_codes: TensorCodes | None,
        factor: Callable[[], Tensor | None],
        name: str | None,
    ) -> Varying | None:
        """Return the op's other arguments; None if x has no integers.

        `call` is the number of the layer's call. `factor` returns the factors of the output channels of the weight before it
        is quantized, or None.
        """
        codes = codes_of(run, x, layer.source_at(call), self.others["integer"], input_codes)
        if codes is None:
            return None
        raw = codes.raw_of(run, x) if self.takes_raw else None
        tensors = {
            "x": x if raw is None else x.detach(),
            "codes": codes.codes,
            "x_scale": codes.scale,
            "x_zero_point": codes.zero_point,
            "raw": None if raw is None else raw.values,
            "raw_scale": None if raw is None else raw.scale,
        }
        numbers: Fields = {
            "x_qmin": codes.qmin,
            "x_qmax": codes.qmax,
            "raw_factor": 1.0 if raw is None else raw.grad_factor,
        }
        if self.grid is not None:
            return tensors, numbers
        grid = _weight_grid_now(run, layer, factor(), name)
        return {**tensors, "start": grid.pop("scale"), "zero_point": grid.pop("zero_point")}, {**numbers, **grid}


def layer_arguments(run: Run, layer: Any, x: Tensor) -> LayerArguments | None:
    """Return the arguments of an op for a layer of an input like x; None if the op may not compute it."""
    g = layer.geometry(x)
    if g is None:
        return None
    integer = on_codes.computes_on_codes(layer, x, g)
    if not integer and (layer.training_arithmetic.save == "float" or on_codes.copies_weight(run, layer, x)):
        return None
    layer.check_input(x)
    try:
        with torch.no_grad():  # gradient checkpointing counts the tensors that a forward saves
            like = layer.compute(x.to("meta"), layer.weight.to("meta"), None)
    except RuntimeError:  # the input does not fit: the layer has a clearer error
        return None
    dtype = on_codes.computed_type(layer.weight, x)
    computed = {"dtype": dtype, "channels_last": on_codes.computed_format(layer, x, integer) is not None}
    parameters = {"weight": layer.weight, "bias": layer.bias, "updated": layer.updated_channels}
    others = {**parameters, **vars(g), "integer": integer, **computed}
    takes_raw = dtype == x.dtype and on_codes.reads_image(layer, x, g)
    return LayerArguments(grid_of_weight(layer), others, like, takes_raw)


def kind_of_inputs(weight: Tensor | None, x: Tensor) -> tuple[Hashable, ...] | None:
    """Return the values, besides the modules, on which an op's way to compute a layer of a parameter depends, or None."""
    if weight is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, weight.dtype, on_codes.computed_type(weight, x)


# ---- scales and grids

MADE_AT_EACH_CALL: Fields = {
    "ratio": None,
    "rate": None,
    "lo": None,
    "hi": None,
    "pow2_scale": False,
    "float16": False,
}
"""Of a weight's grid that is made at each call."""

NO_RANGE: Fields = {"lo": None, "hi": None, "pow2_scale": False}
"""Of a grid whose range the op does not set."""


def grid_of_weight(layer: Any) -> Fields | None:
    """Return the scale and the grid of a weight, and the range that the op sets; None where they are made at each call."""
    quantizer = layer.weight_quantizer
    if quantizer.follows and not quantizer.training:  # it may follow a weight that a frozen batch norm scales
        return None
    trained = quantizer.kind.start(quantizer)
    followed = _followed(layer) if quantizer.follows else NO_RANGE
    if trained is None or followed is None:
        return None
    start, ratio, rate = trained
    spec = quantizer.spec
    return {
        "start": start,
        "ratio": ratio,
        "rate": rate,
        "zero_point": quantizer._zero_point,
        "qmin": spec.qmin,
        "qmax": spec.qmax,
        "axis": None if spec.axis is None else spec.axis % layer.weight.dim(),
        "group": quantizer.group,
        "block_size": spec.block_size,
        "grad_factor": quantizer.kind.grad_factor(quantizer, layer.weight),
        "float16": quantizer.float16,
        **followed,
    }


def _followed(layer: Any) -> Fields | None:
    """Return the range that the op sets to a weight's, and the grid with it; None where the quantizer sets it."""
    quantizer, bn = layer.weight_quantizer, layer.batch_norm
    spec, observer, scale = quantizer.spec, quantizer.observer, quantizer._scale
    along_outputs = spec.axis is not None and spec.axis % layer.weight.dim() == 0 == layer.OUTPUT_AXIS
    plain = along_outputs and spec.symmetric and spec.group_size is None and not layer.weight_groups()[0]
    others = (observer.lo, observer.hi, *(() if bn is None else (bn.weight, bn.running_var)))
    if not plain or any(t is not None and (t.dtype, t.device) != (scale.dtype, scale.device) for t in others):
        return None
    return {"lo": observer.lo, "hi": observer.hi, "pow2_scale": spec.pow2_scale}


def _weight_grid_now(run: Run, layer: Any, factor: Tensor | None, name: str | None) -> Fields:
    """Return the grid of a weight whose quantizer makes it anew at each call."""
    grid = layer.weight_grid(run, factor)
    if grid is None:
        raise RuntimeError(f"the weight quantizer of {name!r} changed while its layer ran.")
    return dict(vars(grid))
