"""prepare as a whole: structure, numerics with quantizers off, idempotence, copies, checkpoints and compiled training."""

import copy
import pickle
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import qtoolkit as qt
from qtoolkit.graph.capture import trace
from qtoolkit.graph.passes import insert, swap
from qtoolkit.layer_rules import LayerRules
from tests import nets

SHAPE = (4, 3, 8, 8)
BACKENDS = list(qt.backends)


def prepared_net(backend: str = "tensorrt10", training: bool = True, **kwargs: object) -> fx.GraphModule:
    model = nets.trained(nets.ConvNet(), *SHAPE).train(training)
    return qt.prepare(model, torch.randn(SHAPE), backend=backend, **kwargs)


def quantized_tensors(model: fx.GraphModule) -> dict[str, tuple[str, ...]]:
    """Return the takers of each quantized tensor, by the name of its node."""
    lines = qt.quantization_report(model).tensors
    return {line.quantizer.removeprefix("activation_quantizers."): line.consumers for line in lines}


# ---- trace


def test_tracing_keeps_outputs_and_names() -> None:
    model = nets.trained(nets.ConvNet(), *SHAPE).eval()
    traced = trace.run(copy.deepcopy(model)).gm
    x = torch.randn(SHAPE)
    assert torch.equal(traced(x), model(x))
    assert set(traced.state_dict()) == set(model.state_dict())


def test_an_untraceable_model_is_told_the_line_and_the_remedy() -> None:
    model = nets.ControlFlow()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(qt.UntraceableError) as error:
        qt.prepare(model, backend="tensorrt10")
    words = str(error.value)
    assert "nets.py, line" in words
    assert "`if x.sum() > 0:" in words
    assert "submodule 'block' (Block)" in words
    assert "untraced=['block'] or leaf_modules=[Block]" in words
    assert type(model) is nets.ControlFlow
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("how", [{"untraced": ["block"]}, {"leaf_modules": [nets.ControlFlow.Block]}])
def test_the_remedy_works(how: dict[str, object]) -> None:
    prepared = qt.prepare(nets.ControlFlow(), (torch.ones(2, 4),), backend="tensorrt10", **how)
    report = qt.quantization_report(prepared)
    assert [line.name for line in report.quantized] == ["first", "block", "block.fc"]
    assert report.left_float == ()


def test_unknown_names_say_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown submodule 'blok'; did you mean 'block'"):
        qt.prepare(nets.ControlFlow(), untraced=["blok"], backend="tensorrt10")
    with pytest.raises(ValueError, match="unknown backend 'tensort'; did you mean 'tensorrt'"):
        qt.prepare(nets.LinearNet(), backend="tensort")
    mapping = qt.QConfigMapping().set_module_name("fc3", None)
    with pytest.raises(ValueError, match="unknown layer 'fc3'; did you mean 'fc"):
        qt.prepare(nets.LinearNet(), qconfig_mapping=mapping, backend="tensorrt10")
    with pytest.raises(ValueError, match="matches no layer's full name"):
        qt.prepare(
            nets.LinearNet(),
            qconfig_mapping=qt.QConfigMapping().set_module_name_regex("conv.*", None),
            backend="tensorrt10",
        )


def test_wrapped_models_are_refused() -> None:
    with pytest.raises(qt.UntraceableError, match=r"wrapped in DataParallel; prepare model\.module"):
        qt.prepare(nn.DataParallel(nets.LinearNet()), backend="tensorrt10")


def test_preserved_attributes_survive() -> None:
    model = nets.LinearNet()
    model.stride, model.label = 32, lambda: "label"
    prepared = qt.prepare(model, preserve_attributes=["stride", "fc1.in_features"], backend="tensorrt10")
    assert prepared.stride == 32
    with pytest.raises(ValueError, match="no attribute 'strid'"):
        qt.prepare(model, preserve_attributes=["strid"], backend="tensorrt10")


def test_concrete_args_fix_an_argument() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor, double: bool = False) -> Tensor:
            return self.fc(x) * 2 if double else self.fc(x)

    prepared = qt.prepare(Optional(), concrete_args={"double": False}, backend="tensorrt10")
    assert sum(node.op == "call_function" and "mul" in str(node.target) for node in prepared.graph.nodes) == 0


