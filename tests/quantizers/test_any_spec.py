"""Any combination of a spec's fields: a model that trains and converts, or one sentence that says what works."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.config.spec import FIXED, FORMATS
from qtoolkit.quantizers.table import OBSERVERS, QUANTIZERS

X = torch.randn(4, 4, 4, 4, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.fc = nn.ConvTranspose2d(8, 8, 2, 2, groups=2), nn.Linear(512, 16)
        self.table = nn.Embedding(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(torch.relu(self.bn(self.conv(x)))))
        return self.fc(y.flatten(1)) + self.table(torch.arange(len(x)))


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a spec, of which half the formats come with what they need."""
    form = draw(st.sampled_from(["int", "int", "int", *FORMATS]))
    found: dict[str, Any] = {
        "bits": draw(st.integers(2, 16)),
        "signed": draw(st.booleans()),
        "symmetric": draw(st.booleans()),
        "narrow": draw(st.sampled_from([False, False, True])),
        "axis": draw(st.sampled_from([None, None, 0, 1, -1, 2, 3])),
        "group_size": draw(st.sampled_from([None, None, None, 2, 4])),
        "pow2_scale": draw(st.sampled_from([False, False, True])),
        "dynamic": draw(st.sampled_from([False, False, False, True])),
        "observer": draw(st.sampled_from([*OBSERVERS])),
        "quantizer": draw(st.sampled_from([*QUANTIZERS])),
        "format": form,
    }
    if form != "int" and draw(st.booleans()):
        found |= {**FIXED[form], "quantizer": "fixed", "dynamic": False}
    return found


def assert_sentence(error: ValueError) -> None:
    text = str(error)
    assert text.endswith("."), text
    assert text.startswith(
        ("QuantSpec: ", "QConfig: ", "layer '", "quantizer '", "calibrate: the model has no quant")
    ), text


def spec_of(values: dict[str, Any]) -> qt.QuantSpec | None:
    try:
        return qt.QuantSpec(**values)
    except ValueError as error:
        assert_sentence(error)
        return None


@settings(max_examples=400, deadline=None)
@given(fields())
def test_a_spec_is_built_or_refused_in_a_sentence(values: dict[str, Any]) -> None:
    spec = spec_of(values)
    if spec is not None:
        assert qt.QuantSpec.from_dict(spec.to_dict()) == spec
        assert spec.qmin <= 0 < spec.qmax or not spec.symmetric


def used(route: str, activation: qt.QuantSpec, weight: qt.QuantSpec, x: Tensor, model: nn.Module) -> None:
    """Build, calibrate, train, convert."""
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    if route == "replace":
        prepared = qt.quant_modules.replace(model.train(), qconfig_mapping=mapping, backend="tensorrt")
    else:
        prepared = qt.prepare(model.train(route == "prepare"), x, backend="onnxruntime", qconfig_mapping=mapping)
    qt.calibrate(prepared, [x], progress=False)
    optimizer = torch.optim.Adam(prepared.train().parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    y = prepared.eval()(x).detach()
    assert bool(y.isfinite().all())
    torch.testing.assert_close(qt.convert(prepared)(x).detach(), y, rtol=0, atol=1e-5 * float(y.abs().max()) + 1e-12)


@pytest.mark.parametrize("route", ["prepare", "prepare in eval mode", "replace"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(activation=fields(), weight=fields(), data=st.sampled_from(["random", "random", "constant", "zeros"]))
def test_a_model_works_or_says_why_not(route: str, activation: dict, weight: dict, data: str) -> None:
    specs = spec_of(activation), spec_of(weight)
    if specs[0] is None or specs[1] is None:
        return
    torch.manual_seed(0)
    model, x = Net(), X
    if data != "random":
        value = 3.0 if data == "constant" else 0.0
        x = torch.full_like(X, value)
        for layer in (model.conv, model.fc, model.table):
            nn.init.constant_(layer.weight, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            used(route, *specs, x, model)
        except ValueError as error:
            assert_sentence(error)


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_an_axis_that_an_activation_does_not_have_names_the_quantizer(route: str) -> None:
    words = r"the axis of a tensor of 2 dimensions must lie in \[-2, 1\], got 2; set another axis"
    with pytest.raises(ValueError, match=f"quantizer '.*': {words}"):
        used(route, qt.QuantSpec(axis=2), qt.QuantSpec(), torch.ones(2, 4), nn.Sequential(nn.Linear(4, 3)))


def test_the_error_is_not_put_down_to_an_embedding_elsewhere_in_the_model() -> None:
    with pytest.raises(ValueError, match="^quantizer 'fc.input_quantizer': the axis of a tensor of 2 dimensions"):
        used("replace", qt.QuantSpec(axis=2), qt.QuantSpec(), X, Net())


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_blocks_that_do_not_fit_an_activation_name_the_quantizer(route: str) -> None:
    model = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 3))
    blocks, words = qt.QuantSpec(format="mxfp8"), r"group_size must divide dimension -1 of a tensor of shape \(2, 4\)"
    with pytest.raises(ValueError, match=f"quantizer '.*': {words}"):
        used(route, blocks, qt.QuantSpec(), torch.ones(2, 4), model)


@pytest.mark.parametrize("observer", ["histogram", "moving_histogram"])
def test_a_histogram_serves_an_affine_grid_without_the_lowest_code(observer: str) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(signed=False, symmetric=False, narrow=True, observer=observer))
    with qt.calibrating(quantizer):
        quantizer(X)
    assert float((quantizer(X) - X).abs().max()) < 0.1
    assert float(quantizer(torch.zeros(1))) == 0
