"""quantization_report of models without a graph: every line, and why."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.graph.lint import lint
from qtoolkit.verdicts import Cause
from tests import nets
from tests.replaced import Branches, Loops, calibrated, of_loops, ways

INT8, PER_CHANNEL = "int8", "int8 per-channel(0)"


def lines_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return of each layer its kind, weight, inputs, status and reason."""
    report = qt.quantization_report(model)
    names = [line.name for line in report.layers]
    assert len(set(names)) == len(names)
    return {x.name: (x.kind, x.weight, *x.inputs, x.status, x.reason) for x in report.layers}


class Odd(nn.Linear):
    """A subclass."""


class Zoo(nn.Module):
    """A layer for each reason."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 2)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.odd, self.pool, self.bn = Odd(4, 4), nn.MaxPool2d(2), nn.BatchNorm2d(4)
        self.attn, self.named = nn.MultiheadAttention(4, 2), nn.Linear(4, 4)
        self.ours = nn.ModuleList([qt.TensorQuantizer(qt.QuantSpec(bits=4))])


def test_a_line_for_each_layer_with_the_reason() -> None:
    mapping = qt.QConfigMapping().set_module_name("named", None)
    replaced = qt.quant_modules.replace(Zoo(), mapping, ignore=["body.*", "up"], backend="tensorrt10")
    lines = lines_of(replaced)
    assert lines["conv"] == ("conv", PER_CHANNEL, "conv.input_quantizer", "quantized", "by module replacement")
    inner = [f"attn.{name}" for name in ("query", "key", "value", "softmax", "out_proj_input", "input")]
    kind, weight, *rest = lines["attn"]
    assert (kind, weight, rest[-2:]) == ("attention", PER_CHANNEL, ["quantized", "by module replacement"])
    assert sorted(rest[:-2]) == sorted(f"{name}_quantizer" for name in inner)
    reasons = {name: line[-1] for name, line in lines.items() if line[-2] == "float"}
    assert reasons == {
        "up": "float: excluded by 'up'",
        "body.0": "float: excluded by 'body.0'",
        "body.1": "float: no QAT type for ReLU",
        "body.2": "float: excluded by 'body.2'",
        "odd": "float: Odd is a subclass of Linear; its forward may differ: pass its QAT type in custom",
        "pool": "float: a max_pool, which only moves values",
        "bn": "float: no chain of qtoolkit.fuse_modules names the layer before it",
        "named": "float: the qconfig_mapping leaves it in float",
    }
    assert lines["body.0"][0] == "linear"
    assert lines[""] == ("other", "", "ours.0", "quantized", "by quantizers that Zoo calls itself")
    report = qt.quantization_report(replaced)
    assert {line.name for line in report.quantized} == {"", "conv", "attn"}
    assert len(report.left_float) == len(reasons)


def test_quantizers_are_those_that_a_config_decides_on() -> None:
    lines = {
        line.name: line.quantizers
        for line in qt.quantization_report(qt.quant_modules.replace(Zoo(), backend="tensorrt10")).layers
    }
    assert lines["conv"] == ("conv.weight_quantizer", "conv.input_quantizer")
    assert len(lines["attn"]) == 8
    assert lines[""] == lines["odd"] == ()


def test_tensors_have_names_of_their_own_and_those_that_take_them() -> None:
    replaced = qt.quant_modules.replace(Loops(), backend="tensorrt10")
    tensors = {line.quantizer: line for line in qt.quantization_report(replaced).tensors}
    assert set(tensors) == {"ours", "first.input_quantizer", "head.input_quantizer"}
    line = tensors["first.input_quantizer"]
    assert (line.source, line.consumers, line.spec, line.shares_scale_with) == ("first.input", ("first",), INT8, ())
    assert (tensors["ours"].source, tensors["ours"].spec) == ("ours", "int4")


def test_a_quantizer_of_several_layers_has_a_line_for_each() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    replaced = qt.quant_modules.replace(model, backend="tensorrt10")
    replaced[2].input_quantizer = replaced[0].input_quantizer
    report = qt.quantization_report(replaced)
    shared = [line for line in report.tensors if line.quantizer == "0.input_quantizer"]
    assert [(x.source, x.consumers, x.shares_scale_with) for x in shared] == [
        ("0.input", ("0",), ("2.input",)),
        ("2.input", ("2",), ("0.input",)),
    ]
    assert report.layers[2].inputs == ("0.input_quantizer",)


@pytest.mark.parametrize("backend", ["tensorrt10", "openvino"])
def test_converted_models_have_the_same_report(backend: str) -> None:
    replaced = calibrated(Branches().eval(), list(ways()), backend=backend)
    report, of_converted = qt.quantization_report(replaced), qt.quantization_report(qt.convert(replaced))
    assert (report.layers, report.tensors) == (of_converted.layers, of_converted.tensors)
    assert all(report.following.values())
    assert not of_converted.following
    head = str(qt.quantization_report(replaced)).splitlines()[0]
    assert head == "5 ops quantized, 1 left in float, 5 tensors"


def test_without_a_record_layers_say_what_can_be_seen() -> None:
    layer = qt.nn.QuantLinear(4, 4, weight_spec=qt.QuantSpec(axis=0))
    layer.input_quantizer = qt.TensorQuantizer(qt.QuantSpec(signed=False))
    model = nn.Sequential(layer, nn.Linear(4, 4), Odd(4, 4), nn.Tanh(), qt.nn.QuantLinear(4, 4))
    off = "float: built while replacement was off, excluded, or added later"
    assert lines_of(model) == {
        "0": ("linear", PER_CHANNEL, "0.input_quantizer", "quantized", "by module replacement"),
        "1": ("linear", "", "float", off),
        "2": ("other", "", "float", "float: Odd is a subclass of Linear, whose forward may compute anything"),
        "3": ("tanh", "", "float", "float: no QAT module for Tanh"),
        "4": ("linear", "", "float", off),
    }


def test_layers_put_in_since_have_lines() -> None:
    replaced = qt.quant_modules.replace(nn.Sequential(nn.Linear(2, 2)), backend="tensorrt10")
    replaced.append(nn.Linear(2, 2))
    assert lines_of(replaced)["1"][-1] == "float: built while replacement was off, excluded, or added later"
    del replaced[0]
    assert set(lines_of(replaced)) == {"0"}


def test_a_replaced_part_of_a_model_keeps_its_record() -> None:
    model = nn.Sequential(
        qt.quant_modules.replace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ignore="1", backend="tensorrt10"),
        nn.Linear(2, 2),
    )
    reasons = {name: line[-1] for name, line in lines_of(model).items()}
    assert reasons == {
        "0.0": "by module replacement",
        "0.1": "float: excluded by '1'",
        "1": "float: built while replacement was off, excluded, or added later",
    }


def test_a_prepared_part_of_a_model_is_reported_by_its_graph() -> None:
    x = torch.rand(2, 3, 8, 8)
    model = nn.Sequential(qt.prepare(nets.ConvNet().eval(), x, backend="tensorrt10"), nn.Linear(5, 2))
    replaced = qt.quant_modules.replace(model, backend="tensorrt10")
    own = qt.quantization_report(model[0])
    report = qt.quantization_report(replaced)
    assert [line.name for line in report.layers] == ["1", *(f"0.{line.name}" for line in own.layers)]
    quantizers = {line.quantizer for line in report.tensors}
    assert quantizers == {"1.input_quantizer", *(f"0.{line.quantizer}" for line in own.tensors)}
    assert quantizers <= set(qt.quantizers_of(replaced))


@pytest.mark.parametrize("replaced", [False, True])
def test_quantizers_of_pytorch_quantization_are_no_silent_float(replaced: bool) -> None:
    model = nn.Sequential(quant_nn.QuantLinear(2, 2), nn.Linear(2, 2))
    lines = lines_of(qt.quant_modules.replace(model, backend="tensorrt10") if replaced else model)
    assert lines["0"][-2:] == ("quantized", "by the quantizers of qtoolkit.compat.pytorch_quantization")
    assert lines["1"][-1] == (
        "by module replacement" if replaced else "float: built while replacement was off, excluded, or added later"
    )


def test_models_with_nothing_of_it_are_refused() -> None:
    words = "quantization_report: model must be what .* returned, got a Linear without quantizers"
    with pytest.raises(TypeError, match=words):
        qt.quantization_report(nn.Linear(2, 2))
    report = qt.quantization_report(
        qt.quant_modules.replace(nn.Sequential(nn.Tanh()), backend="tensorrt10")
    )  # asked for, and nothing was found
    assert [(line.name, line.status) for line in report.layers] == [("0", "float")]


def test_the_table_names_every_layer() -> None:
    inputs = of_loops()
    text = str(qt.quantization_report(calibrated(Loops(), [inputs])))
    assert "3 ops quantized, 0 left in float, 3 tensors" in text
    for word in ("first.input_quantizer", PER_CHANNEL, "by quantizers that Loops calls itself"):
        assert word in text


def test_prepared_models_name_the_quantizers_of_each_op() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.weight = nn.Conv2d(3, 4, 1), nn.Parameter(torch.rand(4, 4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.conv2d(self.conv(x), self.weight)

    report = qt.quantization_report(qt.prepare(Net().eval(), backend="tensorrt10"))
    found = {line.name: line.quantizers for line in report.layers}
    assert found["conv"] == ("conv.weight_quantizer", "activation_quantizers.x")
    assert found["conv2d"] == ("weight_quantizers.conv2d", "activation_quantizers.conv")


# ---- models that were edited after they were quantized


class Edited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.pool = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        self.block = nn.Sequential(nn.Linear(8, 8))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block(torch.flatten(self.pool(self.relu(self.conv(x))), 1)))


def edit(model: nn.Module) -> None:
    model.fc, model.relu, model.block[0] = nn.Linear(8, 3), nn.Sigmoid(), nn.Linear(8, 8)


@pytest.mark.parametrize("convert", [False, True], ids=["prepared", "converted"])
@pytest.mark.parametrize("untraced", [(), ("block",)], ids=["traced", "leaf"])
def test_the_report_of_a_graph_looks_at_the_model_as_it_is(untraced: tuple[str, ...], convert: bool) -> None:
    x = torch.randn(2, 3, 8, 8)
    prepared = qt.prepare(Edited().eval(), (x,), "onnxruntime", untraced=untraced)
    qt.calibrate(prepared, [x], progress=False)
    before = {line.name: line.status for line in qt.quantization_report(prepared).layers}
    edited = qt.convert(prepared) if convert else copy.deepcopy(prepared)
    edit(edited)
    lines = {line.name: line for line in qt.quantization_report(edited).layers}
    inner = "block.0"
    for name, kind in (("fc", "Linear"), ("relu", "Sigmoid"), (inner, "Linear")):
        assert lines[name].reason == f"float: a {kind} that was added after the model was quantized"
        assert (lines[name].verdict.cause, lines[name].weight) == (Cause.PUT_IN, "")
    assert lint(edited)[-1].where == "fc"
    assert not lint(prepared)
    others = set(lines) - {"fc", "relu", inner}
    assert {name: lines[name].status for name in others} == {name: before[name] for name in others}
    assert {line.name: line.status for line in qt.quantization_report(prepared).layers} == before


def test_the_report_of_a_replaced_model_looks_at_the_model_as_it_is() -> None:
    replaced = qt.quant_modules.replace(Edited(), backend="tensorrt10")
    assert {line.name for line in qt.quantization_report(replaced).quantized} >= {"fc", "block.0", "conv"}
    edit(replaced)
    lines = {line.name: line for line in qt.quantization_report(replaced).layers}
    assert [str(lines[name].status) for name in ("fc", "block.0", "conv")] == ["float", "float", "quantized"]
    assert "added later" in lines["fc"].reason
    assert lines["relu"].reason == "float: no QAT module for Sigmoid"


def quantized_linear() -> nn.Module:
    return qt.nn.QuantLinear(8, 3, weight_spec=qt.QuantSpec(axis=0))


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_a_quantized_layer_in_the_place_of_a_float_one_is_quantized(route: str) -> None:
    mapping = qt.QConfigMapping().set_module_name("fc", None)
    take = qt.prepare if route == "prepare" else qt.quant_modules.replace
    ours = take(Edited(), qconfig_mapping=mapping, backend="tensorrt10")
    assert "fc" in {line.name for line in qt.quantization_report(ours).left_float}
    ours.fc = quantized_linear()
    assert "fc" in {line.name for line in qt.quantization_report(ours).quantized}


def test_an_op_that_is_added_to_a_graph_has_a_line() -> None:
    prepared = qt.prepare(Edited().eval(), backend="tensorrt10")
    output = next(iter(reversed(prepared.graph.nodes)))
    with prepared.graph.inserting_before(output):
        added = prepared.graph.call_function(torch.tanh, (output.args[0],))
    output.args = (added,)
    prepared.recompile()
    line = next(line for line in qt.quantization_report(prepared).layers if line.name == "tanh")
    assert line.reason == "float: a tanh that was added after the model was quantized"


def test_export_says_what_was_put_in(tmp_path: Path) -> None:
    prepared = qt.prepare(Edited().eval(), backend="onnxruntime")
    prepared.fc = nn.Linear(8, 3)
    x = torch.randn(2, 3, 4, 4)
    qt.calibrate(prepared, [x], progress=False)
    with pytest.warns(
        UserWarning, match="export_onnx: layers added to the model after quantization are float in the file: 'fc'"
    ):
        qt.export_onnx(prepared, x, tmp_path / "model.onnx")


def test_a_model_in_eval_mode_keeps_the_ranges_that_it_loads() -> None:
    """A weight's range follows the weight in training mode alone."""
    trained, fresh = (qt.prepare(Edited().eval(), backend="onnxruntime") for _ in range(2))
    for quantizer in qt.quantizers_of(trained).values():
        quantizer.amax = 3.0
    fresh.load_state_dict(trained.state_dict())
    fresh(torch.randn(2, 3, 4, 4))
    assert all(float(quantizer.amax.max()) == pytest.approx(3.0) for quantizer in qt.quantizers_of(fresh).values())
    assert not any(
        quantizer.training for quantizer in qt.quantizers_of(qt.prepare(Edited().eval(), backend="tensorrt10")).values()
    )


