"""Module replacement: what is quantized inside submodules that tracing keeps whole, up to the codes in onnxruntime."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.graph.passes import swap
from qtoolkit.graph.passes.leaf_modules import run
from qtoolkit.layer_rules import LayerRules
from qtoolkit.nn.replacement import replace_layers
from tests import nets, reference


class Block(nn.Module):
    """What fx takes for a loop over a tensor of unknown length, and torch.export unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.up = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
        self.odd = Odd(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(self.odd(x))))
        return self.up(torch.stack([part * 2 for part in y]))


class Odd(nn.Conv2d):
    """A subclass of a layer, which no table knows."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 4, 1), Block(), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.relu(self.stem(x))))


SHAPE = (2, 3, 6, 6)
LAYERS = ("block.conv", "block.up")
HOW = [{"untraced": ["block"]}, {"leaf_modules": [Block]}]


def prepared_net(training: bool = False, backend: str = "onnxruntime", **kwargs: object) -> nn.Module:
    model = nets.trained(Net(), *SHAPE).train(training)
    options = {"untraced": ["block"], "backend": backend, **kwargs}
    prepared = qt.prepare(model, torch.randn(SHAPE), **options)
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    return prepared


@pytest.mark.parametrize("how", HOW, ids=["skip", "leaf"])
def test_layers_in_a_submodule_kept_whole_are_quantized(how: dict[str, object]) -> None:
    model = nets.trained(Net(), *SHAPE).eval()
    weights = {name: model.get_submodule(name).weight for name in LAYERS}
    prepared = qt.prepare(model, torch.randn(SHAPE), inplace=True, backend="tensorrt", **how)
    for name in LAYERS:
        layer = prepared.get_submodule(name)
        assert isinstance(layer, qt.nn.QuantModule)
        assert layer.weight is weights[name]
        assert layer.input_quantizer.spec == qt.backends["tensorrt"].qconfig.activation
    assert type(prepared.block.bn) is nn.BatchNorm2d
    assert prepared.block.up.weight_quantizer.scale.numel() == 6  # one for each output channel, of each group
    x = torch.randn(SHAPE)
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x), rtol=0, atol=0)


def test_the_report_has_a_line_for_each_layer_inside() -> None:
    prepared = prepared_net()
    for model in (prepared, qt.convert(prepared), pickle.loads(pickle.dumps(prepared))):
        lines = {line.name: line for line in qt.quantization_report(model).layers}
        assert "2 of 5 layers in it are quantized, by module replacement" in lines["block"].reason
        for name in LAYERS:
            assert lines[name].status == "quantized"
            assert lines[name].reason == "by module replacement, inside the leaf module 'block'"
            assert lines[name].inputs == (f"{name}.input_quantizer",)
            assert lines[name].weight.startswith("int8 per-channel")
        for name in ("block.bn", "block.act", "block.odd"):
            assert lines[name].status == "float"
            assert "only layers with weights" in lines[name].reason
        tensors = {line.quantizer: line.consumers for line in qt.quantization_report(model).tensors}
        assert tensors["block.conv.input_quantizer"] == ("block.conv",)


def test_the_codes_inside_are_those_of_the_formula() -> None:
    prepared = prepared_net()
    seen: dict[str, Tensor] = {}
    layer = prepared.block.conv
    layer.input_quantizer.register_forward_hook(lambda m, args, y: seen.update(x=args[0], y=y))
    prepared.eval()(torch.randn(SHAPE))
    spec, scale, zero = layer.input_quantizer.spec, layer.input_quantizer.scale, layer.input_quantizer.zero_point
    assert torch.equal(seen["y"].detach(), reference.fake_quant(seen["x"].detach(), scale, zero, spec.qmin, spec.qmax))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_converted_equals_the_prepared_model(training: bool) -> None:
    prepared = prepared_net(training)
    converted, x = qt.convert(prepared), torch.randn(SHAPE)
    assert not qt.quantizers_of(converted)
    assert isinstance(converted.block.conv.input_quantizer, qt.Grid)
    torch.testing.assert_close(converted(x), prepared.eval()(x), rtol=1e-5, atol=1e-5)
    twin = copy.deepcopy(prepared)
    assert torch.equal(twin(x), prepared(x))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime"])
def test_codes_inside_are_compared_with_onnxruntimes(tmp_path, exporter: str, backend: str) -> None:
    pytest.importorskip("onnxruntime")
    x = torch.randn(SHAPE)
    prepared = prepared_net(backend=backend)
    result = qt.export_onnx(prepared, x, tmp_path / "model.onnx", exporter=exporter)
    verification = result.verification
    assert verification.missing == ()
    for name in LAYERS:
        assert verification.by_quantizer[f"{name}.input_quantizer"].compared > 0
    assert verification.quantizer_codes.differing == verification.weight_codes.differing == 0
    sizes = [m.weight.numel() for m in prepared.modules() if isinstance(m, qt.nn.QuantModule)]
    assert verification.weight_codes.compared == sum(sizes)


@pytest.mark.slow
def test_a_changed_scale_inside_is_noticed(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    import onnx
    from onnx import numpy_helper

    from qtoolkit.export.verification.verify import verify_onnx

    converted, x = qt.convert(prepared_net()), torch.randn(SHAPE)
    qt.export_onnx(converted, x, tmp_path / "model.onnx")
    proto = onnx.load(str(tmp_path / "model.onnx"))
    scale = next(t for t in proto.graph.initializer if t.name == "block.conv.input_quantizer.scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 2, scale.name))
    with pytest.raises(RuntimeError, match="quantized values must equal the model's"):
        verify_onnx(converted, x, proto).check()


def test_quantizers_that_no_data_reached_are_named() -> None:
    model = nets.ControlFlow()
    prepared = qt.prepare(model, untraced=["block"], backend="tensorrt")
    with torch.no_grad():
        prepared.first.weight.zero_()
        prepared.first.bias.fill_(-1)
    report = qt.calibrate(prepared, [torch.ones(2, 4)], progress=False)
    assert "block.fc.input_quantizer" in report.unreached
    with pytest.warns(UserWarning, match=r"convert: no data reached the layers 'block\.fc', which stay in float"):
        converted = qt.convert(prepared)
    line = next(line for line in qt.quantization_report(converted).layers if line.name == "block.fc")
    assert line.reason == "float: no data reached it before qtoolkit.convert"
    assert type(converted.get_submodule("block.fc")) is nn.Linear
    restored = qt.convert(qt.prepare(model, untraced=["block"], backend="tensorrt"), state_dict=converted.state_dict())
    assert torch.equal(restored(torch.ones(2, 4)), converted(torch.ones(2, 4)))


# ---- which config


W4 = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=0))


def bits_of(mapping: qt.QConfigMapping) -> dict[str, int | None]:
    prepared = qt.prepare(Net(), qconfig_mapping=mapping, untraced=["block"], backend="tensorrt")
    layers = {name: prepared.get_submodule(name) for name in LAYERS}
    return {n: m.weight_quantizer.spec.bits if isinstance(m, qt.nn.QuantModule) else None for n, m in layers.items()}


@pytest.mark.parametrize(
    ("mapping", "conv", "up"),
    [
        (qt.QConfigMapping().set_global(W4), 4, 4),
        (qt.QConfigMapping().set_module_name("block.conv", W4), 4, 8),
        (qt.QConfigMapping().set_module_name("block.conv", None), None, 8),
        (qt.QConfigMapping().set_module_name_regex(r"block\..*", W4), 4, 4),
        (qt.QConfigMapping().set_object_type(nn.ConvTranspose2d, W4), 8, 4),
        (qt.QConfigMapping().set_module_name("block", W4), 4, 4),
        (qt.QConfigMapping().set_module_name("block", None), None, None),
        (qt.QConfigMapping().set_object_type(Block, None), None, None),
        (qt.QConfigMapping().set_module_name("block", None).set_object_type(nn.Conv2d, W4), None, None),
        (qt.QConfigMapping().set_module_name("block", None).set_module_name("block.up", W4), None, 4),
    ],
)
def test_rules_reach_inside_the_most_exact_first(mapping: qt.QConfigMapping, conv: int | None, up: int | None) -> None:
    assert bits_of(mapping) == {"block.conv": conv, "block.up": up}


def test_what_the_mapping_leaves_in_float_is_reported() -> None:
    mapping = qt.QConfigMapping().set_module_name("block", None)
    report = qt.quantization_report(qt.prepare(Net(), qconfig_mapping=mapping, untraced=["block"], backend="tensorrt"))
    reasons = {line.name: line.reason for line in report.left_float}
    assert reasons["block"] == "float: a leaf module in which no layer is quantized"
    assert reasons["block.conv"] == "float: the qconfig_mapping leaves it in float"


def test_unknown_names_inside_are_named() -> None:
    mapping = qt.QConfigMapping().set_module_name("block.convv", None)
    with pytest.raises(ValueError, match="unknown layer 'block.convv'; did you mean 'block.conv'"):
        qt.prepare(Net(), qconfig_mapping=mapping, untraced=["block"], backend="tensorrt")


def test_the_axis_of_a_transposed_convolution_is_the_backends() -> None:
    backend = replace(qt.backends["tensorrt"], conv_transpose_axis=0)
    up = qt.prepare(Net(), backend=backend, untraced=["block"]).get_submodule("block.up")
    assert (up.weight_quantizer.spec.axis, up.weight_quantizer.scale.numel()) == (0, 4)


def test_users_qat_types_serve_inside() -> None:
    class QuantOdd(qt.nn.QuantConv2d):
        FLOAT = Odd

    prepared = qt.prepare(Net(), untraced=["block"], qat_modules={Odd: QuantOdd}, backend="tensorrt")
    assert isinstance(prepared.get_submodule("block.odd"), QuantOdd)
    assert prepared.get_submodule("block.odd").input_quantizer is not None


def test_a_leaf_without_layers_is_float() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x) * 2

    model = nn.Sequential(nn.Linear(3, 3), Scale())
    lines = {
        x.name: x for x in qt.quantization_report(qt.prepare(model, leaf_modules=[Scale], backend="tensorrt")).layers
    }
    assert lines["1"].reason == "float: a leaf module in which no layer is quantized"
    assert lines["1.act"].status == "float"


# ---- sharing


class Tied(nn.Module):
    """A layer that two leaf modules share, and another one that the graph calls too, before a batch norm."""

    class CallsInner(nets.ControlFlow.Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(super().forward(x))

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nets.ControlFlow.Block(), Tied.CallsInner(), nn.Linear(4, 4)
        self.b.fc, self.bn = self.a.fc, nn.BatchNorm1d(4)
        self.b.inner = self.fc

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(self.b(self.a(x))))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_shared_layers_stay_shared(training: bool) -> None:
    model = nets.trained(Tied(), 3, 4).train(training)
    prepared = qt.prepare(model, untraced=["a", "b"], backend="onnxruntime")
    assert isinstance(prepared.get_submodule("a.fc"), qt.nn.QuantLinear)
    assert prepared.get_submodule("a.fc") is prepared.get_submodule("b.fc")
    assert prepared.get_submodule("fc") is prepared.get_submodule("b.inner")
    x = torch.rand(3, 4)
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared.eval()(x), model.eval()(x), rtol=1e-6, atol=1e-6)
    reasons = {line.name: line.reason for line in qt.quantization_report(prepared).left_float}
    assert "its layer is also called inside a leaf module" in reasons["bn"]
    qt.calibrate(prepared, [x], progress=False)
    assert qt.convert(prepared).get_submodule("fc") is not prepared.get_submodule("fc")


# ---- fast paths


@pytest.mark.parametrize("layer", [True, False], ids=["attention", "float_attention"])
def test_a_fused_transformer_layer_does_not_pass_by_the_quantizers(layer: bool) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)).eval()
    mapping = None if layer else qt.QConfigMapping().set_object_type(nn.MultiheadAttention, None)
    prepared = qt.prepare(model, untraced=["0"], qconfig_mapping=mapping, backend="tensorrt")
    report = qt.calibrate(prepared, [torch.randn(2, 3, 8)], progress=False)
    assert report.unreached == ()
    assert {"0.linear1.input_quantizer", "0.linear2.input_quantizer"} <= set(report.ranges)


# ---- on its own


def test_a_whole_model_is_replaced_without_a_graph() -> None:
    model = nets.ControlFlow()
    qconfig = qt.backends["tensorrt"].qconfig
    ignored = {"first"}
    names = replace_layers(
        model, [""], lambda name, module, kind: None if name in ignored else qconfig, qt.nn.QAT_MODULES
    )
    assert names == ["block.fc"]
    assert isinstance(model.block.fc, qt.nn.QuantLinear)
    assert type(model.first) is nn.Linear
    assert qt.calibrate(model, [torch.ones(2, 4), -torch.ones(2, 4)], progress=False).batches == 2


def test_replacing_twice_changes_nothing() -> None:
    prepared, rules = prepared_net(), LayerRules(qt.backends["onnxruntime"], table=qt.nn.QAT_MODULES)
    before, modules, report = str(prepared.graph), list(prepared.modules()), str(qt.quantization_report(prepared))
    swap.run(run(prepared, rules), rules)
    assert str(prepared.graph) == before
    assert all(a is b for a, b in zip(modules, prepared.modules(), strict=True))
    assert str(qt.quantization_report(prepared)) == report


# ---- a layer that is called on both sides


class Sides(nn.Module):
    """A layer that the graph calls, and a leaf module calls too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nets.ControlFlow().block
        self.block.fc = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(self.first(x)))


