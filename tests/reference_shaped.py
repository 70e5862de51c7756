"""The oracle of fake_quant_shaped, as `tests.reference` is of the other ops. Where the op computes functions such as tanh,
the oracle is in double precision, from the same quotients.
"""

import numpy as np
import torch
from torch import Tensor

from tests.reference import Snapped, arithmetic, array, tensor


class Shaped(Snapped):
    """Values, and the terms of the gradients of each element for an incoming gradient."""

    def __init__(self, x, scale, zero_point, steepness, qmin, qmax, shape, levels=(), **channels):
        super().__init__(x, scale, None if shape == "interval" else zero_point, qmin, qmax, **channels)
        self.shape, self.dtype, self.signed = shape, x.dtype, qmin < 0
        self.scale_sign = np.where(array(scale, np.float64).reshape(-1) >= 0, 1.0, -1.0)
        kind = arithmetic(x.dtype)
        if shape == "interval":
            self.center = self.spread(array(zero_point, kind))
        if steepness is not None:
            self.k = self.spread(array(steepness, kind)).astype(np.float64)
        with np.errstate(all="ignore"):
            if shape == "levels":
                self.to_level(np.array(levels, np.float64), kind)
            if shape == "interval":
                self.reach = kind(0.5) * ((np.abs(self.x) if self.signed else self.x) - self.center) / self.s
                self.place = self.reach + kind(0.5)

    def to_level(self, levels: np.ndarray, kind: type) -> None:
        clipped = np.minimum(np.maximum(self.quotient, self.qmin), self.qmax)
        far = np.abs(np.abs(clipped.astype(np.float64))[..., None] - levels)
        level = levels[np.where(np.isnan(far), 0, far).argmin(-1)] * np.sign(clipped)
        self.level = np.where(np.isnan(clipped), clipped, level).astype(kind)
        self.inside = self.quotient == clipped

    def values(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            if self.shape == "clip":
                return super().values()
            if self.shape == "levels":
                return self.level * self.s
            value = np.minimum(np.maximum(self.place, 0), 1)
            return value * np.sign(self.x) if self.signed else value

    def gradients(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return dx, and the terms of the gradients of scale, zero point and steepness."""
        with np.errstate(all="ignore"):
            return getattr(self, f"of_{self.shape}")(g)

    def of_levels(self, g: np.ndarray) -> tuple:
        steps = np.where(self.inside, self.level - self.quotient, self.level)
        return np.where(self.inside, g, 0), g * steps, None, None

    def of_interval(self, g: np.ndarray) -> tuple:
        wide, s = g.astype(np.float64), self.s.astype(np.float64)
        inside = (self.place >= 0) & (self.place <= 1) & ((self.x != 0) | (not self.signed))
        sign = np.sign(self.x) if self.signed else 1.0
        dx = np.where(inside, wide / (2 * s), 0)
        outwards = np.where(inside, -wide / (2 * s) * sign, 0)
        return dx, np.where(inside, outwards * 2 * self.reach, 0), outwards, None

    def of_clip(self, g: np.ndarray) -> tuple:
        low, high = (self.qmin - self.z) * self.s, (self.qmax - self.z) * self.s
        below, above = self.x < low, self.x > high
        dx = np.where((self.x >= low) & (self.x <= high), g, 0)
        ds = np.where(below, g * (self.qmin - self.z), np.where(above, g * (self.qmax - self.z), 0))
        dz = np.where(below | above, -(g * self.s), 0)
        return (dx, ds, dz, None) if not hasattr(self, "k") else (*self.soft(dx)[:1], ds, dz, *self.soft(dx)[1:])

    def soft(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of x and of the steepness k of (tanh(k t) / tanh(k / 2) + 1) / 2 steps."""
        t, wide = (self.quotient - np.floor(self.quotient) - self.quotient.dtype.type(0.5)).astype(np.float64), g * 1.0
        end = np.tanh(self.k / 2)
        of_t, of_end = 1 / np.cosh(self.k * t) ** 2, 1 / np.cosh(self.k / 2) ** 2
        steeper = (t * of_t * end - np.tanh(self.k * t) * of_end / 2) / end**2
        dx, dk = wide * self.k * of_t / end / 2, wide * self.s * steeper / 2
        return np.where(g == 0, 0, dx), np.where(g == 0, 0, dk)

    def check(self, found: tuple[Tensor, ...], grad: Tensor, likes: tuple[Tensor | None, ...]) -> None:
        """Compare the results of fake_quant_shaped_backward; `likes`: scale, zero_point and steepness."""
        dx, *terms = self.gradients(array(grad.to(self.dtype), arithmetic(self.dtype)))
        exact = self.shape != "interval" and not hasattr(self, "k")
        unit = max(torch.finfo(self.dtype).eps, 0 if exact else 1e-13 if self.dtype == torch.float64 else 3e-5)
        wanted = tensor(dx, self.dtype)
        rounded = {} if exact else {"rtol": 2 * unit, "atol": 1e-6 * float(np.nan_to_num(abs(dx)).max(initial=0))}
        torch.testing.assert_close(found[0], wanted, equal_nan=True, **(rounded or {"rtol": 0, "atol": 0}))
        for got, like, term in zip(found[1:], likes, terms, strict=True):
            assert got.shape == ((0,) if like is None else like.shape)
            if like is None:
                continue
            assert got.dtype == like.dtype
            total, mass = self.sum(term), self.sum(np.abs(term))
            if like is likes[2]:  # the terms of the steepness are differences
                mass = self.sum(np.abs(array(grad, np.float64)) * self.s)
            total = total * self.scale_sign if like is likes[0] else total
            bound = (1e-11 if self.dtype == torch.float64 else 1e-4) * mass + torch.finfo(like.dtype).eps * np.abs(
                total
            )
            apart = np.abs(got.double().reshape(-1).numpy() - total)
            held = (apart <= bound + 1e-30) | ~np.isfinite(total) | (mass > torch.finfo(like.dtype).max / 4)
            assert held.all(), (got, total)
