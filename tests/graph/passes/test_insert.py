"""Which edges the insert pass quantizes: shared scales, residual adds, units, policies, rules of the user's; and its plan."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.verdicts import Cause, Status, Verdict
from tests import nets
from tests.graph.test_nodes import Probe, edges
from tests.nn import test_attention
from tests.sweep import common_first

ORT = qt.backends["onnxruntime"]
TRT = qt.backends["tensorrt"]
W4 = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=0))
BOTH = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0))


def activations(prepared: nn.Module) -> dict[str, qt.QuantSpec]:
    quantizers = qt.quantizers_of(prepared).items()
    return {n.removeprefix("activation_quantizers."): q.spec for n, q in quantizers if n.startswith("activation")}


def shared(prepared: nn.Module) -> dict[str, str]:
    """Return of each quantized tensor the quantizer."""
    lines = qt.quantization_report(prepared).tensors
    return {line.source: line.quantizer.removeprefix("activation_quantizers.") for line in lines}


class Dense(nn.Module):
    """Concats of concats, as DenseNet and U-Net have them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 2, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(6, 2, 1)
        self.other = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.a(x))
        second = torch.relu(self.b(torch.cat([x, first], 1)))
        return self.c(torch.cat([x, first, second], 1)) + self.other(torch.sigmoid(x))


# ---- one quantizer a tensor, one scale a concat


@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime", "openvino"])
def test_connected_concats_share_one_quantizer(backend: str) -> None:
    prepared = qt.prepare(Dense(), backend=backend)
    owners = shared(prepared)
    assert {owners[name] for name in ("x", "relu", "relu_1")} == {"cat"}
    assert owners["sigmoid"] == "sigmoid"
    assert len({id(prepared.get_submodule(f"activation_quantizers.{owners[n]}")) for n in ("x", "relu")}) == 1
    (line,) = (line for line in qt.quantization_report(prepared).tensors if line.source == "relu")
    assert line.shares_scale_with == ("x", "relu_1")
    assert "relu, relu_1" in str(qt.quantization_report(prepared))


def test_a_shared_scale_covers_all_that_it_serves() -> None:
    prepared = qt.prepare(Dense().eval(), backend="tensorrt")
    x = torch.randn(2, 2, 4, 4) * 50
    qt.calibrate(prepared, [x], progress=False)
    assert float(prepared.get_submodule("activation_quantizers.cat").amax) >= float(x.abs().max())


def test_without_shared_concats_each_input_has_a_scale_and_so_has_the_output() -> None:
    prepared = qt.prepare(Dense(), backend=replace(ORT, shared_concat=False))
    owners = shared(prepared)
    assert {"x", "relu", "relu_1", "cat", "cat_1"} <= set(owners)
    assert all(source == name for source, name in owners.items())


def test_a_concat_that_nothing_takes_quantized_stays_float() -> None:
    class Cat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, torch.exp(x)])

    prepared = qt.prepare(Cat(), backend="tensorrt")
    assert activations(prepared) == {}
    reasons = {line.name: line.reason for line in qt.quantization_report(prepared).left_float}
    assert reasons["cat"] == "float: no quantized op takes its output"


def test_one_tensor_has_one_quantizer_for_all_that_take_it() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            x = torch.exp(x)
            return self.a(x), self.b(x.flatten(1)), self.c(x[:, :4]) + x, torch.exp(x)

    prepared = qt.prepare(Fork(), backend="openvino")
    (line,) = (line for line in qt.quantization_report(prepared).tensors if line.source == "exp")
    assert set(line.consumers) == {"a", "flatten", "getitem", "add"}
    assert (
        next(n for n in prepared.graph.nodes if n.name == "exp_1").args[0].name == "exp"
    )  # a float op takes the float


# ---- residual adds and rule 6 of TensorRT


@pytest.mark.parametrize(("backend", "branches"), [("tensorrt", 1), ("openvino", 2), ("snpe", 2)])
@pytest.mark.parametrize("downsample", [False, True])
def test_residual_add(backend: str, branches: int, downsample: bool) -> None:
    plan = qt.prepare(nets.Residual(downsample), backend=backend).plan
    assert len({e.source for e in plan.edges if e.consumer == "add"}) == branches


