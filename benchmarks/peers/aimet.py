"""AIMET: its affine quantizer, which learns the ends of the range."""

from aimet_torch.quantization.affine import QuantizeDequantize
from op_cases.subjects import QMAX, QMIN, Subject
from tools import Forward, Learned, Tool


def _quantizer(t: Subject) -> QuantizeDequantize:
    scale = t.scale[0] if t.axis is None else t.shaped
    module = QuantizeDequantize(tuple(scale.shape), 8, True).to(t.x.device)
    module.set_range(QMIN * scale, QMAX * scale)
    return module


def fixed(t: Subject) -> Forward:
    return _quantizer(t).requires_grad_(False)


def learned(t: Subject) -> Learned:
    module = _quantizer(t)
    return module, list(module.parameters())


TOOL = Tool("aimet", fixed, learned)
