"""A layer with its batch norm and all that follows it up to a quantizer, in one op."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    why_batch_norm_not_fused,
    why_layer_not_fused,
)
from qtoolkit.graph.program.units.base import (
    OF_LAYER,
    OF_OUTPUT,
    Decided,
    Result,
    Varying,
    kind_of_inputs,
    layer_arguments,
    layer_is_plain,
)
from qtoolkit.graph.program.units.layer import LayerPlan
from qtoolkit.nn.batch_norm import (
    QuantFrozenBatchNorm,
    divisor_of,
    factor_of,
    is_folded,
    process_group_of,
    step_variance,
    tracks,
)
from qtoolkit.nn.hooks import all_watched, is_ordinary
from qtoolkit.nn.output_grid import is_learned, output_grid
from qtoolkit.op_kinds.kind import Bounds
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.quantizers.recomputation import is_recomputing

_bind = library.bind_unit.default

NOT_TRACKED = (None, None, None, 0.0)


@dataclass(slots=True)
class NormPlan(LayerPlan):
    """The same, with what follows the layer; the bias is that which a frozen batch norm gives it."""

    # the batch norm, without the variance with which the weight is folded: with its mean if it is frozen, else with the
    # running statistics, and the process group with which they are shared
    norm: tuple[Any, ...]
    activation: tuple[float, float, float]
    last: bool  # whether the layer's output is in channels_last
    of_step: bool  # whether the factor is that of a step of the training


class BatchNormUnit(Decided[NormPlan]):
    """A layer with its batch norm, a residual add, an activation and a quantizer; the code of a prepared model calls `run`.

    `names` are those of its modules, in this order without the add. `one_by_one` computes the batch norm and what follows it,
    and `bounds` is what the function of the activation computes, as in `qtoolkit.graph.program.epilogue.epilogue_of`.
    """

    VARYING = (*OF_LAYER, "variance", "residual", "residual_codes", "residual_scale", "residual_zero_point", *OF_OUTPUT)

    def __init__(
        self, root: nn.Module, names: Sequence[str | None], one_by_one: Callable[..., Any], bounds: Bounds | None
    ) -> None:
        super().__init__(root, names)
        self.one_by_one, self.bounds = one_by_one, bounds

    def run(
        self,
        x: Tensor,
        known: TensorCodes | None = None,
        residual: Tensor | None = None,
        of_residual: TensorCodes | None = None,
    ) -> Result:
        """Return the unit's output, with its codes; `known` and `of_residual` are what is known of x and of the residual."""
        if torch.compiler.is_compiling():
            return self._one_by_one(self.modules_now(), x, known, residual, of_residual)
        self.look()
        tensors = type(x) is Tensor and (residual is None or type(residual) is Tensor)
        found = self.by_op(x, known, residual, of_residual) if tensors and torch.is_grad_enabled() else None
        return self._one_by_one(self.modules, x, known, residual, of_residual) if found is None else found

    def _one_by_one(
        self, modules: Any, x: Tensor, known: Any, residual: Tensor | None, of_residual: TensorCodes | None
    ) -> Result:
        layer, bn, activation, quantizer = modules
        value = layer_output(layer, bn, x, known)
        found: Result = self.one_by_one(value, residual, of_residual, layer, bn, activation, quantizer)
        return found

    def kind_of(self, x: Tensor, *others: Any) -> Hashable:
        """Return on what a plan depends besides the modules; None where there is none."""
        _, residual, _ = others
        layer, bn, *_ = self.modules
        kind = kind_of_inputs(layer._parameters.get("weight"), x)
        added = None if residual is None else (residual.shape, residual.dtype, residual.device)
        return None if kind is None else (*kind, added, *_forward_of(bn))

    def _planned(self, x: Tensor, *others: Any) -> NormPlan | None:
        _, residual, _ = others
        layer, bn, activation, _ = self.modules
        bounds = bounds_now(activation, self.bounds)
        if bounds is None or bn.running_var is None or not is_ordinary(x) or not _is_one_op(layer, bn):
            return None
        of_layer = layer_arguments(layer, x)
        if of_layer is None:
            return None
        like, (dtype, memory_format) = of_layer.like, of_layer.computed
        if not fits(bn, like.shape) or not (residual is None or is_added(residual, like.shape, dtype, x.device)):
            return None
        quantizer = self.quantizer_in_op()
        return NormPlan(
            quantizer,
            output_grid(quantizer, like),
            of_layer,
            is_folded(bn) and layer.sum_steps() is not None,
            True,
            (bn.weight, bn.bias, bn.eps, *_statistics(bn)),
            bounds,
            memory_format is not None or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)),
            not is_folded(bn) or (layer.training and layer.takes_factor),
        )

    def _varying(self, plan: NormPlan, x: Tensor, *others: Any) -> Varying | None:
        known, residual, of_residual = others
        layer, bn, *_ = self.modules
        variance = step_variance(layer, bn) if plan.of_step else _variance_now(layer, bn)
        found = plan.layer.varying(layer, x, known, partial(_factor, bn, variance), self.names[0])
        if found is None:
            return None
        (of_layer, constants), (of_output, of_codes) = found, plan.varying_output()
        added = NO_CODES if residual is None else codes_added(residual, of_residual, plan.last)
        return (*of_layer, variance, residual, *added, *of_output), (_forward_of(bn), *constants, *of_codes)

    def _bound(self, plan: NormPlan, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> Any:
        count = len(OF_LAYER)
        variance, *residual = tensors[count:-2]
        first, last = plan.layer.call(self.modules[0], tensors[:count], constants[1:-1])
        output = plan.output_call(tensors[-2:], constants[-1:])
        following = *residual, *plan.activation, *output, is_learned(output)
        return _bind(self.VARYING, *first, plan.rounds_bias, variance, *plan.norm, *following, *last)


def _variance_now(layer: Any, bn: Any) -> Tensor:
    """Return the running variance, after the scales have taken its factor."""
    layer.rescale_to_bn_factor()
    variance: Tensor = bn.running_var
    return variance


@torch.no_grad()
def _factor(bn: Any, variance: Tensor) -> Tensor:
    return factor_of(bn) if is_folded(bn) else divisor_of(bn, variance)


def _forward_of(bn: Any) -> tuple[Any, ...]:
    """Return with which ranks a forward shares statistics, and whether it recomputes another forward, so that none move."""
    return process_group_of(bn), is_recomputing()


def _statistics(bn: Any) -> tuple[Any, ...]:
    """Return the mean of a frozen batch norm; and the running statistics of another one, with its process group."""
    if is_folded(bn):
        return bn.running_mean, *NOT_TRACKED, None
    tracked = (bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.momentum)
    return None, *(tracked if tracks(bn) else NOT_TRACKED), process_group_of(bn)


def _is_one_op(layer: Any, bn: Any) -> bool:
    """Return whether the op computes modules as they are now, for some inputs."""
    if all_watched() or why_layer_not_fused(layer, bn) is not None or not layer_is_plain(layer):
        return False
    if is_folded(bn) and why_batch_norm_not_fused(bn, folded=True) is not None:
        return False
    if not is_folded(bn) and (bn.momentum is None or not trains(bn)):
        return False
    kind = Tensor if type(bn) is QuantFrozenBatchNorm else nn.Parameter
    return all(type(p) is kind for p in (bn.weight, bn.bias) if p is not None)
