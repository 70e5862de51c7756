"""A layer with its batch norm and all that follows it up to a quantizer, in one op."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtoolkit._native import library
from qtoolkit.graph.program.epilogue import (
    NO_CODES,
    bounds_now,
    codes_added,
    fits,
    is_added,
    layer_output,
    trains,
    why_layer_not_fused,
)
from qtoolkit.graph.program.units.base import (
    Decided,
    LayerArguments,
    kind_of_inputs,
    layer_arguments,
    layer_call,
    layer_is_plain,
)
from qtoolkit.nn.batch_norm import divisor_of, variance_of_step
from qtoolkit.nn.hooks import all_watched, is_ordinary
from qtoolkit.nn.output_grid import GridNow, grid_of, output_grid
from qtoolkit.op_kinds.bounds import Bounds
from qtoolkit.quantizers.codes import TensorCodes, codes_of
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

_unit = library.unit.default

NOT_TRACKED = (None, None, None, 0.0)


class Names(NamedTuple):
    """The names of the modules of a unit."""

    layer: str
    batch_norm: str
    activation: str | None
    quantizer: str | None


class Plan(NamedTuple):
    """The arguments of the op for some inputs, in its order.

    Attributes:
        layer: The layer.
        norm: The batch norm, without the variance with which the weight is folded, and the running statistics.
        activation: Its bounds.
        quantizer: The output's quantizer in the op, if there is one.
        output: The output's scale and grid.
        last: Whether the layer's output is in channels_last.
        changing: The parameters whose changes end a step.
    """

    layer: LayerArguments
    norm: tuple[Any, ...]
    activation: tuple[float, float, float]
    quantizer: TensorQuantizer | None
    output: GridNow
    last: bool
    changing: tuple[Tensor, ...]


class BatchNormUnit(Decided):
    """A layer with its batch norm, a residual add, an activation and a quantizer; the code of a prepared model calls `run`.

    Args:
        root: The model, or the block of it in which the unit runs.
        names: The names of its modules.
        one_by_one: What computes the batch norm and what follows it, of `qtoolkit.graph.program.epilogue.epilogue_of`.
        bounds: What the function of the activation computes; None where it is a module, or there is none.
    """

    def __init__(self, root: nn.Module, names: Names, one_by_one: Callable[..., Any], bounds: Bounds | None) -> None:
        super().__init__(root, names)
        self.one_by_one, self.bounds = one_by_one, bounds

    def run(
        self,
        x: Tensor,
        known: TensorCodes | None = None,
        residual: Tensor | None = None,
        of_residual: TensorCodes | None = None,
    ) -> tuple[Tensor, TensorCodes | None]:
        """Return the unit's output, with its codes.

        Args:
            x: The input of the layer.
            known: What is known of it.
            residual: What is added after the batch norm.
            of_residual: What is known of it.
        """
        if torch.compiler.is_compiling():
            return self._one_by_one(self.modules_now(), x, None, residual, None)
        self.look()
        tensors = type(x) is Tensor and (residual is None or type(residual) is Tensor)
        plan = self.plan_of(x, residual) if tensors and torch.is_grad_enabled() else None
        codes = None if plan is None else codes_of(x, self.modules[0].source, plan.layer.integer, known)
        if plan is None or codes is None:
            return self._one_by_one(self.modules, x, known, residual, of_residual)
        return self.compute(plan, x, codes, residual, of_residual)

    def _one_by_one(
        self,
        modules: tuple[Any, ...],
        x: Tensor,
        known: TensorCodes | None,
        residual: Tensor | None,
        of_residual: TensorCodes | None,
    ) -> tuple[Tensor, TensorCodes | None]:
        """Call the functions that ask the modules."""
        layer, bn, activation, quantizer = modules
        value = layer_output(layer, bn, x, known)
        found: tuple[Tensor, TensorCodes | None] = self.one_by_one(
            value, residual, of_residual, layer, bn, activation, quantizer
        )
        return found

    def plan_of(self, x: Tensor, residual: Tensor | None) -> Plan | None:
        """Return the plan for inputs; None where one op may not compute the unit."""
        kind = kind_of_inputs(self.modules[0], x)
        if kind is None:
            return None
        added = None if residual is None else (residual.shape, residual.dtype, residual.device)
        found: Plan | None = self.plan((*kind, added), x, residual, kind[-1])
        return found

    def planned(self, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Plan | None:
        """Ask the modules for the plan."""
        layer, bn, activation, _ = self.modules
        bounds = bounds_now(activation, self.bounds)
        if bounds is None or bn.running_var is None or not is_ordinary(x) or not _is_one_op(layer, bn):
            return None
        of_layer = layer_arguments(layer, x, dtype)
        if of_layer is None:
            return None
        like, (_, memory_format) = of_layer.like, of_layer.computed
        if not fits(bn, like.shape) or not (residual is None or is_added(residual, like.shape, dtype, x.device)):
            return None
        tracked = (bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.momentum)
        quantizer = self.quantizer_in_op()
        return Plan(
            of_layer,
            (bn.weight, bn.bias, bn.eps, *(tracked if bn.track_running_stats else NOT_TRACKED)),
            bounds,
            quantizer,
            output_grid(quantizer, like),
            memory_format is not None or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)),
            tuple(p for p in (layer.weight, layer.bias, bn.weight, bn.bias) if p is not None),
        )

    def compute(
        self,
        plan: Plan,
        x: Tensor,
        codes: TensorCodes,
        residual: Tensor | None,
        of_residual: TensorCodes | None,
    ) -> tuple[Tensor, TensorCodes | None]:
        """Compute the unit by the op."""
        layer, bn, *_ = self.modules
        variance = variance_of_step(bn, bn.running_var, plan.changing)
        output = grid_of(plan.output)
        first, last = layer_call(layer, plan.layer, x, codes, partial(_factor, bn, variance), self.names[0])
        y, y_codes, y_scale, *_ = _unit(
            *first,
            variance,
            *plan.norm,
            residual,
            *(NO_CODES if residual is None else codes_added(residual, of_residual, plan.last)),
            *plan.activation,
            *output,
            *last,
        )
        return self.output(y, y_codes, y_scale, output, plan.quantizer)


@torch.no_grad()
def _factor(bn: Any, variance: Tensor) -> Tensor:
    return divisor_of(bn, variance)


def _is_one_op(layer: Any, bn: Any) -> bool:
    """Return whether the op computes modules as they are now, for some inputs."""
    if all_watched() or not trains(bn) or bn.momentum is None or why_layer_not_fused(layer, bn) is not None:
        return False
    return layer_is_plain(layer) and all(type(p) is nn.Parameter for p in (bn.weight, bn.bias) if p is not None)