class Partly(nn.Module):
    """Layers that are not called in eval mode or at all, an embedding by another name, parameters that functions take."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(10, 4), nn.Embedding(16, 4)
        self.alias, self.bare, self.scaled = self.words, nn.Linear(4, 4), Scaled()
        self.extra, self.norm, self.spare = nn.Conv1d(4, 4, 1), nn.LayerNorm(4), nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("ids", torch.arange(16))

    def forward(self, i: Tensor) -> Tensor:
        x = self.alias(i) + self.positions(self.ids[: i.shape[1]])
        if self.training:
            x = x + self.extra(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.scaled(F.linear(x, self.bare.weight)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("untraced", [(), ("scaled",)])
def test_each_layer_of_the_model_has_a_line(training: bool, untraced: tuple[str, ...]) -> None:
    indices = torch.zeros(2, 3, dtype=torch.long)
    prepared = qt.prepare(Partly().train(training), indices, backend="onnxruntime", untraced=untraced)
    report = qt.quantization_report(prepared)
    lines = {line.name: line for line in report.layers}
    assert {"words", "positions", "extra", "norm", "spare.0", "head", "linear"} <= lines.keys()
    assert "bare" not in lines  # the line of the function "linear" is that of its weight
    assert not any(name.startswith("scaled") for name in lines if name not in untraced)
    not_called = {name for name, line in lines.items() if line.verdict.cause is Cause.NOT_CALLED}
    assert not_called == {"norm", "spare.0"}
    assert (
        lines["norm"].reason
        == "float: forward did not call it when prepare traced the model (its mode and example inputs)"
    )
    qt.calibrate(prepared, [indices], progress=False)
    if not training:  # convert keeps what eval mode takes
        converted = qt.quantization_report(qt.convert(prepared)).layers
        assert all(line in report.layers for line in converted if line.name != "extra")
