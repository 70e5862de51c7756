"""replace(): quantized layers in place of float ones, against plain torch on the operands that the oracle gives."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.eager.record import plan_of
from qtoolkit.model_inputs import tensors_of
from qtoolkit.quant_modules import replace
from tests import nets, processes, ranks, reference

W4 = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=0))


class Branches(nn.Module):
    """Control flow on values, a shared layer under two names, tied weights, and a list of layers that is no ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
        self.pool, self.act = nn.MaxPool2d(2), nn.ReLU()
        self.fc, self.decoder = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.fc.weight
        self.again = self.fc
        self.in_order = (self.fc, self.decoder)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(self.pool(self.conv(x)))).mean((2, 3))
        if y.sum() > 0:
            y = self.again(y)
        for layer in self.in_order:
            y = layer(y)
        return y


SHAPE = (2, 3, 6, 6)


def calibrated(model: nn.Module, *args: Tensor) -> nn.Module:
    qt.calibrate(model, [args], progress=False)
    return model


def statuses(model: nn.Module) -> dict[str, tuple[str, str]]:
    return {name: (verdict.status, verdict.text) for name, verdict in plan_of(model).inside.items()}


def reasons(model: nn.Module) -> dict[str, str]:
    return {name: reason for name, (_, reason) in statuses(model).items()}


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, (status, _) in statuses(model).items() if status == "quantized"}


# ---- what it computes


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("model", [Branches, nets.ConvNet, nets.LinearNet, nets.ControlFlow])
def test_with_quantizers_off_it_is_the_float_model(model: type[nn.Module], training: bool) -> None:
    shape = {nets.LinearNet: (5, 6), nets.ControlFlow: (2, 4)}.get(model, (2, 3, 8, 8))
    net, x = nets.trained(model(), *shape).train(training), torch.randn(shape)
    replaced = replace(net, backend="tensorrt10")
    assert quantized_names(replaced)
    with qt.disable_quantization(replaced):
        assert torch.equal(replaced(x), net(x))
    assert not qt.quantizers_of(net)


LAYERS = {
    "conv": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 5, 5), F.conv2d, {"padding": 1, "groups": 2}),
    "conv_transpose": (
        lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2),
        (2, 4, 3, 3),
        F.conv_transpose2d,
        {"stride": 2, "groups": 2},
    ),
    "linear": (lambda: nn.Linear(5, 3), (4, 5), F.linear, {}),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_computes_with_the_operands_of_the_formula(kind: str) -> None:
    make, shape, function, options = LAYERS[kind]
    layer, x = make(), torch.randn(shape)
    replaced = calibrated(replace(layer, training_arithmetic="float", backend="tensorrt10"), x)
    group, axis = (2, 1) if kind == "conv_transpose" else (1, 0)
    lo, hi = reference.minmax(layer.weight, axis, group)
    w_scale = torch.maximum(-lo, hi) / 127
    x_scale = x.abs().max() / 127
    assert torch.equal(replaced.weight_quantizer.scale, w_scale)
    assert torch.equal(replaced.input_quantizer.scale, x_scale)
    w = reference.fake_quant(layer.weight.detach(), w_scale, None, -128, 127, axis, group)
    expected = function(reference.fake_quant(x, x_scale, None, -128, 127), w, layer.bias, **options)
    assert torch.equal(replaced(x), expected)


# ---- identity


def test_parameters_buffers_and_layers_stay_the_same_objects() -> None:
    model = Branches()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    assert replace(model, inplace=True, backend="tensorrt10") is model
    assert {name: model.get_submodule(name) for name in modules} == modules
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert model.fc is model.again is model.in_order[0]
    assert model.decoder.weight is model.fc.weight
    assert [type(layer) for layer in model.in_order] == [qt.nn.QuantLinear] * 2
    assert sum(name.endswith("fc.input_quantizer") for name in qt.quantizers_of(model)) == 1


def test_a_copy_shares_nothing_and_stays_tied() -> None:
    model = Branches()
    replaced = replace(model, backend="tensorrt10")
    assert not {id(p) for p in model.parameters()} & {id(p) for p in replaced.parameters()}
    assert replaced.fc is replaced.again is replaced.in_order[0]
    assert replaced.decoder.weight is replaced.fc.weight
    assert type(model.fc) is nn.Linear


