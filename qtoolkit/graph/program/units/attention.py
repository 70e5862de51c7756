"""An attention, whose quantizers and projections are units."""

from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import Tensor

from qtoolkit.graph.program.epilogue import called_with
from qtoolkit.graph.program.units.base import Fields, Result, Varying, grid_of_weight, kind_of_inputs
from qtoolkit.graph.program.units.function import HEADS, NONE, FunctionUnit
from qtoolkit.graph.program.units.layer import LayerPlan, LayerUnit
from qtoolkit.nn import QuantMultiheadAttention
from qtoolkit.nn.attention import InputCodes, Parts, heads
from qtoolkit.nn.projection import Projection
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.running import Run

OF_ROWS = ("start", "ratio", "rate", "zero_point", "lo", "hi")
"""A tensor with an element for each scale of a weight, or for each of its rows."""


class AttentionUnit:
    """A QuantMultiheadAttention; the forward of a prepared model calls `run`."""

    def __init__(self) -> None:
        self.parts: PartUnits | None = None

    def run(self, run: Run, module: Any, input_codes: InputCodes, *args: Any, **kwargs: Any) -> Any:
        """Call the module; `input_codes` are the integers of query, key and value."""
        if run.compiled or not _keeps_codes(module):
            return called_with(module, input_codes, *args, **kwargs)
        if self.parts is None or self.parts.attention is not module:
            self.parts = PartUnits(module)
        return module(*args, **kwargs, input_codes=input_codes, parts=self.parts)


class PartUnits(Parts):
    """The quantizers and projections of an attention as units."""

    def __init__(self, attention: QuantMultiheadAttention) -> None:
        super().__init__(attention)
        self.functions: dict[str, FunctionUnit] = {}
        self.projections: dict[str, ProjectionUnit] = {}

    def quantized(self, run: Run, name: str, x: Tensor) -> tuple[Tensor, TensorCodes | None]:
        """Return x quantized by the quantizer of this name, or x itself without one, and its integers, if it has some."""
        if self.attention._modules.get(name) is None:
            return x, None
        if name not in self.functions:
            self.functions[name] = FunctionUnit(self.attention, None, name, None, NONE, True)
        return self.functions[name].run(run, x)

    def of_heads(self, run: Run, name: str, x: Tensor, factor: float) -> tuple[Tensor, TensorCodes | None]:
        """Return a view of heads times a factor, contiguous, quantized by the quantizer of this name."""
        if self.attention._modules.get(name) is None:
            return heads(x, factor), None
        if name not in self.functions:
            called, function = partial(heads, factor=factor), (HEADS, (), None, None, factor)
            self.functions[name] = FunctionUnit(self.attention, None, name, called, function, True)
        return self.functions[name].run(run, x)

    def projected(self, run: Run, projection: Projection, x: Tensor, input_codes: TensorCodes | None) -> Tensor:
        """Return a projection of x, which has these integers."""
        if projection.name not in self.projections:
            self.projections[projection.name] = ProjectionUnit(self.attention)
        return self.projections[projection.name].project(run, projection, x, input_codes)


class ProjectionUnit(LayerUnit):
    """A projection of an attention, which makes it anew in each call: the weight may be a part of another one's rows.

    Args:
        attention: The attention.
    """

    def __init__(self, attention: QuantMultiheadAttention) -> None:
        super().__init__(attention, "", None, False)

    def project(self, run: Run, projection: Projection, x: Tensor, input_codes: TensorCodes | None) -> Tensor:
        """Return the projection of x, which has these integers."""
        if run.compiled:
            return self.one_by_one(run, x, input_codes, projection, None)[0]
        self.refresh_if_modules_changed(run)
        return self.run_modules(run, (projection, None), x, input_codes)[0]

    def kind_of(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Hashable:
        """Return the values on which a plan depends besides the modules."""
        return kind_of_inputs(modules[0].weight, x)

    def _planned(self, run: Run, modules: tuple[Any, ...], x: Tensor, *others: Any) -> LayerPlan | None:
        plan, rows = super()._planned(run, modules, x, *others), modules[0].rows
        grid = None if plan is None or rows is None else grid_of_weight(rows[0].whole)
        if plan is not None and grid is not None:
            plan.fields.update(grid)  # the gradient factor of all rows
        for kept in () if plan is None else (plan.fields, plan.layer.others):
            kept.update(weight=None, bias=None, updated=None)  # parts of tensors, made anew in each step
        return plan

    def one_by_one(self, run: Run, x: Tensor, input_codes: TensorCodes | None, layer: Any, quantizer: Any) -> Result:
        """Compute the projection as the attention does."""
        return layer(run, x, input_codes), None

    def _varying(self, run: Run, plan: LayerPlan, modules: tuple[Any, ...], x: Tensor, *others: Any) -> Varying | None:
        found, layer = super()._varying(run, plan, modules, x, *others), modules[0]
        if found is None:
            return None
        tensors, numbers = found
        grid = {} if plan.layer.grid is None else _grid(plan, layer)
        parts = {"weight": layer.weight, "bias": layer.bias, "updated": layer.updated_channels}
        return {**tensors, **parts, **grid}, numbers


def _grid(plan: LayerPlan, layer: Projection) -> Fields:
    """Return the tensors of the weight's grid: of a part of a weight its part of them."""
    whole = {name: plan.fields[name] for name in OF_ROWS}
    if layer.rows is None:
        return whole
    rows, part = layer.rows
    if rows.decided is None:
        parts = zip(*map(rows.split, whole.values()), strict=True)
        rows.decided = [dict(zip(OF_ROWS, each, strict=True)) for each in parts]
    found: Fields = rows.decided[part]
    return found


def _keeps_codes(module: Any) -> bool:
    return type(module).forward is QuantMultiheadAttention.forward and module.training_arithmetic.save == "codes"
