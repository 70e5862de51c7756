"""Exact sums of products of integers. csrc/exact_sums.h has the rule for exactness."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qtoolkit._native import library
from qtoolkit.running import running

Product = Callable[[Tensor, Tensor], Tensor]  # (input, weight) -> sums of products
LARGEST_IN_TF32 = 2**11  # integers up to here have no more bits than TF32


@dataclass(frozen=True)
class Bounds:
    """How large the sums of products with a quantized weight may be.

    Attributes:
        sums: The largest magnitude of a sum, and of any part of one.
        weights: The largest sum of the magnitudes of the weights of one output.
        low: The lowest integer of the input, zero or less.
        high: The highest, zero or more.
        digit_bits: 0 if every sum is exact in float32; otherwise the largest number of bits of an integer's digits whose sums
            are, or -1 for none.
        other: The largest magnitude of an integer of a weight.
    """

    sums: float
    weights: float
    low: int
    high: int
    digit_bits: int
    other: int = 128

    @classmethod
    def of(cls, positive: Tensor, negative: Tensor, low: int, high: int, other: int = 128) -> "Bounds":
        """Return the bounds for the integers of an input in [low, high], low <= 0 <= high.

        `positive` and `negative` are the sums of each output's positive weights, and of the magnitudes of its negative ones.
        """
        upper, lower = high * positive - low * negative, high * negative - low * positive
        sums, weights = float(torch.maximum(upper, lower).max()), float((positive + negative).max())
        return cls(sums, weights, low, high, library.digit_bits(sums, weights), other)

    @classmethod
    def of_two(cls, terms: int, codes: tuple[int, int], others: tuple[int, int]) -> "Bounds":
        """Return the bounds for sums of so many products of two activations, by the lowest and highest integer of each."""
        largest, other = max(-codes[0], codes[1]), max(-others[0], others[1])
        sums, weights = float(terms * largest * other), float(terms * other)
        return cls(sums, weights, *codes, library.digit_bits(sums, weights), other)

    @property
    def exact_in_float32(self) -> bool:
        """Whether every sum is exact in float32."""
        return self.digit_bits == 0

    def stay_exact_with(self, more: float) -> bool:
        """Return whether sums plus integers of this magnitude are exact in float32."""
        return bool(library.digit_bits(self.sums + more, self.weights) == 0)


def is_exact() -> bool:
    """Return whether torch has the ops, and computes the largest sums of pairs of products exactly."""
    exact: bool = library.int8_is_exact()
    return exact


def has_int8_product(device: torch.device) -> bool:
    """Return whether a device has torch's product of int8 matrices (csrc/layer/int8_product.h)."""
    found: bool = library.int8_product_is_on(device)
    return found


def may_transform(x: Tensor, convolves: bool) -> bool:
    """Return whether the float32 kernels of a layer may transform their operands: convolutions on a GPU (Winograd, FFT).

    The errors of their integer sums exceed one half: rounding does not remove them.
    """
    return x.is_cuda and convolves


def may_round(x: Tensor, bounds: Bounds) -> bool:
    """Return whether products in float32 may round operands: on a GPU, which may take TF32, operands of more than 11 bits."""
    largest = max(bounds.high, -bounds.low) if bounds.digit_bits == 0 else 2**bounds.digit_bits - 1
    return x.is_cuda and max(largest, bounds.other) > LARGEST_IN_TF32


def exact_sums(product: Product, x: Tensor, weight: Tensor, bounds: Bounds, transforms: bool = False) -> Tensor:
    """Return the exact sums of products of integers in float32, as integers in float32 or float64.

    `product` is a convolution, a matrix product or another op that is linear in both arguments. If float32 cannot hold a
    sum, the integers of x are split into digits of fewer bits: each part's sums are exact in float32, whose kernels are much
    faster than float64's. With `transforms` (see `may_transform`) it computes in float64.
    """
    if transforms or bounds.digit_bits < 0 or may_round(x, bounds):
        sums = product(x.double(), weight.double())
        return torch.round(sums) if transforms else sums
    if bounds.exact_in_float32:
        return product(x, weight)
    parts = (product(part, weight).double() * scale for scale, part in _digits(x, bounds))
    return sum(parts, torch.zeros((), dtype=torch.float64, device=x.device))


def exact_matmul(x: Tensor, other: Tensor, codes: tuple[int, int], others: tuple[int, int]) -> Tensor:
    """Return the exact matrix product of integers in float32, as `exact_sums` does, of numbers in these two ranges."""
    if running().compiled:  # a graph does not depend on how many numbers are summed
        return torch.matmul(x.double(), other.double())
    return exact_sums(torch.matmul, x, other, Bounds.of_two(x.size(-1), codes, others))


def _digits(x: Tensor, bounds: Bounds) -> Iterator[tuple[int, Tensor]]:
    """Return parts of x, each with its factor: integers in [0, 2**bits), the last one with the sign."""
    bits, factor, low, high = bounds.digit_bits, 1, bounds.low, bounds.high
    while max(high, -low) >= 2**bits:
        rest = torch.floor(x * 2.0**-bits)
        yield factor, x - rest * 2.0**bits
        x, factor, low, high = rest, factor * 2**bits, low >> bits, high >> bits
    yield factor, x