def test_an_optimizer_built_before_trains_bit_by_bit_as_in_float() -> None:
    model = Branches()
    twin, x = copy.deepcopy(model), torch.rand(SHAPE)
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    replace(model, inplace=True, backend="tensorrt10")
    with qt.disable_quantization(model):
        for _ in range(2):
            for net, optimizer in ((model, mine), (twin, theirs)):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()
    for name, parameter in twin.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_learned_scales_are_for_an_optimizer_built_afterwards() -> None:
    lsq = qt.QuantSpec(quantizer="lsq")
    mapping, model, x = qt.QConfigMapping().set_global(qt.QConfig(lsq, lsq)), nn.Linear(4, 4), torch.randn(3, 4)
    before = torch.optim.SGD(model.parameters(), 0.1)
    replace(model, mapping, inplace=True, backend="tensorrt10")
    calibrated(model, x)
    scale = model.input_quantizer.scale.clone()
    model(x).square().sum().backward()
    before.step()
    assert torch.equal(model.input_quantizer.scale, scale)
    before.add_param_group({"params": [p for q in qt.quantizers_of(model).values() for p in q.parameters()]})
    before.step()
    assert not torch.equal(model.input_quantizer.scale, scale)


def test_handles_of_hooks_remain_valid() -> None:
    model, calls = Branches(), []
    handle = model.conv.register_forward_hook(lambda *_: calls.append(1))
    replace(model, inplace=True, backend="tensorrt10")
    with qt.disable_quantization(model):
        model(torch.rand(SHAPE))
        handle.remove()
        model(torch.rand(SHAPE))
    assert calls == [1]


def test_names_in_the_state_dict_and_float_checkpoints() -> None:
    model = Branches()
    floats = copy.deepcopy(model.state_dict())
    replaced = replace(model, backend="tensorrt10")
    extra = set(replaced.state_dict()) - set(floats)
    assert set(floats) <= set(replaced.state_dict())
    assert {key.rpartition("_quantizer.")[0].rpartition(".")[2] for key in extra} == {"weight", "input"}
    assert replaced.load_state_dict(floats).missing_keys == []
    for name, value in floats.items():
        assert torch.equal(replaced.state_dict()[name], value)
    twin = replace(Branches(), backend="tensorrt10")
    twin.load_state_dict(calibrated(replaced, torch.rand(SHAPE)).state_dict())
    x = torch.rand(SHAPE)
    assert torch.equal(twin(x), replaced(x))


@pytest.mark.parametrize("assign", [True, False])
def test_weights_loaded_after_replacement_get_ranges_of_their_own(assign: bool) -> None:
    weights_only = qt.QConfig(None, qt.QuantSpec(axis=0))
    model = nn.ModuleDict({"fc": nn.Linear(4, 2), "attention": nn.MultiheadAttention(4, 2)})
    replaced = replace(model, qt.QConfigMapping().set_global(weights_only), backend="tensorrt10")
    larger = {name: 10 * value for name, value in model.state_dict().items()}
    replaced.load_state_dict(larger, assign=assign)
    for name, layer in (("fc.weight", "fc.weight"), ("attention.out_proj.weight", "attention.out_proj_weight")):
        expected = larger[name].abs().amax(1) / 127
        assert torch.equal(replaced.get_submodule(f"{layer}_quantizer").scale, expected)
    own = replaced.state_dict()
    own["fc.weight_quantizer._scale"] = torch.ones(2)
    replaced.load_state_dict(own)
    assert torch.equal(replaced.fc.weight_quantizer.scale, torch.ones(2))  # ranges that are in the checkpoint hold
    back = replaced.fc.to_float()
    assert back.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)}).missing_keys == []


def test_replacing_twice_changes_nothing() -> None:
    model = replace(Branches(), backend="tensorrt10")
    calibrated(model, torch.rand(SHAPE))
    before, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    plan, modules = plan_of(model), list(model.modules())
    replace(model, inplace=True, backend="tensorrt10")
    assert [type(m) for m in model.modules()] == types
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert plan_of(model) == plan
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_added_later_are_replaced_by_the_second_call() -> None:
    model = replace(nn.Sequential(nn.Linear(4, 4)), backend="onnxruntime")
    first = model[0]
    model.append(nn.Linear(4, 2))
    replace(model, inplace=True, backend="onnxruntime")
    assert model[0] is first
    assert quantized_names(model) == {"0", "1"}


