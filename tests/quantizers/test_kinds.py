"""Quantizers on all routes: prepare, replace, calibrate, train, copies, compile, convert, export.

They are those of the table, and two of `own.py`, which are a class and a line each.
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.table import QUANTIZERS
from tests.copies import made_once
from tests.quantizers.own import OWN

Fields = dict[str, Any]
# The specs of an activation and of a weight, for each quantizer.
UNSIGNED: Fields = {"bits": 4, "signed": False}
SIGNED: Fields = {"bits": 4}
AFFINE: Fields = {"bits": 4, "signed": False, "symmetric": False}
LSQ: Fields = {"bits": 4, "quantizer": "lsq"}
SPECS: dict[str, tuple[Fields, Fields]] = {
    "fixed": (AFFINE, SIGNED),
    "lsq": (AFFINE, SIGNED),
    "lsq_plus": (AFFINE, {**AFFINE, "signed": True}),
    "pact": (SIGNED, SIGNED),
    "learned_range": (AFFINE, {**AFFINE, "signed": True}),
    "dsq": (AFFINE, SIGNED),
    "tqt": (SIGNED, SIGNED),
    "dorefa": (UNSIGNED, SIGNED),
    "apot": (SIGNED, SIGNED),
    "qil": (SIGNED, SIGNED),
    "log": (AFFINE, SIGNED),
    "formula": (SIGNED, SIGNED),
}
NOT_EXPORTED = {"apot": "its levels are not uniform"}  # of activations


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a quantizer: nothing else of the package knows those of `own.py`."""
    for name, kind in OWN.items():
        monkeypatch.setitem(QUANTIZERS, name, kind)


def test_every_quantizer_has_a_case() -> None:
    assert set(SPECS) == set(QUANTIZERS)


