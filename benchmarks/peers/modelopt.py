"""NVIDIA Model Optimizer: its quantizer with a fixed amax: no learned scale for int8, and by default no clipped gradient."""

from pathlib import Path

import torch
from modelopt.torch import quantization
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from torch import Tensor, nn

from benchmarks.op_cases.subjects import QMAX, Subject
from benchmarks.tools import Forward, Tool


def fixed(t: Subject) -> Forward:
    amax = QMAX * (t.scale[0] if t.axis is None else t.shaped)
    return TensorQuantizer(QuantizerAttributeConfig(num_bits=8, axis=t.axis), amax=amax).to(t.x.device)


TOOL = Tool("modelopt", fixed, lambda t: None)


def qat_model(model: nn.Module, x: Tensor) -> nn.Module:
    """Its int8 configuration: inputs and weights of layers, with the ranges of a calibration."""
    return quantization.quantize(model, quantization.INT8_DEFAULT_CFG, lambda of: of(x))


def export(model: nn.Module, x: Tensor, path: Path) -> nn.Module:
    """By torch's older exporter, for which its quantizers have symbolic functions."""
    torch.onnx.export(model.eval(), (x,), path, dynamo=False)
    return model