# ---- swap and fuse


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("net", [(nets.ConvNet, SHAPE), (nets.LinearNet, (5, 6))], ids=["conv", "linear"])
def test_with_quantizers_off_training_is_the_float_model(
    backend: str, net: tuple[type[nn.Module], tuple[int, ...]]
) -> None:
    kind, shape = net
    model = nets.trained(kind(), *shape)
    prepared = qt.prepare(model, backend=backend)
    x = torch.randn(shape)
    with qt.disable_quantization(prepared):
        for training in (True, False):
            ours, theirs = prepared.train(training)(x), model.train(training)(x)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    buffers = dict(prepared.named_buffers())
    for name, theirs in model.named_buffers():
        torch.testing.assert_close(buffers[name], theirs, rtol=1e-5, atol=1e-6)


def test_without_batch_norm_quantizers_off_is_bit_equal() -> None:
    model = nets.Shared()
    prepared = qt.prepare(model, backend="tensorrt10")
    x = torch.randn(3, 4)
    nets.assert_float_when_off(prepared, model, x)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if not name.endswith("-nlp")])  # convolutions stay float
def test_eval_mode_folds_batch_norm_at_once(backend: str) -> None:
    model = nets.trained(nets.ConvNet(), *SHAPE).eval()
    prepared = qt.prepare(model, backend=backend)
    in_float = {line.name for line in qt.quantization_report(prepared).left_float}
    norms = [name for name, m in prepared.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == (
        0 if qt.backends[backend].grouped_conv_transpose else 1
    )  # after the layer that stays in float
    assert in_float.issuperset(norms)
    x = torch.randn(SHAPE)
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-6, atol=1e-6)


def test_training_mode_keeps_names_and_loads_float_weights() -> None:
    model = nets.trained(nets.ConvNet(), *SHAPE)
    prepared = qt.prepare(nets.ConvNet().train(), backend="tensorrt10")
    assert set(model.state_dict()) <= set(prepared.state_dict())
    prepared.load_state_dict(model.state_dict())  # strict
    assert all(torch.equal(prepared.state_dict()[k], v) for k, v in model.state_dict().items())


def test_gradients_with_quantizers_off_are_those_of_the_float_model() -> None:
    model = nets.trained(nets.ConvNet(), *SHAPE)
    prepared = qt.prepare(model, backend="tensorrt10")
    x = torch.randn(SHAPE)
    with qt.disable_quantization(prepared):
        prepared(x).square().sum().backward()
    model(x).square().sum().backward()
    ours = dict(prepared.named_parameters())
    for name, theirs in model.named_parameters():
        torch.testing.assert_close(ours[name].grad, theirs.grad, rtol=1e-4, atol=2e-5)


