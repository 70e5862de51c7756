"""Quantizers of weights: one builder for layers and for functions that take a weight."""

from collections.abc import Iterable
from typing import Any, TypeGuard
from weakref import ref

from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.processes import whole
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


def weight_quantizer(
    weight: Tensor, spec: QuantSpec, layer: str, group: int = 1, name: str | None = None, *, inserted: bool = False
) -> TensorQuantizer:
    """Return a new quantizer of a weight, on the weight's device and with the weight's range.

    A weight on the meta device has no range, nor has its quantizer then. Errors name the layer, and those of the quantizer its
    own name, by default `layer` + ".weight_quantizer". Raises ValueError if the axis or the group_size does not fit the weight.

    Example:
        >>> weight_quantizer(torch.ones(6, 64), QuantSpec(axis=1, group_size=32), "fc").scale.shape
        torch.Size([6, 2])
    """
    if spec.group_size is not None:
        group = 1
    try:
        shape = spec.scale_shape(weight.shape, group)
    except ValueError as error:
        raise ValueError(f"layer {layer!r}: {error}") from None
    name = f"{layer}.weight_quantizer" if name is None else name
    quantizer = TensorQuantizer(spec, shape, group, name, of_weight=True, inserted=inserted).to(weight.device)
    set_weight_range(quantizer, weight)
    return quantizer


def set_weight_range(quantizer: TensorQuantizer, weight: Tensor, trained: Tensor | None = None) -> None:
    """Set a quantizer's range to that of a weight as it is now; a weight on the meta device leaves it unchanged.

    A learned scale is trained as if it were that of `trained`, the parameter, where a batch norm multiplies it.
    """
    if weight.device.type == "meta":
        return
    weight, trained = whole(weight), None if trained is None else whole(trained)
    quantizer.observer.reset()
    quantizer.observer(weight)
    quantizer.load_observed()
    quantizer.set_weight_rate(weight, weight if trained is None else trained)


def is_stale(quantizer: Quantizer, changed: bool = False) -> TypeGuard[TensorQuantizer]:
    """Return whether the range of a quantizer follows a weight that may have changed, or has, since it was taken."""
    return isinstance(quantizer, TensorQuantizer) and (quantizer.stale or changed) and quantizer.follows


class Versions:
    """Which versions of some tensors are known, to find out later whether the tensors have changed.

    Changes in place count, and new storage (`weight.data = ...`); what writes through `weight.data` leaves no trace. Copies and
    pickles know the same of their own tensors.
    """

    def __init__(self, tensors: Iterable[Tensor], changed: Iterable[bool] | None = None) -> None:
        listed = list(tensors)
        changes = [False] * len(listed) if changed is None else changed
        self._known = [
            (ref(tensor), None if change else _version(tensor)) for tensor, change in zip(listed, changes, strict=True)
        ]

    def changed(self, now: Iterable[Tensor]) -> bool:
        """Return whether a tensor has changed, or another one is among those that are in use now.

        A tensor on the meta device has no values yet: those of offloaded weights come back for each forward.
        """
        changes = self._changes()
        known = {id(tensor) for tensor, _ in changes}
        return any(change for _, change in changes) or any(
            id(tensor) not in known and not tensor.is_meta for tensor in now
        )

    def _changes(self) -> list[tuple[Tensor, bool]]:
        found = ((reference(), version) for reference, version in self._known)
        return [(tensor, _version(tensor) != version) for tensor, version in found if tensor is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        changes = self._changes()
        return Versions, ([tensor for tensor, _ in changes], [change for _, change in changes])


def _version(tensor: Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else tensor._version, tensor.untyped_storage()._cdata
