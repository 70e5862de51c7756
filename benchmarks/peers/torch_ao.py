"""torch.ao: the modules of its eager and FX quantization, observers off."""

import torch
import torch.ao.nn.qat as qat
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    get_default_qat_qconfig_mapping,
)
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torch.ao.quantization.quantize_fx import prepare_qat_fx

from benchmarks.op_cases.subjects import QMAX, QMIN, Subject
from benchmarks.tools import Forward, Learned, Tool


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


def few_bit_layer(layer: nn.Conv2d | nn.Linear, bits: int, signed: bool, learned: bool) -> nn.Module:
    """Its eager layer behind a fake quantizer: scales of moving averages, or learned with LSQ's factor.

    Args:
        layer: The float layer.
        bits: Of its input and its weight.
        signed: Of the input; the weight is signed, and has a scale for each channel.
        learned: Take torch.ao's learnable fake quantizer, which starts from the moving averages.
    """
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    grid = {"quant_min": low, "quant_max": high, "dtype": torch.qint8 if signed else torch.quint8}
    activation = {"observer": MovingAverageMinMaxObserver, "qscheme": torch.per_tensor_symmetric, **grid}
    if not signed:
        activation["qscheme"] = torch.per_tensor_affine
    weight = {
        "observer": MovingAveragePerChannelMinMaxObserver,
        "qscheme": torch.per_channel_symmetric,
        "ch_axis": 0,
        "quant_min": -(1 << bits - 1),
        "quant_max": (1 << bits - 1) - 1,
        "dtype": torch.qint8,
    }
    if learned:
        quantizers = [
            _LearnableFakeQuantize.with_args(**of, channel_len=channels, use_grad_scaling=True)
            for of, channels in ((activation, -1), (weight, layer.weight.shape[0]))
        ]
    else:
        quantizers = [FakeQuantize.with_args(**of) for of in (activation, weight)]
    layer.qconfig = QConfig(*quantizers)
    kind = qat.Conv2d if isinstance(layer, nn.Conv2d) else qat.Linear
    return nn.Sequential(quantizers[0](), kind.from_float(layer))


def learn(model: nn.Module) -> None:
    """Train the scales of learnable fake quantizers from now on, which until then follow their observers."""
    for module in model.modules():
        if isinstance(module, _LearnableFakeQuantize):
            module.enable_param_learning()
