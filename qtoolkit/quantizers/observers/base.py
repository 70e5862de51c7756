"""Observer: the base class of observers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.state import KeepsFloat32, LoadsFloatCheckpoints, latest_load


class Observer(KeepsFloat32, LoadsFloatCheckpoints):
    """The base class of observers.

    Args:
        spec: The spec, with the options of the observer.
        shape: Shape of the ranges: () per tensor, otherwise one element per channel or block.
        group: Groups of dimension 0 (see `qtoolkit.ops`).

    Attributes:
        OPTIONS: The options that `QuantSpec.observer_args` may hold, with their defaults.
        NEEDS: The values of fields of a spec that it needs, in a rule of a QConfigMapping against the backend's.
        ADDED_UP: The attributes that hold sums over all inputs. They serve calibration alone and are no buffers: state dicts do
            not hold them, and DistributedDataParallel does not replace them by rank 0's.

    Example:
        >>> from qtoolkit.quantizers.table import OBSERVERS
        >>> issubclass(OBSERVERS["minmax"], Observer), "histogram" in OBSERVERS
        (True, True)
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    NEEDS: ClassVar[Mapping[str, Any]] = {}
    ADDED_UP: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: QuantSpec, shape: tuple[int, ...] = (), group: int = 1) -> None:
        super().__init__()
        self.axis, self.group, self.block_size = spec.axis, group, spec.block_size

    @classmethod
    def check(cls, spec: QuantSpec) -> None:
        """Raise ValueError for a spec that this observer does not support, or for an option out of its range."""

    @classmethod
    def options(cls, spec: QuantSpec) -> dict[str, Any]:
        """Return the value of each option."""
        return {**cls.OPTIONS, **spec.observer_args}

    @classmethod
    def from_spec(cls, spec: QuantSpec, shape: tuple[int, ...], group: int) -> Self:
        """Build the observer of a spec, with ranges of this shape."""
        return cls(spec, shape, group)

    def forward(self, x: Tensor) -> None:
        """Observe x."""
        raise NotImplementedError

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest values to quantize; lo > hi if nothing was observed."""
        raise NotImplementedError

    def observed(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest values observed, of each range; by default `range`'s."""
        return self.range()

    def share_outside(self, lo: Tensor, hi: Tensor) -> float | None:
        """Return the share of the observed values outside [lo, hi], per tensor or per range; None if it is not known."""
        lowest, highest = self.observed()
        return 0.0 if bool(((lowest >= lo) & (highest <= hi)).all()) else None

    def seen(self) -> bool:
        """Return whether every channel has observed something. Synchronizes with the device."""
        raise NotImplementedError

    def finite(self) -> bool:
        """Return whether all observed values are finite. Synchronizes with the device."""
        raise NotImplementedError

    def reset(self) -> None:
        """Discard all observations."""
        raise NotImplementedError

    def resize(self, shape: tuple[int, ...]) -> None:
        """Set the shape of the ranges, known from the first input. Nothing must have been observed yet."""
        raise NotImplementedError

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        """Load the observer's entries from a state dict.

        Observations are not needed to quantize: entries of another observer are dropped, and this one's may lack in
        the state dict of its quantizer.
        """
        own = {f"{prefix}{name}" for name, _ in self.named_buffers(recurse=False)}
        state_dict = {key: value for key, value in state_dict.items() if key in own or not key.startswith(prefix)}
        quantizer = "".join(prefix[:-1].rpartition(".")[:2])  # the prefix of the module that holds the observer
        if prefix and quantizer in latest_load(missing_keys).found:
            nn.Module._load_from_state_dict(self, state_dict, prefix, local_metadata, False, [], *args)
            self.leave_meta_device()
        else:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)

    def state(self) -> dict[str, Tensor]:
        """Return the observations, on the CPU, for `merge` in another process."""
        own = {**dict(self.named_buffers(recurse=False)), **self.added_up()}
        return {name: tensor.cpu() for name, tensor in own.items()}

    def added_up(self) -> dict[str, Tensor]:
        """Return the tensors of `ADDED_UP`."""
        return {name: getattr(self, name) for name in self.ADDED_UP}

    def reset_added_up(self) -> None:
        """Set them to zero; not in place: an error in calibration brings the old ones back."""
        for name, tensor in self.added_up().items():
            setattr(self, name, torch.zeros_like(tensor))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name, tensor in self.added_up().items():
            new = fn(tensor)
            setattr(self, name, new if new.dtype == tensor.dtype else tensor.to(new.device))
        return self

    def put_sums_on(self, device: torch.device) -> None:
        """Put the sums on a device, if the model was made on the meta device: no state dict has them."""
        for name, tensor in self.added_up().items():
            if tensor.is_meta and device.type != "meta":
                setattr(self, name, torch.zeros_like(tensor, device=device))

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace the observations by several observers' observations; their states include this observer's own."""
        raise NotImplementedError
