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
from qtoolkit.export.rounded_once import PRODUCTS, RoundedOnce, rounded
from qtoolkit.export.verification.follower import Followed, Follower, NodeCodes, by_quantizer
from qtoolkit.nn import QuantConv2d
from qtoolkit.op_kinds.float32 import FLOAT32_OPS
from tests.nets import settled

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


class Bottleneck(nn.Module):
    """As in ResNet-50: an add of a convolution and its input, and ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()), nn.MaxPool2d(2)
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.down, self.last = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        x = F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))) + self.down(x))
        return self.last(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Inverted(nn.Module):
    """As in MobileNetV2 and V3: depthwise convolutions, ReLU6, a gate with a hard sigmoid, hard swish."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep, self.narrow = (
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Conv2d(8, 3, 1),
        )
        self.squeeze, self.excite, self.act = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), nn.Hardswish()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.deep(self.act(self.wide(x))))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return (x + self.narrow(y * gate)).mean((2, 3))


class Detector(nn.Module):
    """As in YOLO: SiLUs, a split and a concat, max pools of one input, a nearest resize, boxes by a softmax, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.split, self.inner = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.merge, self.pool, self.up = nn.Conv2d(12, 8, 1), nn.MaxPool2d(3, 1, 1), nn.Upsample(scale_factor=2)
        self.neck, self.boxes, self.classes = nn.Conv2d(27, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(8, 5, 1)
        self.register_buffer("bins", torch.arange(4.0))
        self.register_buffer("anchors", torch.stack(torch.meshgrid(*2 * [torch.arange(8.0)], indexing="ij")).flatten(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.silu(self.split(F.silu(self.down(x)))).chunk(2, 1)
        y = F.silu(self.merge(torch.cat((a, b, b + F.silu(self.inner(b))), 1)))
        pooled = self.pool(y)
        y = F.silu(self.neck(torch.cat((x, self.up(torch.cat((y, pooled, self.pool(pooled)), 1))), 1)))
        sides = self.boxes(y).flatten(2).unflatten(1, (4, 4)).softmax(2)
        sides = (sides * self.bins[:, None]).sum(2)
        corners = torch.cat((self.anchors - sides[:, :2], self.anchors + sides[:, 2:]), 1)
        return corners, self.classes(y).flatten(2).sigmoid()


class Transformer(nn.Module):
    """As in ViT: patches, a class token, positions, blocks of torch's attention and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.Linear(8, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.mlp(x))[:, 0])


def convolutions() -> nn.Sequential:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), nn.LogSoftmax(-1))


MODELS = {
    "convolutions": (convolutions, X),
    **{each.__name__: (each, X) for each in (Bottleneck, Inverted, Detector, Transformer)},
    "attention": (Attention, torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))),
}


