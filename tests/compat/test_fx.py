"""compat's layers and quantizers are leaf modules for torch.fx."""

import pytest
import torch
from torch import nn

from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization.nn import TensorQuantizer
from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor

LAYERS = {
    "conv": (lambda: quant_nn.QuantConv2d(3, 4, 3), (1, 3, 8, 8)),
    "transposed conv": (lambda: quant_nn.QuantConvTranspose2d(3, 4, 3), (1, 3, 8, 8)),
    "linear": (lambda: quant_nn.QuantLinear(8, 4), (2, 8)),
    "pool": (lambda: quant_nn.QuantAvgPool2d(2), (1, 3, 8, 8)),
    "norm": (lambda: quant_nn.QuantInstanceNorm2d(3), (1, 3, 8, 8)),
    "lstm": (lambda: quant_nn.QuantLSTM(8, 4), (5, 2, 8)),
    "lstm cell": (lambda: quant_nn.QuantLSTMCell(8, 4), (2, 8)),
    "unsigned": (lambda: TensorQuantizer(QuantDescriptor(unsigned=True)), (2, 8)),
    "e4m3": (lambda: TensorQuantizer(QuantDescriptor(num_bits=(4, 3))), (2, 8)),
    "trained": (lambda: TensorQuantizer(QuantDescriptor(learn_amax=True)), (2, 8)),
}


def first(y: object) -> torch.Tensor:
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", LAYERS)
def test_torch_fx_traces_its_modules(name):
    make, shape = LAYERS[name]
    model, x = nn.Sequential(make()), torch.rand(shape)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0"]
    assert torch.equal(first(traced(x)), first(model(x)))


def test_a_traced_model_is_calibrated_by_its_modules():
    model = torch.fx.symbolic_trace(nn.Sequential(quant_nn.QuantLinear(4, 4), nn.ReLU(), TensorQuantizer()))
    quantizers = [module for module in model.modules() if isinstance(module, TensorQuantizer)]
    for quantizer in quantizers:
        quantizer.enable_calib()
        quantizer.disable_quant()
    model(torch.eye(4))
    for quantizer in quantizers:
        quantizer.load_calib_amax()
    assert (len(quantizers), float(quantizers[0].amax)) == (3, 1)


def test_keyword_arguments_are_recorded():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = quant_nn.QuantConvTranspose2d(3, 4, 3, stride=2)

        def forward(self, x):
            return self.up(x, output_size=[12, 12])

    net, x = Net(), torch.rand(1, 3, 5, 5)
    traced = torch.fx.symbolic_trace(net)
    assert traced(x).shape == (1, 4, 12, 12)
    assert torch.equal(traced(x), net(x))


def test_a_layer_of_a_script_with_quantizers_is_traced_to_them():
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self._input_quantizer = TensorQuantizer(QuantDescriptor(amax=1.0))

        def forward(self, a, b):
            return self._input_quantizer(a) + self._input_quantizer(inputs=b)

    net, a, b = Add(), torch.rand(3), torch.rand(3)
    traced = torch.fx.symbolic_trace(net)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["_input_quantizer"] * 2
    assert torch.equal(traced(a, b), net(a, b))
