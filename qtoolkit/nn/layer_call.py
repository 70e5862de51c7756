"""The calls of a layer in a graph: the grid of the input, the grid of the bias, and the integer kernel of each."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qtoolkit.nn.computed_weights import computing_hooks
from qtoolkit.nn.hooks import is_watched
from qtoolkit.quantizers.bias import bias_scale, enlarged, on_grid
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.spec_ops import typed_scale

if TYPE_CHECKING:
    from qtoolkit.nn.weighted import QuantWeighted

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


COPIED_LATER = 0
"""The key of functions in the memo of a deep copy of a model, which no object has for an id. They make copies of sources refer
to copies of modules. Made at once, each copy of a layer would begin with the modules before it: a chain of them as long as the
model, which is longer than Python's recursion limit."""


@dataclass(frozen=True)
class Source:
    """The origin of a tensor's values.

    Attributes:
        holder: The module that holds the quantizer of the values.
        name: The quantizer's name there: another quantizer may take its place at any time.
        between: The modules after it, up to the taker of the values. They may get hooks at any time, and dropouts among them,
            of probability 0, another probability.
    """

    holder: nn.Module
    name: str
    between: tuple[nn.Module, ...] = ()

    @property
    def quantizer(self) -> Quantizer | None:
        """The quantizer that is there now; None where there is none any more."""
        quantizer = getattr(self.holder, self.name)
        return quantizer if isinstance(quantizer, Quantizer) else None

    def now(self) -> Quantizer | None:
        """Return the quantizer; None while a dropout or a hook may move the values off its grid."""
        quantizer = self.quantizer
        if quantizer is None or is_watched(quantizer) or any(map(_may_change_values, self.between)):
            return None
        return quantizer

    def __deepcopy__(self, memo: dict[int, object]) -> "Source":
        twin, later = Source(self.holder, self.name, self.between), memo.get(COPIED_LATER)
        if isinstance(later, list):
            later.append(partial(twin._copy, memo))
        else:
            twin._copy(memo)
        return twin

    def _copy(self, memo: dict[int, object]) -> None:
        """Refer to copies of the modules."""
        for name in ("holder", "between"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name), memo))

    def modules(self) -> list[nn.Module]:
        """Return the modules on which the source depends."""
        quantizer = self.quantizer
        return [self.holder, *([] if quantizer is None else [quantizer]), *self.between]


def _may_change_values(module: nn.Module) -> bool:
    return is_watched(module) or (isinstance(module, DROPOUTS) and module.training and bool(module.p))


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One of the calls of a layer, or all of them where they are alike. A layer without a graph has one, too.

    The calls share the layer's weight and its quantizer. So methods take the layer, which a call does not hold: a call without
    a layer can be shared by copies of it, and no layer keeps itself alive. A pass that changes the links of a call gives
    the layer new calls: decisions about the layer hold as long as its attributes are the same objects.

    Attributes:
        number: Its number among the calls of the layer. The node of a call names it where it is not 0.
        source: The source of the input in training; None: the input may have any values.
        integer_bias: Whether the target adds the bias to integer sums.
        sums_over: The source of the input in these sums; None: the layer's own input quantizer, if it has one.
    """

    number: int = 0
    source: Source | None = None
    integer_bias: bool = False
    sums_over: Source | None = None

    # ---- the input

    def input_quantizer(self, layer: "QuantWeighted") -> Quantizer | None:
        """Return the quantizer on whose grid the input lies in training, or None where that is not known."""
        if layer.input_quantizer is not None:
            return layer.input_quantizer
        changes_input = len(layer._forward_pre_hooks) > len(computing_hooks(layer))
        return None if self.source is None or changes_input else self.source.now()

    def summed_quantizer(self, layer: "QuantWeighted") -> Quantizer | None:
        """Return the quantizer of the input in the target's integer sums; None where it adds the bias in float."""
        source = None if self.sums_over is None else self.sums_over.quantizer
        return source or (layer.input_quantizer if self.integer_bias else None)

    # ---- the bias

    def sum_steps(self, layer: "QuantWeighted") -> Tensor | None:
        """Return the steps of the integer sums: one, or one per output channel. None where the target has none."""
        weight, source = layer.weight_quantizer, self.summed_quantizer(layer)
        if source is None or weight is None or not (source.capability_now.codes and weight.capability_now.sums):
            return None
        return bias_scale(source.scale, weight.scale) if layer.scales_along_outputs() else None

    def bias_in_sums(self, layer: "QuantWeighted", bias: Tensor | None) -> Tensor | None:
        """Return a bias as the target adds it: on the grid of its sums, if it has some."""
        steps = None if bias is None else self.sum_steps(layer)
        converted = isinstance(layer.weight_quantizer, Grid)
        return bias if bias is None or steps is None else on_grid(bias, steps, fits=converted)

    def fit_bias(self, layer: "QuantWeighted", grid: Grid) -> None:
        """Enlarge the scales of a converted layer's weight, which this grid has, where the bias does not fit in int32."""
        source = self.summed_quantizer(layer)
        if layer.bias is not None and source is not None and self.sum_steps(layer) is not None:
            grid.scale = typed_scale(grid.spec, enlarged(grid.scale, source.scale, layer.bias))

    # ---- the integer kernel

    @property
    def kernel_name(self) -> str:
        """The name of the call's kernel in the layer, which registers it."""
        return f"integer_kernel_{self.number}" if self.number else "integer_kernel"

    def kernel(self, layer: "QuantWeighted") -> Any:
        """Return the `qtoolkit.integer.kernels.LayerKernel` that computes the call in integers, or None."""
        return getattr(layer, self.kernel_name, None)
