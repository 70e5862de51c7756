"""A converted model is restored from its state dict, in another process, without data."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests import processes

ROOT = Path(__file__).parents[1]
X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.up = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 2, groups=2)
        self.norm, self.weight = nn.BatchNorm2d(6), nn.Parameter(torch.randn(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.conv(x)))
        return F.linear((self.norm(self.up(y)) + 1).mean((2, 3)), self.weight)


CONFIGS = {
    "default": lambda: None,
    "learned": lambda: qt.QConfig(
        qt.QuantSpec(signed=False, symmetric=False, quantizer="lsq"), qt.QuantSpec(bits=4, axis=0, quantizer="lsq")
    ),
    "activations per channel": lambda: qt.QConfig(qt.QuantSpec(axis=1), qt.QuantSpec(axis=1)),
    "histogram": lambda: qt.QConfig(qt.QuantSpec(observer="histogram"), qt.QuantSpec(axis=0)),
}


def quantized(route: str, config: str, training: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    spec = CONFIGS[config]()
    mapping = qt.QConfigMapping().set_global(spec) if spec is not None else None
    model = Net().train(training)
    if route == "graph":
        return qt.prepare(model, X, backend="onnxruntime", qconfig_mapping=mapping)
    return qt.quant_modules.replace(model, backend="onnxruntime", qconfig_mapping=mapping)


def converted(route: str, config: str, training: bool) -> nn.Module:
    model = quantized(route, config, training, seed=0)
    qt.calibrate(model, [X, X * 2], progress=False)
    if training:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        model(X).square().mean().backward()
        optimizer.step()
    return qt.convert(model)


@pytest.mark.parametrize("route", ["graph", "modules"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("training", [True, False])
def test_restored_without_data(route: str, config: str, training: bool) -> None:
    trained = converted(route, config, training)
    restored = qt.convert(quantized(route, config, training, seed=1), state_dict=trained.state_dict())
    assert torch.equal(restored(X), trained(X))
    assert not restored.training
    found, wanted = restored.state_dict(), trained.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_in_a_new_process(tmp_path: Path) -> None:
    trained = converted("graph", "learned", True)
    torch.save(trained.state_dict(), tmp_path / "converted.pt")
    program = (
        "import sys, torch, qtoolkit as qt; from tests.test_restore import X, quantized; "
        "state = torch.load(sys.argv[1] + '/converted.pt', weights_only=True); "
        "restored = qt.convert(quantized('graph', 'learned', True, seed=5), state_dict=state); "
        "torch.save(restored(X), sys.argv[1] + '/y.pt')"
    )
    processes.python("-c", program, tmp_path).check_returncode()
    assert torch.equal(torch.load(tmp_path / "y.pt"), trained(X))


def test_what_does_not_fit_is_an_error() -> None:
    trained = converted("graph", "default", True)
    model = quantized("graph", "default", True, seed=1)
    with pytest.raises(TypeError, match="state_dict must be a mapping of names to tensors, got str"):
        qt.convert(model, state_dict="converted.pt")
    with pytest.raises(RuntimeError, match=r"state_dict has no entry '.*\.scale'; it must come from a model converted"):
        qt.convert(model, state_dict=model.state_dict())
    state = trained.state_dict()
    with pytest.raises(RuntimeError, match='Missing key.*"conv.bias"'):
        qt.convert(model, state_dict={name: value for name, value in state.items() if name != "conv.bias"})
    with pytest.raises(ValueError, match="quantizer 'conv.weight_quantizer': scale must be positive and finite"):
        qt.convert(model, state_dict={**state, "conv.weight_quantizer.scale": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"its scale must have shape \(4,\), got \(3,\)"):
        qt.convert(model, state_dict={**state, "conv.weight_quantizer.scale": torch.ones(3)})
    other = converted("graph", "learned", True).state_dict()
    with pytest.raises(ValueError, match="its spec in the state dict has"):
        qt.convert(model, state_dict=other)
    with pytest.raises(RuntimeError, match="saw no data"):
        qt.convert(model)


def test_convert_names_quantizers_that_left_out_what_is_not_finite() -> None:
    model = quantized("graph", "default", True, seed=0)
    qt.calibrate(model, [X], progress=False)
    quantizer = model.get_submodule("activation_quantizers.x")
    quantizer.observing = True
    model.eval()(torch.full_like(X, torch.nan))  # in training mode it would spoil the batch norm, as in float
    with pytest.warns(
        UserWarning, match="convert: 1 quantizers got NaN or infinities .*: activation_quantizers.x; qtool"
    ):
        qt.convert(model)
