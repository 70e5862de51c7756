"""Files in float16: their types, the ops that stay in float32, and what float16 does not have."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export.files.quantizer_nodes import quantizer_nodes
from qtoolkit.export.float16 import computing_in_float16
from qtoolkit.export.verification.follower import Followed, Follower, NodeCodes, by_quantizer
from qtoolkit.op_kinds.float32 import FLOAT32_OPS

EXPORTERS = ("dynamo", "torchscript")
QDQ = ("QuantizeLinear", "DequantizeLinear")
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Products of activations with a softmax between them, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1)
        return self.out((weights @ v + x).mean(1))


def convolutions() -> nn.Sequential:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), nn.LogSoftmax(-1))


MODELS = {
    "convolutions": (convolutions, X),
    "attention": (Attention, torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))),
}


def converted(model: nn.Module, x: Any, scale_dtype: str = "float16", backend: str = "tensorrt") -> nn.Module:
    spec = qt.QuantSpec(scale_dtype=scale_dtype)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec))
    prepared = qt.prepare(model.eval(), x, backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [x], progress=False)
    return qt.convert(prepared)


def written(name: str, folder: Path, **options: Any) -> qt.ExportResult:
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = converted(make(), x)
    options = {"float_type": "float16", "progress": False, **options}
    return qt.export_onnx(model, x, folder / "model.onnx", **options)


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """The type of each tensor of a model, by strict inference."""
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    found = {each.name: each.type.tensor_type.elem_type for each in values}
    return found | {each.name: each.data_type for each in graph.initializer}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("opset", [None, 21, 23])
@pytest.mark.parametrize("name", MODELS)
def test_floats_are_float16_but_in_the_listed_ops(name: str, opset: int | None, exporter: str, tmp_path: Path) -> None:
    result = written(name, tmp_path, exporter=exporter, opset=opset)
    assert result.verification is not None
    assert result.verification.weight_codes.differing == 0
    assert result.verification.quantizer_codes.differing == 0
    assert result.opset == (opset or 19)
    model = onnx.load(result.path)
    types, graph = types_of(model), model.graph
    ends = {each.name for each in (*graph.input, *graph.output)}
    assert {types[end] for end in ends} == {TensorProto.FLOAT}
    made_by = {name: node for node in graph.node for name in node.output}
    takers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for each in node.input:
            takers.setdefault(each, []).append(node)
    in_float32 = [n for n, dtype in types.items() if dtype == TensorProto.FLOAT and n not in ends]
    constants = {each.name for each in graph.initializer}
    for each in in_float32:  # from a Cast to a listed op, between two, or from one to a Cast
        source = [made_by[each].op_type] if each in made_by else []
        around = {*source, *(node.op_type for node in takers.get(each, []))} - {"Cast", "Resize"}
        assert around <= {*FLOAT32_OPS}, (each, around)
        assert each in constants or around
    casts = [node for node in graph.node if node.op_type == "Cast" and made_by.get(node.input[0], node).op_type in QDQ]
    assert not casts
    assert not qt.export.lint(result.path, "tensorrt")


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_inputs_and_outputs_may_be_float16_too(exporter: str, tmp_path: Path) -> None:
    result = written("convolutions", tmp_path, exporter=exporter, keep_io_types=False, output_names=["y"])
    types, graph = types_of(onnx.load(result.path)), onnx.load(result.path).graph
    assert [types[each.name] for each in (*graph.input, *graph.output)] == [TensorProto.FLOAT16] * 2
    assert graph.output[0].name == "y"


def test_a_result_in_float32_is_taken_by_the_next_op_without_casts(tmp_path: Path) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(-self.fc(x).abs())
            return y / y.sum(-1, keepdim=True)

    x = torch.randn(4, 8)
    result = qt.export_onnx(converted(Norm(), x), x, tmp_path / "m.onnx", float_type="float16", progress=False)
    nodes = {node.output[0]: node for node in onnx.load(result.path).graph.node}
    (total,) = (node for node in nodes.values() if node.op_type == "ReduceSum")
    assert nodes[total.input[0]].op_type == "Exp"


def test_other_inputs_stay_and_the_model_is_not_changed(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(10, 8), nn.Linear(8, 4)

        def forward(self, ids: Tensor, scale: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"y": F.relu(self.fc(self.table(ids) * scale["of"]))}

    given = (torch.arange(6).reshape(2, 3), {"of": torch.rand(2, 3, 1)})
    model = converted(Words(), given)
    path = tmp_path / "m.onnx"
    qt.export_onnx(model, given, path, float_type="float16", dynamic_batch=True, progress=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    types = [each.type.tensor_type.elem_type for each in onnx.load(path).graph.input]
    assert types == [TensorProto.INT64, TensorProto.FLOAT]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    (y,) = session.run(None, dict(zip(names, (given[0].numpy(), given[1]["of"].numpy()), strict=True)))
    np.testing.assert_allclose(y, model(*given)["y"].detach().numpy(), atol=2e-2)


# ---- the comparison with the model, which is in float32


def in_reference_evaluator(model: nn.Module, x: Tensor, path: Path) -> Followed:
    """Compare a model in float16 with its file as ONNX's own evaluator computes it, layer by layer."""
    proto = onnx.load(path)
    nodes = quantizer_nodes(proto.graph)
    outputs = [helper.make_tensor_value_info(node.codes, TensorProto.INT8, None) for node in nodes]
    proto.graph.output.extend(outputs)
    names = [each.name for each in proto.graph.output]
    values = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    codes = dict(zip(names, values, strict=True))
    with computing_in_float16(model, x, "test") as in_float16:
        follower = Follower(in_float16, (x,), {})
        return follower.layer_by_layer(
            by_quantizer((node.quantizer, NodeCodes(codes[node.codes], node.is_constant)) for node in nodes),
            complete=True,
        )