def converted(model: nn.Module, x: Any, backend: str = "tensorrt") -> nn.Module:
    prepared = qt.prepare(model.eval(), x, backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    return qt.convert(prepared)


def written(name: str, folder: Path, **options: Any) -> qt.ExportResult:
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = converted(make(), x)
    return qt.export_onnx(model, x, folder / "model.onnx", **{"progress": False, **options})


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """The type of each tensor of a model, by strict inference."""
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    found = {each.name: each.type.tensor_type.elem_type for each in values}
    return found | {each.name: each.data_type for each in graph.initializer}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("opset", [None, 20, 21, 22, 23])
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
    # From a Cast to a listed op, between two, or from one to a Cast or a quantizer; or the sizes of a resize.
    for each in in_float32:
        source = [made_by[each].op_type] if each in made_by else []
        around = {*source, *(node.op_type for node in takers.get(each, []))} - {
            "Cast",
            "Resize",
            "Constant",
            "QuantizeLinear",
        }
        assert around <= {*FLOAT32_OPS}, (each, around)
        assert each in constants or around or source == ["Constant"]
    inner = [node for node in graph.node if node.op_type == "Cast" and node.input[0] not in ends]
    assert not [node for node in inner if made_by[node.input[0]].op_type in QDQ]
    assert not [node for node in inner for each in takers.get(node.output[0], []) if each.op_type in QDQ]
    assert not qt.export.lint(result.path, "tensorrt")


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_inputs_and_outputs_may_be_float16_too(exporter: str, tmp_path: Path) -> None:
    result = written("convolutions", tmp_path, exporter=exporter, keep_io_types=False, output_names=["y"])
    types, graph = types_of(onnx.load(result.path)), onnx.load(result.path).graph
    assert [types[each.name] for each in (*graph.input, *graph.output)] == [TensorProto.FLOAT16] * 2
    assert graph.output[0].name == "y"


def test_a_file_that_takes_float16_is_verified_with_the_inputs_of_its_export(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    model = converted(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), x)
    path = qt.export_onnx(model, x, tmp_path / "m.onnx", keep_io_types=False, progress=False).path
    assert qt.export.verify_onnx(model, x, path, progress=False).weight_codes.differing == 0
    qt.export.verify(model, x, path, progress=False).check()
    with pytest.raises(ValueError, match=r"'input' of the file is float16 of shape \(4, 8\), got .* of shape \(2, 8\)"):
        qt.export.verify_onnx(model, x[:2], path, progress=False)


def test_a_model_in_float16_gives_the_file_of_its_target(tmp_path: Path) -> None:
    """It takes and returns float16, as the model does, and no Cast stands at its pairs."""
    model = converted(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 3)), X).half()
    result = qt.export_onnx(model, X.half(), tmp_path / "m.onnx", progress=False)
    assert result.opset == 19
    assert not {node.op_type for node in onnx.load(result.path).graph.node} & {"Cast", "Sigmoid"}
    assert not qt.export.lint(result.path, "tensorrt")
    qt.export.verify(model, X.half(), result.path, progress=False).check()


@pytest.mark.parametrize("held", [True, False], ids=["buffer", "constant"])
def test_masks_beyond_float16_are_named_with_a_remedy(held: bool, tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(8, 8).triu(1) * -1e9)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return (y + self.mask if held else y.masked_fill(self.mask < 0, -1e9)).softmax(-1)

    x = torch.randn(8, 8)
    model = Masked()
    if not held:
        model.mask = torch.ones(8, 8).triu(1) * -1
    model = converted(model, x)
    with pytest.raises(ValueError, match="no number above 65,504, but .*such as -1e4 for the -1e9 of a mask, or write"):
        qt.export_onnx(model, x, tmp_path / "m.onnx", progress=False)
    assert not list(tmp_path.iterdir())


def test_a_result_in_float32_is_taken_by_the_next_op_without_casts(tmp_path: Path) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(-self.fc(x).abs())
            return y / y.sum(-1, keepdim=True)

    x = torch.randn(4, 8)
    result = qt.export_onnx(converted(Norm(), x), x, tmp_path / "m.onnx", progress=False)
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
    qt.export_onnx(model, given, path, dynamic_batch=True, progress=False)
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


@pytest.mark.slow
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
    assert codes.layer_codes.steps == 1
    assert {layer.kernel for layer in codes.integer_layers} <= {"MatMulIntegerToFloat"}
    text = str(found)
    assert "verdict: rounding of float16" in text
    assert re.search(
        r"\d+ of [\d,]+ differ, by at most 1 steps: \d+ at rounding boundaries of float16, and 0 elsewhere\.", text
    )
    assert f"it computes {len(codes.float_layers)} of {len(codes.layers)} layers and ops in float" in text
    layers = qt.export.verify_onnx(model, x, path, progress=False)
    layers.check()
    assert layers.weight_codes.differing == layers.quantizer_codes.differing == 0
    comparison = qt.export.compare_runtimes(path, progress=False)
    assert "Use the file on GPUs." in str(comparison)


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


# ---- the codes of weights


