"""pytorch_quantization's TensorQuantizer."""

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtoolkit.compat.pytorch_quantization import calib
from qtoolkit.compat.pytorch_quantization.nn.modules.clip import Clip
from qtoolkit.compat.pytorch_quantization.nn.modules.export_form import affine_form, check_exportable
from qtoolkit.compat.pytorch_quantization.nn.modules.quantizer_settings import QuantizerSettings, float32
from qtoolkit.compat.pytorch_quantization.reduction import reduce_amax
from qtoolkit.compat.pytorch_quantization.tensor_quant import (
    QUANT_DESC_8BIT_PER_TENSOR,
    QuantDescriptor,
    fake_tensor_quant,
    scaled_e4m3,
    tensor_quant,
)
from qtoolkit.quantizers.legacy import LegacyQuantizer

_CALIBRATORS = {"max": calib.MaxCalibrator, "histogram": calib.HistogramCalibrator}
_BUFFERS = ("_amax", "_pre_quant_scale")  # they exist once they have a value, as scripts ask by hasattr


class TensorQuantizer(QuantizerSettings, LegacyQuantizer):
    """Multiply by `pre_quant_scale`, collect for the calibrator, clip, and quantize: each where it is switched on.

    Without a range each input is quantized by its own. For new work take `qtoolkit.TensorQuantizer`.

    Args:
        quant_desc: How to quantize.
        disabled: Pass inputs through.
        if_quant: Quantize.
        if_clip: Clip to the trained bounds.
        if_calib: Let the calibrator collect.

    Raises:
        ValueError: if_clip without learn_amax.

    Example:
        >>> quantizer = TensorQuantizer(QuantDescriptor(num_bits=4))
        >>> quantizer.amax = 7.0
        >>> quantizer(torch.tensor([0.6, 100.0, -100.0])).tolist()
        [1.0, 7.0, -8.0]
    """

    use_fb_fake_quant: ClassVar[bool] = False  # compute torch's own ops, which exporters know
    _enable_onnx_export: ClassVar[bool] = False  # the same, with checks

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
        self._scale = None
        self._disabled, self._if_quant, self._if_clip, self._if_calib = disabled, if_quant, False, if_calib
        if quant_desc.amax is not None:
            self.register_buffer("_amax", torch.tensor(quant_desc.amax))
        if self._learn_amax:
            bound = 1.0 if quant_desc.amax is None else float(quant_desc.amax.max())
            self.clip = Clip(-bound, bound, learn_min=True, learn_max=True)
        if self._learn_amax or if_clip:
            self.enable_clip()
        self._calibrator = _CALIBRATORS[quant_desc.calib_method](
            num_bits=self._num_bits, axis=self._axis, unsigned=self._unsigned
        )

    # ---- ranges

    def load_calib_amax(self, *args: Any, strict: bool = True, **kwargs: Any) -> None:
        """Take the range that the calibrator found.

        Args:
            *args: As the calibrator's `compute_amax` takes them.
            strict: Raise where the calibrator has seen nothing; else warn, and leave the range as it is.
            **kwargs: As the calibrator's `compute_amax` takes them.

        Raises:
            RuntimeError: There is no calibrator, or it has seen nothing.
        """
        if self._calibrator is None:
            raise RuntimeError("Calibrator not created.")
        amax = self._calibrator.compute_amax(*args, **kwargs)
        if amax is not None:
            self.register_buffer("_amax", float32(amax))
            return
        sentence = "Calibrator returned None. This usually happens when calibrator hasn't seen any tensor."
        if strict:
            raise RuntimeError(f"{sentence} Passing 'strict=False' to `load_calib_amax()` will ignore the error.")
        warnings.warn(f"{sentence} The range stays as it is: {self._short_amax()}.", stacklevel=2)

    def init_learn_amax(self) -> None:
        """Start the trained bounds at the range.

        Raises:
            RuntimeError: Without learn_amax, or without a range.
        """
        if not self._learn_amax or self.amax is None:
            raise RuntimeError("TensorQuantizer: init_learn_amax needs learn_amax=True and an amax; calibrate first.")
        if self._amax.numel() > 1:
            warnings.warn("TensorQuantizer: one range is trained, so it starts at the largest amax.", stacklevel=2)
        with torch.no_grad():
            self.clip.clip_value_min.copy_(-self._amax.max())
            self.clip.clip_value_max.copy_(self._amax.max())

    def _range_of(self, inputs: Tensor) -> Tensor:
        if self._learn_amax:
            return torch.maximum(-self.clip.clip_value_min, self.clip.clip_value_max).detach()
        amax = self._kept_range(inputs) if self.amax is not None else self._own_range(inputs)
        return amax if self._scale_amax is None else amax * self._scale_amax

    def _kept_range(self, inputs: Tensor) -> Tensor:
        if self._amax.device != inputs.device:
            self._amax = self._amax.to(inputs.device)  # calibrated, set or loaded elsewhere: it stays with its inputs
        return self._amax.detach()

    def _own_range(self, inputs: Tensor) -> Tensor:
        axes = (self._axis,) if isinstance(self._axis, int) else self._axis or ()
        kept = {axis % inputs.dim() for axis in axes}
        return reduce_amax(inputs.detach(), axis=tuple(d for d in range(inputs.dim()) if d not in kept))

    # ---- forward

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs through all that is switched on."""
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
            known = self._learn_amax or self.amax is not None
            check_exportable(self._num_bits, self._unsigned, self._narrow_range, known)
        amax = self._range_of(inputs)
        if isinstance(self._num_bits, tuple):
            return self._quantize_float(inputs, amax, *self._num_bits)
        if not self._fake_quant:
            codes, self._scale = tensor_quant(inputs, amax, self._num_bits, self._unsigned, self._narrow_range)
            return codes
        if self._enable_onnx_export or self.use_fb_fake_quant or torch.onnx.is_in_onnx_export():
            return affine_form(inputs, amax, self._num_bits, self._unsigned)
        return fake_tensor_quant(inputs, amax, self._num_bits, self._unsigned, self._narrow_range)

    def _quantize_float(self, inputs: Tensor, amax: Tensor, exponent: int, mantissa: int) -> Tensor:
        if not self._fake_quant:
            raise NotImplementedError("TensorQuantizer: E4M3 is fake-quantized only; leave fake_quant=True.")
        return scaled_e4m3(inputs, amax, exponent, mantissa)

    # ---- state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
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
        """Return how it quantizes, the range and the switches."""
        if self._disabled:
            return "disabled"
        words = [f"{'unsigned ' if self._unsigned else ''}{self._num_bits}bit"]
        words += ["narrow"] if self._narrow_range else []
        words += ["fake"] if self._fake_quant else []
        words += ["per-tensor" if self._axis is None else f"axis={self._axis}", f"amax={self._short_amax()}"]
        words += [] if self._scale_amax is None else [f"*{self._scale_amax}"]
        words += [] if self.pre_quant_scale is None else ["pre_quant_scale"]
        words += ["learned"] if self._learn_amax else []
        words += [] if self._calibrator is None else [f"calibrator={type(self._calibrator).__name__}"]
        words += [] if self._scale is None else [f"scale={self._scale}"]
        switches = {"quant": self._if_quant, "clip": self._if_clip, "calib": self._if_calib}
        return " ".join(words + [word for word, on in switches.items() if on])
