"""The integer arithmetic of runtimes: the ops themselves.

csrc/library.cpp has the schema of each with its meaning, csrc/requantize.h the formulas and their sources. Ops that a
converted model keeps are functions, since pickles name them.
"""

from torch import Tensor

from qtoolkit._native import Op, library

add_codes: Op = library.add_codes.default
average_codes: Op = library.average_codes.default
centred_codes: Op = library.centred_codes.default
hard_swish_codes: Op = library.hard_swish_codes.default
requantize: Op = library.requantize.default
requantize_fixed_point: Op = library.requantize_fixed_point.default
resize_linear_codes: Op = library.resize_linear_codes.default
softmax_codes: Op = library.softmax_codes.default
_fake_quant_away: Op = library.fake_quant_away.default
_fake_quant_by_factor: Op = library.fake_quant_by_factor.default


def fake_quant_by_factor(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """Return `fake_quant` of one grid as OpenVINO computes it: x times a factor that the range gives.

    Example:
        >>> fake_quant_by_factor(torch.tensor([0.3, 9.0]), torch.tensor(0.25), None, -8, 7)
        tensor([0.2500, 1.7500])
    """
    return _fake_quant_by_factor(x, scale, zero_point, qmin, qmax)


def fake_quant_by_reciprocal(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """Return `fake_quant` of one grid as XNNPACK computes it: x times f32(1 / scale), halves rounded to even.

    Example:
        >>> fake_quant_by_reciprocal(torch.tensor([0.3, 9.0]), torch.tensor(0.25), torch.tensor(2.0), -8, 7)
        tensor([0.2500, 1.2500])
    """
    step, zero = scale.reshape(()), 0.0 if zero_point is None else zero_point.reshape(())
    nearest = requantize(x.to(step.dtype), 1 / step, step, qmin - qmax, qmax - qmin)
    return nearest.clamp((qmin - zero) * step, (qmax - zero) * step).to(x.dtype)


def fake_quant_away(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """Return `fake_quant` of one grid as LiteRT computes it: halves are rounded away from zero.

    Example:
        >>> fake_quant_away(torch.tensor([0.125, -0.375]), torch.tensor(0.25), None, -8, 7)
        tensor([ 0.2500, -0.5000])
    """
    return _fake_quant_away(x, scale, zero_point, qmin, qmax)
