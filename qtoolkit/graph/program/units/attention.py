"""An attention, whose quantizers and projections are units."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from qtoolkit.graph.program.epilogue import called_with
from qtoolkit.graph.program.units.base import Result, kind_of_inputs, layer_is_plain
from qtoolkit.graph.program.units.function import NONE, FunctionUnit
from qtoolkit.graph.program.units.layer import LayerUnit
from qtoolkit.nn import QuantMultiheadAttention
from qtoolkit.nn.attention import Parts
from qtoolkit.quantizers.codes import TensorCodes


class AttentionUnit:
    """A QuantMultiheadAttention; the code of a prepared model calls `run`."""

    def __init__(self) -> None:
        self.parts: PartUnits | None = None

    def run(self, module: Any, known: TensorCodes | None, *args: Any, **kwargs: Any) -> Any:
        """Call the module; `known` is what is known of its query, the first argument."""
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
        self.projections = {name: ProjectionUnit(attention, name) for name in ("in_projection", "out_projection")}

    def quantized(self, name: str, x: Tensor) -> tuple[Tensor, TensorCodes | None]:
        """Return x quantized by the quantizer of this name, or x itself without one, and what is known of it."""
        if self.attention._modules.get(name) is None:
            return x, None
        if name not in self.functions:
            self.functions[name] = FunctionUnit(self.attention, None, name, None, NONE, True)
        return self.functions[name].run(x)

    def projected(self, name: str, x: Tensor, known: TensorCodes | None) -> Tensor:
        """Return the projection of x of this name; `known` is what is known of x."""
        return self.projections[name].run(x, known)[0]


class ProjectionUnit(LayerUnit):
    """A projection of an attention.

    Args:
        attention: The attention.
        projection: Its attribute.
    """

    def __init__(self, attention: QuantMultiheadAttention, projection: str) -> None:
        super().__init__(attention, "", None, False)
        self.projection = projection

    def modules_now(self) -> tuple[Any, ...]:
        """Return the projection as the attention is now."""
        return getattr(self.model(), self.projection), None

    def kind_of(self, x: Tensor, *others: Any) -> Hashable:
        """Return on what a plan depends besides the modules."""
        return kind_of_inputs(self.modules[0].weight, x)

    def is_one_op(self, layer: Any) -> bool:
        """Return whether the op computes the projection as it is now, for some inputs."""
        return layer.training and layer_is_plain(layer)

    def one_by_one(self, x: Tensor, known: TensorCodes | None, layer: Any, quantizer: Any) -> Result:
        """Compute the projection as the attention does."""
        return layer(x, known), None


def _keeps_codes(module: Any) -> bool:
    return type(module).forward is QuantMultiheadAttention.forward and module.training_arithmetic.save == "codes"
