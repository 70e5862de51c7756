"""pytorch_quantization's QuantDescriptor, the configuration of a TensorQuantizer, and the predefined descriptors."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from qtoolkit.errors import check_known, with_article


@dataclass(frozen=True, eq=False)
class ScaledQuantDescriptor:
    """Configuration of quantization by the largest magnitude.

    Args:
        num_bits: Bit width, or (4, 3) for the float format E4M3.
        name: A label; it does not affect quantization.
        fake_quant: Quantize and dequantize; False returns integers.
        axis: Axes along which each index has its own range; None for one range. Negative axes count from the end.
        amax: The range, kept as a float32 array; None to calibrate it, or to take it from each input.
        learn_amax: Train the bounds of one range, as PACT does.
        scale_amax: Factor on the range, or None; it does not apply to a trained range.
        calib_method: How to calibrate: "max" or "histogram".
        unsigned: Whether the lowest integer is 0.
        narrow_range: Exclude the lowest signed integer.

    Raises:
        ValueError: num_bits is an int below 1, amax contains NaN, or calib_method is unknown.
        TypeError: num_bits, name, axis or amax has another type, learn_amax is given with an axis, or an argument is
            unknown.

    Example:
        >>> QuantDescriptor(num_bits=4, axis=(0,), narrow_range=True).dict()
        {'num_bits': 4, 'axis': (0,), 'narrow_range': True}
    """

    num_bits: int | tuple[int, int] = 8
    name: str | None = None
    _: KW_ONLY
    fake_quant: bool = True
    axis: int | tuple[int, ...] | None = None
    amax: Any = None  # __post_init__ makes it an array
    learn_amax: bool = False
    scale_amax: float | None = None
    calib_method: str = "max"
    unsigned: bool = False
    narrow_range: bool = False

    def __new__(cls, *args: object, **kwargs: object) -> "ScaledQuantDescriptor":
        """Check the names of the arguments."""
        known = [field.name for field in fields(cls)]
        unused = sorted(kwargs.keys() - known)
        if unused:
            blocks = "; for blocks, use qtoolkit.QuantSpec(group_size=...)" if "block_sizes" in unused else ""
            raise TypeError(f"Unused keys: {', '.join(unused)}. Known: {', '.join(known)}{blocks}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.num_bits, int) and self.num_bits < 1:
            raise ValueError(f"QuantDescriptor: num_bits must be > 0, got {self.num_bits}.")
        if not isinstance(self.num_bits, int) and self.num_bits != (4, 3):
            raise TypeError(f"QuantDescriptor: num_bits must be an int or (4, 3), got {self.num_bits!r}.")
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"QuantDescriptor: name must be a string or None, got {with_article(type(self.name))}.")
        object.__setattr__(self, "axis", _axes(self.axis))
        if self.learn_amax and self.axis is not None:
            raise TypeError(
                f"QuantDescriptor: axis is ignored and must be None when learn_amax is true, got {self.axis}; one range is "
                f"trained."
            )
        check_known("calib_method", self.calib_method, ("histogram", "max"))
        object.__setattr__(self, "amax", _array(self.amax))

    def __eq__(self, other: object) -> bool:
        return self.dict() == other.dict() if isinstance(other, ScaledQuantDescriptor) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self.dict()))

    def dict(self) -> dict[str, object]:
        """Return the arguments that differ from their defaults; amax as a float or nested lists of floats."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["amax"] = None if self.amax is None else self.amax.tolist()
        return {field.name: values[field.name] for field in fields(self) if values[field.name] != field.default}

    def to_yaml(self) -> str:
        """Return `dict()` as YAML, with tuples as lists; needs PyYAML."""
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in self.dict().items()}
        return str(_yaml().safe_dump(listed))

    @classmethod
    def from_yaml(cls, yaml_str: str) -> "ScaledQuantDescriptor":
        """Return the descriptor from the text of `to_yaml`; needs PyYAML.

        Raises:
            TypeError: The text is not a mapping, or an argument is unknown or has a wrong type.
            ValueError: As in the constructor.
        """
        values = _yaml().safe_load(yaml_str)
        if not isinstance(values, dict):
            raise TypeError(
                f"QuantDescriptor.from_yaml: the text must hold a mapping, got {with_article(type(values))}."
            )
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) and k != "amax" else v for k, v in values.items()}
        return cls(**given)


QuantDescriptor = ScaledQuantDescriptor


def _axes(axis: object) -> int | tuple[int, ...] | None:
    if axis is None or isinstance(axis, int):
        return axis
    if isinstance(axis, Sequence) and all(isinstance(a, int) for a in axis):
        return tuple(axis)
    raise TypeError(f"QuantDescriptor: axis must be an int, a tuple of ints or None, got {axis!r}.")


def _array(amax: object) -> np.ndarray | None:
    if amax is None:
        return None
    if not isinstance(amax, float | list | np.ndarray):
        raise TypeError(f"QuantDescriptor: amax must be float, list or ndarray, got {with_article(type(amax))}.")
    array = np.array(amax, dtype=np.float32)
    if np.isnan(array).any():
        raise ValueError(f"QuantDescriptor: amax must not be NaN, got {amax!r}.")
    return array


def _yaml() -> ModuleType:
    try:
        return import_module("yaml")
    except ImportError as error:
        raise ImportError(
            "QuantDescriptor: to_yaml and from_yaml need PyYAML; install it: pip install pyyaml."
        ) from error


QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor()
QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR = QuantDescriptor(unsigned=True)
QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW = QuantDescriptor(axis=0)
QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW
QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW
QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(axis=1)  # of (in, out / groups, k...)
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL

__all__ = [name for name in globals() if name.startswith("QUANT_DESC") or name.endswith("QuantDescriptor")]
