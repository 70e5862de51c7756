"""Brevitas: its integer quantizer, put together from its parts, with a constant or a parameter for the scale."""

from pathlib import Path

import torch
from brevitas.core.bit_width import BitWidthConst
from brevitas.core.function_wrapper import Identity, TensorClamp
from brevitas.core.quant.int import RescalingIntQuant
from brevitas.core.quant.int_base import IntQuant
from brevitas.core.scaling import ConstScaling, IntScaling, ParameterScaling
from brevitas.core.zero_point import ZeroZeroPoint
from brevitas.export import export_onnx_qcdq
from brevitas.graph.calibrate import calibration_mode
from brevitas.graph.quantize import layerwise_quantize, preprocess_for_quantize, quantize
from brevitas.nn import QuantConv2d, QuantLinear
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Uint8ActPerTensorFloat
from torch import Tensor, nn

from benchmarks.op_cases.subjects import QMIN, Subject
from benchmarks.tools import Forward, Learned, Tool


def _quantizer(scaling: nn.Module, t: Subject) -> nn.Module:
    grid = IntQuant(narrow_range=False, signed=True, input_view_impl=Identity(), tensor_clamp_impl=TensorClamp())
    integers = IntScaling(signed=True, narrow_range=False)
    return RescalingIntQuant(grid, scaling, integers, ZeroZeroPoint(), BitWidthConst(8)).to(t.x.device)


def fixed(t: Subject) -> Forward:
    module = _quantizer(ConstScaling(-QMIN * t.shaped), t)
    return lambda x: module(x)[0]


def learned(t: Subject) -> Learned:
    module = _quantizer(ParameterScaling(-QMIN * t.shaped, tuple(t.shaped.shape)), t)
    return lambda x: module(x)[0], list(module.parameters())


TOOL = Tool("brevitas", fixed, learned)


def qat_model(model: nn.Module, x: Tensor) -> nn.Module:
    """Its int8 configuration, with learned scales of activations; batch norms are kept."""
    graph = preprocess_for_quantize(model.eval(), merge_bn=False, equalize_iters=0)
    # Its rewriting of residual adds does not end on a transformer: there, layers only.
    transformer = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    quantized = (layerwise_quantize if transformer else quantize)(graph).eval()
    with torch.no_grad(), calibration_mode(quantized):
        quantized(x)
    return quantized.train()


def export(model: nn.Module, x: Tensor, path: Path) -> nn.Module:
    """With pairs of QuantizeLinear and DequantizeLinear, by torch's older exporter, which its exporter takes."""
    export_onnx_qcdq(model.eval(), x, export_path=str(path), dynamo=False)
    return model


def few_bit_layer(layer: nn.Conv2d | nn.Linear, bits: int, signed: bool) -> nn.Module:
    """Its layer with a quantized input: learned scales of activations, scales of weights from their ranges."""
    options = {
        "bias": layer.bias is not None,
        "weight_quant": Int8WeightPerChannelFloat,
        "weight_bit_width": bits,
        "input_quant": Int8ActPerTensorFloat if signed else Uint8ActPerTensorFloat,
        "input_bit_width": bits,
    }
    if isinstance(layer, nn.Conv2d):
        shape = {"kernel_size": layer.kernel_size, "stride": layer.stride, "padding": layer.padding}
        quantized = QuantConv2d(layer.in_channels, layer.out_channels, **shape, **options)
    else:
        quantized = QuantLinear(layer.in_features, layer.out_features, **options)
    quantized.load_state_dict(layer.state_dict(), strict=False)
    return quantized
