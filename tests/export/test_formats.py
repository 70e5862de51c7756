"""Codes of 4 bits, small float formats and models in half precision: how files store them, and that codes are the same."""

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.frozen import Grid

EXPORTERS = ["dynamo", "torchscript"]
SHAPE = (4, 8, 6, 6)
WEIGHTS = 8 * 8 * 9 + 512 * 12  # of the layers that every backend quantizes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.fc = nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 2, 2, groups=2), nn.Linear(512, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.up(torch.relu(self.conv(x)))).flatten(1))


def converted(activation: Any, weight: Any, backend: str = "onnxruntime") -> nn.Module:
    torch.manual_seed(0)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    prepared = qt.prepare(Net().eval(), torch.randn(SHAPE), backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    return qt.convert(prepared)


def types_of(path) -> Counter:
    graph = onnx.load(str(path)).graph
    return Counter(
        TensorProto.DataType.Name(t.data_type) for t in graph.initializer for _ in range(int(np.prod(t.dims)))
    )


def nodes_of(path) -> Counter:
    return Counter(node.op_type for node in onnx.load(str(path)).graph.node)


def assert_exact(codes: Any) -> None:
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0
    assert codes.weight_codes.compared >= WEIGHTS
    assert codes.missing == ()


# ---- 4 bits


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("signed", [True, False])
def test_weights_of_4_bits_are_packed(tmp_path, exporter: str, signed: bool) -> None:
    weight = qt.QuantSpec(bits=4, axis=0, signed=signed, symmetric=signed, narrow=True)
    model, x = converted(qt.QuantSpec(signed=False, symmetric=False), weight), torch.randn(SHAPE)
    result = qt.export_onnx(model, x, tmp_path / "m.onnx", opset=21, exporter=exporter)
    assert_exact(result.verification)
    assert types_of(result.path)["INT4" if signed else "UINT4"] >= WEIGHTS
    codes = {t.name: t for t in onnx.load(result.path).graph.initializer if t.name.endswith(".codes")}
    assert {len(t.raw_data) for t in codes.values()} >= {512 * 12 // 2}
    eight = qt.export_onnx(model, x, tmp_path / "m.onnx", exporter=exporter)
    assert eight.opset == 18
    assert eight.bytes - result.bytes > 3000


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("signed", [True, False])
def test_activations_of_4_bits_are_clipped_codes_of_8(tmp_path, exporter: str, signed: bool) -> None:
    """With codes of 4 bits onnxruntime does not load the file at its default optimizations."""
    for narrow in (False, True):
        activation = qt.QuantSpec(bits=4, signed=signed, symmetric=signed, narrow=narrow)
        model = converted(activation, qt.QuantSpec(bits=4, axis=0))
        result = qt.export_onnx(model, 2 * torch.randn(SHAPE), tmp_path / "m.onnx", opset=21, exporter=exporter)
        assert_exact(result.verification)
        assert nodes_of(result.path)["Clip"] == 3  # of three activations; a pair that is repeated needs none
        onnxruntime.InferenceSession(result.path, providers=["CPUExecutionProvider"])


# ---- small floats


@pytest.mark.sweep(2)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_8_bit_floats_have_the_codes_of_training(tmp_path, format: str, backend: str, exporter: str) -> None:
    model = converted(qt.QuantSpec(format=format), qt.QuantSpec(format=format, axis=0), backend)
    x = 3 * torch.randn(SHAPE)  # beyond the calibrated ranges
    result = qt.export_onnx(model, x, tmp_path / "m.onnx", exporter=exporter)
    assert result.opset == 19
    assert_exact(result.verification)
    assert result.verification.layer_codes.are_ties()
    name = {"e4m3": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2"}[format]
    assert (types_of(result.path)[name] > 6000) == (backend == "onnxruntime")
    with pytest.raises(ValueError, match=rf"opset must be at least 19 for .+, which quantizes to {format}.*, got 18"):
        qt.export_onnx(model, x, tmp_path / "m.onnx", exporter=exporter, opset=18)


def test_a_changed_code_of_a_small_float_is_noticed(tmp_path) -> None:
    model, x = converted(qt.QuantSpec(format="e4m3"), qt.QuantSpec(format="e4m3", axis=0)), torch.randn(SHAPE)
    path = qt.export_onnx(model, x, tmp_path / "m.onnx").path
    with torch.no_grad():
        model.get_submodule("conv").weight[0, 0, 0, 0] *= -1.5
    assert qt.export.verify_onnx(model, x, path).weight_codes.differing == 1


MX = {"axis": 1, "group_size": 8, "pow2_scale": True}


def stored(path, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the values that the standard's reference implementation dequantizes, and the tensors that it takes."""
    model = onnx.load(str(path))
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    node = next(n for n in model.graph.node if n.name == name)
    taken = {key: arrays[key] for key in node.input}
    inputs = [
        helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for key, a in taken.items()
    ]
    output = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "one", inputs, [output])
    alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    return ReferenceEvaluator(alone).run(None, taken)[0], taken


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("spec", "opset", "types"),
    [
        ({"format": "e2m1", "bits": 4, "axis": 0}, 23, ("float4_e2m1fn", "float32")),
        ({"format": "e2m1", "bits": 4, **MX}, 24, ("float4_e2m1fn", "float8_e8m0fnu")),
        ({"format": "e4m3", **MX}, 24, ("float8_e4m3fn", "float8_e8m0fnu")),
        ({"format": "e5m2", **MX}, 25, ("float8_e5m2", "float8_e8m0fnu")),
    ],
    ids=str,
)
def test_formats_that_onnxruntime_does_not_run(
    tmp_path, spec: dict[str, Any], opset: int, types, exporter: str
) -> None:
    model, x = converted(None, qt.QuantSpec(**spec)), torch.randn(SHAPE)
    with pytest.raises(RuntimeError, match="onnxruntime cannot run the file on the CPU: .+ pass verify=False"):
        qt.export_onnx(model, x, tmp_path / "m.onnx", opset=opset, exporter=exporter)
    path = qt.export_onnx(model, x, tmp_path / "m.onnx", opset=opset, exporter=exporter, verify=False).path
    for layer in ("conv", "fc"):
        values, taken = stored(path, f"{layer}.weight_quantizer.dequantize")
        codes, scale, _ = taken.values()
        assert (codes.dtype.name, scale.dtype.name) == types
        weight = model.get_submodule(layer)
        np.testing.assert_array_equal(values, weight.weight_quantizer(weight.weight).detach().numpy())


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("channels", [{}, {"axis": 0}, {"axis": 1, "group_size": 16}], ids=str)
def test_codes_of_small_floats_are_places(format: str, channels: dict[str, int]) -> None:
    spec = qt.QuantSpec(format=format, bits=4 if format == "e2m1" else 8, **channels)
    x = torch.randn(6, 64) * torch.logspace(-3, 3, 64)
    scale = torch.rand(spec.scale_shape(x.shape)) + 0.1
    grid = Grid(scale, None, spec)
    codes = grid.codes(x)
    assert torch.equal(grid.values(codes), grid(x))
    assert codes.unique().numel() > (10 if format == "e2m1" else 100)
    assert torch.equal(grid.codes(grid(x)), codes)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("format", ["e4m3", "e2m1"])
@pytest.mark.parametrize("backend", ["tensorrt10", "openvino", "academic", "snpe"])
def test_formats_on_the_whole_route(tmp_path, backend: str, format: str) -> None:
    spec = {"format": format, "bits": 4 if format == "e2m1" else 8}
    qconfig = qt.QConfig(qt.QuantSpec(**spec), qt.QuantSpec(axis=0, **spec))
    mapping, x = qt.QConfigMapping().set_global(qconfig), torch.randn(SHAPE)
    assert qt.QConfigMapping.from_json(mapping.to_json()) == mapping
    replaced = qt.quant_modules.replace(Net(), qconfig_mapping=mapping, backend="tensorrt10")
    for model in (qt.prepare(Net().train(), x, backend=backend, qconfig_mapping=mapping), replaced):
        qt.calibrate(model, [x], progress=False)
        model.train()(x).square().mean().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        frozen = qt.convert(model)
        torch.testing.assert_close(frozen(x), model.eval()(x), rtol=1e-4, atol=1e-4)
        assert format in str(qt.quantization_report(model))
        assert {m.spec.format for m in frozen.modules() if isinstance(m, Grid)} >= {format}
        qt.export_onnx(frozen, x, tmp_path / "m.onnx", verify=format == "e4m3")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "e2m1"}, "format='e2m1' needs bits=4, got 8"),
        ({"format": "e4m3", "bits": 4}, "format='e4m3' needs bits=8, got 4"),
        ({"format": "e4m3", "signed": False}, "format='e4m3' needs signed=True, got False"),
        ({"format": "e5m2", "symmetric": False}, "format='e5m2' needs symmetric=True, got False"),
        ({"format": "e4m3", "quantizer": "lsq"}, "format='e4m3' needs quantizer='fixed', got 'lsq'"),
        ({"format": "e4m4"}, "unknown format 'e4m4'; did you mean 'e4m3'"),
    ],
)
def test_specs_that_a_format_does_not_have(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        qt.QuantSpec(**options)


# ---- half precision


def half_model(pow2: bool, dtype: torch.dtype, backend: str = "onnxruntime") -> nn.Module:
    activation = qt.QuantSpec(pow2_scale=pow2, signed=False, symmetric=False)
    return converted(activation, qt.QuantSpec(axis=0, pow2_scale=pow2), backend).to(dtype)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
def test_nodes_of_half_models_are_half_where_their_scales_are_exact(tmp_path, backend: str, exporter: str) -> None:
    model, x = half_model(True, torch.float16, backend), torch.randn(SHAPE).half()
    for opset, casts in ((19, False), (21, False), (18, True)):
        result = qt.export_onnx(model, x, tmp_path / "m.onnx", opset=opset, exporter=exporter)
        assert_exact(result.verification)
        assert bool(nodes_of(result.path)["Cast"]) == casts


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_nodes_of_half_models_are_float32_for_other_scales(tmp_path, exporter: str) -> None:
    model, x = half_model(False, torch.float16), torch.randn(SHAPE).half()
    result = qt.export_onnx(model, x, tmp_path / "m.onnx", opset=21, exporter=exporter)
    assert_exact(result.verification)
    nodes = nodes_of(result.path)
    assert nodes["Cast"] <= nodes["QuantizeLinear"] + nodes["DequantizeLinear"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(("pow2", "opset", "casts"), [(True, 22, 0), (False, 23, 0), (False, 22, 9)])
def test_nodes_of_bfloat16_models(tmp_path, pow2: bool, opset: int, casts: int, exporter: str) -> None:
    model, x = half_model(pow2, torch.bfloat16), torch.randn(SHAPE).bfloat16()
    path = qt.export_onnx(model, x, tmp_path / "m.onnx", opset=opset, exporter=exporter, verify=False).path
    assert (nodes_of(path)["Cast"] > 0) == (casts > 0)
    if pow2 or opset < 23:
        return
    values, _ = stored(path, "fc.weight_quantizer.dequantize")
    layer = model.get_submodule("fc")
    np.testing.assert_array_equal(
        values.astype(np.float32), layer.weight_quantizer(layer.weight).float().detach().numpy()
    )