def test_the_plan_says_why() -> None:
    plan = qt.prepare(nets.Residual(False), backend="tensorrt").plan
    why = {(e.source, e.consumer): e.why for e in plan.edges}
    assert why["relu", "add"] == "identity branch of a residual add, which becomes part of bn2"
    assert why["x", "stem"] == "conv computes on quantized inputs"
    assert why["stem.weight", "stem"] == "weight of a conv"
    (edge,) = (e for e in plan.edges if e.consumer == "stem" and e.source == "x")
    assert str(edge) == "x -> stem: int8 float16 scale by activation_quantizers.x: conv computes on quantized inputs"


class KeptWhole(nn.Module):
    """Layers and attention inside a leaf module, and a layer that the graph calls too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.ReLU(), self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(self.first(x)))


NETS = [
    (nets.ConvNet, ()),
    (test_attention.Block, ()),
    (KeptWhole, ("block",)),
    (test_attention.Block, ("attn", "cross")),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("make", "untraced"), NETS, ids=["graph", "attention", "skip", "attention-skip"])
@pytest.mark.parametrize("backend", list(qt.backends))
def test_every_quantizer_is_in_the_plan(make: type[nn.Module], untraced: tuple[str, ...], backend: str) -> None:
    prepared = qt.prepare(make(), untraced=untraced, backend=backend)
    quantizers = qt.quantizers_of(prepared)
    planned = {edge.quantizer: edge.spec for edge in prepared.plan.edges}
    assert planned == {name: quantizer.spec for name, quantizer in quantizers.items()}
    weights = {name for name in quantizers if name.endswith("weight_quantizer")}
    lines = qt.quantization_report(prepared).tensors
    assert {line.quantizer: line.spec for line in lines} == {
        name: quantizer.spec.describe() for name, quantizer in quantizers.items() if name not in weights
    }
    assert len({(line.quantizer, line.source) for line in lines}) == len(lines)


def own_edges(prepared: nn.Module) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the quantizers in layers, and why, by what they quantize and for whom."""
    edges = (edge for edge in prepared.plan.edges if not edge.quantizer.startswith("activation_quantizers."))
    return {(edge.source, edge.consumer): (edge.quantizer, edge.why) for edge in edges}


def test_the_plan_lists_the_tensors_between_the_ops_of_attention() -> None:
    planned = own_edges(qt.prepare(test_attention.Block(), backend="onnxruntime"))
    why = "QuantMultiheadAttention quantizes it between its ops"
    for layer in ("attn", "cross"):
        for inner in ("query", "key", "value", "softmax", "out_proj_input"):
            assert planned[f"{layer}.{inner}", layer] == (f"{layer}.{inner}_quantizer", why)
        assert planned[f"{layer}.out_proj_weight", layer][1] == "weight of an attention"


def test_the_plan_lists_what_is_quantized_inside_a_submodule_kept_whole() -> None:
    prepared = qt.prepare(KeptWhole(), untraced=["block"], backend="onnxruntime")
    planned = own_edges(prepared)
    inside = "the layer quantizes its input itself: it is inside a leaf module"
    for layer in ("block.0.linear1", "block.0.linear2"):
        assert planned[f"{layer}.input", layer] == (f"{layer}.input_quantizer", inside)
        assert planned[f"{layer}.weight", layer] == (f"{layer}.weight_quantizer", "weight of a linear")
    attention = "block.0.self_attn"
    assert planned[f"{attention}.softmax", attention][0] == f"{attention}.softmax_quantizer"
    # One quantizer for a layer that both call, under its first name.
    assert planned["x", "first"][0] == planned["block.2.input", "block.2"][0] == "first.input_quantizer"
    assert planned["first.weight", "first"][0] == planned["block.2.weight", "block.2"][0] == "first.weight_quantizer"
    shared = [line for line in qt.quantization_report(prepared).tensors if line.quantizer == "first.input_quantizer"]
    assert [(line.source, line.shares_scale_with) for line in shared] == [
        ("x", ("block.2.input",)), ("block.2.input", ("x",)),
    ]  # fmt: skip


def test_on_tensorrt_an_op_without_weights_needs_a_quantized_output() -> None:
    pool = Probe(lambda m, x, y: F.avg_pool2d(m.first(x), 2))
    assert ("first", "avg_pool2d") in edges(pool, TRT)
    alone = Probe(lambda m, x, y: torch.exp(F.avg_pool2d(m.first(x), 2)))
    assert ("first", "avg_pool2d") not in edges(alone, TRT)
    asked = qt.QConfigMapping().set_module_name("avg_pool2d", BOTH)
    assert ("first", "avg_pool2d") in edges(alone, TRT, qconfig_mapping=asked)


# ---- integers throughout


