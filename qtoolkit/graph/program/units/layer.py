"""A layer without a batch norm, with a quantizer right after it, in one op."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit.graph.module_calls import numbered
from qtoolkit.graph.program.epilogue import called_with
from qtoolkit.graph.program.units.base import (
    CachedFusedOp,
    LayerArguments,
    Result,
    UnitPlan,
    Varying,
    kind_of_inputs,
    layer_arguments,
)
from qtoolkit.nn.fusion import Unit, fusion
from qtoolkit.nn.hooks import is_ordinary
from qtoolkit.nn.output_grid import gives_codes, output_grid, quantized_by
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.running import Run


@dataclass(slots=True)
class LayerPlan(UnitPlan):
    """The arguments of the op for some inputs."""

    layer: LayerArguments


class LayerUnit(CachedFusedOp[LayerPlan]):
    """A layer and the quantizer that alone takes its output, or none; the forward of a prepared model calls `run`.

    `with_codes` is whether an op takes the result as integers, `call` the number of the call of the layer.
    """

    KIND = torch.classes.qtoolkit.LayerUnit

    def __init__(self, root: nn.Module, layer: str, quantizer: str | None, with_codes: bool, call: int = 0) -> None:
        super().__init__(root, (layer, quantizer))
        self.with_codes, self.call = with_codes, call

    def run(self, run: Run, x: Tensor, input_codes: TensorCodes | None = None) -> Result:
        """Return the unit's output, with its integers; `input_codes` are x's integers."""
        if run.compiled:
            return self.one_by_one(run, x, input_codes, *self.modules_now())
        self.refresh_if_modules_changed(run)
        return self.run_modules(run, self.modules, x, input_codes)

    def run_modules(self, run: Run, modules: tuple[Any, ...], x: Tensor, input_codes: TensorCodes | None) -> Result:
        """Return the output of a layer and its quantizer, or None in its place, by one op or one by one."""
        found = self.by_op(run, modules, x, input_codes) if type(x) is Tensor and torch.is_grad_enabled() else None
        return self.one_by_one(run, x, input_codes, *modules) if found is None else found

    def one_by_one(self, run: Run, x: Tensor, input_codes: TensorCodes | None, layer: Any, quantizer: Any) -> Result:
        """Call the modules one by one."""
        return quantized_by(run, quantizer, called_with(layer, input_codes, x, **numbered(self.call)), self.with_codes)

    def kind_of(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Hashable:
        """Return the values on which a plan depends besides the modules; None without a plan."""
        return kind_of_inputs(modules[0]._parameters.get("weight"), x)

    def _planned(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> LayerPlan | None:
        layer = modules[0]
        found = fusion(run, layer, quantizer=modules[-1]) if is_ordinary(run, x) else None
        of_layer = layer_arguments(run, layer, x) if isinstance(found, Unit) else None
        if of_layer is None or not isinstance(found, Unit):
            return None
        quantizer = found.quantizer
        how = {
            "rounds_bias": layer.sum_steps(self.call) is not None,
            "with_codes": self.with_codes and gives_codes(quantizer),
        }
        return LayerPlan(quantizer, output_grid(run, quantizer, of_layer.like), {**of_layer.fields, **how}, of_layer)

    def _varying(self, run: Run, plan: LayerPlan, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Varying | None:
        (input_codes,) = others
        found = plan.layer.varying(run, modules[0], self.call, x, input_codes, lambda: None, self.names[0])
        return None if found is None else plan.with_output(*found)
