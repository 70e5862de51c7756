"""The logarithmic grid on the whole route: observers, layers, the backend "nnie"; and what has no integer codes says so."""

import pickle

import pytest
import torch
from torch import Tensor

import qtoolkit as qt
from tests import nets, reference
from tests.cases import assert_same

LOG = qt.QuantSpec(format="nnie")


def by_the_oracle(x: Tensor, amax: Tensor) -> Tensor:
    return reference.fake_quant_nnie(x.detach(), amax)[0]


def calibrated(training: bool = False) -> torch.nn.Module:
    model = nets.trained(nets.ConvNet(), 4, 3, 8, 8).train(training)
    prepared = qt.prepare(model, torch.randn(4, 3, 8, 8), backend="nnie")
    qt.calibrate(prepared, [torch.randn(4, 3, 8, 8)], progress=False)
    return prepared


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
@pytest.mark.parametrize("axis", [None, 0])
def test_a_quantizer_takes_the_largest_magnitude_for_its_scale(observer: str, axis: int | None) -> None:
    spec = qt.QuantSpec(format="nnie", observer=observer, axis=axis)
    quantizer, x = qt.TensorQuantizer(spec, channels=None if axis is None else 5), torch.randn(5, 7) * 3
    with qt.calibrating(quantizer):
        quantizer(x)
    amax = x.abs().amax() if axis is None else x.abs().amax(1)
    assert torch.equal(quantizer.amax, amax)
    wanted = reference.fake_quant_nnie(x, amax, axis=axis)[0]
    assert_same(quantizer(x), wanted)
    assert_same(quantizer.to_grid()(x), wanted)


def test_it_observes_and_quantizes_in_training() -> None:
    quantizer, x = qt.TensorQuantizer(LOG), torch.randn(64, requires_grad=True)
    quantizer.observing = True
    y = quantizer(x)
    assert_same(y.detach(), by_the_oracle(x, x.detach().abs().max()))
    y.sum().backward()
    assert_same(x.grad, torch.ones(64))


def test_amax_of_zero_is_a_grid_too() -> None:
    quantizer = qt.TensorQuantizer(LOG)
    quantizer.amax = 0.0
    assert quantizer(torch.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("training", [True, False])
def test_the_backend_quantizes_layers_and_adds_alone(training: bool) -> None:
    prepared = calibrated(training)
    assert {edge.spec.format for edge in prepared.plan.edges} == {"nnie"}
    weight = prepared.get_submodule("head").weight
    quantizer = prepared.get_submodule("head").weight_quantizer
    assert_same(quantizer(weight).detach(), by_the_oracle(weight, weight.detach().abs().max()))
    x = torch.randn(2, 3, 8, 8)
    converted = qt.convert(prepared)
    torch.testing.assert_close(converted(x), prepared.eval()(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(pickle.loads(pickle.dumps(converted))(x), converted(x))
    assert "nnie" in str(qt.quantization_report(prepared))


def test_training_moves_the_weights() -> None:
    prepared = calibrated(training=True)
    prepared(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in prepared.parameters())
    assert prepared.get_submodule("head").weight.grad.abs().sum() > 0


def test_what_needs_integer_codes_is_refused(tmp_path) -> None:
    prepared = calibrated()
    with pytest.raises(
        ValueError, match=r"quantizes to format='nnie', for which ONNX has no node; use qtoolkit.export.encodings"
    ):
        qt.export_onnx(prepared, torch.randn(1, 3, 8, 8), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"Grid\.codes: format='nnie' has no integers"):
        qt.Grid(torch.tensor(1.0), None, LOG).codes(torch.ones(3))


def test_percentiles_of_a_histogram_fit_it() -> None:
    args = {"method": "percentile", "percentile": 99.0}
    quantizer = qt.TensorQuantizer(qt.QuantSpec(format="nnie", observer="histogram", observer_args=args))
    x = torch.linspace(-1, 1, 10_000)
    with qt.calibrating(quantizer):
        quantizer(x)
    assert float(quantizer.amax) == pytest.approx(0.99, abs=0.002)
