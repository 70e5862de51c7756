"""The formats of small floats that a QuantSpec may have, and the types of what files hold."""

from dataclasses import dataclass
from typing import Literal

# How a file stores signed 8-bit integers of a weight: as they are, or 128 higher with a zero point of 128.
WeightCodes = Literal["int8", "uint8"]
# The types of scales, and of what a file does not quantize.
FloatType = Literal["float32", "float16"]

# The largest number of each small float format of `qtoolkit.ops.fake_quant_float`.
LARGEST = {"e4m3": 448, "e5m2": 57344, "e2m1": 6}


@dataclass(frozen=True)
class BlockFormat:
    """A format of `qtoolkit.ops.fake_quant_block`: small floats, with a scale for each block of neighbours."""

    element: str
    size: int
    scale_format: Literal["e8m0", "e4m3"]

    @property
    def largest(self) -> int:
        """The largest number of an element, in units of its scale."""
        return LARGEST[self.element]


# OCP MX v1.0, and NVIDIA's NVFP4, whose scales are relative to a scale of the tensor.
BLOCKS = {
    "mxfp8": BlockFormat("e4m3", 32, "e8m0"),
    "mxfp4": BlockFormat("e2m1", 32, "e8m0"),
    "nvfp4": BlockFormat("e2m1", 16, "e4m3"),
}