@pytest.mark.parametrize("name", MODELS)
def test_verify_compares_with_the_model_in_float16_and_says_what_holds(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = converted(MODELS[name][0](), MODELS[name][1]), MODELS[name][1]
    path = tmp_path / "m.onnx"
    qt.export_onnx(model, x, path, float_type="float16", progress=False)
    found = qt.export.verify(model, x, path, progress=False)
    (codes,) = found.runtimes.values()
    assert found.check() == {"onnxruntime": qt.export.Verdict.FLOAT16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert 0 < codes.layer_codes.differing == codes.layer_codes.ties  # all are neighbours, near a boundary
    assert codes.codes.steps == codes.layer_codes.steps == 1
    assert {layer.kernel for layer in codes.integer_layers} <= {"MatMulIntegerToFloat"}
    text = str(found)
    assert "verdict: rounding of float16" in text
    assert re.search(
        r"\d+ of [\d,]+ differ, by 1 steps at most: \d+ of values that float16 rounds .*, and 0 of others\.", text
    )
    assert f"it computes {len(codes.float_layers)} of {len(codes.layers)} layers and ops in float" in text
    layers = qt.export.verify_onnx(model, x, path, progress=False)
    layers.check()
    assert layers.weight_codes.differing == layers.quantizer_codes.differing == 0
    comparison = qt.export.compare_runtimes(path, progress=False)
    assert "The file is for GPUs." in str(comparison)


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_evaluator_has_neighbours_alone(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = converted(MODELS[name][0](), MODELS[name][1]), MODELS[name][1]
    path = tmp_path / "m.onnx"
    qt.export_onnx(model, x, path, float_type="float16", progress=False)
    followed = in_reference_evaluator(model, x, path)
    assert not followed.missing
    assert followed.stored.compared
    counts = followed.counts.values()
    assert sum(count.differing for count in counts)  # it divides in float16
    assert all(count.are_ties() for count in counts)  # it sums in float16 too, and its weights have other codes
    assert followed.stored.steps <= 1


def test_a_file_of_another_model_is_different(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "m.onnx"
    qt.export_onnx(converted(convolutions(), X), X, path, float_type="float16", progress=False)
    with pytest.raises(RuntimeError, match="the weights of the file differ from the model's"):
        qt.export.verify(converted(convolutions(), X), X, path, progress=False).check()


def test_integer_kernels_are_off_in_the_comparison_and_on_after_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = qt.QuantSpec(scale_dtype="float16")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec))
    prepared = qt.prepare(convolutions().eval(), X, backend="tensorrt", qconfig_mapping=mapping)
    qt.calibrate(prepared, [X], progress=False)
    path = tmp_path / "m.onnx"
    qt.export_onnx(prepared, X, path, float_type="float16", progress=False)
    integer = qt.convert(prepared, arithmetic="integer")
    before = integer(X)
    (codes,) = qt.export.verify(integer, X, path, progress=False).runtimes.values()
    assert codes.verdict is qt.export.Verdict.FLOAT16
    assert not codes.on_codes
    assert torch.equal(integer(X), before)


# ---- what float16 does not have


class Large(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.fc, self.act, self.last = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.fc(x) * self.factor) / self.factor)


def test_numbers_above_its_largest_are_named(tmp_path: Path) -> None:
    x, path = torch.rand(2, 4) + 1, tmp_path / "m.onnx"
    model = converted(Large(1e6), x, scale_dtype="float32")
    with pytest.raises(
        ValueError, match=r"'act' returns NaN or infinities for the example inputs: a value is above 65,504"
    ):
        qt.export_onnx(model, x, path, float_type="float16")
    large = Large(1.0)
    with torch.no_grad():
        large.last.bias.fill_(1e5)
    with pytest.raises(ValueError, match="has no number above 65,504, and 'last.bias' has 100000; write the file with"):
        qt.export_onnx(converted(large, x), x, path, float_type="float16")
    assert not path.exists()


def test_a_model_that_makes_float32_by_itself_is_an_error(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x * torch.ones(x.shape, dtype=torch.float32))

    x = torch.rand(2, 4)
    with pytest.raises(
        RuntimeError, match=r'does not run with float_type="float16" \(.*\): it may make tensors of float32'
    ):
        qt.export_onnx(converted(Own(), x), x, tmp_path / "m.onnx", float_type="float16")


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    model, path = converted(convolutions(), X), tmp_path / "m.onnx"
    with pytest.raises(
        ValueError, match='float_type="float16" needs opset 19 or newer, whose .*, got 18; leave opset out'
    ):
        qt.export_onnx(model, X, path, opset=18, float_type="float16")
    with pytest.raises(ValueError, match="unknown float_type of export_onnx: 'half'"):
        qt.export_onnx(model, X, path, float_type="half")
    with pytest.raises(ValueError, match='float_type="float32" is for a model in float32, got torch.float16; pass'):
        qt.export_onnx(converted(convolutions(), X).half(), X.half(), path, float_type="float32")


def test_scales_that_are_no_float16_numbers_are_named(tmp_path: Path) -> None:
    model, path = converted(convolutions(), X, scale_dtype="float32"), tmp_path / "m.onnx"
    with pytest.warns(UserWarning, match=r"the scales of 7 of 7 quantizers are no float16 numbers: .* between Casts"):
        qt.export_onnx(model, X, path, float_type="float16", progress=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        written("convolutions", tmp_path)
    assert not [each for each in found if re.search("float16", str(each.message))]


# ---- how runtimes compute the nodes


def test_onnxruntime_divides_in_float32_and_the_reference_in_float16() -> None:
    """So onnxruntime gives the codes of qtoolkit's quantizers, and ONNX's own evaluator neighbours of ties."""
    random = np.random.default_rng(0)
    scale = np.float16(0.0301)
    x = np.float16(np.float32(scale) * (random.integers(-120, 120, 4000) + random.choice([0.5, 0.49, 0.1], 4000)))
    node = helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [4000])]
    ends += [helper.make_tensor_value_info("y", TensorProto.INT8, [4000])]
    grid = [numpy_helper.from_array(np.array(scale), "scale"), numpy_helper.from_array(np.int8(0).reshape(()), "zero")]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], grid)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (codes,) = session.run(None, {"x": x})
    ours = qt.ops.quantize(torch.from_numpy(x), torch.tensor(float(scale))).numpy()
    np.testing.assert_array_equal(codes, ours)
    (others,) = ReferenceEvaluator(model).run(None, {"x": x})
    assert 0 < (others != ours).sum() < 2000
    assert np.abs(others.astype(int) - ours).max() == 1