def test_a_replaced_part_keeps_its_status_in_a_larger_model() -> None:
    model = Branches()
    replace(model.up, inplace=True, backend="tensorrt10")
    with pytest.warns(
        UserWarning, match="^replace: .* exclude or backend gives another config .* keep theirs: 'up'; replace"
    ):
        replace(model, ignore="*", inplace=True, backend="tensorrt10")
    assert quantized_names(model) == {"up"}


FOUR_BITS = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=4, axis=0)))


@pytest.mark.parametrize(
    "options", [{"qconfig_mapping": FOUR_BITS}, {"exclude": "0"}, {"backend": "openvino"}], ids=str
)
def test_rules_for_layers_that_are_quantized_already_have_no_effect(options: dict[str, object]) -> None:
    model = replace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="tensorrt10")
    words = "layers that are quantized already, which keep theirs: '0'; replace the float model, with all rules in one"
    with pytest.warns(UserWarning, match=words):
        again = replace(model, **{"backend": "tensorrt10", **options})
    assert (quantized_names(again), again[0].weight_quantizer.spec) == ({"0"}, model[0].weight_quantizer.spec)


@pytest.mark.parametrize("options", [{"qconfig_mapping": FOUR_BITS}, {"exclude": "0"}], ids=str)
def test_rules_for_layers_that_initialize_has_built_have_no_effect(options: dict[str, object]) -> None:
    with qt.quant_modules.initialize(backend="tensorrt10"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.warns(
        UserWarning, match="layers that are quantized already, which keep theirs: '0'; replace the float"
    ):
        assert quantized_names(replace(model, backend="tensorrt10", **options)) == {"0"}


def test_what_initialize_builds_records_its_rules(tmp_path: Path) -> None:
    with qt.quant_modules.initialize(FOUR_BITS, backend="openvino"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    model[0] = model[0].to_float()  # which records nothing
    plan = plan_of(copy.deepcopy(model))
    assert (plan.backend.name, plan.mapping) == ("openvino", FOUR_BITS)
    assert qt.quantization_report(model).layers[-1].reason == "by module replacement"
    qt.save_checkpoint(model, tmp_path / "model.safetensors")
    assert qt.load_checkpoint(model, tmp_path / "model.safetensors").backend == "openvino"
    for _ in range(2):  # the second call warns too: the layer still has the rules that it was built with
        with pytest.warns(UserWarning, match="keep theirs: '1.1'; replace"):
            replace(model, inplace=True, backend="snpe")
    assert quantized_names(model) == {"0", "1.1"}


def test_rules_that_initialize_has_followed_do_not_warn() -> None:
    with qt.quant_modules.initialize(FOUR_BITS, backend="tensorrt10"):
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 4, 3), nn.AvgPool2d(2), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace(model, FOUR_BITS, backend="tensorrt10")
        replace(model, backend="tensorrt10")


@pytest.mark.parametrize(
    "options", [{}, {"qconfig_mapping": FOUR_BITS, "backend": "openvino"}], ids=["no rules", "the same"]
)
def test_a_second_call_that_asks_for_nothing_else_does_not_warn(options: dict[str, object]) -> None:
    model = replace(
        nn.Sequential(nn.Linear(4, 4)), qconfig_mapping=FOUR_BITS, backend=options.get("backend", "tensorrt10")
    )
    model.append(nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "replace: qconfig_mapping, exclude or backend gives another config")
        replace(model, inplace=True, **{"backend": "tensorrt10", **options})
    assert quantized_names(model) == {"0", "1"}


# ---- rules


def bits(model: nn.Module) -> dict[str, int | None]:
    layers = ((n, model.get_submodule(n)) for n in ("conv", "up", "fc", "pool"))
    specs = {n: getattr(m, "weight_quantizer", None) or getattr(m, "input_quantizer", None) for n, m in layers}
    return {name: None if quantizer is None else quantizer.spec.bits for name, quantizer in specs.items()}


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (qt.QConfigMapping(), (8, 8, 8, None)),
        (qt.QConfigMapping().set_global(W4), (4, 4, 4, None)),
        (qt.QConfigMapping().set_global(None), (None, None, None, None)),
        (qt.QConfigMapping().set_module_name("a.conv", W4), (4, 8, 8, None)),
        (qt.QConfigMapping().set_module_name("a.conv", W4).set_object_type(nn.Conv2d, None), (4, 8, 8, None)),
        (qt.QConfigMapping().set_module_name_regex(r"a\..*", W4), (4, 4, 4, 4)),
        (qt.QConfigMapping().set_object_type(nn.Linear, None), (8, 8, None, None)),
        (qt.QConfigMapping().set_object_type(nn.MaxPool2d, W4), (8, 8, 8, 4)),
        (qt.QConfigMapping().set_module_name("a", W4).set_global(None), (4, 4, 4, None)),
        (qt.QConfigMapping().set_module_name_regex("[ab]", None), (None, None, None, None)),
        (qt.QConfigMapping().set_object_type(Branches, None), (None, None, None, None)),
        (qt.QConfigMapping().set_module_name("a", None).set_object_type(nn.Conv2d, W4), (None, None, None, None)),
        (qt.QConfigMapping().set_object_type(Branches, None).set_object_type(nn.Conv2d, W4), (4, None, None, None)),
    ],
)
def test_the_most_exact_rule_applies(mapping: qt.QConfigMapping, expected: tuple[int | None, ...]) -> None:
    model = replace(nn.ModuleDict({"a": Branches()}), mapping, backend="tensorrt10")
    assert bits(model.get_submodule("a")) == dict(zip(("conv", "up", "fc", "pool"), expected, strict=True))


