"""The oracle: section 4 of the design, written out plainly in NumPy, with tensors in and out.

Arithmetic is float32 (float64 for float64 input), one IEEE operation at a time; sums are float64. Nothing here shares a
line, or an idea, with the C++.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

TINY = np.finfo(np.float32).tiny  # a scale counts as at least this


def arithmetic(dtype: torch.dtype) -> type:
    return np.float64 if dtype == torch.float64 else np.float32


def array(t: Tensor, kind: type) -> np.ndarray:
    """The values of any tensor, in NumPy's row-major order (NumPy has no bfloat16)."""
    wide = t.detach().cpu().contiguous()
    wide = wide.double() if t.dtype == torch.float64 else wide.float() if t.dtype.is_floating_point else wide.long()
    with np.errstate(all="ignore"):
        return wide.numpy().astype(kind)


def tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).reshape(values.shape)


def channels(shape: tuple[int, ...], axis: int | None, group: int, block_size: int = 0) -> tuple[np.ndarray, int]:
    """For each element the number of its channel (its block, where there are blocks), and how many there are."""
    if axis is None:
        return np.zeros(shape, np.int64), 1
    axis %= len(shape)
    if block_size:
        blocks = [n // block_size if d == axis else n for d, n in enumerate(shape)]
        numbers = np.arange(np.prod(blocks, dtype=np.int64)).reshape(blocks)
        return np.repeat(numbers, block_size, axis), numbers.size
    places = np.indices(shape, sparse=False).reshape(len(shape), -1)
    within = shape[0] // group
    part = places[0] // within if group > 1 else np.zeros(places.shape[1], np.int64)
    return (part * shape[axis] + places[axis]).reshape(shape), group * shape[axis]


def ends(qmin: int, qmax: int, kind: type) -> tuple:
    """The outermost numbers of the arithmetic within [qmin, qmax]: float32 holds not every code beyond 2^24."""
    low, high = kind(qmin), kind(qmax)
    low = np.nextafter(low, kind(np.inf)) if int(low) < qmin else low
    high = np.nextafter(high, kind(-np.inf)) if int(high) > qmax else high
    return low, high


class Snapped:
    """Every quantity of an integer grid on x, element by element."""

    def __init__(self, x, scale, zero_point=None, qmin=-128, qmax=127, axis=None, group=1, block_size=0):
        kind = arithmetic(x.dtype)
        self.channel, self.count = channels(tuple(x.shape), axis if scale.numel() != 1 else None, group, block_size)
        self.x = array(x, kind)
        self.s = self.spread(np.maximum(np.abs(array(scale, kind)), kind(TINY)))
        z = np.zeros(scale.numel(), kind) if zero_point is None else np.rint(array(zero_point, kind))
        self.z = self.spread(z)
        self.qmin, self.qmax = lowest, highest = ends(qmin, qmax, kind)
        with np.errstate(all="ignore"):
            self.quotient = self.x / self.s
            self.level = np.rint(self.quotient) + self.z
            self.q = np.minimum(np.maximum(self.level, lowest), highest)
            self.inside = (self.level >= lowest) & (self.level <= highest)

    def spread(self, per_channel: np.ndarray) -> np.ndarray:
        return per_channel.reshape(-1)[self.channel]

    def values(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            return (self.q - self.z) * self.s

    def codes(self) -> np.ndarray:
        return np.where(np.isnan(self.q), self.qmin, self.q).astype(np.int64)

    def sum(self, terms: np.ndarray) -> np.ndarray:
        totals = np.zeros(self.count)
        np.add.at(totals, self.channel.reshape(-1), terms.reshape(-1).astype(np.float64))
        return totals


def fake_quant(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *grid, **named) -> Tensor:
    return tensor(Snapped(x, scale, zero_point, *grid, **named).values(), x.dtype)


def inside(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *grid, **named) -> Tensor:
    return tensor(Snapped(x, scale, zero_point, *grid, **named).inside, torch.bool)


def packed(bits: Tensor, like: Tensor) -> Tensor:
    """Bits in the memory order of `like` (dense), eight a byte, the first one lowest; the last byte ends in zeros."""
    ordered = torch.empty_like(like, dtype=torch.bool).copy_(bits)
    flat = ordered.as_strided((ordered.numel(),), (1,))
    return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))


