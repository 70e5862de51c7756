"""Scales that are computed from each input: of tokens, and of blocks of small floats."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.frozen import Grid
from tests.copies import made_once

TOKENS = [
    {},
    {"bits": 4},
    {"signed": False, "symmetric": False},
    {"symmetric": False},
    {"signed": False},
    {"bits": 4, "narrow": True},
    {"pow2_scale": True},
    {"format": "e4m3"},
    {"format": "e2m1", "bits": 4},
]
BLOCKS = ["mxfp8", "mxfp4", "nvfp4"]
X = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 5).view(5, 1)


@pytest.mark.parametrize("fields", TOKENS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_token_has_the_scale_of_its_own_range(fields: dict[str, Any], dtype: torch.dtype) -> None:
    spec = qt.QuantSpec(dynamic=True, **fields)
    x = X.to(dtype)
    x[0, 0] = 0
    y = qt.TensorQuantizer(spec)(x)
    for i, row in enumerate(x.flatten(0, -2)):
        static = qt.TensorQuantizer(qt.QuantSpec(**fields))
        static.set_range(row.double().amin().float(), row.double().amax().float())
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float64 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(y.flatten(0, -2)[i], static(row), **tolerance)


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("axis", [-1, 1])
def test_each_block_has_the_scale_of_its_own_range(format: str, axis: int) -> None:
    x = X if axis == -1 else X.movedim(-1, 1).contiguous()
    y = qt.TensorQuantizer(qt.QuantSpec(format=format, axis=axis))(x)
    rows = x.movedim(axis, -1).contiguous()
    if format == "nvfp4":
        wanted = qt.ops.fake_quant_block(rows, "e2m1", 16, "e4m3", X.abs().max() / (448 * 6))
    else:
        wanted = qt.ops.fake_quant_block(rows, {"mxfp8": "e4m3", "mxfp4": "e2m1"}[format], 32)
    assert torch.equal(y.movedim(axis, -1), wanted)


@pytest.mark.parametrize("format", BLOCKS)
def test_the_blocks_of_a_weight_are_those_of_the_op_and_follow_it(format: str) -> None:
    weight = torch.randn(6, 64) * torch.logspace(-30, 3, 6).view(6, 1)
    weight[1, :40] = 0
    layer = qt.nn.QuantLinear.from_float(nn.Linear(64, 6), qt.QuantSpec(format=format)).train()
    with torch.no_grad():
        layer.weight.copy_(weight)
    quantizer = layer.weight_quantizer
    activation = qt.TensorQuantizer(qt.QuantSpec(format=format))
    found = quantizer(layer.weight)
    assert torch.equal(found, activation(weight))
    found.sum().backward()
    assert bool(layer.weight.grad.isfinite().all())
    grid = layer.eval().weight_quantizer.to_grid()
    assert isinstance(grid, Grid)
    assert torch.equal(grid(weight), found)
    assert torch.equal(grid.values(grid.codes(weight)), found)
    if format != "nvfp4":
        assert bool((torch.frexp(grid.scale)[0] == 0.5).all())


def mapping_of(activation: dict[str, Any] | None, weight: dict[str, Any]) -> qt.QConfigMapping:
    spec = None if activation is None else qt.QuantSpec(**activation)
    return qt.QConfigMapping().set_global(qt.QConfig(spec, qt.QuantSpec(**weight)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


DYNAMIC = {"dynamic": True, "symmetric": True}
ROUTES = [
    *(({**DYNAMIC, **fields}, {"axis": 0}) for fields in TOKENS[:5]),
    ({"dynamic": True, "format": "e4m3"}, {"axis": 0, "format": "e4m3"}),
    ({"format": "e4m3"}, {"axis": 0, "format": "e4m3"}),
    ({"format": "e5m2"}, {"axis": 0, "format": "e5m2"}),
    ({"format": "e2m1", "bits": 4}, {"format": "e2m1", "bits": 4}),
    ({}, {"bits": 4, "axis": 1, "group_size": 32}),
    *(({"format": format}, {"format": format}) for format in BLOCKS),
]


@made_once
def quantized(route: str, specs: tuple[dict[str, Any], dict[str, Any]]) -> nn.Module:
    torch.manual_seed(0)
    mapping = mapping_of(*specs)
    if route == "prepare":
        return qt.prepare(Net().train(), X, backend="onnxruntime", qconfig_mapping=mapping)
    return qt.quant_modules.replace(Net().train(), qconfig_mapping=mapping, backend="tensorrt")


@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("specs", ROUTES, ids=str)
def test_formats_train_and_convert_to_what_they_compute(route: str, specs: Any) -> None:
    model = quantized(route, specs)
    if not all(q.dynamic or q.of_weight for q in qt.quantizers_of(model).values()):
        qt.calibrate(model, [X], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert all(bool(p.grad.isfinite().all()) and bool((p.grad != 0).any()) for p in model.parameters())
    y = model.eval()(X)
    assert not torch.equal(y, Net()(X))
    converted = qt.convert(model)
    assert torch.equal(converted(X), y)
    assert not qt.quantizers_of(converted)
    restored = qt.convert(quantized(route, specs), state_dict=converted.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(converted)), restored):
        assert torch.equal(other(X), y)
    loaded = quantized(route, specs)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded.eval()(X), y)
    with qt.disable_quantization(converted):
        assert not torch.equal(converted(X), y)
    name = specs[0].get("format", "int8 dynamic" if specs[0] == DYNAMIC else "int")
    assert name in str(qt.quantization_report(model))


@pytest.mark.parametrize("specs", [ROUTES[0], ROUTES[2], ROUTES[5], ROUTES[-1]], ids=str)
def test_compiled_code_has_no_graph_breaks(specs: Any) -> None:
    torch.compiler.reset()
    eager, model = (quantized("prepare", specs) for _ in range(2))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, wanted = compiled(X), eager(X)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found.square().mean().backward()
    wanted.square().mean().backward()
    torch.testing.assert_close(model.up.weight.grad, eager.up.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("fields", [{}, {"bits": 4}, {"signed": False, "symmetric": False}], ids=str)
def test_dynamic_integers_are_written_as_ops(tmp_path: Any, fields: dict[str, Any], exporter: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    mapping = mapping_of({**DYNAMIC, **fields}, {"axis": 0})
    model = qt.convert(qt.prepare(nn.Linear(64, 8).eval(), X, backend="onnxruntime", qconfig_mapping=mapping))
    qt.export_onnx(model, X, tmp_path / "m.onnx", exporter=exporter, input_names=["x"])
    options = runtime.SessionOptions()  # optimized, onnxruntime quantizes the input of the product once more
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"), options, providers=["CPUExecutionProvider"])
    found = torch.tensor(session.run(None, {"x": X.numpy()})[0])
    torch.testing.assert_close(found, model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "activation", [*({"format": name} for name in BLOCKS), {"format": "e4m3", "dynamic": True}], ids=str
)
def test_other_dynamic_activations_are_not_written(tmp_path: Any, activation: dict[str, Any]) -> None:
    pytest.importorskip("onnxruntime")
    model = quantized("prepare", (activation, {"axis": 0})).eval()
    with pytest.raises(
        ValueError, match="activation_quantizers.x' cannot be written: its scales of .* take format='e4m3'"
    ):
        qt.export_onnx(model, X, tmp_path / "m.onnx")


@pytest.mark.parametrize("format", BLOCKS)
def test_weights_in_blocks_are_written_in_blocks(tmp_path: Any, format: str) -> None:
    onnx = pytest.importorskip("onnx")
    model = quantized("prepare", ({"format": "e4m3"}, {"format": format}))
    qt.calibrate(model, [X], progress=False)
    qt.export_onnx(model.eval(), X, tmp_path / "m.onnx", verify=False)
    nodes = onnx.load(str(tmp_path / "m.onnx")).graph.node
    sizes = {
        a.i for node in nodes if node.op_type == "DequantizeLinear" for a in node.attribute if a.name == "block_size"
    }
    assert sizes == {16 if format == "nvfp4" else 32}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dynamic": True, "axis": 0}, "dynamic=True computes a scale for each token.* needs axis=None, got 0"),
        ({"dynamic": True, "quantizer": "lsq"}, "dynamic=True .* needs quantizer='fixed', got 'lsq'"),
        ({"dynamic": True, "observer": "histogram"}, "dynamic=True .* needs observer='minmax', got 'histogram'"),
        (
            {"dynamic": True, "format": "mxfp4"},
            "dynamic=True needs format='int'.* got 'mxfp4'; the blocks of activations",
        ),
        ({"dynamic": 1}, "dynamic must be true or false, got 1"),
        ({"format": "mxfp4", "bits": 6}, "format='mxfp4' needs bits=4, got 6"),
        ({"format": "mxfp8", "group_size": 16}, "format='mxfp8' needs group_size=32, got 16"),
        ({"format": "nvfp4", "quantizer": "lsq"}, "format='nvfp4' needs quantizer='fixed', got 'lsq'"),
        ({"format": "mxfp4", "symmetric": False}, "format='mxfp4' needs symmetric=True, got False"),
    ],
    ids=str,
)
def test_specs_that_exclude_each_other(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        qt.QuantSpec(**fields)


def test_a_weight_is_not_dynamic_and_a_block_fits_its_axis() -> None:
    with pytest.raises(
        ValueError, match="quantizer '0.weight_quantizer': dynamic=True is for activations, got a weight"
    ):
        qt.prepare(
            nn.Sequential(nn.Linear(4, 2)), qconfig_mapping=mapping_of(None, {"dynamic": True}), backend="tensorrt"
        )
    with pytest.raises(ValueError, match="layer '0': group_size must divide dimension -1 of a tensor of shape"):
        qt.prepare(
            nn.Sequential(nn.Linear(48, 2)), qconfig_mapping=mapping_of(None, {"format": "mxfp4"}), backend="tensorrt"
        )
    with pytest.raises(ValueError, match="must divide dimension -1"):
        qt.TensorQuantizer(qt.QuantSpec(format="mxfp4"))(torch.randn(4, 48))


def test_a_spec_of_blocks_survives_a_dict() -> None:
    for format in BLOCKS:
        spec = qt.QuantSpec(format=format)
        assert (spec.axis, spec.bits) == (-1, 8 if format == "mxfp8" else 4)
        assert qt.QuantSpec.from_dict(spec.to_dict()) == spec
        assert spec.describe() == format


@pytest.mark.parametrize("shape", [(), (64,), (0, 64), (2, 0, 64)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    y = qt.TensorQuantizer(qt.QuantSpec(dynamic=True))(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y, x, rtol=0.02, atol=0.01)
