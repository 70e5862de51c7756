"""pytorch_quantization's TensorQuantizer."""

from collections.abc import Callable
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from qtoolkit.compat.pytorch_quantization import calib
from qtoolkit.compat.pytorch_quantization.descriptor import QUANT_DESC_8BIT_PER_TENSOR, QuantDescriptor
from qtoolkit.compat.pytorch_quantization.nn.functional import Clip
from qtoolkit.compat.pytorch_quantization.nn.modules.export_form import (
    affine_form,
    check_exportable,
    e4m3_form,
    fx_leaf,
)
from qtoolkit.compat.pytorch_quantization.reduction import amax_along
from qtoolkit.compat.pytorch_quantization.tensor_quant import E4M3_MAX, fake_tensor_quant, scaled_e4m3, tensor_quant
from qtoolkit.errors import warn
from qtoolkit.foreign import ForeignQuantizer
from qtoolkit.running import running

_CALIBRATORS = {"max": calib.MaxCalibrator, "histogram": calib.HistogramCalibrator}
_BUFFERS = ("_amax", "_pre_quant_scale")  # registered with their first value, as scripts ask for them by hasattr


def _setting(name: str, doc: str, writable: bool = False) -> property:
    """Return a property that reads an attribute, and writes it if `writable`."""
    return property(attrgetter(name), (lambda self, value: setattr(self, name, value)) if writable else None, doc=doc)


def _switch(name: str, value: bool, doc: str) -> Callable[["TensorQuantizer"], None]:
    """Return a method that sets a switch."""

    def switch(self: "TensorQuantizer") -> None:
        setattr(self, name, value)

    switch.__doc__ = doc
    return switch


