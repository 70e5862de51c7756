"""Layers with quantized inputs and weights, with pytorch-quantization's names, numerics and defaults."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules import conv

from qtoolkit import nn as qnn
from qtoolkit.compat.pytorch_quantization import descriptor
from qtoolkit.compat.pytorch_quantization.nn.modules.export_form import fx_leaf
from qtoolkit.compat.pytorch_quantization.nn.modules.mixins import QuantInputMixin, QuantMixin, take_quant_desc
from qtoolkit.config import QuantSpec


class QuantLayer(QuantMixin):
    """Mixin for a layer of `qtoolkit.nn`; its quantizers are created from descriptors.

    forward uses only the two quantizers and the attributes of torch's layer: scripts create layers without `__init__`.
    """

    weight: Tensor
    bias: Tensor | None
    compute: Callable[..., Tensor]

    def __init__(self, *args: object, **kwargs: object) -> None:
        descs = take_quant_desc(type(self), kwargs)
        super().__init__(*args, **kwargs)
        self.init_quantizer(*descs)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Add no quantizers: they are created from descriptors."""

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of attributes that the float layer lacks."""
        return ("_input_quantizer", "_weight_quantizer", "_input_quantizers", "_weight_quantizers")

    def quantized_weights(self) -> Mapping[str, object]:
        """Return no quantizers, so that qtoolkit's passes do not change them."""
        return {}

    weight_quantizers = quantized_weights

    @fx_leaf
    def forward(self, input: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Compute the layer with its quantized input and weight; further arguments are torch's."""
        return self.compute(*self._quant(input), self.bias, *args, **kwargs)

    def _quant(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantized input and weight, for layers of scripts."""
        return self._input_quantizer(input), self._weight_quantizer(self.weight)


class _QuantConvNd(QuantLayer, conv._ConvNd):
    """The base class of the convolutions, from which scripts derive layers."""


class _QuantConvTransposeNd(QuantLayer, conv._ConvTransposeNd):
    """The base class of the transposed convolutions, from which scripts derive layers."""


class _QuantInputLayer(QuantInputMixin):
    """Mixin for a torch layer without a weight."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        desc = take_quant_desc(type(self), kwargs, input_only=True)
        super().__init__(*args, **kwargs)
        self.init_quantizer(desc)

    @fx_leaf
    def forward(self, input: Tensor) -> object:
        return super().forward(self._input_quantizer(input))  # type: ignore[misc]  # of torch's class


def _layer(name: str, bases: tuple[type, ...], doc: str, **attributes: object) -> type[nn.Module]:
    return type(f"Quant{name}", bases, {"__module__": __name__, "__doc__": doc, **attributes})


_SIZES = (1, 2, 3)
_WEIGHTED = {
    "Linear": descriptor.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW,
    **{f"Conv{d}d": descriptor.QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL for d in _SIZES},
    **{f"ConvTranspose{d}d": descriptor.QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL for d in _SIZES},
}
_BASES = {"Linear": QuantLayer, "Conv": _QuantConvNd, "ConvTranspose": _QuantConvTransposeNd}
_KINDS = ("MaxPool", "AvgPool", "AdaptiveAvgPool", "InstanceNorm")

LAYERS = {
    f"Quant{name}": _layer(
        name,
        (_BASES[name.rstrip("123d")], getattr(qnn, f"Quant{name}")),
        f"torch.nn.{name} with quantized input and weight; by default the weight has a range for each index of axis "
        f"{desc.axis}.",
        default_quant_desc_weight=desc,
    )
    for name, desc in _WEIGHTED.items()
} | {
    f"Quant{name}": _layer(name, (_QuantInputLayer, getattr(nn, name)), f"torch.nn.{name} with a quantized input.")
    for name in (f"{kind}{d}d" for kind in _KINDS for d in _SIZES)
}
NAMES = {**LAYERS, **{name.removeprefix("Quant"): cls for name, cls in LAYERS.items()}}
globals().update(NAMES)  # pickle and scripts find the classes here

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