def wide(**fields: Any) -> tuple[nn.Module, Tensor]:
    """A converted model with enough weights for ties, most of which lie between two numbers of float16."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3))
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(**fields)))
    prepared = qt.prepare(settled(model).eval(), x, backend="tensorrt", qconfig_mapping=mapping)
    qt.calibrate(prepared, [x], progress=False)
    return qt.convert(prepared), x


def stored_values(path: Path) -> list[np.ndarray]:
    """What the quantizers of weights return, before a Cast behind them."""
    graph = onnx.load(path).graph
    constants = {each.name: numpy_helper.to_array(each).astype(np.float32) for each in graph.initializer}
    nodes = {node.output[0]: node for node in graph.node}

    def constant(name: str) -> np.ndarray | None:
        node = nodes.get(name)
        if node is None:
            return constants.get(name)
        x = constant(node.input[0])
        if x is None or node.op_type in ("Cast", "Clip"):  # codes of few bits are clipped between the two nodes
            return x
        scale = constants[node.input[1]].reshape(-1, *[1] * (x.ndim - 1))
        return np.clip(np.rint(x / scale), -128, 127) if node.op_type == "QuantizeLinear" else x * scale

    found = [constant(node.output[0]) for node in graph.node if node.op_type == "DequantizeLinear"]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("integer_weights", [False, True])
@pytest.mark.parametrize("fields", [{}, {"quantizer": "dorefa", "bits": 7}, {"scale_dtype": "float32"}], ids=str)
def test_weights_keep_the_codes_of_training(
    fields: dict[str, Any], integer_weights: bool, exporter: str, tmp_path: Path
) -> None:
    """Rounded to float16 before they are quantized, about one weight in a hundred would have the next code."""
    model, x = wide(**fields)
    options = {"exporter": exporter, "integer_weights": integer_weights, "progress": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*are not exact in float16")
        result = qt.export_onnx(model, x, tmp_path / "m.onnx", **options)
    wanted = [
        layer.weight_quantizer(layer.weight).detach().numpy()
        for layer in model.modules()
        if isinstance(layer, QuantConv2d)
    ]
    found = stored_values(result.path)
    assert len(found) == len(wanted) == 2
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert result.bytes < 3 * sum(weight.size for weight in wanted)  # no weight is there twice


def test_codes_of_more_bits_than_float16_has_are_named(tmp_path: Path) -> None:
    model, x = wide(bits=16)
    with pytest.warns(
        UserWarning, match=r"weights of [12] quantizers .* more bits than the 11 of float16: .* \([0-9]+ of 864\)"
    ):
        qt.export_onnx(model, x, tmp_path / "m.onnx", progress=False)


def test_a_block_that_is_called_twice_is_written(tmp_path: Path) -> None:
    """Such a block takes no hooks, by which values are watched."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(x)) + x

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    x = torch.rand(2, 4)
    assert qt.export_onnx(converted(Twice(), x), x, tmp_path / "m.onnx", progress=False).opset == 19


# ---- what float16 does not have


class Large(nn.Module):
    """Values times a factor, with or without a float op behind them, which takes the factor away."""

    def __init__(self, factor: float, exact: bool = False) -> None:
        super().__init__()
        self.fc, self.act, self.last = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
        self.factor, self.exact = factor, exact

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc(x) * self.factor)
        return self.last(y / self.factor if self.exact else y)


def test_numbers_above_its_largest_are_named(tmp_path: Path) -> None:
    x, path = torch.rand(2, 4) + 1, tmp_path / "m.onnx"
    with pytest.raises(
        ValueError, match=r"'act' returns NaN or infinity for the example inputs: a value exceeds 65,504"
    ):
        qt.export_onnx(converted(Large(1e6, exact=True), x), x, path)
    large = Large(1.0)
    with torch.no_grad():
        large.last.bias.fill_(1e5)
    with pytest.raises(
        ValueError, match="above 65,504, but 'last.bias' contains 100000. Use smaller values, .* or write the file with"
    ):
        qt.export_onnx(converted(large, x), x, path)
    assert not path.exists()


