"""torch.ao: the modules of its eager and FX quantization, observers off."""

import torch
from op_cases.subjects import QMAX, QMIN, Subject
from tools import Forward, Learned, Tool
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantize,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    get_default_qat_qconfig_mapping,
)
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torch.ao.quantization.quantize_fx import prepare_qat_fx


def _observer(t: Subject) -> dict[str, object]:
    common = {"quant_min": QMIN, "quant_max": QMAX, "dtype": torch.qint8}
    if t.axis is None:
        return {"observer": MinMaxObserver, "qscheme": torch.per_tensor_symmetric, **common}
    return {"observer": PerChannelMinMaxObserver, "qscheme": torch.per_channel_symmetric, "ch_axis": t.axis, **common}


def fixed(t: Subject) -> Forward:
    module = FakeQuantize(**_observer(t)).to(t.x.device)
    module.scale.resize_(t.scale.shape).copy_(t.scale)
    module.zero_point.resize_(t.scale.shape).zero_()
    module.disable_observer()
    return module


def learned(t: Subject) -> Learned | None:
    if t.x.dtype != torch.float32:
        return None
    channels = -1 if t.axis is None else t.scale.numel()
    module = _LearnableFakeQuantize(**_observer(t), channel_len=channels).to(t.x.device)
    module.enable_param_learning()
    module.scale.data.copy_(t.scale)
    return module, [module.scale]


TOOL = Tool("torch.ao", fixed, learned)


def qat_model(model: nn.Module, x: Tensor) -> nn.Module:
    """FX graph mode with the default fused modules, which observe while they quantize."""
    return prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
