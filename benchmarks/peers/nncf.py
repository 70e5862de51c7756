"""NNCF: its symmetric quantizer. Its C++ extension is compiled at first use, for about a minute, once on a machine."""

import os
from pathlib import Path

os.environ.setdefault("NNCF_EXTENSION_LOAD_TIMEOUT", "0")  # by default it gives up after a minute

import torch
from nncf import AdvancedQuantizationParameters, Dataset, quantize, strip
from nncf.common.quantization.structs import QuantizationScheme
from nncf.torch.quantization.layers import PTQuantizerSpec, SymmetricQuantizer
from torch import Tensor, nn

from benchmarks.op_cases.subjects import QMAX, Subject
from benchmarks.tools import Forward, Learned, Tool


def _quantizer(t: Subject) -> SymmetricQuantizer:
    spec = PTQuantizerSpec(8, QuantizationScheme.SYMMETRIC, True, False, False, tuple(t.shaped.shape), False)
    module = SymmetricQuantizer(spec).to(t.x.device)
    module.scale = nn.Parameter(QMAX * t.shaped)
    return module


def fixed(t: Subject) -> Forward:
    module = _quantizer(t)
    module.disable_gradients()
    return module


def learned(t: Subject) -> Learned:
    module = _quantizer(t)
    return module, [module.scale]


TOOL = Tool("nncf", fixed, learned)


def qat_model(model: nn.Module, x: Tensor) -> nn.Module:
    """Its default quantization, whose scales are trained."""
    options = AdvancedQuantizationParameters(disable_bias_correction=True)  # training corrects them
    quantized = quantize(model.eval(), Dataset([x]), advanced_parameters=options)
    return quantized.train()


def export(model: nn.Module, x: Tensor, path: Path) -> nn.Module:
    """Stripped to torch's fake quantizers, as its documentation says before an export."""
    stripped = strip(model.eval(), do_copy=True, example_input=x)
    torch.onnx.export(stripped, (x,), path, dynamo=False)
    return stripped
