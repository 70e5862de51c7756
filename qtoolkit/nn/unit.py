"""A layer with all that follows it up to a quantizer, in one op, while its modules are as they were when that was decided.

What a unit computes depends on its modules: their modes, hooks, types, parameters and quantizers. It is decided once, and holds
as long as the attributes of these modules are the same objects, which `Snapshot` compares in some microseconds. While no
decision holds, and where one op may not compute the unit, the functions of `qtoolkit.nn.epilogue` ask the modules at each call.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from qtoolkit._native import library
from qtoolkit._snapshot import Snapshot
from qtoolkit.nn import on_codes
from qtoolkit.nn.batch_norm import divisor_of, variance_of_step
from qtoolkit.nn.epilogue import (
    bounds_now,
    fits,
    grid_now,
    is_added,
    layer_output,
    trains,
    why_layer_not_fused,
    why_quantizer_not_fused,
)
from qtoolkit.nn.hooks import all_watched, is_ordinary
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.bounds import Bounds
from qtoolkit.quantizers.handed_over import Handed, grid_with_codes, handed_as, handed_with, keep
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

_unit = library.unit.default

WATCHING = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CHANGING = ("_seen", "stale", "steps", "seen_in_step", "looked", "warned", "_range_of")  # in training
IGNORED = frozenset({*CHANGING, *(name for name in vars(nn.Module()) if "hooks" in name and name not in WATCHING)})
"""Attributes on which it does not depend what a unit is."""

MOST_PLANS = 64
"""Of one unit, for inputs of different sizes."""

NOT_QUANTIZED = (None, None, None, None, -128, 127, 1.0)
NO_CODES = (None, None, None)
NOT_TRACKED = (None, None, None, 0.0)
NOT_FOLLOWED = (None, None, False)


class Names(NamedTuple):
    """The names of the modules of a unit."""

    layer: str
    batch_norm: str
    activation: str | None
    quantizer: str | None


class Inputs(NamedTuple):
    """For which inputs a plan is made. Tensors with these sizes and types take the same ops."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weight: torch.dtype
    computed: torch.dtype
    residual: tuple[torch.Size, torch.dtype, torch.device] | None


class Plan(NamedTuple):
    """The arguments of the op for some inputs, in its order.

    Attributes:
        grid: The weight's scale and grid, and the range that it follows; None where they are computed at each call.
        geometry: What the layer computes, and whether on codes.
        computed: The type and the memory format of its output, and the bias that its batch norm subtracts.
        norm: The batch norm, without the variance with which the weight is folded, and the running statistics.
        activation: Its bounds.
        output: The output's scale and grid; None where they are computed at each call.
        like: A tensor of the output's shape, without memory.
        integer: Whether the layer computes on codes.
        last: Whether the layer's output is in channels_last.
        changing: The parameters whose changes end a step.
        gives_codes: Whether the output has codes for other layers.
    """

    grid: tuple[tuple[Any, ...], tuple[Any, ...]] | None
    geometry: tuple[Any, ...]
    computed: tuple[Any, ...]
    norm: tuple[Any, ...]
    activation: tuple[float, float, float]
    output: tuple[Any, ...] | None
    like: Tensor
    integer: bool
    last: bool
    changing: tuple[Tensor, ...]
    gives_codes: bool


