"""The quantizers of the papers, written as compositions of torch ops, to compare values and gradients with."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Ste(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounded: Tensor, x: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def ste(rounded: Tensor, x: Tensor) -> Tensor:
    """The rounded value with the gradient of x."""
    return _Ste.apply(rounded.detach(), x)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """x within [low, high]; the gradient of torch.clamp at the ends depends on torch's version."""
    return torch.where(x < low, float(low), torch.where(x > high, float(high), x))


def scaled(x: Tensor, factor: float) -> Tensor:
    """x, with its gradient times a factor: section 2.2 of LSQ."""
    return (x - x * factor).detach() + x * factor


def lsq(x: Tensor, s: Tensor, z: Tensor, qmin: int, qmax: int, factor: float = 1.0) -> Tensor:
    s = scaled(s, factor)
    code = clip(ste(torch.round(x / s), x / s) + z, qmin, qmax)
    return (code - z) * s


def lsq_plus(x: Tensor, s: Tensor, beta: Tensor, qmin: int, qmax: int, factor: float) -> Tensor:
    """Equation 2 of LSQ+, whose offset is rounded to a whole number of steps."""
    s, beta = scaled(s, factor), scaled(beta, factor)
    z = -beta / s
    z = ste(z.round().clamp(qmin, qmax), z)
    return (clip(ste(torch.round(x / s), x / s) + z, qmin, qmax) - z) * s


def tqt(x: Tensor, log2_t: Tensor, qmin: int, qmax: int) -> Tensor:
    """Equations 3 to 6 of TQT: the threshold divided by 2^(b-1), or 2^b for unsigned numbers."""
    exponent = ste(log2_t.ceil(), log2_t)
    s = 2**exponent / (qmax + 1)
    return clip(ste(torch.round(x / s), x / s), qmin, qmax) * s


def pact(x: Tensor, alpha: Tensor, qmin: int, qmax: int) -> Tensor:
    """Equations 1 and 2 of PACT; on signed codes the lowest one clips too."""
    low = alpha * (qmin / qmax)
    y = 0.5 * ((x - low).abs() - (x - alpha).abs() + low + alpha)
    s = (alpha / qmax).detach()
    return ste(torch.round(y / s) * s, y)


def learned_range(x: Tensor, low: Tensor, high: Tensor, qmin: int, qmax: int) -> Tensor:
    """fake_quant_with_min_max_vars of TensorFlow: nudged ends, whose gradients are those of the elements beyond them."""
    s = ((high - low) / (qmax - qmin)).detach()
    z = torch.clamp(torch.round(qmin - low.detach() / s), qmin, qmax)
    nudged_low, nudged_high = ste((qmin - z) * s, low), ste((qmax - z) * s, high)
    y = torch.where(x < nudged_low, nudged_low, torch.where(x > nudged_high, nudged_high, x))
    return ste((torch.round(y / s)) * s, y)


def dsq(x: Tensor, low: Tensor, high: Tensor, alpha: Tensor, steps: int) -> Tensor:
    """Equations 3 to 8 of DSQ, with the sign of phi as the forward value."""
    delta = ((high - low) / steps).detach()
    k = torch.log(2 / alpha - 1) / delta
    number = torch.clamp(torch.floor((x - low) / delta), 0, steps - 1).detach()
    middle = (low + (number + 0.5) * delta).detach()
    phi = torch.tanh(k * (x - middle)) / (1 - alpha)
    soft = low.detach() + delta * (number + (ste(phi.sign(), phi) + 1) / 2)
    return torch.where(x < low, low, torch.where(x > high, high, soft))


def dorefa(w: Tensor, bits: int, largest: Callable[[Tensor], Tensor]) -> Tensor:
    """Equation 9 of DoReFa."""
    t = torch.tanh(w)
    r = t / (2 * largest(t.abs())) + 0.5
    n = 2**bits - 1
    return 2 * ste(torch.round(n * r) / n, r) - 1


def apot(x: Tensor, alpha: Tensor, levels: Tensor) -> Tensor:
    """Equations 3 and 6 of APoT: the nearest level of the clipped, divided input."""
    u = clip(x / alpha, -1, 1)
    nearest = levels[(u.detach().abs()[..., None] - levels).abs().argmin(-1)] * u.detach().sign()
    return alpha * ste(nearest, u)


def qil(x: Tensor, c: Tensor, d: Tensor, gamma: Tensor, steps: int) -> Tensor:
    """Equations 2 to 5 of QIL."""
    alpha, beta = 0.5 / d, -0.5 * c / d + 0.5
    middle = (alpha * x.abs() + beta).clamp(min=1e-30) ** gamma * x.sign()
    t = torch.where(x.abs() < c - d, 0.0, torch.where(x.abs() > c + d, x.sign(), middle))
    return ste(torch.round(t * steps) / steps, t)


def powers_of_two(bits: int) -> list[float]:
    """The levels of APoT's authors (build_power_value of github yhhhli/APoT_Quantization), as shares of the largest."""
    a, b, c = [0.0], [0.0], [0.0]
    if bits == 1:
        a.append(1.0)
    elif bits == 2:
        a += [2 ** (-i - 1) for i in range(3)]
    elif bits == 3:
        a += [2**-1, 2**-2, 2**-4]
        b.append(2**-3)
    elif bits == 4:
        a += [2 ** (-2 * i - 1) for i in range(3)]
        b += [2 ** (-2 * i - 2) for i in range(3)]
    else:
        a += [2**-1, 2**-3, 2**-6]
        b += [2**-2, 2**-4, 2**-7]
        c.append(2**-5)
    sums = sorted({x + y + z for x in a for y in b for z in c})
    assert math.isclose(sums[0], 0)
    return [value / sums[-1] for value in sums]