def test_outputs_are_quantized_after_the_whole_unit() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2), nn.ReLU6())
    for backend in ("snpe", "qnn", "vitis", "ppl", "tengine", "tvm"):
        prepared = qt.prepare(model, backend=backend)
        assert list(activations(prepared)) == ["input_1", "_2", "_5"]
        returned = next(n for n in prepared.graph.nodes if n.op == "output").args[0]
        assert returned.target == "activation_quantizers._5"


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_its_own_and_its_relu_are_one_unit(training: bool) -> None:
    class PreActivation(nn.Module):
        """As DenseNet has it: the concat before the batch norm keeps it from being folded."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.relu, self.conv = nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.conv(self.relu(self.norm(torch.cat([x, y], 1))))

    prepared = qt.prepare(PreActivation().train(training), backend="snpe")
    assert list(activations(prepared)) == ["x", "y", "cat", "relu", "conv"]  # none between the batch norm and its ReLU
    assert prepared.plan.status["relu"] == Verdict(Status.FUSED, Cause.JOINED, "fused with norm")
    planned = {(edge.source, edge.consumer) for edge in prepared.plan.edges}
    assert ("relu", "conv") in planned
    assert not any(source == "norm" for source, _ in planned)


def test_policies_of_graph_inputs_and_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert list(activations(qt.prepare(model, backend=ORT))) == ["input_1", "_1"]
    assert list(activations(qt.prepare(model, backend=replace(ORT, quantize_graph_inputs=False)))) == ["_1"]
    outputs = replace(ORT, quantize_graph_outputs=True)
    assert list(activations(qt.prepare(model, backend=outputs))) == ["input_1", "_1", "_2"]
    inner = replace(qt.backends["snpe"], quantize_graph_outputs=False)
    assert list(activations(qt.prepare(model, backend=inner))) == ["input_1", "_1"]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_first_and_last_layers_keep_their_bits(bits: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    low = qt.QConfig(qt.QuantSpec(bits=bits), qt.QuantSpec(bits=bits, axis=0))
    prepared = qt.prepare(model, backend="academic", qconfig_mapping=qt.QConfigMapping().set_global(low))
    assert [prepared.get_submodule(n).weight_quantizer.spec.bits for n in ("0", "2", "5")] == [8, bits, 8]
    assert [spec.bits for spec in activations(prepared).values()] == [8, bits, 8]
    named = qt.QConfigMapping().set_global(low).set_module_name("0", low)
    own = qt.prepare(model, backend="academic", qconfig_mapping=named)
    assert own.get_submodule("0").weight_quantizer.spec.bits == bits


@pytest.mark.parametrize("quantizer", ["apot", "dorefa"])
def test_first_and_last_layers_with_more_bits_than_their_quantizer_has_take_lsq(quantizer: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    low = qt.QConfig(qt.QuantSpec(bits=4, signed=False, quantizer=quantizer), qt.QuantSpec(bits=4, quantizer=quantizer))
    prepared = qt.prepare(model, backend="academic", qconfig_mapping=qt.QConfigMapping().set_global(low))
    weights = [prepared.get_submodule(n).weight_quantizer.spec for n in ("0", "2", "5")]
    assert [(spec.bits, spec.quantizer) for spec in weights] == [(8, "lsq"), (4, quantizer), (8, "lsq")]
    assert "int8 per-channel(0) lsq" in str(qt.quantization_report(prepared))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", list(qt.backends))
@pytest.mark.parametrize("op", [lambda m, x, y: x / 3, lambda m, x, y: x * m.row])
def test_an_op_by_a_constant(backend: str, op: Any) -> None:
    plan = qt.prepare(Probe(op), backend=backend).plan
    (name,) = (name for name in plan.status if name in ("truediv", "mul"))
    if backend in ("openvino", "snpe", "qnn", "vitis", "ppl", "ppl-w8a16", "stpu", "tengine", "tvm"):
        assert plan.status[name] == Verdict.quantized()
        assert {(e.source, e.consumer) for e in plan.edges} >= {("x", name), (name, "probe")}
        assert all(e.source != "row" for e in plan.edges)  # the constant stays as it is
    else:
        assert plan.status[name].status is Status.FLOAT


@pytest.mark.parametrize("backend", list(qt.backends))
def test_a_sum_with_a_constant_stays_in_float(backend: str) -> None:
    """Masks are such sums, of -inf or -1e4, which would take all of a range."""
    plan = qt.prepare(Probe(lambda m, x, y: 1 - x), backend=backend).plan
    assert [v.status for name, v in plan.status.items() if name in ("rsub", "sub")] == [Status.FLOAT]


class Branches(nn.Module):
    """Two convolutions whose sum is activated, and one behind them; `op` writes the sum."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.a, self.b, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.op(self.a(x), self.b(x))))  # type: ignore[no-any-return]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", list(qt.backends))
