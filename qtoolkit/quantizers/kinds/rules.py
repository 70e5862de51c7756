"""Rules about specs that several quantizers share."""

from qtoolkit.config import QuantSpec


def needs_integers(spec: QuantSpec) -> None:
    """Raise ValueError for a format other than integers."""
    if spec.format != "int":
        raise ValueError(f"QuantSpec: format={spec.format!r} needs quantizer='fixed', got {spec.quantizer!r}.")


def needs_any_scale(spec: QuantSpec) -> None:
    """Raise ValueError for powers of two."""
    if spec.pow2_scale:
        raise ValueError(
            f"QuantSpec: pow2_scale=True needs quantizer='fixed' or 'tqt'; the scales of {spec.quantizer!r} have any value."
        )


def needs_no_zero_point(spec: QuantSpec) -> None:
    """Raise ValueError for an affine grid."""
    if not spec.symmetric:
        raise ValueError(
            f"QuantSpec: quantizer={spec.quantizer!r} has no zero point: it needs symmetric=True, got False; take 'lsq_plus' "
            f"or 'learned_range' for an affine grid."
        )