def test_the_nearest_container_comes_first() -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4))))
    mapping = qt.QConfigMapping().set_module_name("0", None).set_module_name("0.0", W4)
    assert replace(model, mapping, backend="tensorrt10").get_submodule("0.0.0").weight_quantizer.spec.bits == 4


@pytest.mark.parametrize(("backend", "axis"), [("tensorrt10", 1), ("tensorrt8", 0)])
def test_the_axis_of_transposed_convolutions(backend: str, axis: int) -> None:
    def axis_of(mapping: qt.QConfigMapping | None) -> int | None:
        model = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, stride=2))
        return replace(model, mapping, backend=backend).get_submodule("0").weight_quantizer.spec.axis

    assert axis_of(None) == axis_of(qt.QConfigMapping().set_global(W4)) == axis
    own = qt.QConfigMapping().set_object_type(nn.ConvTranspose2d, W4)
    assert axis_of(own) == 0  # as the rule says
    assert replace(Branches(), own, backend=backend).up.weight_quantizer.spec.axis == 0  # groups, on each target


def test_transposed_convolutions_with_groups_stay_float_without_kernels() -> None:
    assert type(replace(Branches(), backend="tensorrt8").up) is nn.ConvTranspose2d
    assert type(replace(Branches(), backend="tensorrt10").up) is qt.nn.QuantConvTranspose2d


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"custom": {nn.GLU: nn.GLU}}, "replace: custom names GLU, which is not in the model and has no effect"),
        (
            {"qconfig_mapping": qt.QConfigMapping().set_object_type(nn.GRU, None)},
            "a rule for GRU, which is not in the model",
        ),
        (
            {"qconfig_mapping": qt.QConfigMapping().set_object_type(torch.add, None)},
            r"has a rule for add, which is a function \(replace quantizes modules only\) and has no effect",
        ),
    ],
)
def test_types_that_are_not_in_the_model_raise_a_warning(options: dict[str, object], words: str, monkeypatch) -> None:
    monkeypatch.setattr(nn.GLU, "from_float", print, raising=False)
    with pytest.warns(UserWarning, match=words) as caught:
        replace(Branches(), backend="tensorrt10", **options)
    assert caught[0].filename == __file__


def test_types_of_replaced_layers_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = qt.QConfigMapping().set_object_type(nn.Linear, qt.backends["tensorrt10"].qconfig)
        replace(replace(nn.Sequential(nn.Linear(2, 2)), backend="tensorrt10"), own, backend="tensorrt10")


def test_switches_apply_to_a_submodule_and_are_restored_after_errors() -> None:
    model, x = calibrated(replace(Branches(), backend="tensorrt10"), torch.rand(SHAPE)), torch.rand(SHAPE)
    y = model(x)
    with qt.disable_quantization(model.conv):
        assert torch.equal(model.conv(x), F.conv2d(x, model.conv.weight, model.conv.bias, padding=1))
        assert model.up.weight_quantizer.quantizing
    with pytest.raises(RuntimeError, match="Expected 3D"), qt.disable_quantization(model.conv):
        model(torch.rand(2, 6))
    assert torch.equal(model(x), y)


