"""pytorch_quantization.tensor_quant: quantization by the largest magnitude, and the descriptors."""

from collections.abc import Callable

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit._native import TupleOp, library
from qtoolkit.compat.pytorch_quantization.descriptor import *  # noqa: F403  # names that scripts import from here
from qtoolkit.ops.legacy import check_values, has_values

E4M3_MAX = 448.0
_fake_affine_tensor_quant: TupleOp = library.fake_affine_tensor_quant.default
_scaled_e4m3: TupleOp = library.scaled_e4m3.default


def tensor_quant(
    x: Tensor, amax: Tensor | float, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> tuple[Tensor, Tensor]:
    """Return integers, stored as floats, and their multiplier (see `qtoolkit.ops.tensor_quant`); amax may be a number too.

    Example:
        >>> tensor_quant(torch.tensor([-1.0, 0.3, 2.0]), 1.0, 4)
        (tensor([-7.,  2.,  7.]), tensor(7.))
    """
    return ops.tensor_quant(x, _as_tensor(amax, x), num_bits, unsigned, narrow_range)


def fake_tensor_quant(
    x: Tensor, amax: Tensor | float, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Return the integers of `tensor_quant`, with its arguments and errors, divided by their multiplier.

    Example:
        >>> x = torch.tensor([0.5043, 0.8178, 0.4798, 0.9201])
        >>> fake_tensor_quant(x, x.abs().max())
        tensor([0.5071, 0.8187, 0.4782, 0.9201])
    """
    return ops.fake_tensor_quant(x, _as_tensor(amax, x), num_bits, unsigned, narrow_range)


legacy_fake_tensor_quant = fake_tensor_quant


def fake_affine_tensor_quant(
    x: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
) -> Tensor:
    """Round x to an affine grid of signed integers over [min_range, max_range], one element each, and back.

    The step is `(max_range - min_range) / (2^num_bits - 1)`; the zero point is rounded, and may lie outside the integer range.
    The gradient passes to x where min_range <= x <= max_range.

    Raises:
        ValueError: The highest value is not above the lowest (checked on CPU tensors), or num_bits is below 1.

    Example:
        >>> fake_affine_tensor_quant(torch.tensor([-2.0, 0.1, 0.9]), -1.0, 2.0, 2)
        tensor([-1.,  0.,  1.])
    """
    low, high = _as_tensor(min_range, x), _as_tensor(max_range, x)
    if has_values(low, high) and not bool((low < high).all()):
        raise ValueError(
            f"fake_affine_tensor_quant: max_range must be above min_range, got min_range={low} and max_range={high}."
        )
    return _fake_affine_tensor_quant(x, low, high, num_bits)[0]


def scaled_e4m3(x: Tensor, amax: Tensor | float | None = None, E: int = 4, M: int = 3) -> Tensor:  # noqa: N803
    """Round x to the float format E4M3 and back, scaled so that amax becomes its largest number, 448.

    Larger values saturate; |x| < 2^-24 gives 0. The gradient passes to x where |x| <= amax. None means 448, without scaling;
    2^-24 or less gives zeros.

    Raises:
        NotImplementedError: E, M, the bits of exponent and mantissa, are not 4, 3.
        ValueError: amax has negative values, NaN or infinities (checked on CPU tensors, as by `tensor_quant`).

    Example:
        >>> scaled_e4m3(torch.tensor([0.3, 1.3, 5.0]), 2.0)
        tensor([0.2857, 1.2857, 2.0000])
    """
    if (E, M) != (4, 3):
        raise NotImplementedError(
            f"scaled_e4m3: E, M must be 4, 3, got {E}, {M}; other float formats are not supported."
        )
    amax = _as_tensor(E4M3_MAX if amax is None else amax, x)
    check_values(x, amax, unsigned=False)
    return _scaled_e4m3(x, amax)[0]


# ---- names of the autograd functions


def function_class(name: str, apply: Callable[..., object]) -> type:
    """Return a class with the name of an autograd function of pytorch-quantization, whose `apply` is the given function."""
    return type(name, (), {"apply": staticmethod(apply), "__doc__": apply.__doc__, "__module__": apply.__module__})


TensorQuantFunction = function_class("TensorQuantFunction", tensor_quant)
FakeTensorQuantFunction = function_class("FakeTensorQuantFunction", fake_tensor_quant)
LegacyFakeTensorQuantFunction = function_class("LegacyFakeTensorQuantFunction", legacy_fake_tensor_quant)
FakeAffineTensorQuantFunction = function_class("FakeAffineTensorQuantFunction", fake_affine_tensor_quant)
ScaledE4M3Function = function_class("ScaledE4M3Function", scaled_e4m3)


def _as_tensor(amax: Tensor | float, x: Tensor) -> Tensor:
    return amax if isinstance(amax, Tensor) else torch.tensor(amax, dtype=torch.float32, device=x.device)
