"""SiLU behind a convolution becomes a sigmoid and a product, which onnxruntime computes on codes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests.integer.test_onnxruntime import assert_equal_codes

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def net(inplace: bool = True) -> nn.Module:
    torch.manual_seed(2)
    first = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=inplace))
    return nn.Sequential(first, nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(128, 6)).eval()


def prepared(model: nn.Module, **options: object) -> nn.Module:
    quantized = qt.prepare(model, (X,), **{"backend": "onnxruntime", **options})
    qt.calibrate(quantized, [X], progress=False)
    return quantized


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_it_runs_on_codes(tmp_path, exporter: str) -> None:
    model = qt.convert(prepared(net()), arithmetic="integer")
    assert [how.kernel for how in model.plan.computed.values()].count("QLinearMul") == 2
    assert_equal_codes(model, X, tmp_path / "m.onnx", exporter=exporter)
    result = qt.export.verify(model, X, tmp_path / "m.onnx").runtimes["onnxruntime"]
    kernels = [layer.kernel for layer in result.integer_layers]
    assert (kernels.count("QLinearSigmoid"), kernels.count("QLinearMul")) == (2, 2)
    assert result.float_layers == ()


def test_with_quantizers_off_it_is_the_same_function() -> None:
    model = net(inplace=False)
    quantized = prepared(model)
    with qt.disable_quantization(quantized):
        torch.testing.assert_close(quantized(X), model(X), rtol=1e-5, atol=1e-6)
    found = qt.debug.compare(model, quantized, X)
    assert {"_0_2", "_0_2_sigmoid"} <= {line.name for line in found.layers}
    assert min(line.own.sqnr for line in found.layers) > 25


class Rest(nn.Module):
    """A SiLU behind a linear layer, and one behind a convolution that changes what another op takes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(8, 8), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.fc(x))
        y = self.conv(x)
        return self.conv(F.silu(y, inplace=True) + y)


def test_which_stay() -> None:
    rest = Rest().eval()
    quantized = prepared(rest)
    functions = [node.target for node in quantized.graph.nodes if node.op == "call_function"]
    assert (functions.count(F.silu), functions.count(torch.sigmoid)) == (1, 1)
    with qt.disable_quantization(quantized):
        torch.testing.assert_close(quantized(X), rest(X), rtol=1e-5, atol=1e-6)
    whole = [node.target for node in prepared(net(), backend="tensorrt").graph.nodes]
    assert "0.2" in whole
    mapping = qt.QConfigMapping().set_module_name("0.2", None)
    named = prepared(net(), qconfig_mapping=mapping)
    assert [str(node.target) for node in named.graph.nodes].count("0.2") == 1