def test_two_configs_for_one_module_are_refused() -> None:
    mapping = qt.QConfigMapping().set_module_name("fc", W4).set_module_name("again", None)
    with pytest.raises(
        ValueError, match="'fc', 'again' are names of one module, and the mapping has different configs"
    ):
        replace(Branches(), mapping, backend="tensorrt10")
    replaced = replace(Branches(), qt.QConfigMapping().set_module_name("again", None), backend="tensorrt10")
    assert type(replaced.fc) is nn.Linear


@pytest.mark.parametrize(
    ("qconfig", "conv", "average", "table"),
    [
        (qt.QConfig(qt.QuantSpec(), None), {"input"}, {"input"}, set()),
        (qt.QConfig(None, qt.QuantSpec()), {"weight"}, set(), {"weight"}),
        (qt.QConfig(None, None), set(), set(), set()),
    ],
)
def test_a_config_of_the_weight_or_the_activation_alone(
    qconfig: qt.QConfig, conv: set, average: set, table: set
) -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 1), "average": nn.AvgPool2d(2), "table": nn.Embedding(5, 4)})
    replaced = replace(model, qt.QConfigMapping().set_global(qconfig), backend="onnxruntime")
    expected = {
        f"{layer}.{of}_quantizer" for layer, those in zip(model, (conv, average, table), strict=True) for of in those
    }
    assert set(qt.quantizers_of(replaced)) == expected


def test_every_type_of_the_table_by_default_and_by_rule() -> None:
    makers: dict[str, Callable[[], nn.Module]] = {
        "LSTM": lambda: nn.LSTM(3, 4),
        "GRUCell": lambda: nn.GRUCell(3, 4),
        "AvgPool1d": lambda: nn.AvgPool1d(2),
        "AdaptiveAvgPool3d": lambda: nn.AdaptiveAvgPool3d(2),
        "Add": qt.nn.Add,
        "Cat": qt.nn.Cat,
        "MatMul": qt.nn.MatMul,
        "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
        "ScaledDotProductAttention": qt.nn.ScaledDotProductAttention,
        "MaxPool2d": lambda: nn.MaxPool2d(2),
        "InstanceNorm2d": lambda: nn.InstanceNorm2d(3),
        "Embedding": lambda: nn.Embedding(5, 4),
        "Mul": qt.nn.Mul,
    }
    model = nn.ModuleDict({name: make() for name, make in makers.items()})
    left = {"MaxPool2d", "InstanceNorm2d", "Embedding", "Mul"}
    replaced = replace(model, backend="tensorrt10")
    assert quantized_names(replaced) == set(makers) - left
    why = reasons(replaced)
    assert why["MaxPool2d"] == "float: a max_pool, which only moves values"
    assert why["Embedding"] == "float: an embedding, which tensorrt10 computes in float"
    mapping = qt.QConfigMapping()
    for name in left:
        mapping.set_module_name(name, qt.backends["tensorrt10"].qconfig)
    assert quantized_names(replace(model, mapping, backend="tensorrt10")) == set(makers)
    assert not hasattr(replace(model, mapping, backend="tensorrt10")["Embedding"].input_quantizer, "spec")


# ---- ignore


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ("a.conv", {"a.conv"}),
        ("a", {"a.conv", "a.up", "a.fc", "a.again", "a.decoder"}),
        ("*.conv", {"a.conv", "b.conv"}),
        (["a.conv", "b.f*"], {"a.conv", "b.fc", "b.again"}),
        (lambda name, module: isinstance(module, nn.ConvTranspose2d), {"a.up", "b.up"}),
        (lambda name, module: name == "b.again", {"b.fc", "b.again"}),
        ([], set()),
    ],
)
def test_ignored_modules_and_their_submodules_stay_float(ignore: object, left: set[str]) -> None:
    replaced = replace(nn.ModuleDict({"a": Branches(), "b": Branches()}), ignore=ignore, backend="tensorrt10")
    layers = {f"{net}.{name}" for net in "ab" for name in ("conv", "up", "fc", "again", "decoder")}
    assert {name for name in layers if not isinstance(replaced.get_submodule(name), qt.nn.QuantModule)} == left
    why = reasons(replaced)  # of a layer with several names by the first one
    assert all("excluded by" in why[name.replace("again", "fc")] for name in left)