class Net(nn.Module):
    """No batch norm of it is behind the last two layers, so that each quantizer has layers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.fc = nn.ConvTranspose2d(8, 8, 2, 2, groups=2), nn.Linear(8 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn(self.conv(x)))
        return self.fc(torch.relu(self.up(y)).flatten(1))


X = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(1)) - 0.2


def mapping_of(name: str, axis: int | None = 0) -> qt.QConfigMapping:
    activation, weight = ({**fields, "quantizer": name} for fields in SPECS[name])
    return qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(**activation), qt.QuantSpec(axis=axis, **weight)))


@made_once
def quantized(name: str, route: str, axis: int | None = 0, kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    net = kind().train()
    if route == "prepare":
        model = qt.prepare(
            net, X, backend="onnxruntime", qconfig_mapping=mapping_of(name, axis), training_arithmetic="float"
        )
    else:
        model = qt.quant_modules.replace(
            net, qconfig_mapping=mapping_of(name, axis), training_arithmetic="float", backend="tensorrt10"
        )
    qt.calibrate(model, [X], progress=False)
    return model.train()


def trained(model: nn.Module, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.sweep(2)
@pytest.mark.parametrize("axis", [None, 0], ids=["tensor", "channel"])
@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("name", SPECS)
def test_a_model_trains_and_converts_to_what_it_computes(name: str, route: str, axis: int | None) -> None:
    model = quantized(name, route, axis)
    learned = {n: p for q in qt.quantizers_of(model).values() for n, p in q.named_parameters()}
    assert bool(learned) == QUANTIZERS[name].LEARNED
    model(X).square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name
    trained(model)
    for quantizer in qt.quantizers_of(model).values():
        assert bool((quantizer.scale > 0).all())
        assert bool(quantizer.scale.isfinite().all())
    y = model.eval()(X)
    converted = qt.convert(model)
    assert torch.equal(converted(X), y)
    assert not qt.quantizers_of(converted)
    for grid in (module for module in converted.modules() if isinstance(module, Grid)):
        assert grid.spec.format == "int"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_checkpointed_steps_after_plain_ones_have_the_same_gradients(
    name: str, autocast: bool, reentrant: bool
) -> None:
    """A forward saves as many tensors as its recomputation, after a forward of each kind."""
    torch.manual_seed(0)
    model = qt.prepare(Net().train(), X, backend="onnxruntime", qconfig_mapping=mapping_of(name))
    qt.calibrate(model, [X], progress=False)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        model.zero_grad()
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            run(x).float().square().mean().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    wanted = gradients(model)
    model(X)
    found = gradients(lambda x: checkpoint(model, x, use_reentrant=reentrant))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", SPECS)
def test_copies_and_state_dicts_compute_the_same(name: str) -> None:
    model = trained(quantized(name, "prepare"))
    y = model.eval()(X)
    loaded = quantized(name, "prepare")
    loaded.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(other.eval()(X), y)
    converted = qt.convert(model)
    again = pickle.loads(pickle.dumps(converted))
    restored = qt.convert(quantized(name, "prepare"), state_dict=converted.state_dict())
    for other in (again, copy.deepcopy(converted), restored):
        assert torch.equal(other(X), y)


class Smaller(nn.Module):
    """What of the network quantizers compute in different ways: torch.compile takes a second for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.bn(self.conv(x))))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_compiled_code_has_no_graph_breaks_and_the_same_gradients(name: str) -> None:
    eager, compiled = (quantized(name, "prepare", kind=Smaller) for _ in range(2))
    torch.compiler.reset()
    graph = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    found, wanted = graph(X), eager(X)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found.square().mean().backward()
    wanted.square().mean().backward()
    for parameter_name, parameter in eager.named_parameters():
        other = compiled.get_parameter(parameter_name).grad
        torch.testing.assert_close(
            other, parameter.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=parameter_name: f"{n}: {m}"
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("name", SPECS)
def test_files_have_the_codes_of_training(tmp_path: Any, name: str, route: str, exporter: str) -> None:
    pytest.importorskip("onnxruntime")
    model = trained(quantized(name, route)).eval()
    if name in NOT_EXPORTED:
        with pytest.raises(ValueError, match=f"cannot be written: {NOT_EXPORTED[name]}"):
            qt.export_onnx(model, X, tmp_path / "m.onnx", exporter=exporter)
        return
    result = qt.export_onnx(model, X, tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.weight_codes.compared > 0
    assert result.verification.weight_codes.differing == 0
    assert result.verification.quantizer_codes.differing == 0
    assert not result.verification.missing


@pytest.mark.parametrize("name", ["apot", "dorefa", "qil"])
def test_weights_that_are_shaped_are_stored_as_codes(tmp_path: Any, name: str) -> None:
    onnx = pytest.importorskip("onnx")
    weight = qt.QuantSpec(axis=0, quantizer=name, **SPECS[name][1])
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), weight))
    prepared = qt.prepare(Net().eval(), X, backend="onnxruntime", qconfig_mapping=mapping)
    qt.calibrate(prepared, [X], progress=False)
    converted = qt.convert(prepared)
    before = converted(X)
    qt.export_onnx(converted, X, tmp_path / "m.onnx")
    assert torch.equal(converted(X), before)
    names = {node.op_type for node in onnx.load(str(tmp_path / "m.onnx")).graph.node}
    assert not names & {"Tanh", "Pow", "Abs", "Sign", "Where"}


@pytest.mark.parametrize("name", SPECS)
def test_the_integer_route_is_the_float_one_up_to_rounding(name: str) -> None:
    model = trained(quantized(name, "prepare")).eval()
    y = model(X).detach()
    converted = qt.convert(model, arithmetic="integer")
    torch.testing.assert_close(converted(X), y, rtol=0.2, atol=0.3 * float(y.abs().max()))
    codes = copy.deepcopy(model).train()
    plain = copy.deepcopy(model).train()
    qt.nn.set_training_arithmetic(codes, arithmetic="integer")
    torch.testing.assert_close(codes(X), plain(X), rtol=0.02, atol=0.05 * float(y.abs().max()))
    report = str(qt.quantization_report(codes))
    assert ("its inputs are transformed before rounding" in report) == (name in ("apot", "qil"))