def quantize(x, scale, zero_point=None, qmin=-128, qmax=127, dtype=torch.int8, **channels) -> Tensor:
    return tensor(Snapped(x, scale, zero_point, qmin, qmax, **channels).codes(), dtype)


def dequantize(codes, scale, zero_point=None, dtype=torch.float32, **channels) -> Tensor:
    grid = Snapped(torch.zeros_like(codes, dtype=dtype), scale, zero_point, **channels)
    with np.errstate(all="ignore"):
        return tensor((array(codes, arithmetic(dtype)) - grid.z) * grid.s, dtype)


def minmax(x: Tensor, axis: int | None = None, group: int = 1, block_size: int = 0) -> tuple[Tensor, Tensor]:
    """Per channel; np.minimum and np.maximum spread NaN. A channel without elements has the range [inf, -inf]."""
    channel, count = channels(tuple(x.shape), axis, group, block_size)
    values = array(x, arithmetic(x.dtype))
    lo, hi = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(lo, channel.reshape(-1), values.reshape(-1))
    np.maximum.at(hi, channel.reshape(-1), values.reshape(-1))
    shape = () if axis is None else (count,)
    if block_size:
        shape = tuple(n // block_size if d == axis % x.dim() else n for d, n in enumerate(x.shape))
    return tensor(lo.reshape(shape), x.dtype), tensor(hi.reshape(shape), x.dtype)


def moved(
    old: tuple[Tensor, Tensor], x: Tensor, momentum: float | None, skipped: Tensor | None = None, **channels
) -> tuple[Tensor, ...]:
    """Running ranges after x, in float64, and the new count; the first range that is not [0, 0] is taken as it is."""
    new = [array(t, np.float64).reshape(-1) for t in minmax(x.double(), **channels)]
    was = [array(t, np.float64).reshape(-1) for t in old]
    if momentum is None:
        now = [np.minimum(was[0], new[0]), np.maximum(was[1], new[1])]
    else:
        with np.errstate(all="ignore"):
            now = [w * (1 - momentum) + n * momentum for w, n in zip(was, new, strict=True)]
        unseen = (was[0] > was[1]) | ((was[0] == 0) & (was[1] == 0))
        nothing = new[0] > new[1]
        now = [np.where(nothing, w, np.where(unseen, n, m)) for w, n, m in zip(was, new, now, strict=True)]
    if skipped is None:
        return tuple(tensor(n.reshape(t.shape), torch.float64) for n, t in zip(now, old, strict=True))
    with np.errstate(all="ignore"):
        left_out = ~(np.isfinite(new[0]) & np.isfinite(new[1])) & ~(new[0] > new[1])
    now = [np.where(left_out, w, n) for w, n in zip(was, now, strict=True)]
    ends = (tensor(n.reshape(t.shape), torch.float64) for n, t in zip(now, old, strict=True))
    return (*ends, skipped + torch.from_numpy(left_out).reshape(skipped.shape))


def grid_of_range(lo: Tensor, hi: Tensor, qmin: int, qmax: int, symmetric: bool, pow2: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point (for a symmetric grid one without meaning) that cover ranges widened to hold zero."""
    kind = arithmetic(lo.dtype)
    low, high = np.minimum(array(lo, kind), 0), np.maximum(array(hi, kind), 0)
    with np.errstate(all="ignore"):
        reach = high if qmin >= 0 else np.maximum(-low, high)
        width, steps = (reach, qmax) if symmetric else (high - low, qmax - qmin)
        scale = np.maximum(width / kind(steps), kind(TINY))
        others = scale[(width > 0) & np.isfinite(width)]
        scale = np.where(width == 0, others.max(initial=0) or kind(1), scale).astype(kind)
        if pow2:
            mantissa, exponent = np.frexp(scale)
            scale = np.where(np.isfinite(scale) & (mantissa > 0.5), np.ldexp(kind(1), exponent), scale)
        zero_point = np.clip(kind(qmin) - np.rint(low / scale), kind(qmin), kind(qmax))
    return tensor(scale, lo.dtype), tensor(zero_point, lo.dtype)


def float16_scale(scale: Tensor) -> Tensor:
    """Scales with 11 significant bits, ties to even, and at least 2^-14."""
    values = array(scale, arithmetic(scale.dtype))
    with np.errstate(all="ignore"):
        mantissa, exponent = np.frexp(values)
        rounded = np.ldexp(np.rint(mantissa * 2048), exponent - 11)
    return tensor(np.where(np.abs(values) < 2**-14, np.copysign(2**-14, values), rounded), scale.dtype)


class Gradients:
    """dx exactly; dscale and dzero_point as float64 sums of float32 terms, with the sums of the terms' magnitudes."""

    def __init__(self, grad, x, scale, zero_point=None, qmin=-128, qmax=127, *, grad_factor=1.0, **channels):
        p = Snapped(x, scale, zero_point, qmin, qmax, **channels)
        g = array(grad, arithmetic(x.dtype))
        with np.errstate(all="ignore"):
            steps = p.q - p.z
            ds_terms = g * np.where(p.inside, steps - p.quotient, steps)
            dz_terms = np.where(p.inside, 0, -(g * p.s))
        self.dx = tensor(np.where(p.inside, g, 0), x.dtype)
        sign = np.where(array(scale, np.float64).reshape(-1) >= 0, 1.0, -1.0)
        self.ds, self.dz = grad_factor * sign * p.sum(ds_terms), grad_factor * p.sum(dz_terms)
        self.ds_mass, self.dz_mass = (abs(grad_factor) * p.sum(np.abs(t)) for t in (ds_terms, dz_terms))


class Prelu:
    """PReLU and a grid behind it: values and dx exactly, sums and masses as in `Gradients`."""

    def __init__(self, x, weight, scale, zero_point=None, qmin=-128, qmax=127):
        kind = arithmetic(x.dtype)
        self.like, self.grid = x, (scale, zero_point, qmin, qmax)
        self.x, w = array(x, kind), array(weight, kind).reshape(-1)
        self.channel, self.count = channels(tuple(x.shape), None if weight.numel() == 1 else 1, 1)
        self.slope = w[self.channel]
        with np.errstate(all="ignore"):
            self.rectified = torch.from_numpy(np.where(self.x > 0, self.x, self.slope * self.x))

    def values(self) -> Tensor:
        return fake_quant(self.rectified, *self.grid).to(self.like.dtype)

    def gradients(self, grad: Tensor, grad_factor: float = 1.0) -> "Prelu":
        kind = arithmetic(self.like.dtype)
        wide = tensor(array(grad.to(self.like.dtype), kind), self.rectified.dtype)
        behind = Gradients(wide, self.rectified, *self.grid, grad_factor=grad_factor)
        passed = array(behind.dx, kind)
        with np.errstate(all="ignore"):
            self.dx = tensor(np.where(self.x > 0, passed, self.slope * passed), self.like.dtype)
            terms = np.where(self.x > 0, 0, self.x * passed).astype(np.float64).reshape(-1)
        self.dw, self.dw_mass = np.zeros(self.count), np.zeros(self.count)
        np.add.at(self.dw, self.channel.reshape(-1), terms)
        np.add.at(self.dw_mass, self.channel.reshape(-1), np.abs(terms))
        self.ds, self.ds_mass = behind.ds, behind.ds_mass
        return self


# ---- histograms ---------------------------------------------------------------------------------------------------------


def histogram(x: Tensor, n: int) -> tuple[np.ndarray, float, float]:
    """Counts and range of all values: the smallest width of 2^k that fits, found by doubling; bins found by their edges."""
    values = array(x, np.float64).reshape(-1)
    if values.size == 0:
        return np.zeros(n, np.int64), 0.0, 0.0
    if not (np.abs(values) < 2.0**126).all():
        return np.zeros(n, np.int64), np.nan, np.nan
    negative = values[values < 0]
    side = n // 2 if negative.size else n
    width = 2.0**-125 if negative.size else 2.0**-126
    while np.abs(values).max() >= side * width:
        width *= 2
    edges = np.arange(side + 1) * width
    up = np.bincount(np.searchsorted(edges, values[values >= 0], "right") - 1, minlength=side)
    if not negative.size:
        return up, 0.0, side * width
    down = np.bincount(np.searchsorted(edges, -negative, "right") - 1, minlength=side)
    return np.concatenate([down[::-1], up]), -side * width, side * width


class Bins:
    """A histogram with its bins as numbers, and what each method makes of a candidate range [-a, b], whole bins."""

    def __init__(
        self,
        counts: Tensor,
        lo: Tensor,
        hi: Tensor,
        qmin: int,
        qmax: int,
        symmetric: bool,
        given: Sequence[int] = (),  # candidates
    ):
        self.counts = counts.numpy().astype(np.float64)
        n = len(self.counts)
        self.width = (float(hi) - float(lo)) / n
        self.zero = round(-float(lo) / self.width)
        self.edges = np.arange(n + 1) - self.zero
        self.qmin, self.qmax, self.symmetric, self.given = qmin, qmax, symmetric, given
        full = np.flatnonzero(self.counts)
        self.below, self.above = max(self.zero - full[0], 0), max(full[-1] + 1 - self.zero, 0)

    def grid(self, a: int, b: int) -> tuple[float, float]:
        if self.symmetric:
            return b / self.qmax, 0
        scale = (a + b) / (self.qmax - self.qmin)
        return scale, np.clip(self.qmin + np.rint(a / scale), self.qmin, self.qmax)

    def mse(self, a: int, b: int) -> float:
        scale, zero_point = self.grid(a, b)
        centers = self.edges[:-1] + 0.5
        q = np.clip(np.rint(centers / scale) + zero_point, self.qmin, self.qmax)
        return float((self.counts * ((q - zero_point) * scale - centers) ** 2).sum())

    def l2(self, a: int, b: int) -> float:
        """The integral, piece by piece between the edges of bins and the boundaries of levels."""
        scale, zero_point = self.grid(a, b)
        levels = (np.arange(self.qmin, self.qmax + 1) - zero_point) * scale
        boundaries = (levels[1:] + levels[:-1]) / 2
        cuts = np.unique(np.concatenate([self.edges, np.clip(boundaries, self.edges[0], self.edges[-1])]))
        middle = (cuts[1:] + cuts[:-1]) / 2
        density = self.counts[np.searchsorted(self.edges, middle) - 1]
        level = levels[np.searchsorted(boundaries, middle)]
        return float((density * ((cuts[1:] - level) ** 3 - (cuts[:-1] - level) ** 3) / 3).sum())

    def entropy(self, a: int, b: int) -> float:
        """KL(P || Q) as pytorch-quantization computes it, for either end."""
        if self.symmetric:
            up = self.counts[self.zero :]
            down = self.counts[: self.zero][::-1] if self.qmin < 0 else up[:0]
            row = np.zeros(max(len(up), len(down)))
            row[: len(up)] += up
            row[: len(down)] += down
            row = row[: max(self.above, self.below if self.qmin < 0 else 0)]
            row = np.pad(row, (0, max(0, *self.given, len(row)) - len(row)))
            levels, begin, end, zero = self.qmax + 1, 0, b, 0
        else:
            row = self.counts[self.zero - self.below : self.zero + self.above].copy()
            levels, zero = self.qmax - self.qmin + 1, self.below
            begin, end = zero - a, zero + b
        if zero + 1 < len(row):
            row[zero] = row[zero + 1]
        inside = row[begin:end]
        too_few = np.count_nonzero(inside) < min(levels, np.count_nonzero(row))
        if (too_few and not self.given) or inside.sum() == 0:
            return np.inf
        p = inside.copy()
        p[0] += row[:begin].sum()
        p[-1] += row[end:].sum()
        of = np.arange(len(inside)) * levels // len(inside)
        q = np.zeros(len(inside))
        for level in range(levels):
            filled = (of == level) & (inside > 0)
            if filled.any():
                q[filled] = inside[of == level].sum() / filled.sum()
        p, q = p / p.sum(), q / q.sum()
        if ((p > 0) & (q == 0)).any():
            return np.inf
        here = p > 0
        return float((p[here] * np.log(p[here] / q[here])).sum())

    def candidates(self) -> list[tuple[int, int]]:
        if self.symmetric:
            most = max(self.above, self.below) if self.qmin < 0 else self.above
            return [(b, b) for b in self.given or range(1, most + 1)] if most else []
        return [(a, b) for a in range(self.below + 1) for b in range(self.above + 1) if a + b > 0]

    def percentile(self, percent: float) -> tuple[float, float]:
        """Where the cumulated counts, a straight line over each bin that is not empty, reach the share."""
        total, share = self.counts.sum(), percent / 100

        def reach(row: np.ndarray, wanted: float) -> float:
            ends = np.cumsum(row)
            for i in np.flatnonzero(row):
                if ends[i] >= wanted * (1 - 1e-12):
                    return i + np.clip(1 - (ends[i] - wanted) / row[i], 0, 1)
            return 0.0

        if not self.symmetric:
            wanted = total * (1 + share) / 2
            above = reach(self.counts, wanted) - self.zero
            below = reach(self.counts[::-1], wanted) - (len(self.counts) - self.zero)
            return -max(below, 0) * self.width, max(above, 0) * self.width
        up, down = self.counts[self.zero :], self.counts[: self.zero][::-1]
        if self.qmin == 0:
            return 0.0, reach(up, total * share - down.sum()) * self.width
        t = reach(up + down if len(down) else up, total * share) * self.width
        return -t, t


# ---- small float formats: every number of a format is listed, and the nearest is looked up


def float_numbers(mantissa: int, bias: int, exponents: int, largest: float) -> np.ndarray:
    """The magnitudes of a format in order, which is the order of their codes: even places have even codes."""
    fractions = np.arange(2**mantissa) / 2**mantissa
    normal = [(1 + fractions) * 2.0 ** (e - bias) for e in range(1, exponents)]
    numbers = np.concatenate([fractions * 2.0 ** (1 - bias), *normal])
    return numbers[numbers <= largest]


FORMATS = {
    "e4m3": float_numbers(3, 7, 16, 448),
    "e5m2": float_numbers(2, 15, 31, 57344),
    "e2m1": float_numbers(1, 1, 4, 6),
}


def cast(values: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Values rounded to a format, and whether they did not saturate."""
    numbers = FORMATS[format]
    mid = (numbers[1:] + numbers[:-1]) / 2  # exact: float64 holds them
    step = numbers[-1] - numbers[-2]
    end = numbers[-1] + step / 2
    magnitude = np.abs(values).astype(np.float64)
    place = np.searchsorted(mid, magnitude)  # ties go to the lower number...
    tie = (place < len(mid)) & (magnitude == np.append(mid, 0)[np.minimum(place, len(mid))])
    place = place + (tie & (place % 2 == 1))  # ... unless its code is odd
    rounded = np.where(np.isnan(values), np.nan, np.copysign(numbers[place], values))
    inside = (magnitude < end) | ((magnitude == end) & (len(numbers) % 2 == 1))
    return rounded.astype(values.dtype), inside


def log_level(n: np.ndarray, kind: type) -> np.ndarray:
    """2^(n/16), correctly rounded; NaN stays."""
    return np.exp2(np.asarray(n, np.longdouble) / 16).astype(kind)


def log_index(v: np.ndarray) -> np.ndarray:
    """The n whose 2^(n/16) is nearest to v > 0 in the logarithm."""
    mantissa, exponent = np.frexp(v)
    return np.rint(16 * np.log2(mantissa.astype(np.longdouble))) + 16 * exponent


def fake_quant_nnie(x: Tensor, scale: Tensor, **channels) -> tuple[Tensor, Tensor]:
    """MQBench's rule: n = round(16 log2 |x|), clipped to a range, whose higher bound is that of the scale."""
    grid = Snapped(x, scale, **channels)
    kind, magnitude = grid.s.dtype.type, np.abs(grid.x)
    with np.errstate(all="ignore"):
        scales = np.clip(grid.s, kind(2.0**-117), kind(2.0 ** (1022 if kind == np.float64 else 126)))
        top = log_index(scales)
        lowest = top - 127 + (grid.x < 0)
        n = log_index(np.clip(magnitude, kind(TINY), log_level(top + 16, kind)))
        zero = magnitude <= log_level(lowest, kind) / 2
        values = np.where(zero, 0, np.copysign(log_level(np.clip(n, lowest, top), kind), grid.x))
        values = np.where(np.isnan(grid.x), np.nan, values).astype(kind)
    return tensor(values, x.dtype), tensor((n <= top) | zero, torch.bool)


def fake_quant_float(x: Tensor, scale: Tensor, format: str, **channels) -> tuple[Tensor, Tensor]:
    """Values, and where the gradient passes."""
    if format == "nnie":
        return fake_quant_nnie(x, scale, **channels)
    grid = Snapped(x, scale, **channels)
    with np.errstate(all="ignore"):
        rounded, inside = cast(grid.quotient, format)
        return tensor(rounded * grid.s, x.dtype), tensor(inside, torch.bool)


def fake_quant_block(x: Tensor, format: str, size: int, scale_format: str, tensor_scale=None) -> tuple[Tensor, ...]:
    """Values, scales, and where the gradient passes."""
    kind = arithmetic(x.dtype)
    blocks = array(x, kind).reshape(-1, size)
    amax = np.max(np.where(np.isnan(blocks), 0, np.abs(blocks)), axis=1, initial=0)
    largest = kind(FORMATS[format][-1])
    whole = kind(1) if tensor_scale is None else np.maximum(np.abs(array(tensor_scale, kind).reshape(())), kind(TINY))
    with np.errstate(all="ignore"):
        if scale_format == "e8m0":
            exponent = np.frexp(np.where(np.isinf(amax), 1, amax))[1] - np.frexp(largest)[1]
            exponent = np.where(np.isinf(amax), 127, np.where(amax == 0, -126, np.clip(exponent, -126, 127)))
            scales = np.where(np.isfinite(blocks).all(1), np.ldexp(kind(1), exponent), np.nan).astype(kind)
        else:
            scales = cast(amax / largest / whole, scale_format)[0] * whole
        used = np.maximum(scales, kind(TINY))[:, None]
        rounded, inside = cast(blocks / used, format)
        values = (rounded * used).reshape(x.shape)
    scales = scales.reshape(*x.shape[:-1], x.shape[-1] // size)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return tensor(values, x.dtype), tensor(scales, wide), tensor(inside.reshape(x.shape), torch.bool)


# ---- the numerics of pytorch-quantization


def tensor_quant(x: Tensor, amax: Tensor, num_bits=8, unsigned=False, narrow_range=True) -> tuple[Tensor, ...]:
    """Codes, multiplier, values, and where the gradient passes."""
    kind = arithmetic(x.dtype)
    values, most = array(x, kind), np.maximum(np.abs(array(amax, kind)), kind(TINY))  # as every scale
    high = kind(2 ** (num_bits - 1 + unsigned) - 1)
    low = kind(0) if unsigned else -high if narrow_range else -high - kind(1)
    with np.errstate(all="ignore"):
        none = most <= kind(2.0**-24)
        multiplier = high / most
        codes = np.minimum(np.maximum(np.rint(values * np.where(none, kind(0), multiplier)) + kind(0), low), high)
        multiplier = np.where(none, kind(1), multiplier)
        results = codes, multiplier, codes / multiplier
        inside = np.abs(values) <= most
    return *(tensor(r, x.dtype) for r in results), tensor(inside, torch.bool)


# ---- batch norm and what is fused behind it, from torch's ops


def batch_norm(
    low: float,
    high: float,
    slope: float,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    divisor: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    grad_factor: float = 1.0,
    eps: float = 1e-3,
    **codes: Tensor,
) -> Tensor:
    """The composition that batch_norm_fake_quant is in one op; the residual's codes are not read."""
    if divisor is not None:
        x = x / divisor.reshape(-1, *[1] * (x.dim() - 2))
    y = torch.nn.functional.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    y = y if residual is None else y + residual
    if slope:
        y = torch.nn.functional.leaky_relu(y - low, slope) + low
    elif low > -np.inf or high < np.inf:
        y = torch.nn.functional.hardtanh(y, low, high)
    if scale is None:
        return y
    learned = [None if t is None else Scaled.apply(t, grad_factor) for t in (scale, zero_point)]
    return Rounded.apply(y, *learned, qmin, qmax)


class Scaled(torch.autograd.Function):
    """x, with its gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Rounded(torch.autograd.Function):
    """Fake quantization with the gradients of LSQ and LSQ+."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
        z = torch.zeros_like(scale) if zero_point is None else zero_point
        level = torch.round(x / scale) + z
        code = level.clamp(qmin, qmax)
        ctx.save_for_backward(x / scale, level == code, code - z, scale)
        ctx.symmetric = zero_point is None
        return (code - z) * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        quotient, inside, steps, scale = ctx.saved_tensors
        ds = (grad * torch.where(inside, steps - quotient, steps)).sum().reshape(scale.shape)
        dz = (grad * ~inside * -scale).sum().reshape(scale.shape)
        return grad * inside, ds, None if ctx.symmetric else dz, None, None


def wide(t: Tensor) -> Tensor:
    """In the type of the arithmetic."""
    return t if t.dtype == torch.float64 else t.float()


class Normalized:
    """The value before the activation and the result, each step rounded as the op rounds it, from given statistics."""

    def __init__(
        self, x, weight, bias, divisor, residual, mean, variance, eps, low, high, slope, scale, zero_point, qmin, qmax
    ) -> None:
        kind = wide(x).dtype
        along = (-1, *[1] * (x.dim() - 2))
        f, w, b = (
            torch.full_like(mean, absent, dtype=kind) if t is None else t.to(kind)
            for t, absent in ((divisor, 1), (weight, 1), (bias, 0))
        )
        self.divisor, self.weight = f.double(), w.double()
        with np.errstate(all="ignore"):  # torch's own roots and divisions are off by a bit for some numbers of elements
            spread = variance.to(kind).double().numpy() + eps * self.divisor.numpy() * self.divisor.numpy()
            self.inverse = torch.from_numpy(np.asarray(1 / np.sqrt(spread)))
        self.inverse = torch.where(f < 0, -self.inverse, self.inverse)
        self.factor = (self.weight * self.inverse).to(kind).reshape(along)
        self.centred = x.to(kind) - mean.to(kind).reshape(along)
        before = self.centred * self.factor + b.reshape(along)
        self.before = before if residual is None else before + residual.to(kind)
        ends = [torch.tensor(e, dtype=kind) for e in (low, high)]
        under = ends[0] + slope * (self.before - ends[0]) if slope else ends[0].expand_as(self.before)
        self.below = (self.before <= ends[0]) & (low > -np.inf)
        self.above = (self.before >= ends[1]) & (high < np.inf)
        self.value = torch.where(self.below, under, torch.where(self.above, ends[1], self.before))
        self.slope, self.dtype = slope, x.dtype
        self.grid = {"scale": scale, "zero_point": zero_point, "qmin": qmin, "qmax": qmax}

    def y(self) -> Tensor:
        whole = self.value if self.grid["scale"] is None else fake_quant(self.value, **self.grid)
        return whole.to(self.dtype)

    def grad_before(self, grad: Tensor) -> Tensor:
        """Of the value before the activation, from that of the result."""
        grad = grad.to(self.dtype).to(self.value.dtype)
        if self.grid["scale"] is not None:
            grad = torch.where(inside(self.value, **self.grid), grad, torch.zeros_like(grad))
        zeros = torch.zeros_like(grad)
        return torch.where(self.below, grad * self.slope if self.slope else zeros, torch.where(self.above, zeros, grad))

    def gradients(self, grad: Tensor, eps: float) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """That of x, and for each of the channels' tensors its gradient and the sum of its terms' magnitudes."""
        dims = [0, *range(2, grad.dim())]
        along = (-1, *[1] * (grad.dim() - 2))
        g, centred = self.grad_before(grad).double(), self.centred.double()
        count = grad.numel() // grad.size(1)
        of_weight = self.inverse * (g * centred).sum(dims)
        of_divisor = -eps * self.divisor * self.inverse**2 * self.weight
        slope = -self.factor.double() * (self.inverse * of_weight / count).reshape(along)
        offset = -self.factor.double() * (g.sum(dims) / count).reshape(along)
        mass = (g * centred).abs().sum(dims) * self.inverse.abs()
        return g * self.factor.double() + centred * slope + offset, {
            "weight": (of_weight, mass),
            "bias": (g.sum(dims), g.abs().sum(dims)),
            "divisor": (of_divisor * of_weight, of_divisor.abs() * mass),
        }
