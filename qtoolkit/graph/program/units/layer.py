"""A layer without a batch norm, with a quantizer right behind it, in one op."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtoolkit._native import library
from qtoolkit.graph.program.epilogue import called_with
from qtoolkit.graph.program.units.base import (
    Decided,
    LayerArguments,
    kind_of_inputs,
    layer_arguments,
    layer_call,
    layer_is_plain,
)
from qtoolkit.nn.hooks import all_watched, is_ordinary, is_watched
from qtoolkit.nn.output_grid import GridNow, gives_codes, grid_of, is_learned, output_grid, quantized_by
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.quantizers.codes import TensorCodes, codes_of
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
        with_codes: Whether an op takes the codes of the result.
    """

    def __init__(self, root: nn.Module, layer: str, quantizer: str | None, with_codes: bool) -> None:
        super().__init__(root, (layer, quantizer))
        self.with_codes = with_codes

    def run(self, x: Tensor, known: TensorCodes | None = None) -> tuple[Tensor, TensorCodes | None]:
        """Return the unit's output, with its codes.

        Args:
            x: The input of the layer.
            known: What is known of it.
        """
        if torch.compiler.is_compiling():
            return _one_by_one(x, None, *self.modules_now())
        self.look()
        layer, quantizer = self.modules
        plan = self.plan_of(x) if type(x) is Tensor and torch.is_grad_enabled() else None
        codes = None if plan is None else codes_of(x, layer.source, plan.layer.integer, known)
        if plan is not None and codes is not None:
            return self.compute(plan, x, codes)
        return _one_by_one(x, known, layer, quantizer)

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

    def compute(self, plan: Plan, x: Tensor, codes: TensorCodes) -> tuple[Tensor, TensorCodes | None]:
        """Compute the unit by the op."""
        output = grid_of(plan.output)
        first, last = layer_call(self.modules[0], plan.layer, x, codes, lambda: None, self.names[0])
        y, y_codes, y_scale, *_ = _layer_fake_quant(
            *first,
            plan.rounds_bias,
            *output,
            is_learned(output),
            plan.with_codes,
            *last,
        )
        return self.output(y, y_codes if plan.with_codes else None, y_scale, output, plan.quantizer)


def _one_by_one(x: Tensor, known: TensorCodes | None, layer: Any, quantizer: Any) -> tuple[Tensor, TensorCodes | None]:
    return quantized_by(quantizer, called_with(layer, known, x))