class Shapes(TorchDispatchMode):
    """The shapes of the results of ops, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Counter[tuple[str, tuple[int, ...]]]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self.of.update((op.__name__, tuple(t.shape)) for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


def test_with_quantizers_off_no_weight_is_multiplied_by_a_factor() -> None:
    prepared = qt.prepare(nets.trained(nets.ConvNet(), *SHAPE), backend="tensorrt10")
    with qt.disable_quantization(prepared), Shapes() as shapes:
        prepared(torch.randn(SHAPE)).sum().backward()
    weights = {tuple(p.shape) for p in prepared.parameters() if p.dim() == 4}
    found = {(op, shape) for op, shape in shapes.of if shape in weights and op.startswith("mul")}
    assert weights
    assert not found


def test_a_zero_gamma_gives_no_nan() -> None:
    model = nets.trained(nets.ConvNet(), *SHAPE)
    nn.init.zeros_(model.bn2.weight)
    prepared = qt.prepare(model, backend="tensorrt10")
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    y = prepared.train()(torch.randn(SHAPE))
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in prepared.parameters() if p.grad is not None)
    assert torch.isfinite(qt.convert(prepared)(torch.randn(SHAPE))).all()


def test_a_batch_norm_behind_a_layer_with_a_second_user_is_not_linked() -> None:
    model = nets.SecondUser().eval()
    prepared = qt.prepare(model, backend="tensorrt10")
    report = {line.name: line for line in qt.quantization_report(prepared).layers}
    assert "cannot be folded" in report["bn"].reason
    x = torch.randn(2, 3, 4, 4)
    nets.assert_float_when_off(prepared, model, x)


def test_shared_layers_stay_shared() -> None:
    prepared = qt.prepare(nets.Shared(), backend="tensorrt10")
    layers = [m for m in prepared.modules() if isinstance(m, qt.nn.QuantLinear)]
    assert len(layers) == 1
    assert sum(node.op == "call_module" and node.target == "fc" for node in prepared.graph.nodes) == 2


def test_the_users_model_is_not_changed() -> None:
    model = nets.trained(nets.ConvNet(), *SHAPE)
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    prepared = qt.prepare(model, backend="tensorrt10")
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.add_(1)
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_layers_go_back_to_float() -> None:
    prepared = qt.prepare(nets.LinearNet(), backend="tensorrt10")
    layer = prepared.get_submodule("fc1").to_float()
    assert type(layer) is nn.Linear
    assert layer.weight is prepared.get_submodule("fc1").weight
    assert set(layer.state_dict()) == {"weight", "bias"}


# ---- insert


def test_every_wanted_edge_has_one_quantizer_on_tensorrt() -> None:
    assert quantized_tensors(prepared_net("tensorrt10")) == {
        "x": ("conv1",),
        "relu": ("pool",),  # conv2 and the add's identity branch take it through the pool
        "relu_1": ("up",),
        "relu_2": ("average",),
        "average": ("flatten",),
    }


def test_both_inputs_of_an_add_are_quantized_on_onnxruntime() -> None:
    assert quantized_tensors(prepared_net("onnxruntime"))["bn2"] == ("add",)


@pytest.mark.slow
def test_nothing_stands_between_a_layer_and_its_batch_norm_or_activation() -> None:
    for backend in BACKENDS:
        sources = quantized_tensors(prepared_net(backend))
        assert not {"conv1", "conv2", "up", "bn1", "bn3"} & set(sources)


@pytest.mark.parametrize("downsample", [False, True])
def test_tensorrt_leaves_the_main_branch_of_a_residual_add_free(downsample: bool) -> None:
    prepared = qt.prepare(nets.Residual(downsample), backend="tensorrt10")
    sources = quantized_tensors(prepared)
    assert "bn2" not in sources
    assert ("shortcut" in sources) == downsample
    main_conv_input = next(n for n in prepared.graph.nodes if n.target == "conv1").args[0]
    if not downsample:  # the identity branch shares conv1's quantizer
        add = next(n for n in prepared.graph.nodes if n.target is torch.add)
        identity = next(n for n in add.args if n.target == "shortcut")
        assert identity.args[0] is main_conv_input


def test_a_policy_is_changed_by_replacing_a_field() -> None:
    backend = replace(qt.backends["tensorrt10"], name="mine", residual_add="both")
    assert "bn2" in quantized_tensors(qt.prepare(nets.Residual(False), backend=backend))


def test_x_plus_x_has_one_quantizer() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x

    prepared = qt.prepare(Double(), backend="openvino")
    assert quantized_tensors(prepared) == {"x": ("add",)}


def test_adding_a_constant_is_no_residual_add() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    report = qt.quantization_report(qt.prepare(Shift(), backend="tensorrt10"))
    assert [line.name for line in report.left_float] == ["add"]


def test_keyword_inputs_are_seen() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.add(input=self.fc(x), other=x)

    prepared = qt.prepare(Keywords(), backend="openvino")
    assert quantized_tensors(prepared) == {"x": ("fc", "add"), "fc": ("add",)}


def test_of_two_specs_for_one_tensor_the_finer_holds() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.b(x)

    coarse = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=0))
    prepared = qt.prepare(
        Twice(), qconfig_mapping=qt.QConfigMapping().set_module_name("a", coarse), backend="tensorrt10"
    )
    (quantizer,) = [q for n, q in qt.quantizers_of(prepared).items() if n.startswith(insert.HOLDER)]
    assert quantizer.spec.bits == 8
    assert prepared.get_submodule("a").weight_quantizer.spec.bits == 4


def test_layers_can_be_left_in_float_and_are_reported() -> None:
    mapping = qt.QConfigMapping().set_object_type(nn.ConvTranspose2d, None).set_module_name("head", None)
    prepared = prepared_net(qconfig_mapping=mapping)
    assert type(prepared.get_submodule("up")) is nn.ConvTranspose2d
    report = qt.quantization_report(prepared)
    reasons = {line.name: line.reason for line in report.left_float}
    assert reasons == {
        "up": "float: the qconfig_mapping leaves it in float",
        "bn3": "float: a batch norm that cannot be folded (its layer is not quantized)",
        "head": "float: the qconfig_mapping leaves it in float",
        # Rule 6 of TensorRT: without the head, nothing takes the pool's output quantized.
        "average": "float: its output is not quantized, and tensorrt10 computes it in integers only between two quantized "
        "tensors",
    }


def test_the_axis_of_a_transposed_convolution() -> None:
    default = prepared_net().get_submodule("up").weight_quantizer
    assert (default.spec.axis, default.group, default.scale.numel()) == (1, 2, 12)
    older = replace(qt.backends["tensorrt10"], conv_transpose_axis=0)
    by_input = qt.prepare(nets.ConvNet(), backend=older).get_submodule("up").weight_quantizer
    assert (by_input.spec.axis, by_input.group, by_input.scale.numel()) == (0, 1, 8)
    said = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0))
    mapping = qt.QConfigMapping().set_object_type(nn.ConvTranspose2d, said)
    literal = (
        qt.prepare(nets.ConvNet(), qconfig_mapping=mapping, backend="tensorrt10").get_submodule("up").weight_quantizer
    )
    assert literal.spec.axis == 0


def test_passing_twice_changes_nothing() -> None:
    prepared = prepared_net()
    before, rules = str(prepared.graph), LayerRules(qt.backends["tensorrt10"], table=qt.nn.QAT_MODULES)
    insert.run(swap.run(prepared, rules), rules)
    assert str(prepared.graph) == before


@pytest.mark.parametrize("name", ["plan", "kept", "products", "code", "graph", "meta"])
def test_a_submodule_of_the_name_of_an_attribute_is_refused(name: str) -> None:
    model = nn.Sequential(OrderedDict({name: nn.Conv2d(3, 4, 3)})).train()
    with pytest.raises(
        ValueError, match=f"^prepare: the model must not have a submodule, .* named '{name}', .*rename it"
    ):
        qt.prepare(model, (torch.randn(1, 3, 8, 8),), backend="tensorrt10")


def test_preparing_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="prepared already"):
        qt.prepare(prepared_net(), backend="tensorrt10")


# ---- as a whole


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("training", [True, False])
def test_copies_compute_and_train_the_same(copy_of, training: bool) -> None:
    prepared = prepared_net("onnxruntime")
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    twin = copy_of(prepared)
    x = torch.randn(SHAPE)
    assert torch.equal(twin.train(training)(x), prepared.train(training)(x))
    assert set(twin.state_dict()) == set(prepared.state_dict())
    layer = twin.get_submodule("conv1")
    assert layer.batch_norm is twin.get_submodule("bn1")
    assert str(qt.quantization_report(twin)) == str(qt.quantization_report(prepared))
    assert torch.equal(qt.convert(twin)(x), qt.convert(prepared)(x))


def test_a_checkpoint_resumes() -> None:
    mapping = qt.QConfigMapping().set_global(
        qt.QConfig(qt.QuantSpec(quantizer="lsq"), qt.QuantSpec(axis=0, quantizer="lsq"))
    )
    one, other = prepared_net(qconfig_mapping=mapping), prepared_net(qconfig_mapping=mapping)
    qt.calibrate(one, [torch.randn(SHAPE)], progress=False)
    other.load_state_dict(one.state_dict())
    x = torch.randn(SHAPE)
    assert torch.equal(one.eval()(x), other.eval()(x))


# Of a smaller net, all kinds of quantizers are compiled in quantizers/test_kinds.py.
@pytest.mark.parametrize("quantizer", [pytest.param("fixed", marks=pytest.mark.sweep), "lsq"])
def test_training_compiles_without_graph_breaks(quantizer: str) -> None:
    mapping = qt.QConfigMapping().set_global(
        qt.QConfig(qt.QuantSpec(quantizer=quantizer), qt.QuantSpec(axis=0, quantizer=quantizer))
    )
    prepared = prepared_net(qconfig_mapping=mapping)
    prepared.double()  # batch norm is computed another way when compiled: in float32 a code could flip
    x = torch.randn(SHAPE, dtype=torch.float64)
    qt.calibrate(prepared, [x], progress=False)
    twin = copy.deepcopy(prepared)
    compiled = torch.compile(twin.train(), fullgraph=True, backend="aot_eager")
    prepared.train()(x).square().sum().backward()
    compiled(x).square().sum().backward()
    theirs = dict(twin.named_parameters())
    for name, parameter in prepared.named_parameters():
        torch.testing.assert_close(theirs[name].grad, parameter.grad, rtol=1e-9, atol=1e-9)


def test_training_under_autocast() -> None:
    prepared = prepared_net()
    x = torch.randn(SHAPE)
    qt.calibrate(prepared, [x], progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        y = prepared.train()(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in prepared.parameters() if p.grad is not None)


def test_inference_mode_around_the_call_is_refused() -> None:
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match="prepare: this call is inside torch.inference_mode"),
    ):
        qt.prepare(nets.linear_of(), (torch.rand(2, 4),), backend="tensorrt10")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("measured", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("number", [True, False], ids=["number", "tensor"])
def test_graphs_are_deeper_than_pythons_stack(measured: bool, number: bool) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nets.linear_of()

        def forward(self, x: Tensor) -> Tensor:
            y, step = self.fc(x), x.shape[0] if number else x
            total = step if number else y
            for _ in range(330):
                total = total + step
            return y * total if number else total

    model, x = Deep().eval(), torch.rand(2, 4)
    prepared = qt.prepare(model, (x,) if measured else None, "onnxruntime")
    nets.assert_float_when_off(prepared, model, x)


@pytest.mark.parametrize("name", ["meta", "graph", "plan", "code", "kept", "forward", "state_dict"])
def test_attributes_of_prepared_models_are_not_preserved(name: str) -> None:
    model = nets.linear_of()
    if not hasattr(model, name):
        setattr(model, name, 3)
    with pytest.raises(ValueError, match=f"prepare: preserve_attributes must not name '{name}'.* rename it"):
        qt.prepare(model, preserve_attributes=[name], backend="tensorrt10")


class Scored(nn.Module):
    """Computes a loss if it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nets.linear_of()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        y = self.fc(x)
        loss = None if labels is None else nn.functional.cross_entropy(y, labels.to(y.device))
        return {"loss": loss, "logits": y}


