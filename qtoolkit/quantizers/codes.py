"""The integers of a tensor on an integer grid, for ops that compute on them or keep them for backward.

The tensor and its quantizer determine the integers, which can be computed from these two.
"""

from dataclasses import dataclass, replace
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.ops.layer import Codes, RawInput
from qtoolkit.quantizers.frozen import code_dtype
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.running import Run


@dataclass(slots=True)
class TensorCodes:
    """The grid of a tensor's values, and their integers once they were asked for."""

    # The step size, positive, in a tensor of its own: an observer may change its quantizer's
    scale: Tensor
    zero_point: Tensor | None  # the zero point, rounded, or None for 0
    qmin: int  # the lowest quantized value
    qmax: int  # the highest quantized value
    packed: bool  # whether two integers are kept in a byte
    tensor: ReferenceType[Tensor] | Tensor  # refers to the tensor; in a compiled forward the tensor itself
    version: int  # the tensor's: after a change in place the codes no longer hold
    # the integers, int8 or uint8 and of the tensor's shape, or packed: in one dimension in row-major order, or two channels of
    # an image in a byte; None until `completed`
    codes: Tensor | None = None
    raw: RawInput | None = None  # what the values were before, where only the scale has a gradient; or None
    raw_version: int = 0  # the version of that

    def hold_for(self, y: Tensor) -> bool:
        """Return whether y is the tensor, unchanged."""
        if isinstance(self.tensor, Tensor):
            return self.tensor is y
        return self.tensor() is y and (y.is_inference() or self.version == y._version)

    def completed(self, y: Tensor, channels_last: bool) -> "TensorCodes":
        """Return this with the integers of y, the tensor; for an image in channels_last, if wanted."""
        codes = self.codes
        if codes is None:
            codes = self.of(y, in_memory_order=True).codes
        if channels_last and codes.dim() == 4:
            codes = codes.contiguous(memory_format=torch.channels_last)
        self.codes = codes
        return self

    def of(self, values: Tensor, packs: bool = True, in_memory_order: bool = False) -> Codes:
        """Return the integers of values on the grid; without `packs` each has a byte. Packed, they are in rows by default."""
        x, grid = values.detach(), (self.scale, self.zero_point, self.qmin, self.qmax)
        if packs and self.packed:
            return self.as_codes(ops.quantize_int4(x, *grid, in_memory_order=in_memory_order))
        return self.as_codes(ops.quantize(x, *grid, dtype=code_dtype(self.qmin, self.qmax)))

    def of_whole(self, y: Tensor, packs: bool = True) -> Codes:
        """Return the integers of y, the tensor, as `of` does, or the ones that it has."""
        has_whole = self.codes is not None and (not self.packed or (packs and self.codes.dim() == 1))
        return self.as_codes(self.codes) if has_whole else self.of(y, packs)  # type: ignore[arg-type]  # not None

    def as_codes(self, codes: Tensor) -> Codes:
        """Return integers on the grid."""
        return Codes(codes, self.scale, self.zero_point, self.qmin, self.qmax)

    def without_codes(self, run: Run, y: Tensor) -> "TensorCodes":
        """Return the grid of a tensor that has some of the values, such as a max pool's."""
        return replace(self, codes=None, tensor=_reference(run, y), version=version_of(run, y), raw=None, raw_version=0)

    def raw_of(self, run: Run, y: Tensor) -> RawInput | None:
        """Return the tensor before it became y; None if that is not known, or if y's gradient is needed elsewhere."""
        if self.raw is None or y._backward_hooks or y.retains_grad:
            return None
        is_same = version_of(run, self.raw.values) == self.raw_version  # else autograd says that it was changed
        return self.raw if is_same else None


def version_of(run: Run, y: Tensor) -> int:
    """Return the version of a tensor; 0 where it has none, and in a compiled forward."""
    return 0 if run.compiled or y.is_inference() else y._version


def _reference(run: Run, y: Tensor) -> ReferenceType[Tensor] | Tensor:
    return y if run.compiled else ref(y)


def codes_on(
    run: Run, scale: Tensor, zero_point: Tensor | None, quantizer: Quantizer, y: Tensor, codes: Tensor | None = None
) -> TensorCodes:
    """Return the integers of a tensor y on the grid of a quantizer with `Capability.codes`.

    No other object may share the scale, positive, and the zero point, rounded. `codes` is an op's result,
    empty where the op gives none.
    """
    spec, given = quantizer.spec, None if codes is None or codes.numel() == 0 else codes
    packed = quantizer.capability.packed
    held = _reference(run, y), version_of(run, y)
    return TensorCodes(scale, zero_point, spec.qmin, spec.qmax, packed, *held, given)


def codes_by(run: Run, quantizer: Quantizer | None, y: Tensor) -> TensorCodes | None:
    """Return the grid of a tensor as its quantizer is now, with the integers yet to be computed; None if it has none."""
    if quantizer is None or not quantizer.capability_now.codes:
        return None
    return codes_on(run, quantizer.scale.detach().abs(), rounded(quantizer.zero_point), quantizer, y)


def rounded(zero_point: Tensor | None) -> Tensor | None:
    """Return a zero point as `Codes` has it, in a tensor of its own."""
    return None if zero_point is None else zero_point.detach().round()


def codes_of(
    run: Run, y: Tensor, quantizer: Quantizer | None, channels_last: bool, kept: TensorCodes | None = None
) -> TensorCodes | None:
    """Return the grid of a tensor, with its integers computed; None where the grid is not known or has no integers of a byte.

    `kept` are the integers that came with the tensor; they are left out if they are of another one, or y has changed.
    Then its values lie on the grid of the quantizer. `channels_last` is whether the integers of an image are wanted in
    this memory format.
    """
    found = tensor_codes_of(run, y, quantizer, kept)
    return None if found is None else found.completed(y, channels_last)


def tensor_codes_of(
    run: Run, y: Tensor, quantizer: Quantizer | None, kept: TensorCodes | None = None
) -> TensorCodes | None:
    """Return the grid of a tensor, with its integers if they are computed; the arguments are `codes_of`'s.

    The grid of a quantizer that observes may be another one since it quantized the tensor.
    """
    if kept is not None and kept.hold_for(y):
        return kept
    found = codes_by(run, quantizer, y)
    return None if found is None or (quantizer is not None and quantizer.observing) else found