@pytest.mark.parametrize(
    "op",
    [
        lambda a, b: sum([a, b]),
        lambda a, b: a.mul(1) + b,  # the scale of a residual, when it is 1
        lambda a, b: (a / 1.0).sub_(0) + b,
        lambda a, b: a + b + 0,
    ],
    ids=["sum", "mul", "div and sub", "behind the sum"],
)
def test_a_number_that_changes_no_value_changes_no_quantizer(op: Any, backend: str) -> None:
    plain, x = qt.prepare(Branches(lambda a, b: a + b), backend=backend), torch.randn(2, 3, 6, 6)
    model = Branches(op)
    prepared = qt.prepare(model, x, backend=backend)
    assert len(activations(prepared)) == len(activations(plain))
    assert list(activations(prepared).values()) == list(activations(plain).values())
    nets.assert_float_when_off(prepared, model, x)


@pytest.mark.parametrize("op", [lambda m, x, y: 0 - x, lambda m, x, y: 1 / x], ids=["negated", "reciprocal"])
def test_a_number_that_is_the_first_operand_changes_values(op: Any) -> None:
    plan = qt.prepare(Probe(op), backend="onnxruntime").plan
    assert all(edge.source != "x" for edge in plan.edges)


class ReadsSizes(nn.Module):
    """A unit of a layer, a batch norm and a ReLU, in which Python reads sizes, behind the op of this name."""

    def __init__(self, behind: str) -> None:
        super().__init__()
        self.behind = behind
        self.conv, self.bn, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = (2, 4, 4, 4)
        for name in ("conv", "bn"):
            x = self.get_submodule(name)(x)
            if name == self.behind:
                size = (x.shape[0], x.size(1), *x.shape[2:])
        x = F.relu(x)
        if self.behind:
            x = x.reshape(size[0], -1).reshape(size)
        return self.last(x)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backend", common_first(name for name in qt.backends if not name.endswith("-nlp")))
def test_python_that_reads_sizes_does_not_part_a_unit(backend: str, training: bool) -> None:
    torch.manual_seed(0)
    model, x = ReadsSizes(""), torch.randn(2, 3, 6, 6)
    outputs, quantizers = [], []
    for model.behind in ("", "conv", "bn"):
        prepared = qt.prepare(model.train(training), (x,), backend=backend)
        qt.calibrate(prepared, [x], progress=False)
        quantizers.append(list(activations(prepared)))
        y = prepared.train()(x)
        y.sum().backward()
        converted = qt.convert(prepared)
        assert torch.equal(converted(x), prepared.eval()(x))
        outputs.append((y, converted(x)))
    assert quantizers[0] == quantizers[1] == quantizers[2]
    for trained, deployed in outputs[1:]:
        torch.testing.assert_close(trained, outputs[0][0])
        torch.testing.assert_close(deployed, outputs[0][1])


# ---- unsigned


def test_unsigned_after_relu_where_the_backend_allows_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(4, 4, 1) for _ in range(3))
            self.d = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.a(x))
            z = F.max_pool2d(torch.sigmoid(self.b(y)) + y, 2)
            return self.d(torch.cat([self.c(z), z], 1))

    unsigned = activations(qt.prepare(Net(), backend="openvino"))
    assert {name: spec.signed for name, spec in unsigned.items()} == {
        "x": True, "relu": False, "sigmoid": False, "cat": True,
    }  # fmt: skip
    assert all(spec.signed for spec in activations(qt.prepare(Net(), backend="tensorrt")).values())


def test_an_unsigned_grid_is_not_narrow() -> None:
    narrow = qt.QConfig(qt.QuantSpec(narrow=True), qt.QuantSpec(axis=0))
    mapping = qt.QConfigMapping().set_global(narrow)
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
    (spec,) = activations(qt.prepare(model, backend="openvino", qconfig_mapping=mapping)).values()
    assert (spec.qmin, spec.qmax) == (0, 255)


# ---- the user's rules