@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("name", ["dorefa", "qil"])
def test_a_batch_norm_stays_behind_a_weight_of_another_size(name: str, route: str) -> None:
    model = quantized(name, route)
    assert type(model.get_submodule("bn")) is nn.BatchNorm2d
    if route == "prepare":
        assert f"quantizer='{name}' gives all weights the size of 1" in str(qt.quantization_report(model))
    eval_mode = qt.prepare(Net().eval(), X, backend="tensorrt", qconfig_mapping=mapping_of(name))
    assert type(eval_mode.get_submodule("bn")) is nn.BatchNorm2d


@pytest.mark.parametrize("name", SPECS)
def test_layers_without_a_normalization_keep_the_size_of_their_weights(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qt.prepare(Net(), X, backend="onnxruntime", qconfig_mapping=mapping_of(name))
    said = [each for each in caught if "no normalization takes" in str(each.message)]
    assert len(said) == (name in ("dorefa", "qil"))
    if said:
        assert "outputs of 'up', 'fc', and quantizer=" in str(said[0].message)
        assert said[0].filename == __file__


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm])
def test_what_normalizes_behind_a_relu_takes_out_the_size(norm: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*no normalization takes")
        qt.prepare(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), norm(4)), qconfig_mapping=mapping_of("qil"), backend="tensorrt"
        )


@pytest.mark.parametrize("name", SPECS)
def test_sparse_embeddings_look_up_quantized_rows(name: str) -> None:
    table = nn.Embedding(6, 4, sparse=True)
    spec = qt.QuantSpec(axis=0, quantizer=name, **SPECS[name][1])
    layer = qt.nn.QuantEmbedding.from_float(table, spec)
    index = torch.tensor([1, 5, 1])
    wanted = layer.weight_quantizer(layer.weight)[index]
    torch.testing.assert_close(layer.train()(index), wanted, rtol=0, atol=0)
    layer(index).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPECS)
def test_half_precision_is_quantized_in_float32(name: str, dtype: torch.dtype) -> None:
    for of_weight, fields in zip((False, True), SPECS[name], strict=True):
        quantizer = qt.TensorQuantizer(qt.QuantSpec(quantizer=name, **fields), of_weight=of_weight)
        quantizer.set_range(torch.tensor(-1.0), torch.tensor(1.7))
        x = torch.randn(64).to(dtype).requires_grad_()
        y = quantizer.to(dtype)(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y, quantizer(x.float()).to(dtype), rtol=0, atol=0)
        y.sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in quantizer.parameters())


@pytest.mark.parametrize("name", SPECS)
def test_nan_stays_nan(name: str) -> None:
    for of_weight, fields in zip((False, True), SPECS[name], strict=True):
        quantizer = qt.TensorQuantizer(qt.QuantSpec(quantizer=name, **fields), of_weight=of_weight)
        quantizer.amax = 1.0
        assert bool(quantizer(torch.tensor([0.3, torch.nan]))[1].isnan())


@pytest.mark.parametrize("value", [-1e3, -3.0, 0.0, 1e-9, 3.0, 1e3])
@pytest.mark.parametrize("name", [name for name, kind in QUANTIZERS.items() if kind.LEARNED])
def test_scales_are_positive_and_values_finite_whatever_the_parameters(name: str, value: float) -> None:
    for of_weight, fields in zip((False, True), SPECS[name], strict=True):
        quantizer = qt.TensorQuantizer(qt.QuantSpec(quantizer=name, **fields), of_weight=of_weight)
        quantizer.set_range(torch.tensor(-1.0), torch.tensor(1.7))
        for parameter in quantizer.parameters():
            nn.init.constant_(parameter, value)
        assert bool((quantizer.scale > 0).all())
        assert bool(quantizer.scale.isfinite().all())
        x = torch.linspace(-2, 2, 9, requires_grad=True)
        y = quantizer(x)
        y.sum().backward()
        assert bool(y.isfinite().all())
        assert all(bool(t.grad.isfinite().all()) for t in (x, *quantizer.parameters()))
        converted = quantizer.to_grid()
        torch.testing.assert_close(converted(x), y, rtol=0, atol=0)