def test_an_argument_that_the_graph_computes_with_is_required() -> None:
    x, labels = torch.rand(2, 4), torch.tensor([0, 1])
    prepared = qt.prepare(Scored().eval(), {"x": x, "labels": labels}, "onnxruntime")
    qt.calibrate(prepared, [{"x": x, "labels": labels}], progress=False)
    for ours in (prepared, pickle.loads(pickle.dumps(prepared)), qt.convert(prepared)):
        assert set(ours(x, labels)) == {"loss", "logits"}
        for given in ({}, {"labels": None}):
            with pytest.raises(ValueError, match="argument 'labels' is None: it was in the example_inputs"):
                ours(x, **given)


def test_what_forward_reads_from_its_keywords_must_be_in_the_example_inputs() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nets.linear_of()

        def forward(self, *tensors: Tensor, **keywords: Tensor) -> Tensor:
            return self.fc(tensors[0]) * keywords["scale"]

    with pytest.raises(ValueError, match=r"prepare: the model does not run on example_inputs \(KeyError: 'scale'\)"):
        qt.prepare(Keywords(), (torch.rand(2, 4),), backend="tensorrt10")


def test_each_step_compiles_the_graph_once(monkeypatch) -> None:
    """Tracing compiles it too, because it compares the graph with the model."""
    compiled, recompile = [], fx.GraphModule.recompile
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda self: compiled.append(self) or recompile(self))
    x = torch.rand(2, 3, 8, 8)
    prepared = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()), x, backend="onnxruntime")
    assert len(compiled) == 2
    qt.calibrate(prepared, [x], progress=False)
    for arithmetic in ("float", "integer"):
        compiled.clear()
        converted = qt.convert(prepared, arithmetic=arithmetic)
        assert compiled == [converted]