@pytest.mark.parametrize(
    "rule",
    [
        lambda m: m.set_module_name("softmax", BOTH),
        lambda m: m.set_module_name_regex("soft.*", BOTH),
        lambda m: m.set_object_type(F.softmax, BOTH),
    ],
    ids=["name", "regex", "type"],
)
def test_a_rule_with_a_config_includes_a_float_op(rule: Any) -> None:
    model = Probe(lambda m, x, y: F.softmax(x, 1))
    assert edges(model, ORT) == {("softmax", "probe")}
    assert edges(model, ORT, qconfig_mapping=rule(qt.QConfigMapping())) == {("x", "softmax"), ("softmax", "probe")}


@pytest.mark.parametrize(
    "rule",
    [
        lambda m: m.set_module_name("add", None),
        lambda m: m.set_module_name_regex("ad+", None),
        lambda m: m.set_object_type(torch.Tensor.add, None),
    ],
    ids=["name", "regex", "method"],
)
def test_a_rule_of_none_excludes_an_op(rule: Any) -> None:
    model = Probe(lambda m, x, y: x.add(y))
    assert edges(model, ORT, qconfig_mapping=rule(qt.QConfigMapping())) == {("add", "probe")}


def test_an_unknown_op_is_included_by_its_name() -> None:
    model = Probe(lambda m, x, y: torch.exp(x))
    mapping = qt.QConfigMapping().set_module_name("exp", BOTH)
    assert edges(model, ORT, qconfig_mapping=mapping) == {("x", "exp"), ("exp", "probe")}
    wide = qt.QConfigMapping().set_module_name_regex(".*", BOTH)
    assert edges(model, ORT, qconfig_mapping=wide) == {("exp", "probe")}


def test_a_quantizer_does_not_move_across_an_excluded_op() -> None:
    model = Probe(lambda m, x, y: x.flatten(1))
    mapping = qt.QConfigMapping().set_module_name("flatten", None)
    assert edges(model, ORT, qconfig_mapping=mapping) == {("flatten", "probe")}


def test_a_rule_for_a_whole_block_does_not_cut_its_units() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.SiLU()), nn.Conv2d(4, 4, 1))
    prepared = qt.prepare(
        model, qconfig_mapping=qt.QConfigMapping().set_module_name_regex(r"0\..*", W4), backend="tensorrt"
    )
    assert {name: spec.bits for name, spec in activations(prepared).items()} == {"input_1": 4, "_0_2": 8}


# ---- weights of functions


@pytest.mark.parametrize(
    ("op", "axis", "scales"),
    [
        (lambda m, x, y: F.conv2d(x, m.weight), 0, 4),
        (lambda m, x, y: F.linear(x, m.matrix), 0, 4),
        (lambda m, x, y: x @ m.matrix, -1, 4),
        (lambda m, x, y: m.matrix @ x, -2, 4),
        (lambda m, x, y: x @ m.matrix.t(), -1, 4),
        (lambda m, x, y: torch.einsum("bi,io->bo", x, m.matrix), 1, 4),
        (lambda m, x, y: torch.einsum("bchw,cd", x, m.matrix), 1, 4),
        (lambda m, x, y: F.conv_transpose2d(x, m.weight, None, 1, 0, 0, 2), 1, 8),
    ],
)
def test_a_weight_of_a_function_is_quantized_per_output_channel(op: Any, axis: int, scales: int) -> None:
    prepared = qt.prepare(Probe(op), backend="onnxruntime")
    ((name, quantizer),) = ((n, q) for n, q in qt.quantizers_of(prepared).items() if n.startswith("weight_quantizers."))
    assert (quantizer.spec.axis, quantizer.scale.numel()) == (axis, scales)
    assert quantizer.ready
    (edge,) = (e for e in prepared.plan.edges if e.quantizer == name)
    assert edge.why.endswith("called as a function")
    line = next(line for line in qt.quantization_report(prepared).layers if line.name == edge.consumer)
    assert line.status == "quantized"
    assert line.weight == quantizer.spec.describe()


WEIGHT_ONLY = qt.QConfig(None, qt.QuantSpec(axis=0))


@pytest.mark.parametrize(
    "mapping",
    [
        qt.QConfigMapping().set_global(WEIGHT_ONLY),
        qt.QConfigMapping().set_object_type(F.conv2d, WEIGHT_ONLY),
        qt.QConfigMapping().set_module_name("conv2d", WEIGHT_ONLY),
    ],
    ids=["global", "type", "name"],
)
def test_a_config_for_weights_alone_quantizes_a_functions_weight(mapping: qt.QConfigMapping) -> None:
    model = Probe(lambda m, x, y: F.conv2d(x, m.weight)).eval()
    prepared = qt.prepare(model, backend="onnxruntime", qconfig_mapping=mapping)
    assert [edge.quantizer for edge in prepared.plan.edges if edge.consumer == "conv2d"] == ["weight_quantizers.conv2d"]
    line = next(line for line in qt.quantization_report(prepared).layers if line.name == "conv2d")
    assert (line.status, line.weight, line.inputs) == ("quantized", "int8 per-channel(0)", ())
    scale = model.weight.detach().abs().amax((1, 2, 3)) / 127
    torch.testing.assert_close(prepared.get_submodule("weight_quantizers.conv2d").scale, scale, rtol=0, atol=0)


