"""Encoding: the quantization grid of one tensor, in a form that fits the files of all backends."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Encoding:
    """The grid of a tensor: its values are `(q - zero_point) * scale` for integers q in [qmin, qmax].

    Attributes:
        tensor: Name of the tensor in the ONNX file.
        scale: Float32 numbers: one, or one per channel.
        zero_point: The zero points: one for each scale.
        qmin: Lowest quantized value.
        qmax: Highest quantized value.
        is_weight: Whether the tensor does not depend on the inputs of the model.
        axis: The channel axis of the tensor; None for one scale.
        group: Groups of dimension 0, for weights of transposed convolutions: channel g * out + i belongs to group g.
        format: "int"; or "nnie", logarithmic, whose scale is the largest magnitude.
        quantizer: Dotted name of the quantizer in the model; "" if the encoding was read from a file.

    Example:
        >>> x = Encoding("x", (0.5,), (10,), 0, 255)
        >>> x.bits, x.is_symmetric, x.low, x.high
        (8, False, (-5.0,), (122.5,))
    """

    tensor: str
    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    qmin: int
    qmax: int
    is_weight: bool = False
    axis: int | None = None
    group: int = 1
    format: str = "int"
    quantizer: str = ""

    @property
    def bits(self) -> int:
        """Bit width of the quantized values."""
        return (self.qmax - self.qmin).bit_length()

    @property
    def is_symmetric(self) -> bool:
        """Whether the quantized values are signed and the zero point is 0."""
        return self.qmin < 0 and not any(self.zero_point)

    @property
    def lowest(self) -> int:
        """The lowest integer of this bit width; `qmin` is one above it on a narrow grid."""
        return -(1 << self.bits - 1) if self.qmin < 0 else 0

    @property
    def unsigned_zero_point(self) -> tuple[int, ...]:
        """The zero points if the quantized values are counted from 0."""
        return tuple(zero_point - self.lowest for zero_point in self.zero_point)

    @property
    def low(self) -> tuple[float, ...]:
        """The lowest value of each channel, in float64."""
        if self.format == "nnie":
            return tuple(-largest for largest in self.scale)
        return tuple((self.qmin - z) * s for s, z in zip(self.scale, self.zero_point, strict=True))

    @property
    def high(self) -> tuple[float, ...]:
        """The highest value of each channel, in float64."""
        if self.format == "nnie":
            return self.scale
        return tuple((self.qmax - z) * s for s, z in zip(self.scale, self.zero_point, strict=True))

    def has_grid_of(self, other: "Encoding") -> bool:
        """Return whether another encoding has the same scales, to the last place of float32, and the same zero points."""
        return (
            len(self.scale) == len(other.scale)
            and all(math.isclose(*pair, rel_tol=2**-22) for pair in zip(self.scale, other.scale, strict=True))
            and self.unsigned_zero_point == other.unsigned_zero_point
            and (self.bits, self.format) == (other.bits, other.format)
        )


def float32(value: float) -> float:
    """Return the float32 number nearest to a value.

    Raises ValueError: it is not positive and finite, as a scale must be.
    """
    nearest = float(np.float32(value))
    if not 0 < nearest < float("inf"):
        raise ValueError(f"a scale must be positive and finite, got {value!r}.")
    return nearest
