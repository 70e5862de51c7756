"""bias_correction(): planted shifts go away; the clipped normal distribution against samples; every layer type."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.tuning.bias_correction import clipped_mean
from tests import nets
from tests.tuning.nets import LAYERS, W3, W3A4, Residual, correlated, prepared_on


@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_mean_of_each_channel_is_that_of_the_float_model(kind: str, route: str) -> None:
    make, shape, axis = LAYERS[kind]
    model, x = nn.Sequential(make(), nn.ReLU()).eval(), correlated(*shape)
    w2 = qt.QConfigMapping().set_global(qt.QConfig(activation=None, weight=qt.QuantSpec(bits=2, axis=axis)))
    prepared = (
        qt.prepare(model, qconfig_mapping=w2, backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(model, qconfig_mapping=w2, backend="tensorrt10")
    )
    qt.calibrate(prepared, [x], progress=False)

    def means(net: nn.Module) -> torch.Tensor:
        y = net.get_submodule("0")(x).detach()
        return y.mean([d for d in range(y.dim()) if d != 1])

    assert not torch.allclose(means(prepared), means(model), atol=1e-3)
    report = qt.tuning.bias_correction(prepared, [x, x], progress=False)
    torch.testing.assert_close(means(prepared), means(model), rtol=1e-4, atol=1e-5)
    assert list(report.shifts) == ["0"]
    assert "1 biases corrected (empirical)" in str(report)


def test_a_planted_shift_is_removed_and_the_output_is_nearer() -> None:
    model, x = nets.trained(Residual(), 8, 3, 8, 8).eval(), [torch.randn(8, 3, 8, 8) for _ in range(2)]
    prepared = prepared_on(model, x, W3A4)
    prepared.train()
    prepared.eval()
    with torch.no_grad():
        clean, target = prepared(x[0]), model(x[0])
        qt.tuning.bias_correction(prepared, x, progress=False)
        corrected = prepared(x[0])
    assert (corrected - target).square().mean() < (clean - target).square().mean()
    torch.testing.assert_close(corrected.mean(0), target.mean(0), rtol=0, atol=0.1)


ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.Identity, partial(nn.Hardtanh, 0.0, 1.0), partial(nn.Hardtanh, -1.0, 2.0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_analytic_agrees_with_empirical_on_normal_inputs(activation: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), activation(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    x = torch.randn(20_000, 16)
    nn.init.uniform_(model[1].weight, 0.5, 3.0)
    nn.init.normal_(model[1].bias, std=2.0)
    with torch.no_grad():
        model[1].momentum = model[4].momentum = None
        model(x)
    mapping = qt.QConfigMapping().set_global(W3).set_module_name("0", qt.QConfig(None, qt.QuantSpec(bits=16, axis=0)))
    prepared = qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    other = copy.deepcopy(prepared)
    report = qt.tuning.bias_correction(prepared, method="analytic")
    qt.tuning.bias_correction(other, [x], progress=False)
    assert list(report.shifts) == ["3"]
    assert "so no batch norm gives its mean; use 'empirical'" in report.skipped["0"]
    assert report.shifts["3"] > 0.02
    torch.testing.assert_close(prepared.state_dict()["4.bias"], other.state_dict()["4.bias"], rtol=0, atol=0.02)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_analytic_sums_over_groups_and_kernels(transposed: bool, stride: int) -> None:
    conv = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), conv(4, 6, 4, groups=2, stride=stride)).train()
    nn.init.normal_(model[1].bias)
    w2 = qt.QConfig(activation=None, weight=qt.QuantSpec(bits=2, axis=None))
    prepared = prepared_on(model, [torch.randn(4, 3, 8, 8)], w2)
    prepared.eval()
    layer = prepared.get_submodule("2")
    before = layer.bias.detach().clone()
    mean = model[1].bias.detach()[None, :, None, None].expand(1, 4, 12, 12)  # no activation: the mean is the shift
    with torch.no_grad():
        shift = layer.compute(mean, layer.quantize_weight(layer.weight) - layer.weight, None)
    inner = shift[0, :, 4:-4, 4:-4] if transposed else shift[0]  # at the edges fewer inputs add up
    qt.tuning.bias_correction(prepared, method="analytic")
    torch.testing.assert_close(layer.bias.detach(), before - inner.mean((1, 2)), rtol=1e-4, atol=1e-5)


def test_the_clipped_normal_distribution() -> None:
    mean, deviation = torch.tensor([-1.0, 0.5, 4.0]).double(), torch.tensor([1.0, 2.0, 3.0]).double()
    samples = mean + deviation * torch.randn(400_000, 3, dtype=torch.double)
    for low, high in ((0.0, torch.inf), (0.0, 6.0), (-1.0, 1.0), (-torch.inf, torch.inf)):
        torch.testing.assert_close(
            clipped_mean(mean, deviation, low, high), samples.clamp(low, high).mean(0), rtol=0, atol=0.02
        )


def test_layers_without_a_bias_or_called_twice_are_named() -> None:
    prepared = prepared_on(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)).eval(), [torch.randn(8, 4)])
    report = qt.tuning.bias_correction(prepared, [torch.randn(8, 4)], progress=False)
    assert report.skipped == {"1": "it has no bias; give the float layer bias=True"}
    shared = prepared_on(nn.Sequential(nets.Shared(), nn.Linear(4, 4)).eval(), [torch.randn(8, 4)])
    report = qt.tuning.bias_correction(shared, [torch.randn(8, 4)], progress=False)
    assert report.skipped == {"0.fc": "the model calls it several times"}


def test_a_model_without_a_layer_says_so() -> None:
    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight)

    x = torch.randn(16, 8)
    prepared = qt.prepare(Functions().eval(), x, backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    with pytest.raises(
        ValueError, match=r"no layer can be corrected by method='empirical' \(linear: it is a function with"
    ):
        qt.tuning.bias_correction(prepared, [x], progress=False)


def test_bad_arguments_leave_the_model_as_it_was() -> None:
    prepared = prepared_on(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), [torch.randn(8, 4)])
    before = copy.deepcopy(prepared.state_dict())
    runs = 0

    def failing(model: nn.Module, x: torch.Tensor) -> object:
        nonlocal runs
        runs += 1
        if runs > 2:
            raise KeyboardInterrupt
        return model(x)

    for arguments, error, words in (
        ({}, ValueError, "method='empirical' needs batches"),
        ({"batches": [], "method": "analytic"}, ValueError, "method='analytic' takes no batches"),
        ({"method": "analytic"}, ValueError, r"no layer can be corrected by method='analytic' \(.*use 'empirical'"),
        ({"method": "analitic"}, ValueError, "did you mean 'analytic'"),
        ({"batches": []}, ValueError, "bias_correction: batches must hold at least one batch"),
        ({"batches": [torch.ones(2, 4)], "forward": failing}, KeyboardInterrupt, None),
    ):
        with pytest.raises(error, match=words):
            qt.tuning.bias_correction(prepared, **{"progress": False, **arguments})
        torch.testing.assert_close(dict(prepared.state_dict()), dict(before), rtol=0, atol=0)
        assert all(not module._forward_hooks for module in prepared.modules())
    with pytest.raises(TypeError, match="needs the graph of qtoolkit.prepare"):
        qt.tuning.bias_correction(
            qt.quant_modules.replace(nn.Sequential(nn.Linear(4, 4)), backend="tensorrt10"), method="analytic"
        )


def test_a_bias_on_a_coarse_grid_is_corrected_to_the_nearest_code() -> None:
    """The shift has the rounding of the bias in it, so that it is taken off the bias as rounded."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 64)).eval(), 100 * torch.rand(256, 4)
    w2 = qt.QConfig(qt.QuantSpec(bits=3, signed=False), qt.QuantSpec(bits=2, axis=0))
    prepared = qt.prepare(model, x, "onnxruntime", qt.QConfigMapping().set_global(w2))
    qt.calibrate(prepared, [x], progress=False)
    step = prepared.get_submodule("0").sum_steps()
    qt.tuning.bias_correction(prepared, [x], progress=False)
    shift = (prepared(x) - model(x)).mean(0)
    assert (shift.abs() <= step / 2 * 1.001).all()


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_a_bias_of_two_layers_stays(route: str) -> None:
    """The shifts of both differ: the second correction would undo the first."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    model[2].bias = model[0].bias
    x = torch.rand(64, 8)
    prepared = (
        qt.prepare(model, x, backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(model, backend="tensorrt10")
    )
    qt.calibrate(prepared, [x], progress=False)
    report = qt.tuning.bias_correction(prepared, [x], progress=False)
    assert report.skipped == {
        "0": "it shares its bias with '2', which has another shift",
        "2": "it shares its bias with '0', which has another shift",
    }
    assert torch.equal(prepared.get_submodule("0").bias, model[0].bias)
    assert list(report.shifts) == ["4"]
