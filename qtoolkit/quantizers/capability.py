"""Capability: the properties of a quantizer's integers, on which it depends which ops can compute on them."""

from dataclasses import dataclass

from qtoolkit.config import QuantSpec


@dataclass(frozen=True)
class Capability:
    """The properties of a quantizer's integers."""

    bits: int | None = None  # bits of a quantized value; None where it is no integer
    signed: bool = True  # whether quantized values may be negative
    zero_point: bool = False  # whether zero may map to another integer than 0
    axis: int | None = None  # the dimension along which scales differ; None for one scale
    # whether the quantizer does nothing but to round its input to a grid that does not depend on it
    direct: bool = False
    # whether it quantizes as `qtoolkit.ops.fake_quant` does, so that other ops may do it in its place
    plain: bool = False

    @classmethod
    def of(cls, spec: QuantSpec, direct: bool = True, plain: bool = True) -> "Capability":
        """Return the capability of a spec.

        Example:
            >>> Capability.of(qt.QuantSpec(bits=4, axis=0))
            Capability(bits=4, signed=True, zero_point=False, axis=0, direct=True, plain=True)
        """
        bits = spec.bits if spec.format == "int" else None
        return cls(bits, spec.signed, not spec.symmetric, spec.axis, direct, plain and bits is not None)

    @property
    def sums(self) -> bool:
        """Whether its products are summed in int32, as a weight's are: integers of at most 8 bits."""
        return self.bits is not None and self.bits <= 8

    @property
    def codes(self) -> bool:
        """Whether a tensor on its grid has integers of at most a byte with one scale, as kernels take and return them."""
        return self.sums and self.direct and self.axis is None

    @property
    def packed(self) -> bool:
        """Whether two integers are kept in a byte."""
        return self.bits is not None and self.bits <= 4


NO_CODES = Capability()
