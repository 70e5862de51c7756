"""A layer with its batch norm and all that follows it up to a quantizer, in one op."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit.graph.program.epilogue import NO_CODES, codes_added, fits, is_added, layer_output
from qtoolkit.graph.program.units.base import (
    CachedFusedOp,
    Fields,
    Result,
    Varying,
    kind_of_inputs,
    layer_arguments,
)
from qtoolkit.graph.program.units.layer import LayerPlan
from qtoolkit.nn.batch_norm import (
    divisor_of,
    factor_of,
    is_folded,
    process_group_of,
    step_variance,
    tracks,
)
from qtoolkit.nn.fusion import Unit, fusion
from qtoolkit.nn.hooks import is_ordinary
from qtoolkit.nn.output_grid import output_grid
from qtoolkit.op_kinds.kind import Bounds
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.running import Run

OF_RESIDUAL = ("residual", "residual_codes", "residual_scale", "residual_zero_point")


@dataclass(slots=True)
class NormPlan(LayerPlan):
    """The same, with the ops after the layer."""

    last: bool  # whether the layer's output is in channels_last
    of_step: bool  # whether one factor holds for a step of the training


class BatchNormUnit(CachedFusedOp[NormPlan]):
    """A layer with its batch norm, a residual add, an activation and a quantizer; the forward of a prepared model calls `run`.

    `names` are the names of its modules, in this order without the add. `one_by_one` computes the batch norm and the rest,
    and `bounds` are the bounds of the activation's function, as in `qtoolkit.graph.program.epilogue.epilogue_of`. `call` is
    the number of the call of the layer.
    """

    KIND = torch.classes.qtoolkit.BatchNormUnit

    def __init__(
        self,
        root: nn.Module,
        names: Sequence[str | None],
        one_by_one: Callable[..., Any],
        bounds: Bounds | None,
        call: int = 0,
    ) -> None:
        super().__init__(root, names)
        self.one_by_one, self.bounds, self.call = one_by_one, bounds, call

    def run(
        self,
        run: Run,
        x: Tensor,
        input_codes: TensorCodes | None = None,
        residual: Tensor | None = None,
        residual_codes: TensorCodes | None = None,
    ) -> Result:
        """Return the unit's output, with its integers; `input_codes` and `residual_codes` are x's and the residual's."""
        if run.compiled:
            return self._one_by_one(run, self.modules_now(), x, input_codes, residual, residual_codes)
        self.refresh_if_modules_changed(run)
        given = run, self.modules, x, input_codes, residual, residual_codes
        tensors = type(x) is Tensor and (residual is None or type(residual) is Tensor)
        found = self.by_op(*given) if tensors and torch.is_grad_enabled() else None
        return self._one_by_one(*given) if found is None else found

    def _one_by_one(self, run: Run, modules: tuple[Any, ...], x: Tensor, codes: Any, *residual: object) -> Result:
        layer, bn, activation, quantizer = modules
        value = layer_output(run, layer, bn, x, codes, self.call)
        found: Result = self.one_by_one(run, value, *residual, layer, bn, activation, quantizer)
        return found

    def kind_of(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Hashable:
        """Return the values on which a plan depends besides the modules; None without a plan."""
        _, residual, _ = others
        layer, bn, *_ = modules
        kind = kind_of_inputs(layer._parameters.get("weight"), x)
        added = None if residual is None else (residual.shape, residual.dtype, residual.device)
        return None if kind is None else (*kind, added, *_of_forward(run, bn).values())

    def _planned(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> NormPlan | None:
        _, residual, _ = others
        layer, bn, activation, quantizer = modules
        may_be_one = is_ordinary(run, x)
        found = fusion(run, layer, bn, True, activation or self.bounds, quantizer) if may_be_one else None
        if not isinstance(found, Unit) or not found.whole or found.bounds is None:
            return None
        of_layer = layer_arguments(run, layer, x)
        if of_layer is None:
            return None
        like, dtype, last = of_layer.like, of_layer.others["dtype"], of_layer.others["channels_last"]
        if not (residual is None or is_added(run, residual, like.shape, dtype, x.device)) or not fits(bn, like.shape):
            return None
        fields = {
            **of_layer.fields,
            # the bias that a frozen batch norm gives it
            "rounds_bias": is_folded(bn) and layer.sum_steps(self.call) is not None,
            "gamma": bn.weight,
            "beta": bn.bias,
            "eps": bn.eps,
            **_statistics(bn),
            **found.bounds._asdict(),
        }
        return NormPlan(
            found.quantizer,
            output_grid(run, found.quantizer, like),
            fields,
            of_layer,
            last or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)),
            not is_folded(bn) or (layer.training and layer.takes_factor),
        )

    def _varying(self, run: Run, plan: NormPlan, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Varying | None:
        input_codes, residual, residual_codes = others
        layer, bn, *_ = modules
        variance = step_variance(run, layer, bn) if plan.of_step else _variance_now(layer, bn)
        factor = partial(_factor, bn, variance)
        found = plan.layer.varying(run, layer, self.call, x, input_codes, factor, self.names[0])
        if found is None:
            return None
        tensors, numbers = found
        codes = NO_CODES if residual is None else codes_added(run, residual, residual_codes, plan.last)
        added = dict(zip(OF_RESIDUAL, (residual, *codes), strict=True))
        return plan.with_output({**tensors, "variance": variance, **added}, {**numbers, **_of_forward(run, bn)})


def _variance_now(layer: Any, bn: Any) -> Tensor:
    """Return the running variance, after the scales have taken its factor."""
    layer.rescale_to_bn_factor()
    variance: Tensor = bn.running_var
    return variance


@torch.no_grad()
def _factor(bn: Any, variance: Tensor) -> Tensor:
    return factor_of(bn) if is_folded(bn) else divisor_of(bn, variance)


def _of_forward(run: Run, bn: Any) -> Fields:
    """Return the ranks that share statistics with a forward, and whether statistics move; not for constant statistics."""
    if is_folded(bn):
        return {"process_group": None, "tracks": False}
    return {"process_group": process_group_of(bn), "tracks": tracks(run, bn)}


def _statistics(bn: Any) -> Fields:
    """Return the mean of a frozen batch norm, and the running statistics of another one."""
    folded = is_folded(bn)
    return {
        "frozen_mean": bn.running_mean if folded else None,
        "running_mean": None if folded else bn.running_mean,
        "running_var": None if folded else bn.running_var,
        "batches": None if folded else bn.num_batches_tracked,
        "momentum": 0.0 if folded else float(bn.momentum),
    }
