"""AIMET: its affine quantizer, which learns the range."""

from aimet_torch.common.defs import QuantScheme
from aimet_torch.quantization.affine import QuantizeDequantize
from aimet_torch.quantsim import QuantizationSimModel
from torch import Tensor, nn

from benchmarks.op_cases.subjects import QMAX, QMIN, Subject
from benchmarks.tools import Forward, Learned, Tool


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


def qat_model(model: nn.Module, x: Tensor) -> nn.Module:
    """Every op's output and every weight, with learned ranges."""
    learned = QuantScheme.training_range_learning_with_tf_init
    simulation = QuantizationSimModel(
        model.eval(), dummy_input=x, quant_scheme=learned, default_param_bw=8, default_output_bw=8
    )
    simulation.compute_encodings(lambda of, _: of(x), None)
    return simulation.model.train()