@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime", "snpe"])
def test_a_layer_called_on_both_sides_has_one_quantizer_for_its_inputs(backend: str) -> None:
    model, x = Sides().eval(), torch.randn(8, 4)
    prepared = qt.prepare(model, untraced=["block"], backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    quantizers = qt.quantizers_of(prepared)
    assert "first.input_quantizer" in quantizers
    seen: list[Tensor] = []
    prepared.first.input_quantizer.register_forward_hook(lambda m, args, y: seen.append(args[0]))
    prepared(x)
    assert len(seen) == 2
    assert torch.equal(seen[0], x)  # as it is: nothing has quantized it before
    line = next(line for line in qt.quantization_report(prepared).layers if line.name == "first")
    assert line.inputs == ("first.input_quantizer",)
    edge, inside = (edge for edge in prepared.plan.edges if edge.quantizer == "first.input_quantizer")
    assert (edge.source, edge.consumer) == ("x", "first")
    assert "inside a leaf module, too" in edge.why
    assert (inside.source, inside.consumer) == ("block.fc.input", "block.fc")


class TakesTheSame(nn.Module):
    """A block that is a leaf module, and a layer beside it, on one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.beside, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(x) - self.block(x)


def test_quantizers_that_the_exporter_joins_are_found_in_the_one_node(tmp_path) -> None:
    x = torch.rand(3, 4)
    prepared = qt.prepare(TakesTheSame().eval(), (x,), backend="onnxruntime", untraced=["block"])
    qt.calibrate(prepared, [x], progress=False)
    result = qt.export_onnx(prepared, x, tmp_path / "model.onnx")
    assert result.quantize_nodes == 1
    assert set(result.verification.by_quantizer) == {"activation_quantizers.x", "block.0.input_quantizer"}
