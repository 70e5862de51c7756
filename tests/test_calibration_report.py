"""What calibrate reports of each range, the choice of a method by a word, and a grid that is known without data."""

import copy

import pytest
import torch
from torch import nn

import qtoolkit as qt

NAME = "activation_quantizers.input_1"
X = torch.cat([torch.rand(1000, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([[-0.5, 0.0, 0.0, 8.0]])])


def prepared(activation: qt.QuantSpec | None = None) -> nn.Module:
    torch.manual_seed(0)
    mapping = (
        None if activation is None else qt.QConfigMapping().set_global(qt.QConfig(activation, qt.QuantSpec(axis=0)))
    )
    return qt.prepare(nn.Sequential(nn.Linear(4, 2)).eval(), qconfig_mapping=mapping, backend="tensorrt10")


def test_minmax_clips_nothing() -> None:
    report = qt.calibrate(prepared(), [X], progress=False)
    assert report.observed[NAME] == report.ranges[NAME] == (-0.5, 8.0)
    assert report.grids[NAME] == pytest.approx((-8 * 128 / 127, 8.0))
    assert report.clipped == {NAME: 0.0, "0.weight_quantizer": 0.0}


def test_a_histogram_reports_what_its_range_clips() -> None:
    spec = qt.QuantSpec(observer="histogram", observer_args={"method": "percentile", "percentile": 90.0})
    model = prepared(spec)
    report = qt.calibrate(model, [X], progress=False)
    lo, hi = report.observed[NAME]
    assert (lo, hi) == pytest.approx((-0.5, 8.0), abs=0.02)
    lowest, highest = report.grids[NAME]
    scale = float(qt.quantizers_of(model)[NAME].scale)
    outside = ~((lowest - scale / 2 <= X) & (highest + scale / 2 >= X))
    assert report.clipped[NAME] == pytest.approx(float(outside.float().mean()), abs=0.01)
    assert report.clipped[NAME] == pytest.approx(0.1, abs=0.01)


def test_each_channel_of_a_histogram_is_counted() -> None:
    spec = qt.QuantSpec(axis=1, observer="histogram", observer_args={"method": "percentile", "percentile": 80.0})
    report = qt.calibrate(prepared(spec), [X], progress=False)
    assert report.clipped[NAME] == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    "spec", [{"observer": "moving_average"}, {"bits": 2, "quantizer": "lsq", "observer": "lsq"}], ids=str
)
def test_what_an_observer_cannot_tell_is_not_claimed(spec: dict) -> None:
    report = qt.calibrate(prepared(qt.QuantSpec(**spec)), [X, X / 2], progress=False)
    assert report.clipped[NAME] is None
    assert report.observed[NAME][1] > report.observed[NAME][0]
    assert " ?" in str(report)


def test_the_table_has_a_column_for_each() -> None:
    lines = str(qt.calibrate(prepared(), [X], progress=False)).splitlines()
    assert lines[0] == "1 batches, 2 quantizers calibrated, 0 not reached"
    assert lines[1].split() == ["quantizer", "observed", "grid", "clipped"]
    assert any(line.split() == [NAME, "[-0.5,", "8]", "[-8.06299,", "8]", "0.000%"] for line in lines)


# ---- a method by a word


@pytest.mark.parametrize("method", ["mse", "l2", "entropy", "percentile"])
def test_a_method_is_that_of_a_spec(method: str) -> None:
    model = prepared()
    report = qt.calibrate(model, X.split(300), progress=False, method=method)
    quantizer = qt.quantizers_of(model)[NAME]
    wanted = qt.QuantSpec(observer="histogram", observer_args={"method": method})
    assert quantizer.spec == wanted
    assert report.ranges == qt.calibrate(prepared(wanted), [X], progress=False).ranges
    again = qt.calibrate(model, [X], progress=False, method="minmax")
    assert again.ranges == qt.calibrate(prepared(), [X], progress=False).ranges
    other = prepared()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), model(X))


def test_the_weights_keep_their_observers() -> None:
    model = prepared()
    qt.calibrate(model, [X], progress=False, method="mse")
    assert qt.quantizers_of(model)["0.weight_quantizer"].spec.observer == "minmax"


def test_an_unknown_method_changes_nothing() -> None:
    model = prepared()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="unknown method of calibrate 'msse'; did you mean 'mse'"):
        qt.calibrate(model, [X], progress=False, method="msse")
    with pytest.raises(RuntimeError):
        qt.calibrate(model, [torch.rand(2, 5)], progress=False, method="mse")
    assert qt.quantizers_of(model)[NAME].spec.observer == "minmax"
    assert list(model.state_dict()) == list(before)


# ---- a grid that is known


def test_a_grid_that_is_known_is_set_after_calibration() -> None:
    """The images of a camera have 256 values, of which a batch may lack the ends."""
    pixels = torch.randint(10, 200, (64, 4))
    model = qt.prepare(nn.Sequential(nn.Linear(4, 2)).eval(), backend="onnxruntime")
    qt.calibrate(model, [pixels / 255], progress=False)
    quantizer = qt.quantizers_of(model)[NAME]
    quantizer.set_range(torch.tensor(0.0), torch.tensor(1.0))
    assert float(quantizer.scale) == pytest.approx(1 / 255)
    every = torch.arange(256) / 255
    assert torch.equal(qt.convert(model).get_submodule(NAME).codes(every), torch.arange(256, dtype=torch.uint8))


# ---- clipping


def of_values(method: str, bits: int = 8) -> nn.Module:
    return prepared(qt.QuantSpec(bits=bits, observer="histogram", observer_args={"method": method}))


def test_much_clipping_gives_a_warning(monkeypatch) -> None:
    monkeypatch.setattr("qtoolkit.ops.search_range", lambda counts, lo, hi, *_: (lo - 0.1, lo + 0.1))
    with pytest.warns(
        UserWarning, match=rf"^calibrate: the ranges of '{NAME}' \(\d\d.\d%\) clip more than 5% of the values"
    ):
        qt.calibrate(of_values("entropy"), [torch.rand(1000, 4)], progress=False)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["mse", "l2", "entropy", "percentile"])
@pytest.mark.parametrize("bits", [4, 8])
def test_ordinary_data_gives_none(method: str, bits: int) -> None:
    qt.calibrate(of_values(method, bits), [torch.randn(20000, 4), torch.rand(100, 4)], progress=False)