class Unit:
    """A unit of a prepared model; its code calls `run`.

    Args:
        root: The model.
        names: The names of its modules.
        one_by_one: What computes the batch norm and what follows it, of `qtoolkit.nn.epilogue.epilogue_of`.
        bounds: What the function of the activation computes; None where it is a module, or there is none.
        gives: Whether others than units take the result, which are handed its codes with it.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Names,
        one_by_one: Callable[..., Tensor],
        bounds: Bounds | None,
        gives: bool,
    ) -> None:
        self.root, self.names, self.one_by_one = ref(root), names, one_by_one
        self.bounds, self.gives = bounds, gives
        self.snapshot: Snapshot | None = None
        self.modules: tuple[Any, ...] = ()
        self.weight: Any = None
        self.variance: Any = None
        self.plans: dict[Inputs, Plan | None] = {}
        self.last: tuple[Inputs, Plan | None] | None = None

    def run(
        self,
        x: Tensor,
        handed: Handed | None = None,
        residual: Tensor | None = None,
        of_residual: Handed | None = None,
    ) -> tuple[Tensor, Handed | None]:
        """Return the unit's output, with its codes.

        Args:
            x: The input of the layer.
            handed: Its codes, if a unit returned it.
            residual: What is added after the batch norm.
            of_residual: Its codes, if a unit returned it.
        """
        if self.snapshot is None or not self.snapshot.holds():
            self._look()
        tensors = type(x) is Tensor and (residual is None or type(residual) is Tensor)
        plan = self._plan(x, residual) if tensors and self.weight is not None and torch.is_grad_enabled() else None
        codes = None if plan is None else grid_with_codes(x, self.modules[0].source, plan.integer, handed)
        if plan is None or codes is None:
            return self._one_by_one(x, handed, residual, of_residual)
        return self._compute(plan, x, codes, residual, of_residual)

    def _one_by_one(
        self, x: Tensor, handed: Handed | None, residual: Tensor | None, of_residual: Handed | None
    ) -> tuple[Tensor, Handed | None]:
        """Call the functions that ask the modules."""
        for tensor, known in ((x, handed), (residual, of_residual)):
            if tensor is not None and known is not None:
                keep(tensor, known)
        layer, bn, activation, quantizer = self.modules
        y = self.one_by_one(layer_output(layer, bn, x), residual, layer, bn, activation, quantizer)
        return y, handed_with(y)

    # ---- what it is

    def _look(self) -> None:
        """Take the modules as they are now."""
        root = self.root()
        if root is None:
            raise RuntimeError("the model of this code does not exist any more.")
        self.modules = tuple(None if name is None else root.get_submodule(name) for name in self.names)
        layer, bn = self.modules[:2]
        self.weight = layer._parameters.get("weight")  # None for a weight that is computed
        self.variance = bn.running_var
        self.snapshot, self.plans, self.last = snapshot_of(root, [n for n in self.names if n is not None]), {}, None

    def _plan(self, x: Tensor, residual: Tensor | None) -> Plan | None:
        computed = on_codes.computed_type(self.weight, x)
        added = None if residual is None else (residual.shape, residual.dtype, residual.device)
        inputs = (x.shape, x.stride(), x.dtype, x.device, self.weight.dtype, computed, added)
        last = self.last
        if last is None or last[0] != inputs:
            last = self.last = Inputs(*inputs), self._found(Inputs(*inputs), x, residual)
        return last[1]

    def _found(self, inputs: Inputs, x: Tensor, residual: Tensor | None) -> Plan | None:
        if inputs not in self.plans:
            if len(self.plans) == MOST_PLANS:
                self.plans.clear()
            self.plans[inputs] = self._planned(x, residual, inputs.computed)
        return self.plans[inputs]

    def _planned(self, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Plan | None:
        """Return how one op computes the unit for inputs like these; None where it may not."""
        layer, bn, activation, quantizer = self.modules
        bounds = bounds_now(activation, self.bounds)
        if bounds is None or self.variance is None or not is_ordinary(x) or not _is_one_op(layer, bn, quantizer):
            return None
        geometry = layer.geometry(x)
        if geometry is None or on_codes.reads_image(layer, x, geometry):
            return None
        integer = on_codes.computes_on_codes(layer, x, geometry)
        if not integer and (layer.training_arithmetic.save == "float" or on_codes.copies_weight(layer, x)):
            return None
        layer.check_input(x)
        with torch.no_grad():  # gradient checkpointing counts the tensors that a forward saves
            like = layer.compute(x.to("meta"), layer.weight.to("meta"), None)
        if not fits(bn, like.shape) or not (residual is None or is_added(residual, like.shape, dtype, x.device)):
            return None
        g, memory_format = geometry, on_codes.computed_format(layer, x, integer)
        sizes = (g.stride, g.padding, g.dilation, g.output_padding, g.transposed, g.groups)
        tracked = (bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.momentum)
        return Plan(
            _grid_of_weight(layer),
            (*sizes, integer),
            (dtype, memory_format, layer.bias),
            (bn.weight, bn.bias, bn.eps, *(tracked if bn.track_running_stats else NOT_TRACKED)),
            bounds,
            NOT_QUANTIZED if quantizer is None else _grid_of_output(quantizer, like),
            like,
            integer,
            memory_format is not None or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)),
            tuple(p for p in (layer.weight, layer.bias, bn.weight, bn.bias) if p is not None),
            quantizer is not None and quantizer.capability.codes,
        )

    # ---- the op

    def _compute(
        self, plan: Plan, x: Tensor, codes: Handed, residual: Tensor | None, of_residual: Handed | None
    ) -> tuple[Tensor, Handed | None]:
        layer, bn, _, quantizer = self.modules
        variance = variance_of_step(bn, self.variance, plan.changing)
        grid, followed = plan.grid or self._grid_now(variance)
        if followed is not NOT_FOLLOWED:
            vars(layer.weight_quantizer)["stale"] = True  # the step after this forward changes the weight
        output = plan.output or _output_now(quantizer, plan.like)
        y, y_codes, y_scale, *_ = _unit(
            x,
            codes.codes,
            codes.scale,
            codes.zero_point,
            codes.qmin,
            codes.qmax,
            self.weight,
            *grid,
            *plan.geometry,
            *followed,
            *plan.computed,
            variance,
            *plan.norm,
            residual,
            *(NO_CODES if residual is None else _codes_added(residual, of_residual, plan.last)),
            *plan.activation,
            *output,
        )
        if not (plan.gives_codes and y.requires_grad):
            return y, None
        scale = y_scale if output[1] is not None else y_scale.abs()  # with a ratio it is positive
        handed = handed_as(scale, output[3], quantizer, y_codes, y._version)
        if self.gives:
            keep(y, handed)
        return y, handed

    def _grid_now(self, variance: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the scale and the grid of a weight whose quantizer makes them anew at each call."""
        layer, bn = self.modules[:2]
        with torch.no_grad():
            factor = divisor_of(bn, variance)
        grid = on_codes.weight_grid(layer, factor)
        if grid is None:
            raise RuntimeError(f"the weight quantizer of {self.names.layer!r} changed while its layer ran.")
        of_codes = (grid.qmin, grid.qmax, grid.axis, grid.group, grid.block_size, grid.grad_factor)
        return (grid.scale, None, None, grid.zero_point, *of_codes), NOT_FOLLOWED