def test_the_scales_of_a_functions_weight_are_those_of_its_channels() -> None:
    model = Probe(lambda m, x, y: x @ m.matrix)
    prepared = qt.prepare(model, backend="onnxruntime")
    (quantizer,) = (q for n, q in qt.quantizers_of(prepared).items() if n.startswith("weight_quantizers."))
    torch.testing.assert_close(quantizer.scale, model.matrix.detach().abs().amax(0) / 127, rtol=0, atol=0)


class Function(nn.Module):
    """A function with a weight of its own."""

    def __init__(self, function: Any, *sizes: int, **options: int) -> None:
        super().__init__()
        self.function, self.options = function, options
        self.weight = nn.Parameter(torch.randn(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight, **self.options)


@pytest.mark.parametrize(
    ("model", "shape", "scales"),
    [
        (Function(F.linear, 8, 64), (4, 64), (8, 2)),
        (Function(F.conv2d, 8, 64, 1, 1), (4, 64, 3, 3), (8, 2, 1, 1)),
        (Function(F.conv_transpose2d, 6, 64, 2, 2, groups=2), (4, 6, 3, 3), (6, 2, 2, 2)),
    ],
    ids=["linear", "conv", "grouped_conv_transpose"],
)
def test_a_weight_of_a_function_in_groups_goes_from_prepare_to_export(
    model: Function, shape: tuple[int, ...], scales: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    qconfig = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=4, axis=1, group_size=32))
    mapping = qt.QConfigMapping().set_object_type(model.function, qconfig)
    prepared = qt.prepare(model.train(), backend="onnxruntime", qconfig_mapping=mapping)
    ((name, quantizer),) = ((n, q) for n, q in qt.quantizers_of(prepared).items() if q.of_weight)
    assert quantizer.scale.shape == scales
    amax = model.weight.detach().unflatten(1, (2, 32)).abs().amax(2)
    torch.testing.assert_close(quantizer.scale, amax / 7, rtol=0, atol=0)
    x = torch.randn(shape)
    qt.calibrate(prepared, [x], progress=False)
    prepared(x).square().mean().backward()
    torch.optim.SGD(prepared.parameters(), lr=0.1).step()
    assert not torch.equal(prepared.get_parameter("weight"), model.weight)
    assert qt.convert(prepared).get_submodule(name).of_weight
    result = qt.export_onnx(prepared, x, tmp_path / "m.onnx")
    assert result.verification.weight_codes.differing == 0


def test_a_weight_that_is_computed_from_the_input_is_an_activation() -> None:
    model = Probe(lambda m, x, y: F.linear(x, y))
    assert {("x", "linear"), ("y", "linear")} <= edges(model, ORT)


