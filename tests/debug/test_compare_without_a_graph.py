"""compare() of models without a graph against figures computed by hand: batch norms in chains, branches, loops, parts."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests.nets import ConvNet
from tests.replaced import Branches

W3 = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=3, axis=0)))


def by_hand(a: Tensor, b: Tensor) -> tuple[float, float]:
    a, b = a.detach().double(), b.detach().double()
    cosine = float((a * b).sum() / a.norm() / b.norm())
    return cosine, float(20 * torch.log10(a.norm() / (a - b).norm()))


def replaced(model: nn.Module, x: Tensor, chains: list[list[str]] | None = None) -> nn.Module:
    quantized = qt.quant_modules.replace(qt.fuse_modules(model, chains) if chains else model, W3, backend="tensorrt")
    qt.calibrate(quantized, [x], progress=False)
    return quantized


def test_figures_are_those_computed_by_hand() -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 8)).eval(), torch.randn(64, 16)
    quantized = replaced(model, x)
    result = qt.debug.compare(model, quantized, {"input": x}, progress=False)
    hidden, expected = F.relu(model[0](x)), model(x)
    (line,) = [line for line in result.layers if line.name == "2"]
    layer = quantized[2]
    weight = layer.weight_quantizer(model[2].weight)
    alone = F.linear(layer.input_quantizer(hidden), weight, model[2].bias)
    for found, wanted in (
        (line.own, by_hand(expected, alone)),
        (line.accumulated, by_hand(expected, quantized(x))),
        (line.weight, by_hand(model[2].weight, weight)),
        (result.output, by_hand(expected, quantized(x))),
    ):
        assert (found.cosine, found.sqnr) == pytest.approx(wanted, rel=1e-5)
    assert {line.name: line.kind for line in result.layers} == {"0": "linear", "2": "linear"}
    assert [line.own.sqnr for line in result.layers] == sorted(line.own.sqnr for line in result.layers)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("converted", [False, True])
def test_a_batch_norm_in_a_chain_counts_to_its_layer(mode: str, converted: bool) -> None:
    model, x = ConvNet().train(), torch.randn(8, 3, 8, 8)
    for _ in range(20):  # so that its statistics are those of the data
        model(x)
    model.train(mode == "train")
    quantized = replaced(model, x, [["conv1", "bn1"], ["conv2", "bn2"], ["up", "bn3"]])
    chosen = qt.convert(quantized) if converted else quantized
    result = qt.debug.compare(model, chosen, x, progress=False)
    assert {line.name for line in result.layers} == {"conv1", "conv2", "up", "average", "head"}
    for line in result.layers:  # three bits for the weights: another tensor would have no dB left
        assert (8 if line.weight else 30) < line.own.sqnr < (40 if line.weight else 60), line
    assert model.training == (mode == "train")
    assert converted or quantized.training == model.training


def test_layers_in_loops_are_compared_over_all_calls_and_layers_that_are_not_called_have_no_line() -> None:
    model, x = Branches().eval(), 1 + torch.rand(4, 3, 6, 6)
    quantized = qt.quant_modules.replace(model, backend="tensorrt")
    qt.calibrate(quantized, [x, -x], progress=False)
    result = qt.debug.compare(model, quantized, x, progress=False)
    assert {line.name for line in result.layers} == {"model", "far", "shared", "head"}
    assert all(math.isfinite(line.own.sqnr) for line in result.layers)


class Doubtful(nn.Module):
    """Calls its second layer where the first one is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if float(y.max()) >= 1.0 else y


def test_another_way_another_model_and_a_prepared_part_are_errors() -> None:
    model, x = Doubtful().eval(), torch.ones(4, 1)
    nn.init.constant_(model.first.weight, 1.0)
    quantized = qt.quant_modules.replace(model, backend="tensorrt")
    qt.calibrate(quantized, [x], progress=False)
    quantized.first.input_quantizer.amax = 0.5
    with pytest.raises(
        ValueError, match=r"'second' is called 1 times in the float model and 0 times in the quantized model"
    ):
        qt.debug.compare(model, quantized, x, progress=False)
    with pytest.raises(ValueError, match="the float model has no first, second; pass the float model that was given"):
        qt.debug.compare(nn.Linear(1, 1), quantized, x, progress=False)
    parts = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)).eval()
    mixed = qt.quant_modules.replace(parts, ignore=["0"], backend="tensorrt")
    mixed[0] = qt.prepare(parts[0], backend="tensorrt")
    with pytest.raises(ValueError, match="submodule '0' was prepared separately"):
        qt.debug.compare(parts, mixed, x, progress=False)
    with pytest.raises(TypeError, match=r"compare: quantized must be .*, got Linear"):
        qt.debug.compare(model, nn.Linear(1, 1), x)


def test_no_range_changes() -> None:
    model, x = ConvNet().eval(), torch.randn(4, 3, 8, 8)
    quantized = replaced(model, x)
    for quantizer in qt.quantizers_of(quantized).values():
        quantizer.observing = not quantizer.of_weight
    before = {name: value.clone() for name, value in quantized.state_dict().items()}
    qt.debug.compare(model, quantized, 5 * x, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in quantized.state_dict().items())
