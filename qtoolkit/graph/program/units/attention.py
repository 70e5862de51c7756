"""An attention, whose quantizers and projections are units."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit.graph.program.epilogue import called_with
from qtoolkit.graph.program.units.base import (
    NOT_FOLLOWED,
    NOT_TRAINED,
    LayerArguments,
    Result,
    Varying,
    gives_ready_grid,
    grid_of_weight,
    kind_of_inputs,
)
from qtoolkit.graph.program.units.function import NONE, FunctionUnit
from qtoolkit.graph.program.units.layer import LayerPlan, LayerUnit
from qtoolkit.nn import QuantMultiheadAttention
from qtoolkit.nn.attention import Known, Parts
from qtoolkit.nn.output_grid import Grid
from qtoolkit.nn.projection import Projection, Rows
from qtoolkit.quantizers.codes import TensorCodes

OF_ROWS = ("weight", "bias", "ratio", "rate", "lo", "hi")
"""The names of the op's tensors that are parts of those of a weight."""


class AttentionUnit:
    """A QuantMultiheadAttention; the code of a prepared model calls `run`."""

    def __init__(self) -> None:
        self.parts: PartUnits | None = None

    def run(self, module: Any, known: Known, *args: Any, **kwargs: Any) -> Any:
        """Call the module; `known` is what is known of its query, key and value."""
        if torch.compiler.is_compiling() or not _keeps_codes(module):
            return called_with(module, known, *args, **kwargs)
        if self.parts is None or self.parts.attention is not module:
            self.parts = PartUnits(module)
        return module(*args, **kwargs, known=known, parts=self.parts)


class PartUnits(Parts):
    """The quantizers and projections of an attention as units."""

    def __init__(self, attention: QuantMultiheadAttention) -> None:
        super().__init__(attention)
        self.functions: dict[str, FunctionUnit] = {}
        self.projections: dict[str, ProjectionUnit] = {}

    def quantized(self, name: str, x: Tensor) -> tuple[Tensor, TensorCodes | None]:
        """Return x quantized by the quantizer of this name, or x itself without one, and what is known of it."""
        if self.attention._modules.get(name) is None:
            return x, None
        if name not in self.functions:
            self.functions[name] = FunctionUnit(self.attention, None, name, None, NONE, True)
        return self.functions[name].run(x)

    def projected(self, projection: Projection, x: Tensor, known: TensorCodes | None) -> Tensor:
        """Return a projection of x; `known` is what is known of x."""
        if projection.name not in self.projections:
            self.projections[projection.name] = ProjectionUnit(self.attention)
        return self.projections[projection.name].project(projection, x, known)


class ProjectionUnit(LayerUnit):
    """A projection of an attention, which makes it anew in each call: the weight may be a part of another one's rows.

    Args:
        attention: The attention.
    """

    VARYING = (*LayerUnit.VARYING, *OF_ROWS)

    def __init__(self, attention: QuantMultiheadAttention) -> None:
        super().__init__(attention, "", None, False)

    def project(self, projection: Projection, x: Tensor, known: TensorCodes | None) -> Tensor:
        """Return the projection of x; `known` is what is known of x."""
        self.modules = projection, None
        try:
            return self.run(x, known)[0]
        finally:
            self.modules = None, None  # nothing of a step is kept

    def modules_now(self) -> tuple[Any, ...]:
        """Return the projection of this call."""
        return self.modules

    def kind_of(self, x: Tensor, *others: Any) -> Hashable:
        """Return on what a plan depends besides the modules."""
        return kind_of_inputs(self.modules[0].weight, x)

    def _planned(self, x: Tensor, *others: Any) -> LayerPlan | None:
        plan, rows = super()._planned(x, *others), self.modules[0].rows  # the plan has the grid of the whole weight
        if plan is not None and rows is not None:
            plan.layer = plan.layer._replace(grid=grid_of_weight(rows[0].whole))
        return plan

    def is_one_op(self, layer: Any) -> bool:
        """Return whether the op computes the projection as it is now, for some inputs."""
        parameters = (p for p in (layer.weight, layer.bias) if p is not None)
        plain = all(type(p) in (Tensor, nn.Parameter) for p in parameters)
        return layer.training and plain and gives_ready_grid(layer.weight_quantizer)

    def arguments(self, plan: LayerPlan) -> LayerArguments:
        """Return what the op is told about the projection: of a part of a weight with its part of the weight's grid."""
        if self.modules[0].rows is None or plan.layer.grid is None:
            return plan.layer
        rows, part = self.modules[0].rows
        if rows.decided is None:
            rows.decided = _split(rows, *plan.layer.grid)
        return plan.layer._replace(grid=rows.decided[part])

    def one_by_one(self, x: Tensor, known: TensorCodes | None, layer: Any, quantizer: Any) -> Result:
        """Compute the projection as the attention does."""
        return layer(x, known), None

    def _varying(self, plan: LayerPlan, x: Tensor, *others: Any) -> Varying | None:
        arguments, layer = self.arguments(plan), self.modules[0]
        found = self.varying_of(arguments, plan, x, *others)
        if found is None:
            return None
        grid, followed = arguments.grid or (NOT_TRAINED, NOT_FOLLOWED)
        return (*found[0], layer.weight, layer.bias, *grid[1:3], *followed[:2]), found[1]

    def _bound(self, plan: LayerPlan, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> Any:
        return super()._bound(plan, tensors[: -len(OF_ROWS)], constants)


def _split(rows: Rows, grid: Grid, followed: Grid) -> list[tuple[Grid, Grid]]:
    """Return the parts of the scale and the grid of a weight, and of the range that the op sets."""
    grids = [(*scales, *grid[4:]) for scales in zip(*map(rows.split, grid[:4]), strict=True)]
    if followed is NOT_FOLLOWED:
        return [(part, followed) for part in grids]
    ranges = [(*ends, followed[2]) for ends in zip(*map(rows.split, followed[:2]), strict=True)]
    return list(zip(grids, ranges, strict=True))


def _keeps_codes(module: Any) -> bool:
    return type(module).forward is QuantMultiheadAttention.forward and module.training_arithmetic.save == "codes"
