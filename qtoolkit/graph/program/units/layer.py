"""A layer without a batch norm, with a quantizer right behind it, in one op."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtoolkit._native import library
from qtoolkit.graph.program.units.base import (
    Decided,
    LayerArguments,
    kind_of_inputs,
    layer_arguments,
    layer_call,
    layer_is_plain,
)
from qtoolkit.nn.hooks import all_watched, is_ordinary, is_watched
from qtoolkit.nn.output_grid import GridNow, gives_codes, grid_of, is_learned, output_grid
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.quantizers.handed_over import Handed, grid_with_codes, handed_with, keep
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

_layer_fake_quant = library.layer_fake_quant.default


class Plan(NamedTuple):
    """The arguments of the op for some inputs, in its order.

    Attributes:
        layer: The layer.
        rounds_bias: Whether its bias is put on the grid of its sums.
        quantizer: The output's quantizer in the op, if there is one.
        output: The output's scale and grid.
        with_codes: Whether the op returns the codes of its output.
    """

    layer: LayerArguments
    rounds_bias: bool
    quantizer: TensorQuantizer | None
    output: GridNow
    with_codes: bool


class LayerUnit(Decided):
    """A layer and a quantizer; the code of a prepared model calls `run`.

    Args:
        root: The model, or the block of it in which the unit runs.
        layer: The name of the layer.
        quantizer: The name of the quantizer that takes the layer's output, and nobody else does; None without one.
        with_codes: Whether a unit takes the codes of the result.
        gives: Whether others than units take the result, which are handed its grid with it.
    """

    def __init__(self, root: nn.Module, layer: str, quantizer: str | None, with_codes: bool, gives: bool) -> None:
        super().__init__(root, (layer, quantizer), gives)
        self.with_codes = with_codes

    def run(self, x: Tensor, handed: Handed | None = None) -> tuple[Tensor, Handed | None]:
        """Return the unit's output, with its codes.

        Args:
            x: The input of the layer.
            handed: Its codes, if a unit returned it.
        """
        if torch.compiler.is_compiling():
            return _one_by_one(x, *self.modules_now()), None
        self.look()
        layer, quantizer = self.modules
        plan = self.plan_of(x) if type(x) is Tensor and torch.is_grad_enabled() else None
        codes = None if plan is None else grid_with_codes(x, layer.source, plan.layer.integer, handed)
        if plan is not None and codes is not None:
            return self.compute(plan, x, codes)
        if handed is not None:
            keep(x, handed)
        y = _one_by_one(x, layer, quantizer)
        return y, handed_with(y)

    def plan_of(self, x: Tensor) -> Plan | None:
        """Return the plan for an input; None where one op may not compute the unit."""
        kind = kind_of_inputs(self.modules[0], x)
        found: Plan | None = None if kind is None else self.plan(kind, x, kind[-1])
        return found

    def planned(self, x: Tensor, dtype: torch.dtype) -> Plan | None:
        """Ask the modules for the plan."""
        layer = self.modules[0]
        if all_watched() or is_watched(layer) or not is_ordinary(x) or type(layer).forward is not QuantWeighted.forward:
            return None
        if not (layer.training and layer.batch_norm is None and layer_is_plain(layer)):
            return None
        of_layer = layer_arguments(layer, x, dtype)
        if of_layer is None:
            return None
        quantizer = self.quantizer_in_op()
        output = output_grid(quantizer, of_layer.like)
        return Plan(
            of_layer, layer.sum_steps() is not None, quantizer, output, self.with_codes and gives_codes(quantizer)
        )

    def compute(self, plan: Plan, x: Tensor, codes: Handed) -> tuple[Tensor, Handed | None]:
        """Compute the unit by the op."""
        output = grid_of(plan.output)
        y, y_codes, y_scale, *_ = _layer_fake_quant(
            *layer_call(self.modules[0], plan.layer, x, codes, lambda: None, self.names[0]),
            plan.rounds_bias,
            *output,
            is_learned(output),
            plan.with_codes,
        )
        return self.output(y, y_codes if plan.with_codes else None, y_scale, output, plan.quantizer)


def _one_by_one(x: Tensor, layer: Any, quantizer: Any) -> Tensor:
    y: Tensor = layer(x)
    return y if quantizer is None else quantizer(y)