class Lora(nn.Module):
    """A frozen weight and a product of two small ones; and a convolution whose weight is standardized."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Parameter(torch.randn(8, 3, 3, 3))
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8), requires_grad=False), nn.Parameter(torch.zeros(8))
        self.a, self.b, self.last = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.conv - self.conv.mean((1, 2, 3), keepdim=True)) / (self.conv.std((1, 2, 3), keepdim=True) + 1e-5)
        x = F.relu(F.conv2d(x, weight)).mean((2, 3))
        return self.last(F.gelu(F.linear(x, self.weight + self.b @ self.a * 0.5, self.bias)))


@pytest.mark.parametrize("backend", list(qt.backends))
def test_what_computes_a_weight_is_not_quantized(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Lora(), torch.randn(4, 3, 6, 6)
    prepared = qt.prepare(model, (x,), backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    of_weights = {"sub", "add", "add_1", "truediv", "mul", "a", "b", "conv", "weight", "matmul", "mean", "std"}
    assert of_weights.isdisjoint(activations(prepared))
    statuses = {name: verdict.text for name, verdict in prepared.plan.status.items() if name in ("matmul", "sub")}
    assert set(statuses.values()) == {"float: computed from parameters alone"}
    torch.optim.SGD(prepared.parameters(), lr=0.1).step()
    prepared.train()(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in (prepared.a, prepared.b, prepared.conv))
    assert torch.equal(qt.convert(prepared)(x), prepared.eval()(x))


def test_a_rule_that_names_an_op_of_parameters_quantizes_it() -> None:
    mapping = qt.QConfigMapping().set_module_name("matmul", BOTH)
    assert {"a", "b"} <= set(
        activations(qt.prepare(Lora(), torch.randn(4, 3, 6, 6), qconfig_mapping=mapping, backend="tensorrt"))
    )


def test_a_spec_that_does_not_fit_a_functions_weight_names_the_node() -> None:
    model = Probe(lambda m, x, y: F.linear(x, m.matrix))
    before = copy.deepcopy(model.state_dict())
    wrong = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=3))
    with pytest.raises(
        ValueError, match=r"'linear': the axis of a tensor of 2 dimensions must lie in \[-2, 1\], got 3"
    ):
        qt.prepare(model, qconfig_mapping=qt.QConfigMapping().set_module_name("linear", wrong), backend="tensorrt")
    assert set(model.state_dict()) == set(before)
    assert [type(module) for module in model.modules()] == [Probe, nn.Linear, nn.Linear]


# ---- backends are data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"roles": {"convv": "compute"}}, "in the roles of Backend 'onnxruntime': 'convv'; did you mean 'conv'"),
        ({"roles": {"conv": "computes"}}, "did you mean 'compute'"),
        ({"residual_add": "one"}, "unknown residual_add of Backend 'onnxruntime': 'one'"),
        ({"conv_transpose_axis": 2}, "conv_transpose_axis must be 0 (input channels) or 1 (output channels), got 2"),
        ({"end_bits": 1}, "end_bits must be None or lie in [2, 16], got 1"),
    ],
)  # fmt: skip
def test_a_backend_with_unknown_values_says_so(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=None) as error:
        replace(ORT, **change)
    assert words in str(error.value)


def test_the_targets() -> None:
    assert list(qt.backends) == [
        "tensorrt", "tensorrt10", "tensorrt8", "tensorrt-nlp", "onnxruntime", "openvino", "snpe", "qnn", "vitis", "ppl",
        "ppl-w8a16", "stpu", "tengine", "nnie", "tvm", "xnnpack", "litert", "litert-16x8", "academic", "academic-nlp",
    ]  # fmt: skip
    up = qt.prepare(nn.Sequential(nn.ConvTranspose2d(3, 4, 2)), backend="tensorrt8").get_submodule("0").weight_quantizer
    assert up.spec.axis == 0
    weights = {name: backend.qconfig.weight.describe() for name, backend in qt.backends.items()}
    assert weights["vitis"] == "int8 pow2"
    assert weights["nnie"] == "nnie"
    assert weights["openvino"] == "int7 per-channel(0)"
    assert weights["snpe"] == weights["qnn"] == weights["tengine"] == "uint8 affine"
    assert weights["ppl"] == "uint8 affine per-channel(0)"
    assert weights["ppl-w8a16"] == "uint8 affine"
    assert weights["stpu"] == "int8 narrow"
    assert weights["xnnpack"] == weights["litert"] == "int8 narrow per-channel(0)"
    assert qt.backends["xnnpack"].qconfig.activation.describe() == "int8 affine"
    assert qt.backends["ppl-w8a16"].qconfig.activation.describe() == "uint16 affine"


@pytest.mark.parametrize("backend", ["academic-nlp", "tensorrt-nlp"])
def test_nlp_targets_quantize_linear_layers_and_matmuls_alone(backend: str) -> None:
    prepared = qt.prepare(nets.ConvNet(), backend=backend)
    assert [line.name for line in qt.quantization_report(prepared).quantized] == ["head"]
    assert type(prepared.get_submodule("conv1")) is nn.Conv2d
    reasons = {line.name: line.reason for line in qt.quantization_report(prepared).left_float}
    assert reasons["conv1"] == f"float: a conv, which {backend} computes in float"


@pytest.mark.parametrize("make", [lambda m: m.set_object_type(dict, None), lambda m: m.set_object_type(Tensor, None)])
def test_types_that_are_no_modules_are_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"a type must be a module type, such as torch\.nn\.Conv2d, got"):
        make(qt.QConfigMapping())


def test_a_rule_for_a_method_survives_json() -> None:
    mapping = qt.QConfigMapping().set_object_type(torch.Tensor.add, None)
    assert qt.QConfigMapping.from_json(mapping.to_json()) == mapping


class PadsForPool(nn.Module):
    """A pool over what was padded with -inf, as TensorFlow's "same" padding has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.max_pool2d(F.pad(self.first(x), (0, 1, 0, 1), value=float("-inf")), 2))


