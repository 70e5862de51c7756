"""A user-defined quantizer: one class and one entry in the table are enough for prepare, training, conversion, checkpoints."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.table import QUANTIZERS, QuantizerKind
from tests.quantizers.own import documented_names


class LogScale(QuantizerKind):
    """The logarithm of the scale is trained, as the sum of two parameters."""

    label = "log"
    OPTIONS = {"grad_factor": 0.5}

    def check(self, spec: qt.QuantSpec) -> None:
        if self.options(spec)["grad_factor"] <= 0:
            raise ValueError("QuantSpec: grad_factor must be positive.")

    def tensors(self, spec: qt.QuantSpec, shape: tuple[int, ...]) -> dict[str, Tensor | None]:
        learned = {"_scale": nn.Parameter(torch.full(shape, torch.nan)), "_offset": nn.Parameter(torch.zeros(shape))}
        return {**super().tensors(spec, shape), **learned}

    def set_grid(self, quantizer: qt.TensorQuantizer, scale: Tensor, zero_point: Tensor | None) -> None:
        super().set_grid(quantizer, scale.log2() - quantizer._offset, zero_point)

    def grid(self, quantizer: qt.TensorQuantizer) -> tuple[Tensor, Tensor | None]:
        return (quantizer._scale + quantizer._offset).exp2(), quantizer._zero_point

    def grad_factor(self, quantizer: qt.TensorQuantizer, x: Tensor) -> float:
        return self.options(quantizer.spec)["grad_factor"]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(QUANTIZERS, "log", LogScale())


def prepared_net(axis: int | None, **quantizer: object) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    qconfig = qt.QConfig(
        qt.QuantSpec(signed=False, symmetric=False, **quantizer), qt.QuantSpec(bits=4, axis=axis, **quantizer)
    )
    return qt.prepare(model.train(), qconfig_mapping=qt.QConfigMapping().set_global(qconfig), backend="tensorrt10")


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("axis", [None, 0], ids=["per_tensor", "per_channel"])
def test_a_user_defined_quantizer_goes_from_prepare_to_a_checkpoint(axis: int | None) -> None:
    prepared, learned = prepared_net(axis, quantizer="log"), prepared_net(axis, quantizer="lsq")
    for model in (prepared, learned):
        qt.calibrate(model, [X], progress=False)
    for name, quantizer in qt.quantizers_of(prepared).items():
        torch.testing.assert_close(quantizer.scale, learned.get_submodule(name).scale, rtol=1e-6, atol=0)
    weight_quantizer = prepared.get_submodule("0.weight_quantizer")
    assert weight_quantizer.scale.shape == (() if axis is None else (4,))
    before = {name: q.scale.clone() for name, q in qt.quantizers_of(prepared).items()}
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    prepared(X).square().mean().backward()
    optimizer.step()
    assert all((q.scale != before[name]).all() for name, q in qt.quantizers_of(prepared).items())
    assert qt.quantization_report(prepared).layers[0].weight.endswith(" log")
    y = prepared.eval()(X)
    for copied in (qt.convert(prepared), copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(copied(X), y)
    loaded = prepared_net(axis, quantizer="log")
    loaded.load_state_dict(prepared.state_dict())
    assert torch.equal(loaded.eval()(X), y)


def test_its_scale_takes_the_factor_of_a_batch_norm() -> None:
    """What is stored is a logarithm, to which the logarithm of the factor's change is added."""
    weight = qt.QConfig(None, qt.QuantSpec(bits=4, axis=0, quantizer="log"))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).train()
    prepared = qt.prepare(
        model, torch.randn(2, 1, 5, 5), qconfig_mapping=qt.QConfigMapping().set_global(weight), backend="tensorrt10"
    )
    before = prepared.get_submodule("0.weight_quantizer").scale.clone()
    for seed in range(3):
        prepared(9 * torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(seed)))
        with torch.no_grad():
            prepared.get_parameter("0.weight").mul_(1.0)  # a step ends
    change = torch.rsqrt(prepared.eval().get_buffer("1.running_var") + 1e-5)  # from the variance of 1 at the start
    assert (change < 0.9).all()
    torch.testing.assert_close(prepared.get_submodule("0.weight_quantizer").scale, before * change, rtol=1e-4, atol=0)


def test_its_options_reach_it_and_are_checked() -> None:
    gradients = []
    for factor in (0.25, 0.5):
        spec = qt.QuantSpec(bits=4, quantizer="log", quantizer_args={"grad_factor": factor})
        assert qt.QuantSpec.from_dict(spec.to_dict()) == spec
        quantizer = qt.TensorQuantizer(spec)
        quantizer.amax = 1.0
        quantizer(X).sum().backward()
        gradients.append(quantizer.get_parameter("_scale").grad)
    torch.testing.assert_close(gradients[1], 2 * gradients[0])
    assert gradients[0] != 0
    with pytest.raises(ValueError, match="unknown option of quantizer 'log' 'grad_facto'; did you mean 'grad_factor'"):
        qt.QuantSpec(quantizer="log", quantizer_args={"grad_facto": 1})
    with pytest.raises(ValueError, match="grad_factor must be positive"):
        qt.QuantSpec(quantizer="log", quantizer_args={"grad_factor": 0})


@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_fixed_scales_and_lsq_take_no_options(quantizer: str) -> None:
    with pytest.raises(ValueError, match=f"quantizer '{quantizer}' takes no options, got 'grad_factor'"):
        qt.QuantSpec(quantizer=quantizer, quantizer_args={"grad_factor": 1.0})


def test_the_documented_quantizer_is_a_class_and_an_entry() -> None:
    names = documented_names()
    model = qt.prepare(nn.Linear(6, 4).train(), X, qconfig_mapping=names["mapping"], backend="tensorrt10")
    qt.calibrate(model, [X], progress=False)
    model(X).sum().backward()
    learned = [quantizer._scale for quantizer in qt.quantizers_of(model).values()]
    assert len(learned) == 2
    assert all(bool((scale.grad != 0).all()) for scale in learned)
    assert torch.equal(qt.convert(model.eval())(X), model(X))


def test_the_documented_table_has_every_quantizer() -> None:
    text = (Path(__file__).parents[2] / "docs" / "quantizers.md").read_text()
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")][: len(QUANTIZERS) - 1] == [
        name for name in QUANTIZERS if name != "log"
    ]