def test_a_callable_sees_the_users_own_modules() -> None:
    model = Branches()
    assert (
        type(replace(model, ignore=lambda name, module: module is model.conv, backend="tensorrt10").conv) is nn.Conv2d
    )


def test_the_entry_that_ignores_is_in_the_reason() -> None:
    assert (
        reasons(replace(Branches(), ignore=["up", "c*"], backend="tensorrt10"))["conv"] == "float: excluded by 'conv'"
    )


# ---- why a layer stays float


class Odd(nn.Conv2d):
    pass


def test_reasons_of_float_layers() -> None:
    model = nn.ModuleDict(
        {
            "odd": Odd(3, 3, 1),
            "weight_norm": nn.utils.parametrizations.weight_norm(nn.LSTM(4, 4), "weight_ih_l0"),
            "bn": nn.BatchNorm2d(4),
            "act": nn.ReLU(),
            "patched": nn.Linear(4, 4),
            "fc": nn.Linear(4, 4),
        }
    )
    model["patched"].forward = lambda x: x
    mapping = qt.QConfigMapping().set_module_name("fc", None)
    why = reasons(replace(model, mapping, inplace=True, backend="tensorrt10"))
    assert "Odd is a subclass of Conv2d" in why["odd"]
    assert "a parametrized LSTM; call torch.nn.utils.parametrize.remove" in why["weight_norm"]
    assert "no chain of qtoolkit.fuse_modules" in why["bn"]
    assert why["act"] == "float: no QAT type for ReLU"
    assert "its forward is an attribute of this one module" in why["patched"]
    assert why["fc"] == "float: the qconfig_mapping leaves it in float"
    assert quantized_names(model) == set()


# ---- custom layers