def test_ranges_above_its_largest_number_are_named(tmp_path: Path) -> None:
    """Also those that the calibration saw and the example inputs do not reach."""
    x, path = torch.rand(2, 4) + 1, tmp_path / "m.onnx"
    model = qt.prepare(Large(1.0).eval(), x, backend="tensorrt")
    qt.calibrate(model, [x, 1e5 * x], progress=False)
    with pytest.raises(
        ValueError,
        match=r"has no number above 65,504, but the range of 'activation_quantizers.x' ends at 1.*Scale .* or write",
    ):
        qt.export_onnx(qt.convert(model), x, path)
    assert not path.exists()
    qt.export_onnx(qt.convert(model), x, path, float_type="float32", progress=False)


def test_scales_above_its_largest_number_are_named() -> None:
    x = 1e8 * torch.rand(2, 4)
    with pytest.raises(ValueError, match=r"'activation_quantizers.x': scale must be at most 65,504, .* give its layer"):
        converted(Large(1.0), x)


def test_values_that_vanish_are_named(tmp_path: Path) -> None:
    x, path = torch.rand(2, 4) + 1, tmp_path / "m.onnx"
    with pytest.warns(
        UserWarning, match=r"the outputs of 'act' \([0-9.]+e-09\) are zero for the example inputs: .* up, or"
    ) as found:
        qt.export_onnx(converted(Large(1e-9, exact=True), x), x, path, progress=False, verify=False)
    assert {each.filename for each in found if "float_type" in str(each.message)} == {__file__}
    model = converted(Large(1e-9), x, backend="tensorrt10")
    with pytest.warns(UserWarning, match=r"the steps of '\S+' \([0-9.]+e-1[0-9]\) are below 6e-8, the smallest number"):
        qt.export_onnx(model, x, path, float_type="float16", progress=False, verify=False)


def test_bounds_in_steps_may_exceed_it(tmp_path: Path) -> None:
    """Whether a quantizer saturates where a clip does is decided in float32: 6 in steps of 2**-14 is no float16 number."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU6(), nn.Conv2d(4, 4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.filterwarnings("ignore", message=".*scales below 2")
        model = converted(model, 1e-3 * X)
        assert float(model.activation_quantizers.get_submodule("_1").scale) == 2**-14
        qt.export_onnx(model, 1e-3 * X, tmp_path / "m.onnx", progress=False)


def test_infinities_of_the_model_are_no_fault_of_float16(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.Softmax(-1)
            self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf, 0.0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.fc(x) + self.mask)

    x = torch.rand(2, 4)
    assert qt.export_onnx(converted(Masked(), x), x, tmp_path / "m.onnx", progress=False).opset == 19


def test_a_model_that_makes_float32_by_itself_is_an_error(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x * torch.ones(x.shape, dtype=torch.float32))

    x = torch.rand(2, 4)
    with pytest.raises(
        RuntimeError, match=r'does not run with float_type="float16" \(.*\): it may create float32 tensors'
    ):
        qt.export_onnx(converted(Own(), x), x, tmp_path / "m.onnx")


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    model, path = converted(convolutions(), X), tmp_path / "m.onnx"
    with pytest.raises(
        ValueError, match='float_type="float16" needs opset 19 or newer, in which .*, got 18; leave opset out, or pass'
    ):
        qt.export_onnx(model, X, path, opset=18)
    with pytest.raises(ValueError, match=r'float_type must be .*, got "bfloat16": .* need 8-bit scales, .* Pass'):
        qt.export_onnx(model, X, path, float_type="bfloat16")
    with pytest.raises(ValueError, match="unknown float_type of export_onnx: 'half'"):
        qt.export_onnx(model, X, path, float_type="half")
    with pytest.raises(ValueError, match='float_type="float32" is for a model in float32, got torch.float16; pass'):
        qt.export_onnx(converted(convolutions(), X).half(), X.half(), path, float_type="float32")


def test_scales_that_are_no_float16_numbers_are_named(tmp_path: Path) -> None:
    model, path = converted(convolutions(), X, backend="tensorrt10"), tmp_path / "m.onnx"
    with pytest.warns(UserWarning, match=r"the scales of 7 of 7 quantizers are not exact in float16: .* need Casts"):
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


# ---- squares


class HandwrittenNorm(nn.Module):
    """A root mean square norm between layers, in one of the forms in which it is written."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), norm, nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)) * self.weight)


