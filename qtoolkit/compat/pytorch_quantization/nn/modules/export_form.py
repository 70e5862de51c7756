"""Behaviour of layers and quantizers in torch.fx traces and for exporters.

Exporters get torch's fake-quantize ops or TensorRT's FP8 ops, which are Q/DQ pairs in ONNX. Scripts compare with these ops, and
other exporters than ONNX recognize them. `qtoolkit.ops` cannot replace them: it divides by the scale, while torch multiplies by
its reciprocal.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import FunctionCtx

from qtoolkit.compat.pytorch_quantization.tensor_quant import E4M3_MAX, scaled_e4m3
from qtoolkit.running import running

QUANTIZE, DEQUANTIZE = "trt::TRT_FP8QuantizeLinear", "trt::TRT_FP8DequantizeLinear"


class LegacyExportError(ValueError, AssertionError):
    """A quantizer has no Q/DQ form. pytorch-quantization raises AssertionError."""


def check_exportable(num_bits: int | tuple[int, int], has_range: bool) -> None:
    """Raise LegacyExportError unless a quantizer has 8 bits, or is E4M3, and has a range."""
    if num_bits not in (8, (4, 3)):
        raise LegacyExportError(
            f"enable_onnx_export: quantizers must have 8 bits, or be E4M3, got num_bits={num_bits}; disable the others, or use "
            f"qtoolkit.quant_modules.replace and qtoolkit.export_onnx, which write more formats."
        )
    if not has_range:
        raise LegacyExportError(
            "enable_onnx_export: a quantizer has no amax; calibrate and call load_calib_amax() first, or disable() it."
        )


def affine_form(x: Tensor, amax: Tensor, num_bits: int, unsigned: bool, narrow_range: bool) -> Tensor:
    """Fake-quantize x with the step `amax / bound` (1 for 0) and integers in [-bound - 1, bound], or [0, bound] if unsigned.

    Half types are computed in float32. LegacyExportError for an amax of several dimensions, and for narrow_range.
    """
    if narrow_range and not unsigned:
        raise LegacyExportError(
            "Q/DQ covers [-128, 127], so signed quantizers must have narrow_range=False to be exported, got True."
        )
    axes = [d - amax.dim() + x.dim() for d, size in enumerate(amax.shape) if size != 1]
    if len(axes) > 1:
        raise LegacyExportError(
            f"Q/DQ supports one channel axis, got an amax of shape {list(amax.shape)}; quantize along one axis."
        )
    bound = 2 ** (num_bits - 1 + unsigned) - 1
    lowest = 0 if unsigned else -bound - 1

    def pair(wide: Tensor, scale: Tensor) -> Tensor:
        zeros = torch.zeros(scale.shape, dtype=torch.int32, device=scale.device)
        if axes:
            return torch.fake_quantize_per_channel_affine(wide, scale, zeros, axes[0], lowest, bound)
        return torch.fake_quantize_per_tensor_affine(wide, scale, zeros, lowest, bound)

    return _in_float32(pair, x, amax.reshape(-1 if axes else ()), bound)


def _in_float32(pair: Callable[[Tensor, Tensor], Tensor], x: Tensor, amax: Tensor, largest: float) -> Tensor:
    """Return the result of a pair, (x, scale), with the scale that maps amax to `largest`."""
    amax = amax.detach().float()
    scale = torch.where(amax == 0, 1.0, amax / largest)
    return pair(x, scale) if x.dtype == torch.float32 else pair(x.float(), scale).to(x.dtype)  # no casts of float32


def e4m3_form(x: Tensor, amax: Tensor) -> Tensor:
    """Fake-quantize x in the float format E4M3; exporters to ONNX get TensorRT's FP8 ops, which take any opset.

    Half types compute in float32. LegacyExportError for an amax of several elements; 0 gives the step 1.
    """
    if any(size != 1 for size in amax.shape):
        raise LegacyExportError(
            f"enable_onnx_export: TensorRT's FP8 ops support one range, got an amax of shape {list(amax.shape)}; use axis=None."
        )
    run = running()
    if not run.for_onnx:
        return scaled_e4m3(x, amax)
    return _in_float32(_dynamo_pair if run.exported else _TorchScriptPair.apply, x, amax.reshape(()), E4M3_MAX)


def _dynamo_pair(x: Tensor, scale: Tensor) -> Tensor:
    codes = torch.onnx.ops.symbolic(QUANTIZE, (x, scale), dtype=torch.uint8, shape=x.shape, version=1)
    return torch.onnx.ops.symbolic(DEQUANTIZE, (codes, scale), dtype=x.dtype, shape=x.shape, version=1)


class _TorchScriptPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, scale: Tensor) -> Tensor:
        return scaled_e4m3(x, scale * E4M3_MAX)

    @staticmethod
    def symbolic(g: Any, x: Any, scale: Any) -> Any:
        codes = g.op(QUANTIZE, x, scale).setType(x.type().with_dtype(torch.uint8))
        return g.op(DEQUANTIZE, codes, scale).setType(x.type())


def fx_leaf(forward: Callable[..., object]) -> Callable[..., Any]:
    """Make a torch.fx tracer record a call of the module, unless it traces the module itself.

    Only modules of torch.nn are leaf modules by default. A quantizer depends on its range and its switches, and a calibrator
    collects values, so a graph must call the module.
    """

    @wraps(forward)
    def traced(self: nn.Module, *args: object, **kwargs: object) -> object:
        for value in (*args, *kwargs.values()):
            tracer = value.tracer if isinstance(value, fx.Proxy) else None
            if isinstance(tracer, fx.Tracer) and tracer.root is not self:
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    return traced