def snapshot_of(root: nn.Module, names: Sequence[str]) -> Snapshot:
    """Return the attributes of submodules now, and of the quantizers on which it depends how they compute."""
    modules = [root.get_submodule(name) for name in names]
    seen = [*modules, *(each for m in modules if isinstance(m, QuantWeighted) for each in m.computes_by())]
    holders = [root.get_submodule(parent)._modules for parent in {p for name in names for p in _parents(name)}]
    return Snapshot((*seen, *holders), IGNORED)


def _parents(name: str) -> list[str]:
    """Return the names of the modules on the way to a submodule, with "" for the model."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


# ---- what may be one op


def _is_one_op(layer: Any, bn: Any, quantizer: Any) -> bool:
    """Return whether the op computes modules as they are now, for some inputs."""
    if all_watched() or not trains(bn) or bn.momentum is None or why_layer_not_fused(layer, bn) is not None:
        return False
    if layer.integer_kernel is not None or layer.input_quantizer is not None or layer.has_dropouts():
        return False
    if quantizer is not None and why_quantizer_not_fused(quantizer) is not None:
        return False
    parameters = (p for p in (layer.weight, layer.bias, bn.weight, bn.bias) if p is not None)
    return _gives_grid(layer.weight_quantizer) and all(type(p) is nn.Parameter for p in parameters)


def _gives_grid(quantizer: Any) -> bool:
    """Return whether the quantizer of a weight leaves it to an op to quantize it."""
    if not isinstance(quantizer, TensorQuantizer) or quantizer.stopping or not quantizer.ready:
        return False
    return quantizer.gives_grid()


# ---- scales and grids


def _grid_of_weight(layer: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Return the scale and the grid of a weight, and the range that the op sets."""
    quantizer = layer.weight_quantizer
    start = quantizer.kind.start(quantizer)
    followed = _followed(layer) if quantizer.follows else NOT_FOLLOWED
    if start is None or followed is None:
        return None
    spec, factor = quantizer.spec, quantizer.kind.grad_factor(quantizer, layer.weight)
    of_codes = (spec.qmin, spec.qmax, spec.axis, quantizer.group, spec.block_size, factor)
    return (*start, quantizer._zero_point, *of_codes), followed


def _followed(layer: Any) -> tuple[Any, ...] | None:
    """Return the range that the op sets to that of a weight, and the grid with it; None where the quantizer sets it."""
    quantizer = layer.weight_quantizer
    spec, observer, variance = quantizer.spec, quantizer.observer, layer.batch_norm.running_var
    along_outputs = spec.axis is not None and spec.axis % layer.weight.dim() == 0 == layer.OUTPUT_AXIS
    plain = along_outputs and spec.symmetric and spec.group_size is None and not layer.weight_groups()[0]
    scales = (observer.lo, observer.hi, quantizer._scale, layer.batch_norm.weight, variance)
    if not plain or any(t is not None and (t.dtype, t.device) != (variance.dtype, variance.device) for t in scales):
        return None
    return observer.lo, observer.hi, spec.pow2_scale


def _grid_of_output(quantizer: TensorQuantizer, like: Tensor) -> tuple[Any, ...] | None:
    start = quantizer.kind.start(quantizer)
    if start is None:
        return None
    factor = quantizer.kind.grad_factor(quantizer, like)
    return (*start, quantizer._zero_point, quantizer.spec.qmin, quantizer.spec.qmax, factor)


def _output_now(quantizer: TensorQuantizer, like: Tensor) -> tuple[Any, ...]:
    """Return the scale and the grid of an output whose quantizer makes them anew at each call."""
    grid = grid_now(quantizer, like)
    return grid.pop("scale"), None, None, *(grid[name] for name in ("zero_point", "qmin", "qmax", "grad_factor"))


def _codes_added(residual: Tensor, handed: Handed | None, channels_last: bool) -> tuple[Tensor | None, ...]:
    """Return the codes of a residual, one a byte, with its scale and zero point."""
    found = grid_with_codes(residual, None, channels_last, handed)
    if found is None or found.codes is None or found.codes.shape != residual.shape:
        return NO_CODES
    return found.codes, found.scale, found.zero_point