NORMS = {
    "rsqrt": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "sqrt": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "sum": lambda x: x * (torch.square(x).sum(-1, keepdim=True) / 16 + 1e-6).rsqrt(),
    "in float32": lambda x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12),
    "vector norm": lambda x: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-9),
    "expanded": lambda x: x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12).expand_as(x),
    "centered": lambda x: (x - x.mean(-1, True)) * ((x - x.mean(-1, True)) ** 2).mean(-1, True).add(1e-6).rsqrt(),
}


def check_norm(model: nn.Module, x: Tensor, folder: Path, capture: str = "trace") -> Tensor:
    """Export a quantized model in float16, compare its file with the model in float32, and return the outputs of the file."""
    prepared = qt.prepare(model.eval(), x, backend="tensorrt", capture=capture)
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    result = qt.export_onnx(converted, x, folder / "m.onnx")
    session = onnxruntime.InferenceSession(str(result.path))
    y = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    wanted = converted(x).detach()
    assert (y - wanted).abs().max() < 0.02 * wanted.abs().max()
    assert result.verification is not None
    assert result.verification.quantizer_codes.differing == 0
    assert not qt.export.lint(result.path, "tensorrt")
    return y


@pytest.mark.parametrize("norm", NORMS)
def test_squares_of_a_norm_written_by_hand_do_not_overflow(tmp_path: Path, norm: str) -> None:
    x = 1000 * torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    check_norm(HandwrittenNorm(NORMS[norm]), x, tmp_path)


@pytest.mark.parametrize("capture", ["trace", "export"])
@pytest.mark.parametrize("norm", ["normalize", "norm", "vector norm", "expanded", "rsqrt"])
def test_a_norm_of_zeros_is_zero_although_its_eps_vanishes_in_float16(tmp_path: Path, norm: str, capture: str) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    x[3:5] = 0
    model = HandwrittenNorm(NORMS[norm])
    nn.init.zeros_(model.first.bias)
    y = check_norm(model, x, tmp_path, capture)
    assert torch.equal(y[3], y[4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [F.conv2d, F.linear, torch.matmul, torch.mm, Tensor.__matmul__])
def test_products_are_rounded_once_as_in_onnxruntime(function: Any, dtype: torch.dtype) -> None:
    assert function.__name__ in PRODUCTS
    shapes = ((2, 8, 9, 9), (4, 8, 3, 3)) if function is F.conv2d else ((5, 256), (256, 256))
    x, weight = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for shape in shapes)
    with RoundedOnce():
        y = function(x, weight)
        assert y.dtype == dtype
        assert torch.equal(y, function(x.float(), weight.float()).to(dtype))
        with pytest.raises(RuntimeError, match="dtype|type"):
            function(x, weight.float())


def test_products_take_the_outputs_of_quantizers_before_they_are_rounded() -> None:
    scale, x = torch.tensor(0.1), torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).half()
    wanted, _ = torch.ops.qtoolkit.fake_quant.default(x.float(), scale, None, -128, 127)
    with RoundedOnce():
        values, _ = torch.ops.qtoolkit.fake_quant.default(x, scale, None, -128, 127)
        assert values.dtype == torch.float16
        assert not torch.equal(values.float(), wanted)
        assert torch.equal(values @ x.T, (wanted @ x.T.float()).half())
        values.mul_(2)  # the product takes it as it is now
        assert torch.equal(values @ x.T, (values.float() @ x.T.float()).half())
    assert torch.equal(rounded(wanted, torch.float32), wanted)


def test_an_op_without_a_kernel_for_float16_is_computed_in_float32(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU(), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(4, 5)).eval()
    x = torch.randn(2, 3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    prepared = qt.prepare(model, x, backend="tensorrt")
    qt.calibrate(prepared, [x], progress=False)
    found = qt.export_onnx(qt.convert(prepared), x, tmp_path / "m.onnx").verification
    assert found is not None
    assert found.quantizer_codes.differing == 0
