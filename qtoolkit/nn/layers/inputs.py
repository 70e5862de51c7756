"""Layers that quantize their input and have no quantized weight: pooling and instance normalization."""

from typing import Any

from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.nn.module import QuantModule, activation_quantizer, quantized
from qtoolkit.quantizers.quantizer import Quantizer


class QuantInput(QuantModule):
    """A layer that quantizes its input and nothing else; to be mixed into the float module's class.

    A user-defined layer needs only its float type and its kind of op, as in the example.

    Args:
        *args: Arguments of the float class.
        input_spec: Spec of the input; None leaves it unchanged.
        **kwargs: Keyword arguments of the float class.

    Attributes:
        input_quantizer: Quantizer of the input, or None (a graph pass inserts it as a node of its own instead).

    Example:
        >>> class QuantGLU(QuantInput, torch.nn.GLU):
        ...     FLOAT, KIND = torch.nn.GLU, "other"
        >>> layer = QuantGLU(input_spec=qt.QuantSpec(bits=4))
        >>> layer.input_quantizer.amax = 7.0
        >>> layer(torch.tensor([1.4, 50.0]))
        tensor([0.9991])
    """

    input_quantizer: Quantizer | None

    def __init__(self, *args: object, input_spec: QuantSpec | None = None, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        name = type(self).__name__
        self.add_quantizers(None, name)
        self.input_quantizer = activation_quantizer(input_spec, f"{name}.input_quantizer", self)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        self.input_quantizer = None

    def own_attributes(self) -> tuple[str, ...]:
        return ("input_quantizer",)

    def forward(self, input: Tensor, *args: object, **kwargs: object) -> Any:
        """Apply the float layer to the quantized input; other arguments and results are the float layer's."""
        return super().forward(quantized(self.input_quantizer, input), *args, **kwargs)


class QuantMaxPool1d(QuantInput, nn.MaxPool1d):
    """torch.nn.MaxPool1d of a quantized input, whose indices it returns."""

    FLOAT, KIND = nn.MaxPool1d, "max_pool"


class QuantMaxPool2d(QuantInput, nn.MaxPool2d):
    """torch.nn.MaxPool2d of a quantized input, whose indices it returns."""

    FLOAT, KIND = nn.MaxPool2d, "max_pool"


class QuantMaxPool3d(QuantInput, nn.MaxPool3d):
    """torch.nn.MaxPool3d of a quantized input, whose indices it returns."""

    FLOAT, KIND = nn.MaxPool3d, "max_pool"


class QuantAvgPool1d(QuantInput, nn.AvgPool1d):
    """torch.nn.AvgPool1d of a quantized input."""

    FLOAT, KIND = nn.AvgPool1d, "avg_pool"


class QuantAvgPool2d(QuantInput, nn.AvgPool2d):
    """torch.nn.AvgPool2d of a quantized input."""

    FLOAT, KIND = nn.AvgPool2d, "avg_pool"


class QuantAvgPool3d(QuantInput, nn.AvgPool3d):
    """torch.nn.AvgPool3d of a quantized input."""

    FLOAT, KIND = nn.AvgPool3d, "avg_pool"


class QuantAdaptiveAvgPool1d(QuantInput, nn.AdaptiveAvgPool1d):
    """torch.nn.AdaptiveAvgPool1d of a quantized input."""

    FLOAT, KIND = nn.AdaptiveAvgPool1d, "avg_pool"


class QuantAdaptiveAvgPool2d(QuantInput, nn.AdaptiveAvgPool2d):
    """torch.nn.AdaptiveAvgPool2d of a quantized input."""

    FLOAT, KIND = nn.AdaptiveAvgPool2d, "avg_pool"


class QuantAdaptiveAvgPool3d(QuantInput, nn.AdaptiveAvgPool3d):
    """torch.nn.AdaptiveAvgPool3d of a quantized input."""

    FLOAT, KIND = nn.AdaptiveAvgPool3d, "avg_pool"


class QuantInstanceNorm1d(QuantInput, nn.InstanceNorm1d):
    """torch.nn.InstanceNorm1d of a quantized input; scaling and statistics stay float."""

    FLOAT, KIND = nn.InstanceNorm1d, "instance_norm"


class QuantInstanceNorm2d(QuantInput, nn.InstanceNorm2d):
    """torch.nn.InstanceNorm2d of a quantized input; scaling and statistics stay float."""

    FLOAT, KIND = nn.InstanceNorm2d, "instance_norm"


class QuantInstanceNorm3d(QuantInput, nn.InstanceNorm3d):
    """torch.nn.InstanceNorm3d of a quantized input; scaling and statistics stay float."""

    FLOAT, KIND = nn.InstanceNorm3d, "instance_norm"