def test_padding_with_minus_infinity_is_not_quantized() -> None:
    prepared = qt.prepare(PadsForPool().eval(), backend="onnxruntime")
    report = qt.calibrate(prepared, [torch.randn(2, 3, 5, 5)], progress=False)
    assert set(report.ranges) >= {"activation_quantizers.x", "activation_quantizers.max_pool2d"}
    assert "activation_quantizers.pad" not in report.ranges


@pytest.mark.parametrize("backend", ["onnxruntime", "snpe"])
def test_an_identity_before_an_activation_does_not_part_it_from_its_layer(backend: str) -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Identity(), nn.Dropout(0.1), nn.ReLU())
    prepared = qt.prepare(nn.Sequential(*body, nn.Conv2d(4, 2, 1)), backend=backend)
    assert prepared.plan.status["_4"] == Verdict(Status.FUSED, Cause.JOINED, "fused with 0")
    assert "activation_quantizers._4" in qt.quantizers_of(prepared)
    assert "activation_quantizers._1" not in qt.quantizers_of(prepared)


@pytest.mark.parametrize("backend", ["tensorrt", "openvino"])
def test_a_linear_resize_is_quantized_on_tensorrt_only_between_quantized_tensors(backend: str) -> None:
    resize = lambda m, x, y: F.interpolate(x, scale_factor=2, mode="bilinear")  # noqa: E731
    status = qt.prepare(Probe(resize), backend=backend).plan.status["interpolate"].status
    assert status == "quantized"  # the probe's layer takes its output

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(self.conv(x), scale_factor=2, mode="bilinear")

    status = qt.prepare(Last(), backend=backend).plan.status["interpolate"].status
    assert status == ("float" if backend == "tensorrt" else "quantized")


def test_a_quantizer_of_the_models_own_is_in_the_plan_and_the_report() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.own = nn.Linear(4, 4), qt.TensorQuantizer(qt.QuantSpec(bits=4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.own(self.fc(x)))

    prepared = qt.prepare(Own(), backend="onnxruntime")
    (edge,) = (edge for edge in prepared.plan.edges if edge.quantizer == "own")
    assert (edge.source, edge.consumer, edge.spec.bits) == ("fc", "tanh", 4)
    assert edge.why == "a quantizer of the model's own"
    assert prepared.plan.status["own"] == Verdict.quantized(Cause.OWN_QUANTIZER, "a quantizer of the model's own")
    (line,) = (line for line in qt.quantization_report(prepared).tensors if line.quantizer == "own")
    assert (line.source, line.consumers) == ("fc", ("tanh",))


METHODS = {
    "to": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "half": lambda x: x.half().float(),
    "type": lambda x: x.type(torch.float32),
    "cpu": lambda x: torch.relu(x.cpu().double()).float(),
}


@pytest.mark.parametrize("name", METHODS)
def test_tensors_that_have_the_names_of_methods_of_modules_are_quantized(name: str) -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nets.linear_of(), nets.linear_of()

        def forward(self, x: Tensor) -> Tensor:
            return METHODS[name](self.last(METHODS[name](self.first(METHODS[name](x)))))

    model, x = Casts().eval(), torch.randn(2, 4)
    prepared = qt.prepare(model, (x,), backend="vitis")
    nets.assert_float_when_off(prepared, model, x)
    assert qt.calibrate(prepared, [x, -x], progress=False).unreached == ()
    converted = copy.deepcopy(qt.convert(prepared))
    assert torch.equal(converted(x), prepared.eval()(x))


class Pyramid(nn.Module):
    """Returns a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [conv(x) for conv in self.convs]


@pytest.mark.parametrize("backend", sorted(qt.backends))
def test_a_slice_of_a_leaf_modules_list_is_quantized_tensor_by_tensor(backend: str) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Pyramid(), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat(self.encoder(x)[1:][::-1], 1))

    model, x = Decoder().eval(), torch.randn(2, 4, 5, 5)
    prepared = qt.prepare(model, (x,), backend, untraced=["encoder"])
    assert ("cat" in activations(prepared)) is not backend.endswith("-nlp")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x))
    if not backend.endswith("-nlp"):  # these have no convolutions
        qt.calibrate(prepared, [x], progress=False)
    assert prepared(x).shape == (2, 4, 5, 5)