class Mine(nn.Module):
    """A linear layer of the user's own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(count, count)), None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) @ self.weight.t()


class QuantMine(qt.nn.QuantWeighted, Mine):
    FLOAT, KIND = Mine, "linear"

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: object, **kwargs: object) -> Tensor:
        return torch.tanh(x) @ weight.t()


class QuantGLU(qt.nn.QuantInput, nn.GLU):
    FLOAT, KIND = nn.GLU, "other"


class Wrapper(nn.Module):
    """Any class that has from_float; this one keeps the float layer inside."""

    def __init__(self, layer: nn.Module, spec: qt.QuantSpec) -> None:
        super().__init__()
        self.layer, self.quantizer = layer, qt.TensorQuantizer(spec)

    @classmethod
    def from_float(cls, module: nn.Module, weight: object, name: str, activation: qt.QuantSpec) -> "Wrapper":
        return cls(module, activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.quantizer(x))


def test_a_custom_layer_takes_two_lines() -> None:
    model, x = nn.Sequential(Mine(4), nn.GLU()), torch.randn(3, 4)
    replaced = calibrated(replace(model, custom={Mine: QuantMine, nn.GLU: QuantGLU}, backend="tensorrt10"), x)
    assert [type(m) for m in replaced] == [QuantMine, QuantGLU]
    w = reference.fake_quant(model[0].weight.detach(), model[0].weight.detach().abs().amax(1) / 127, None, -128, 127, 0)
    y = torch.tanh(reference.fake_quant(x, x.abs().max() / 127, None, -128, 127)) @ w.t()
    scale = replaced[1].input_quantizer.scale
    assert torch.equal(replaced(x), F.glu(reference.fake_quant(y.detach(), scale, None, -128, 127)))


def test_a_wrapper_class_is_used_once() -> None:
    model = nn.Sequential(Mine(4), nn.Linear(4, 4))
    mine = model[0]
    replace(model, custom={Mine: Wrapper}, inplace=True, backend="tensorrt10")
    assert model[0] is mine
    assert (type(mine), type(mine.layer)) == (Wrapper, Mine)
    plan = plan_of(model)
    replace(model, custom={Mine: Wrapper}, inplace=True, backend="tensorrt10")
    assert type(mine.layer) is Mine
    assert plan_of(model) == plan


class Loses(Wrapper):
    @classmethod
    def from_float(cls, *args: object) -> None:
        return None


@pytest.mark.parametrize(
    ("custom", "words"),
    [
        ([nn.Linear], "replace: custom must map float module types to QAT types, got a list"),
        ({"conv": QuantMine}, "replace: each key of custom must be a torch.nn.Module type, got 'conv'"),
        ({nn.Conv2d: "QuantConv2d"}, "replace: each value of custom must be a torch.nn.Module type, got 'QuantConv2d'"),
        ({nn.Linear: nn.Conv2d}, "replace: custom maps Linear to Conv2d, which has no class method from_float"),
        ({nn.Linear: Loses}, "replace: Loses.from_float must return a torch.nn.Module for 'fc', got NoneType"),
    ],
)
def test_bad_tables_leave_the_model_untouched(custom: object, words: str) -> None:
    model = Branches()
    types, state = [type(m) for m in model.modules()], copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError) as caught:
        replace(model, custom=custom, inplace=True, backend="tensorrt10")
    assert words in str(caught.value)
    assert [type(m) for m in model.modules()] == types
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        n: v.tolist() for n, v in state.items()
    }


class QuantMultiAdd(nn.Module):
    """The sum of three inputs through one quantizer: no table needs to know it."""

    def __init__(self) -> None:
        super().__init__()
        self.quantizer = qt.TensorQuantizer(qt.QuantSpec())

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self.quantizer(a) + self.quantizer(b) + self.quantizer(c)


def test_one_quantizer_for_three_inputs_in_a_users_forward() -> None:
    module, inputs = QuantMultiAdd(), [torch.full((2,), 1.0), torch.full((2,), -3.0), torch.full((2,), 2.0)]
    with pytest.raises(RuntimeError, match="quantizer 'quantizer' has no range yet: call qtoolkit.calibrate"):
        module(*inputs)
    replaced = calibrated(replace(module, backend="tensorrt10"), *inputs)
    assert torch.equal(replaced.quantizer.scale, torch.tensor(3.0) / 127)
    a, b, c = (reference.fake_quant(x, torch.tensor(3.0) / 127, None, -128, 127) for x in inputs)
    assert torch.equal(replaced(*inputs), a + b + c)
    assert statuses(replaced) == {}


# ---- models in all states


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Branches, SHAPE),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
        (lambda: nn.LSTM(4, 4, 2, bidirectional=True), (3, 2, 4)),
    ],
    ids=["branches", "transformer", "lstm"],
)
def test_copies_compute_the_same(
    make: Callable[[], nn.Module], shape: tuple[int, ...], copied: Callable[[nn.Module], nn.Module]
) -> None:
    x = torch.rand(shape)
    model = calibrated(replace(make().eval(), backend="tensorrt10"), x)
    twin = copied(model)
    for ours, theirs in zip(tensors_of(twin(x)), tensors_of(model(x)), strict=True):
        assert torch.equal(ours, theirs)
    assert plan_of(twin) == plan_of(model)


def test_averaged_weights_are_those_of_the_formula() -> None:
    x = torch.randn(3, 6)
    model = calibrated(replace(nets.LinearNet().eval(), backend="tensorrt10"), x)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    before = model.fc1.weight.detach().clone()
    with torch.no_grad():
        model.fc1.weight.mul_(3)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.fc1.weight, 2 * before, rtol=1e-6, atol=1e-7)
    assert average(x).shape == (3, 3)


def test_half_precision_keeps_float_scales() -> None:
    x = torch.randn(3, 6)
    model = calibrated(replace(nets.LinearNet().eval(), backend="tensorrt10"), x).half()
    assert model.fc1.weight_quantizer.scale.dtype == torch.float32
    assert model(x.half()).dtype == torch.float16


@pytest.mark.slow
def test_a_replaced_model_compiles_without_graph_breaks() -> None:
    model, x = (
        calibrated(replace(nets.ConvNet().eval(), backend="tensorrt10"), torch.randn(2, 3, 8, 8)),
        torch.randn(2, 3, 8, 8),
    )
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_layer_compiled_before_computes_quantized() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    layer.compile(backend="eager")
    layer(x)
    calibrated(replace(layer, inplace=True, backend="tensorrt10"), x)
    assert torch.equal(layer(x), calibrated(replace(layer, backend="tensorrt10"), x)(x))
    assert not torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_two_processes_calibrate_and_train_as_one(tmp_path) -> None:
    processes.spawn(ranks.work_replaced, (str(tmp_path),), ranks.SIZE)
    model, trained = ranks.replaced(), ranks.replaced("lsq")
    for net in (model, trained):
        qt.calibrate(net, ranks.data().split(1), progress=False)
    ranks.step(trained, ranks.data())
    for rank in range(ranks.SIZE):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, quantizer in qt.quantizers_of(model).items():
            assert torch.equal(found["scales"][name], quantizer.scale), name
        for name, value in trained.state_dict().items():
            torch.testing.assert_close(found["trained"][name], value, rtol=1e-5, atol=1e-6, msg=name)


# ---- errors


def test_bad_arguments_raise_with_a_remedy() -> None:
    for ignore, words in (
        ("convv", "replace: ignore: unknown module 'convv'; did you mean 'conv'"),
        (["conv", "x*"], r"replace: ignore: unknown module 'x\*'"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(Branches(), ignore=ignore, backend="tensorrt10")
    for ignore in (3, ["conv", nn.Linear]):
        with pytest.raises(TypeError, match=r"replace: ignore must be a name, a list of names, or a callable"):
            replace(Branches(), ignore=ignore, backend="tensorrt10")
    with pytest.raises(ValueError, match="unknown layer 'convv'; did you mean 'conv'"):
        replace(Branches(), qt.QConfigMapping().set_module_name("convv", None), backend="tensorrt10")
    with pytest.raises(ValueError, match="unknown backend 'tensort'; did you mean 'tensorrt'"):
        replace(Branches(), backend="tensort")
    with pytest.raises(ValueError, match="unknown quantize 'input'; did you mean 'inputs'"):
        replace(Branches(), quantize="input", backend="tensorrt10")
    with pytest.raises(
        TypeError, match="replace: qconfig_mapping must be a QConfigMapping of qtoolkit or None, got dict"
    ):
        replace(Branches(), {"conv": None}, backend="tensorrt10")
    with pytest.raises(TypeError, match="replace: model must be a torch.nn.Module, got function"):
        replace(lambda x: x, backend="tensorrt10")
    with pytest.raises(ValueError, match="replace: this model is already prepared"):
        replace(qt.prepare(nets.LinearNet(), backend="tensorrt10"), backend="tensorrt10")
    with pytest.raises(
        ValueError, match=r"layer 'fc': the axis of a tensor of 2 dimensions must lie in \[-2, 1\], got 3"
    ):
        replace(
            Branches(),
            qt.QConfigMapping().set_module_name("fc", qt.QConfig(None, qt.QuantSpec(axis=3))),
            backend="tensorrt10",
        )


def test_wrapped_and_unfinished_models_are_refused() -> None:
    with pytest.raises(
        qt.UntraceableError, match=r"replace: .* wrapped in DataParallel; call replace on model\.module"
    ):
        replace(nn.DataParallel(nn.Linear(4, 4)), backend="tensorrt10")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            qt.UntraceableError, match="replace: parameter '0.weight' has no shape yet; run the model once"
        ):
            replace(nn.Sequential(nn.LazyLinear(4)), backend="tensorrt10")
    uncopied = nn.Sequential(nn.Linear(4, 4))
    uncopied.generator = (i for i in range(3))
    with pytest.raises(TypeError, match=r"replace: the model cannot be copied .*, or pass inplace=True\."):
        replace(uncopied, backend="tensorrt10")
    assert type(replace(uncopied, inplace=True, backend="tensorrt10")[0]) is qt.nn.QuantLinear


def test_prepared_parts_of_a_model_do_not_change() -> None:
    model = nn.Sequential(qt.prepare(nets.LinearNet(), backend="tensorrt10"), nn.Linear(3, 3))
    before = list(qt.quantizers_of(model))
    replace(model, inplace=True, backend="tensorrt10")
    assert quantized_names(model) == {"1"}
    assert set(qt.quantizers_of(model)) - set(before) == {"1.input_quantizer", "1.weight_quantizer"}


def test_inputs_of_layers_built_quantized() -> None:
    layer = qt.nn.QuantLinear(4, 2, input_spec=qt.QuantSpec(bits=4))
    assert (layer.weight_quantizer, layer.input_quantizer.spec.bits) == (None, 4)
    with pytest.raises(ValueError, match="QuantEmbedding: input_spec must be None: its inputs are indices"):
        qt.nn.QuantEmbedding(4, 2, input_spec=qt.QuantSpec())
