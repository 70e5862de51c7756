"""What a quantizer computes for exporters: torch's fake-quantize ops, which become Q/DQ pairs in ONNX."""

import torch
from torch import Tensor


class LegacyExportError(ValueError, AssertionError):
    """A quantizer has no Q/DQ form. pytorch-quantization raises AssertionError."""


def check_exportable(num_bits: int | tuple[int, int], unsigned: bool, narrow_range: bool, has_range: bool) -> None:
    """Raise LegacyExportError unless a quantizer has 8 bits, a range, and all codes if they are signed."""
    if num_bits != 8:
        raise LegacyExportError(
            f"enable_onnx_export: quantizers must have 8 bits, got num_bits={num_bits}; disable the others, or use "
            f"qtoolkit.quant_modules.replace and qtoolkit.export_onnx, which write more formats."
        )
    if not has_range:
        raise LegacyExportError(
            "enable_onnx_export: a quantizer has no amax; calibrate and call load_calib_amax() first, or disable() it."
        )
    if narrow_range and not unsigned:
        raise LegacyExportError(
            "enable_onnx_export: Q/DQ covers [-128, 127], so signed quantizers must have narrow_range=False, got True."
        )


def affine_form(x: Tensor, amax: Tensor, num_bits: int, unsigned: bool) -> Tensor:
    """Fake-quantize x with the step `amax / bound` and the codes [-bound - 1, bound], or [0, bound] if unsigned.

    Args:
        x: Input, of a floating dtype; half types are computed in float32.
        amax: Largest magnitude: one element, or several along one dimension. 0 gives the step 1.
        num_bits: Bits of a code.
        unsigned: Whether the lowest code is 0.

    Raises:
        LegacyExportError: amax has more than one element along several dimensions.
    """
    axes = [d - amax.dim() + x.dim() for d, size in enumerate(amax.shape) if size != 1]
    if len(axes) > 1:
        raise LegacyExportError(
            f"Q/DQ takes one channel axis, got an amax of shape {list(amax.shape)}; quantize along one axis."
        )
    bound = 2 ** (num_bits - 1 + unsigned) - 1
    lowest = 0 if unsigned else -bound - 1
    largest = amax.detach().float().reshape(-1 if axes else ())
    scale = torch.where(largest == 0, 1.0, largest / bound)
    zeros = torch.zeros(scale.shape, dtype=torch.int32, device=scale.device)
    wide = x if x.dtype == torch.float32 else x.float()  # the exported file gets no cast of float32
    if axes:
        y = torch.fake_quantize_per_channel_affine(wide, scale, zeros, axes[0], lowest, bound)
    else:
        y = torch.fake_quantize_per_tensor_affine(wide, scale, zeros, lowest, bound)
    return y if x.dtype == torch.float32 else y.to(x.dtype)
