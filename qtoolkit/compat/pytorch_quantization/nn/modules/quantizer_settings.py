"""What a TensorQuantizer can be asked and set to."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit.compat.pytorch_quantization.nn.modules.clip import Clip
from qtoolkit.compat.pytorch_quantization.tensor_quant import E4M3_MAX


class QuantizerSettings(nn.Module):
    """The properties and switches of a TensorQuantizer."""

    _num_bits: int | tuple[int, int]
    _axis: int | tuple[int, ...] | None
    _fake_quant: bool
    _learn_amax: bool
    _unsigned: bool
    _narrow_range: bool
    _scale: Tensor | None
    _disabled: bool
    _if_quant: bool
    _if_clip: bool
    _if_calib: bool
    _calibrator: Any
    _amax: Tensor
    _pre_quant_scale: Tensor
    clip: Clip

    # ---- what it is

    @property
    def num_bits(self) -> int | tuple[int, int]:
        """Bits of a code, or (4, 3) for E4M3."""
        return self._num_bits

    @num_bits.setter
    def num_bits(self, value: int | tuple[int, int]) -> None:
        self._num_bits = value

    @property
    def unsigned(self) -> bool:
        """Whether codes start at 0."""
        return self._unsigned

    @unsigned.setter
    def unsigned(self, value: bool) -> None:
        self._unsigned = value

    @property
    def narrow_range(self) -> bool:
        """Whether the lowest of the signed codes is left out."""
        return self._narrow_range

    @narrow_range.setter
    def narrow_range(self, value: bool) -> None:
        self._narrow_range = value

    @property
    def axis(self) -> int | tuple[int, ...] | None:
        """The axes with ranges of their own."""
        return self._axis

    @property
    def fake_quant(self) -> bool:
        """Whether codes are dequantized again."""
        return self._fake_quant

    @property
    def maxbound(self) -> float:
        """The largest code, or E4M3's largest number."""
        return E4M3_MAX if isinstance(self._num_bits, tuple) else self._largest_code()

    def _largest_code(self) -> int:
        if isinstance(self._num_bits, tuple):
            raise NotImplementedError(f"TensorQuantizer: the float format {self._num_bits} has no integer codes.")
        return int(2 ** (self._num_bits - 1 + self._unsigned) - 1)

    @property
    def amax(self) -> Tensor | None:
        """The range, or None. It may be set again in the same shape only."""
        return getattr(self, "_amax", None)

    @amax.setter
    def amax(self, value: Any) -> None:
        if value is None:
            warnings.warn(
                "TensorQuantizer: setting amax to None does nothing; del quantizer._amax removes it.", stacklevel=2
            )
        elif self.amax is None:
            self.register_buffer("_amax", float32(value))
        else:
            _set(self._amax, value, "amax")

    @property
    def pre_quant_scale(self) -> Tensor | None:
        """What inputs are multiplied by, even where it is disabled; or None."""
        return getattr(self, "_pre_quant_scale", None)

    @pre_quant_scale.setter
    def pre_quant_scale(self, value: Any) -> None:
        if self.pre_quant_scale is None:
            self.register_buffer("_pre_quant_scale", float32(value))
        else:
            _set(self._pre_quant_scale, value, "pre_quant_scale")

    @property
    def scale(self) -> Tensor | None:
        """The multiplier of the codes it gave last; with fake_quant there is none."""
        if self._fake_quant:
            warnings.warn("TensorQuantizer: with fake_quant=True there is no scale; see step_size.", stacklevel=2)
        return self._scale

    @property
    def step_size(self) -> Tensor | None:
        """The distance between values, amax / (2^(num_bits - 1 + unsigned) - 1); None without a range."""
        if self.amax is None:
            warnings.warn("TensorQuantizer: there is no step_size without an amax.", stacklevel=2)
            return None
        return self._amax / self._largest_code()

    # ---- switches

    def enable(self) -> None:
        """Do what is switched on."""
        self._disabled = False

    def disable(self) -> None:
        """Pass inputs through."""
        self._disabled = True

    def enable_quant(self) -> None:
        """Quantize."""
        self._if_quant = True

    def disable_quant(self) -> None:
        """Do not quantize."""
        self._if_quant = False

    def enable_calib(self) -> None:
        """Let the calibrator collect; ValueError without one."""
        if self._calibrator is None:
            raise ValueError("Calibrator was not created, cannot enable calibration.")
        self._if_calib = True

    def disable_calib(self) -> None:
        """Do not let the calibrator collect."""
        self._if_calib = False

    def enable_clip(self) -> None:
        """Clip to the trained bounds, and train them; ValueError without learn_amax."""
        if not self._learn_amax:
            raise ValueError("learn_amax is False. Cannot enable clip.")
        self.clip.requires_grad_(True)
        self._if_clip = True

    def disable_clip(self) -> None:
        """Do not clip, and train no bounds."""
        if self._learn_amax:
            self.clip.requires_grad_(False)
        self._if_clip = False


def float32(value: Any) -> Tensor:
    """Return a float32 tensor of its own."""
    return torch.as_tensor(value, dtype=torch.float32).detach().clone()


def _set(buffer: Tensor, value: Any, name: str) -> None:
    new = float32(value)
    if new.shape != buffer.shape:
        raise RuntimeError(
            f"Changing shape when setting {name} is not allowed. It is {list(buffer.shape)}, got {list(new.shape)}."
        )
    buffer.copy_(new)