class TensorQuantizer(ForeignQuantizer):
    """Multiply by `pre_quant_scale`, calibrate, clip and quantize; the last three have switches.

    Without a range, each input is quantized by its own largest magnitude. For new work use `qtoolkit.TensorQuantizer`. Raises
    ValueError: if_clip is given without learn_amax.

    Example:
        >>> quantizer = TensorQuantizer(QuantDescriptor(num_bits=4))
        >>> quantizer.amax = 7.0
        >>> quantizer(torch.tensor([0.6, 100.0, -100.0])).tolist()
        [1.0, 7.0, -8.0]
    """

    PACKAGE = "qtoolkit.compat.pytorch_quantization"
    use_fb_fake_quant: ClassVar[bool] = False  # compute torch's own ops, which exporters know
    _enable_onnx_export: ClassVar[bool] = False  # the same, with checks

    _amax: Tensor
    _pre_quant_scale: Tensor

    num_bits = _setting("_num_bits", "Bit width, or (4, 3) for E4M3.", writable=True)
    unsigned = _setting("_unsigned", "Whether the lowest integer is 0.", writable=True)
    narrow_range = _setting("_narrow_range", "Whether the lowest signed integer is excluded.", writable=True)
    axis = _setting("_axis", "The axes along which each index has its own range.")
    fake_quant = _setting("_fake_quant", "Whether the result is dequantized.")

    def __init__(
        self,
        quant_desc: QuantDescriptor = QUANT_DESC_8BIT_PER_TENSOR,
        disabled: bool = False,
        if_quant: bool = True,
        if_clip: bool = False,
        if_calib: bool = False,
    ) -> None:
        super().__init__()
        self._num_bits, self._axis = quant_desc.num_bits, quant_desc.axis
        self._fake_quant, self._learn_amax = quant_desc.fake_quant, quant_desc.learn_amax
        self._unsigned, self._narrow_range = quant_desc.unsigned, quant_desc.narrow_range
        self._scale_amax = quant_desc.scale_amax
        self._scale: Tensor | None = None
        self._disabled, self._if_quant, self._if_clip, self._if_calib = disabled, if_quant, False, if_calib
        if quant_desc.amax is not None:
            self.register_buffer("_amax", torch.tensor(quant_desc.amax))
        if self._learn_amax:
            bound = 1.0 if quant_desc.amax is None else float(quant_desc.amax.max())
            self.clip = Clip(-bound, bound, learn_min=True, learn_max=True)
        if self._learn_amax or if_clip:
            self.enable_clip()
        self._calibrator: calib._Calibrator | None = _CALIBRATORS[quant_desc.calib_method](
            self._num_bits, self._axis, self._unsigned
        )

    # ---- switches

    enable = _switch("_disabled", False, "Apply the enabled steps.")
    disable = _switch("_disabled", True, "Return inputs unchanged.")
    enable_quant = _switch("_if_quant", True, "Quantize.")
    disable_quant = _switch("_if_quant", False, "Do not quantize.")
    disable_calib = _switch("_if_calib", False, "Do not let the calibrator collect.")

    def enable_calib(self) -> None:
        """Let the calibrator collect; ValueError without a calibrator."""
        if self._calibrator is None:
            raise ValueError("Calibrator was not created, cannot enable calibration.")
        self._if_calib = True

    def enable_clip(self) -> None:
        """Clip to the trained bounds, and train them; ValueError without learn_amax."""
        if not self._learn_amax:
            raise ValueError("learn_amax is False. Cannot enable clip.")
        self.clip.requires_grad_(True)
        self._if_clip = True

    def disable_clip(self) -> None:
        """Do not train the bounds, and clip to them only for quantization."""
        if self._learn_amax:
            self.clip.requires_grad_(False)
        self._if_clip = False

    # ---- ranges and scales

    @property
    def amax(self) -> Tensor | None:
        """The range, or None. A range can be replaced only by a range of the same shape.

        Example:
            >>> quantizer = TensorQuantizer()
            >>> quantizer.amax = 2.5
            >>> quantizer.amax
            tensor(2.5000)
        """
        return getattr(self, "_amax", None)

    @amax.setter
    def amax(self, value: object) -> None:
        """Set the range; None only causes a warning."""
        if value is None:
            warn("TensorQuantizer: setting amax to None has no effect; del quantizer._amax removes it.")
        else:
            self._set_buffer("amax", value)

    @property
    def pre_quant_scale(self) -> Tensor | None:
        """Factor on the inputs, also applied if the quantizer is disabled; or None."""
        return getattr(self, "_pre_quant_scale", None)

    @pre_quant_scale.setter
    def pre_quant_scale(self, value: object) -> None:
        self._set_buffer("pre_quant_scale", value)

    def _set_buffer(self, name: str, value: object) -> None:
        old, new = getattr(self, name), _float32(value)
        if bool(new.isnan().any()):
            raise ValueError(f"TensorQuantizer: {name} must not be NaN, got {value}.")
        if old is None:
            self.register_buffer(f"_{name}", new)
        elif new.shape == old.shape:
            old.copy_(new)
        else:
            raise RuntimeError(
                f"Changing shape when setting {name} is not allowed. It is {list(old.shape)}, got {list(new.shape)}."
            )

    @property
    def maxbound(self) -> float:
        """The largest integer, or E4M3's largest number."""
        return E4M3_MAX if isinstance(self._num_bits, tuple) else 2 ** (self._num_bits - 1 + self._unsigned) - 1

    @property
    def scale(self) -> Tensor | None:
        """The multiplier of the last result; None with fake_quant=True."""
        if self._fake_quant:
            warn("TensorQuantizer: with fake_quant=True there is no scale; see step_size.")
        return self._scale

    @property
    def step_size(self) -> Tensor | None:
        """The distance between values, amax / (2^(num_bits - 1 + unsigned) - 1); None without a range."""
        if self.amax is None:
            warn("TensorQuantizer: there is no step_size without an amax.")
            return None
        if isinstance(self._num_bits, tuple):
            raise NotImplementedError(f"TensorQuantizer: the float format {self._num_bits} has no integer steps.")
        return self._amax / self.maxbound

    def load_calib_amax(self, *args: object, strict: bool = True, **kwargs: object) -> None:
        """Set the range to the result of the calibrator's `compute_amax` for these arguments.

        Raises:
            RuntimeError: There is no calibrator, or it collected nothing; with strict=False this warns, and keeps the range.
        """
        if self._calibrator is None:
            raise RuntimeError("Calibrator not created.")
        amax = self._calibrator.compute_amax(*args, **kwargs)
        if amax is not None:
            self.register_buffer("_amax", _float32(amax))
            return
        sentence = "Calibrator returned None. This usually happens when calibrator hasn't seen any tensor."
        if strict:
            raise RuntimeError(f"{sentence} Passing 'strict=False' to `load_calib_amax()` will ignore the error.")
        warn(f"{sentence} The range does not change: {self._short_amax()}.")

    def init_learn_amax(self) -> None:
        """Start the trained bounds at the range; RuntimeError without learn_amax or without a range."""
        if not self._learn_amax:
            raise RuntimeError("Called init_learn_amax with learn_amax=False; a QuantDescriptor sets it.")
        if self.amax is None:
            raise RuntimeError("TensorQuantizer: init_learn_amax needs an amax; calibrate first.")
        if self._amax.numel() > 1:
            warn("TensorQuantizer: one range is trained, so it starts at the largest amax.")
        with torch.no_grad():
            self.clip.clip_value_min.copy_(-self._amax.max())
            self.clip.clip_value_max.copy_(self._amax.max())

    def _get_amax(self, inputs: Tensor) -> Tensor:
        """Return the range for an input; scripts call this too."""
        if self._learn_amax:
            return torch.maximum(-self.clip.clip_value_min, self.clip.clip_value_max).detach()
        amax = self._own_range(inputs) if self.amax is not None else amax_along(inputs.detach(), self._axis)
        return amax if self._scale_amax is None else amax * self._scale_amax

    def _own_range(self, inputs: Tensor) -> Tensor:
        if self._amax.device != inputs.device:
            self._amax = self._amax.to(inputs.device)  # it was calibrated, set or loaded on another device
        return self._amax.detach()

    # ---- forward

    @property
    def active(self) -> bool:
        """Whether forward does anything with its input."""
        switched_on = self._if_quant or self._if_clip or self._if_calib
        return self.pre_quant_scale is not None or (switched_on and not self._disabled)

    @fx_leaf
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs after all enabled steps."""
        if self.pre_quant_scale is not None:
            inputs = inputs * self._pre_quant_scale.to(inputs)
        if self._disabled:
            return inputs
        if self._if_calib:
            if self._calibrator is None:
                raise RuntimeError("Calibrator was not created.")
            self._calibrator.collect(inputs.detach())
        if self._if_clip:
            inputs = self.clip(inputs)
        return self._quantize(inputs) if self._if_quant else inputs

    def _quantize(self, inputs: Tensor) -> Tensor:
        if self._enable_onnx_export:
            check_exportable(self._num_bits, self._learn_amax or self.amax is not None)
        if self._learn_amax and not self._if_clip:  # amax is the larger bound, and the other one may be nearer to zero
            inputs = self.clip(inputs)
        amax, exported = self._get_amax(inputs), self._enable_onnx_export or running().for_onnx
        if isinstance(self._num_bits, tuple):
            if not self._fake_quant:
                raise NotImplementedError("TensorQuantizer: E4M3 is fake-quantized only; fake_quant must be True.")
            return e4m3_form(inputs, amax) if exported else scaled_e4m3(inputs, amax, *self._num_bits)
        if not self._fake_quant:
            codes, self._scale = tensor_quant(inputs, amax, self._num_bits, self._unsigned, self._narrow_range)
            return codes
        if exported or self.use_fb_fake_quant:
            return affine_form(inputs, amax, self._num_bits, self._unsigned, self._narrow_range)
        return fake_tensor_quant(inputs, amax, self._num_bits, self._unsigned, self._narrow_range)

    # ---- state

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        for name in _BUFFERS:
            value = state_dict.get(prefix + name)
            if value is not None and getattr(self, name, None) is None:
                self.register_buffer(name, torch.empty_like(value))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _short_amax(self) -> str:
        if self.amax is None:
            return "dynamic"
        if self._amax.numel() == 1:
            return f"{float(self._amax):.4f}"
        return f"[{float(self._amax.min()):.4f}, {float(self._amax.max()):.4f}]({self._amax.numel()})"

    def extra_repr(self) -> str:
        """Return the configuration, the range and the switches."""
        if self._disabled:
            return "disabled"
        words = {
            f"{'unsigned ' if self._unsigned else ''}{self._num_bits}bit": True,
            "narrow": self._narrow_range,
            "fake": self._fake_quant,
            "per-tensor" if self._axis is None else f"axis={self._axis}": True,
            f"amax={self._short_amax()}": True,
            f"*{self._scale_amax}": self._scale_amax is not None,
            "pre_quant_scale": self.pre_quant_scale is not None,
            "learned": self._learn_amax,
            f"calibrator={type(self._calibrator).__name__}": self._calibrator is not None,
            f"scale={self._scale}": self._scale is not None,
            "quant": self._if_quant,
            "clip": self._if_clip,
            "calib": self._if_calib,
        }
        return " ".join(word for word, shown in words.items() if shown)


def _float32(value: object) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32).detach().clone()
