"""NVIDIA Model Optimizer: its quantizer with a fixed amax: no learned scale for int8, and by default no clipped gradient."""

from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from op_cases.subjects import QMAX, Subject
from tools import Forward, Tool


def fixed(t: Subject) -> Forward:
    amax = QMAX * (t.scale[0] if t.axis is None else t.shaped)
    return TensorQuantizer(QuantizerAttributeConfig(num_bits=8, axis=t.axis), amax=amax).to(t.x.device)


TOOL = Tool("modelopt", fixed, lambda t: None)
