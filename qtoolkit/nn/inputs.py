"""Layers without a quantized weight that quantize their input: pools and instance norms."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.nn.module import Quantizer, QuantModule, quantized
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


def inner_quantizer(spec: QuantSpec | None, name: str, module: nn.Module) -> TensorQuantizer | None:
    """Return a new quantizer of a tensor in a module, on the device of its parameters; None where there is no spec."""
    if spec is None:
        return None
    device = next((parameter.device for parameter in module.parameters()), None)
    return TensorQuantizer(spec, name=name).to(device)


def is_active(quantizer: Quantizer | None) -> bool:
    """Return whether a quantizer does anything with a tensor: observes it or quantizes it."""
    observing = isinstance(quantizer, TensorQuantizer) and quantizer.observing
    return quantizer is not None and (observing or quantizer.quantizing)


class QuantInput(QuantModule):
    """A layer that quantizes its input and nothing else; mixed into torch's own class.

    A layer of one's own needs no more than this, its float type and its kind:

    Args:
        *args: As the float class takes them.
        input_spec: Spec of the input, or None for an input that stays as it is.
        **kwargs: As the float class takes them.

    Attributes:
        input_quantizer: Quantizer of the input where no graph pass inserts one, or None.

    Example:
        >>> class QuantGLU(QuantInput, torch.nn.GLU):
        ...     FLOAT, KIND = torch.nn.GLU, "other"
        >>> layer = QuantGLU(input_spec=qt.QuantSpec(bits=4))
        >>> layer.input_quantizer.amax = 7.0
        >>> layer(torch.tensor([1.4, 50.0]))
        tensor([0.9991])
    """

    input_quantizer: Quantizer | None

    def __init__(self, *args: Any, input_spec: QuantSpec | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name = type(self).__name__
        self.add_quantizers(None, name)
        self.input_quantizer = inner_quantizer(input_spec, f"{name}.input_quantizer", self)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Make the place for the quantizer of the input."""
        self.input_quantizer = None

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of what it holds beyond the float layer."""
        return ("input_quantizer",)

    def quantized_weights(self) -> Mapping[str, tuple[Quantizer, Tensor]]:
        """Return nothing: no weight is quantized."""
        return {}

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer of its quantized input; further arguments and results as of the float layer."""
        return super().forward(quantized(self.input_quantizer, input), *args, **kwargs)

    def forward_fp32(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer in float, without quantizers."""
        return super().forward(*args, **kwargs)


class QuantMaxPool1d(QuantInput, nn.MaxPool1d):
    """torch.nn.MaxPool1d of a quantized input; indices, where asked for, are those of the quantized input."""

    FLOAT = nn.MaxPool1d
    KIND = "max_pool"


class QuantMaxPool2d(QuantInput, nn.MaxPool2d):
    """torch.nn.MaxPool2d of a quantized input; indices, where asked for, are those of the quantized input."""

    FLOAT = nn.MaxPool2d
    KIND = "max_pool"


class QuantMaxPool3d(QuantInput, nn.MaxPool3d):
    """torch.nn.MaxPool3d of a quantized input; indices, where asked for, are those of the quantized input."""

    FLOAT = nn.MaxPool3d
    KIND = "max_pool"


class QuantAvgPool1d(QuantInput, nn.AvgPool1d):
    """torch.nn.AvgPool1d of a quantized input."""

    FLOAT = nn.AvgPool1d
    KIND = "avg_pool"


class QuantAvgPool2d(QuantInput, nn.AvgPool2d):
    """torch.nn.AvgPool2d of a quantized input."""

    FLOAT = nn.AvgPool2d
    KIND = "avg_pool"


class QuantAvgPool3d(QuantInput, nn.AvgPool3d):
    """torch.nn.AvgPool3d of a quantized input."""

    FLOAT = nn.AvgPool3d
    KIND = "avg_pool"


class QuantAdaptiveAvgPool1d(QuantInput, nn.AdaptiveAvgPool1d):
    """torch.nn.AdaptiveAvgPool1d of a quantized input."""

    FLOAT = nn.AdaptiveAvgPool1d
    KIND = "avg_pool"


class QuantAdaptiveAvgPool2d(QuantInput, nn.AdaptiveAvgPool2d):
    """torch.nn.AdaptiveAvgPool2d of a quantized input."""

    FLOAT = nn.AdaptiveAvgPool2d
    KIND = "avg_pool"


class QuantAdaptiveAvgPool3d(QuantInput, nn.AdaptiveAvgPool3d):
    """torch.nn.AdaptiveAvgPool3d of a quantized input."""

    FLOAT = nn.AdaptiveAvgPool3d
    KIND = "avg_pool"


class QuantInstanceNorm1d(QuantInput, nn.InstanceNorm1d):
    """torch.nn.InstanceNorm1d of a quantized input; its scaling and statistics stay float."""

    FLOAT = nn.InstanceNorm1d
    KIND = "instance_norm"


class QuantInstanceNorm2d(QuantInput, nn.InstanceNorm2d):
    """torch.nn.InstanceNorm2d of a quantized input; its scaling and statistics stay float."""

    FLOAT = nn.InstanceNorm2d
    KIND = "instance_norm"


class QuantInstanceNorm3d(QuantInput, nn.InstanceNorm3d):
    """torch.nn.InstanceNorm3d of a quantized input; its scaling and statistics stay float."""

    FLOAT = nn.InstanceNorm3d
    KIND = "instance_norm"
