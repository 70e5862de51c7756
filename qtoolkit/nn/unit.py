"""A layer with all that follows it up to a quantizer, in one op, while its modules are as they were when that was decided.

What a unit computes depends on its modules: their modes, hooks, types, parameters and quantizers. It is decided once, and holds
as long as the attributes of these modules are the same objects, which `Snapshot` compares in a microsecond. While no decision
holds, and where one op may not compute the unit, the functions of `qtoolkit.nn.epilogue` ask the modules at each call.
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
    layer_output,
    why_batch_norm_not_fused,
    why_layer_not_fused,
    why_quantizer_not_fused,
)
from qtoolkit.nn.hooks import all_watched, is_ordinary
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.bounds import Bounds
from qtoolkit.quantizers.handed_over import Handed, codes_in, grid_with_codes, handed_as, handed_with, keep
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
        weight: The weight.
        grid: Its scale and its grid, and the range that it follows; None where they are computed at each call.
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
        follows: Whether the weight's range follows it.
    """

    weight: Tensor
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
    follows: bool


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
        codes = None if plan is None else self._handed(x, handed, plan.integer)
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
        self.weight, self.variance = (
            layer._parameters.get("weight"),
            bn.running_var,
        )  # a computed weight is no parameter
        self.snapshot, self.plans, self.last = snapshot_of(root, [n for n in self.names if n is not None]), {}, None

    def _plan(self, x: Tensor, residual: Tensor | None) -> Plan | None:
        weight, device = self.weight.dtype, x.device
        kind = device.type
        computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight
        added = None if residual is None else (residual.shape, residual.dtype, residual.device)
        inputs = (x.shape, x.stride(), x.dtype, device, weight, computed, added)
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
        if not fits(bn, like.shape) or (residual is not None and not _is_added(residual, like, x.device, dtype)):
            return None
        last = integer and layer.returns_channels_last and on_codes.has_kernel_type(x)
        g, memory_format = geometry, torch.channels_last if last else None
        sizes = (g.stride, g.padding, g.dilation, g.output_padding, g.transposed, g.groups)
        tracked = (bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.momentum)
        return Plan(
            layer.weight,
            _grid_of_weight(layer),
            (*sizes, integer),
            (dtype, memory_format, layer.bias),
            (bn.weight, bn.bias, bn.eps, *(tracked if bn.track_running_stats else NOT_TRACKED)),
            bounds,
            NOT_QUANTIZED if quantizer is None else _grid_of_output(quantizer, like),
            like,
            integer,
            last or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)),
            tuple(p for p in (layer.weight, layer.bias, bn.weight, bn.bias) if p is not None),
            quantizer is not None and quantizer.capability.codes,
            layer.weight_quantizer.follows,
        )

    # ---- the op

    def _handed(self, x: Tensor, handed: Handed | None, integer: bool) -> Handed | None:
        """Return the codes of the input; None where it has none."""
        if handed is None or handed.version != x._version:
            return grid_with_codes(x, self.modules[0].source, integer)
        if handed.codes is None or integer:
            codes_in(x, handed, integer)
        return handed

    def _compute(
        self, plan: Plan, x: Tensor, codes: Handed, residual: Tensor | None, of_residual: Handed | None
    ) -> tuple[Tensor, Handed | None]:
        layer, bn, _, quantizer = self.modules
        variance = variance_of_step(bn, self.variance, plan.changing)
        grid, followed = plan.grid or self._grid_of_weight(variance)
        if plan.follows:
            vars(layer.weight_quantizer)["stale"] = True  # the step after this forward changes the weight
        output = plan.output or _grid_now(quantizer, plan.like)
        y, y_codes, y_scale, *_ = _unit(
            x,
            codes.codes,
            codes.scale,
            codes.zero_point,
            codes.qmin,
            codes.qmax,
            plan.weight,
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
        is_positive = output[1] is not None
        handed = handed_as(y, y_codes, y_scale if is_positive else y_scale.abs(), output[3], quantizer)
        if self.gives:
            keep(y, handed)
        return y, handed

    def _grid_of_weight(self, variance: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
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
    if all_watched() or not bn.training or why_batch_norm_not_fused(bn) is not None or bn.momentum is None:
        return False
    if (
        why_layer_not_fused(layer, bn) is not None
        or layer.integer_kernel is not None
        or layer.input_quantizer is not None
    ):
        return False
    if quantizer is not None and why_quantizer_not_fused(quantizer) is not None:
        return False
    parameters = (layer._parameters.get("weight"), layer.bias, bn.weight, bn.bias)
    plain = all(type(p) is nn.Parameter for p in parameters[:1]) and all(
        p is None or type(p) is nn.Parameter for p in parameters
    )
    return plain and _gives_grid(layer.weight_quantizer) and not layer.has_dropouts()


def _gives_grid(quantizer: Any) -> bool:
    """Return whether the quantizer of a weight leaves it to an op to quantize it."""
    if not isinstance(quantizer, TensorQuantizer) or quantizer.stopping or not quantizer.ready:
        return False
    return quantizer.gives_grid()


def _is_added(residual: Tensor, like: Tensor, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the op adds a residual."""
    same = residual.shape == like.shape and residual.dtype == dtype and residual.device == device
    return same and is_ordinary(residual)


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


def _grid_now(quantizer: TensorQuantizer, like: Tensor) -> tuple[Any, ...]:
    """Return the scale and the grid of an output whose quantizer makes them anew at each call."""
    kind, spec = quantizer.kind, quantizer.spec
    scale, zero_point = kind.grid(quantizer)
    return scale, None, None, zero_point, spec.qmin, spec.qmax, kind.grad_factor(quantizer, like)


def _codes_added(residual: Tensor, handed: Handed | None, channels_last: bool) -> tuple[Tensor | None, ...]:
    """Return the codes of a residual, one a byte, with its scale and zero point."""
    if handed is None or handed.version != residual._version:
        handed = grid_with_codes(residual, None, channels_last)
    elif handed.codes is None or channels_last:
        codes_in(residual, handed, channels_last)
    if handed is None or handed.codes is None or handed.codes.shape != residual.shape:
        return NO_CODES
    return handed.codes, handed.scale, handed.zero_point
