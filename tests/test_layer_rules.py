"""One resolver of configs: a mapping means the same to a traced model, to a leaf module and to module replacement."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.graph.lint import lint

W4 = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=0))
W6 = qt.QConfig(qt.QuantSpec(bits=6), qt.QuantSpec(bits=6, axis=0))
INT8 = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(8, 8), nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.fc(x)[..., None])[..., 0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.inner = nn.Linear(8, 8), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.fc(x))


class Net(nn.Module):
    """`shared` is one layer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.shared, self.last = Block(), nn.Linear(8, 8), nn.Linear(8, 8)
        self.same = self.shared

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.block(x)))


LAYERS = ("block.fc", "block.inner.fc", "block.inner.conv", "shared", "last")
ROUTES: dict[str, Callable[[qt.QConfigMapping], nn.Module]] = {
    "traced": lambda mapping: qt.prepare(Net(), qconfig_mapping=mapping, backend="tensorrt10"),
    "block is a leaf module": lambda mapping: qt.prepare(
        Net(), qconfig_mapping=mapping, untraced=["block"], backend="tensorrt10"
    ),
    "replaced": lambda mapping: qt.quant_modules.replace(Net(), mapping, backend="tensorrt10"),
}
over_routes = pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)


def bits(model: nn.Module) -> tuple[int | None, ...]:
    quantizers = [getattr(model.get_submodule(name), "weight_quantizer", None) for name in LAYERS]
    return tuple(None if quantizer is None else quantizer.spec.bits for quantizer in quantizers)


@over_routes
@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (qt.QConfigMapping().set_module_name("block.inner", None), (8, None, None, 8, 8)),
        (qt.QConfigMapping().set_module_name("block", None).set_object_type(nn.Linear, INT8), (None, None, None, 8, 8)),
        (qt.QConfigMapping().set_module_name("block", None).set_module_name("block.inner", W4), (None, 4, 4, 8, 8)),
        (qt.QConfigMapping().set_module_name("block", W4).set_module_name("block.fc", None), (None, 4, 4, 8, 8)),
        (qt.QConfigMapping().set_module_name("block", W4).set_module_name_regex(r".*\.fc", W6), (4, 4, 4, 8, 8)),
        (qt.QConfigMapping().set_module_name_regex(r"block\.in.*", W4).set_global(W6), (6, 4, 4, 6, 6)),
        (qt.QConfigMapping().set_module_name_regex("block", W4).set_object_type(nn.Linear, W6), (4, 4, 4, 6, 6)),
        (qt.QConfigMapping().set_object_type(Inner, None).set_global(W4), (4, None, None, 4, 4)),
        (qt.QConfigMapping().set_object_type(Block, W4).set_object_type(nn.Conv1d, None), (4, 4, None, 8, 8)),
        (qt.QConfigMapping().set_object_type(Net, W4).set_object_type(Inner, W6), (4, 6, 6, 4, 4)),
        (qt.QConfigMapping().set_module_name("same", None), (8, 8, 8, None, 8)),
        (qt.QConfigMapping().set_global(None).set_module_name("block.inner.conv", W4), (None, None, 4, None, None)),
    ],
)
def test_a_rule_means_the_same_on_every_route(
    route: Callable[[qt.QConfigMapping], nn.Module], mapping: qt.QConfigMapping, expected: tuple[int | None, ...]
) -> None:
    assert bits(route(mapping)) == expected


@over_routes
def test_names_of_one_layer_with_different_configs_are_refused(route: Callable[[qt.QConfigMapping], nn.Module]) -> None:
    with pytest.raises(ValueError, match="'shared', 'same' are names of one module, and the mapping has different"):
        route(qt.QConfigMapping().set_module_name("shared", W4).set_module_name("same", W6))


@over_routes
def test_a_name_that_the_model_does_not_have_is_refused(route: Callable[[qt.QConfigMapping], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"unknown layer 'block.iner'; did you mean 'block.inner"):
        route(qt.QConfigMapping().set_module_name("block.iner", None))


class Sums(nn.Module):
    """Functions in a submodule and in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(8, 8), SumOfTwo()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.body(x)


class SumOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.fc(x).T, x) @ x.T


def test_a_rule_for_a_module_holds_for_the_functions_that_its_forward_calls() -> None:
    def kinds(mapping: qt.QConfigMapping | None) -> set[str]:
        report = qt.quantization_report(qt.prepare(Sums(), backend="openvino", qconfig_mapping=mapping))
        return {f"{line.kind} {line.status}" for line in report.layers if line.kind in ("matmul", "add")}

    assert kinds(None) == {"matmul quantized", "add quantized"}
    assert kinds(qt.QConfigMapping().set_module_name("body", None)) == {"matmul float", "add quantized"}
    assert kinds(qt.QConfigMapping().set_object_type(SumOfTwo, None)) == {"matmul float", "add quantized"}


def test_a_rule_for_a_module_does_not_bring_in_ops_that_the_target_leaves_in_float() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.softmax(x, -1))

    mapping = qt.QConfigMapping().set_module_name("0", W4)
    report = qt.quantization_report(qt.prepare(nn.Sequential(Gate()), qconfig_mapping=mapping, backend="tensorrt10"))
    assert [(line.kind, line.status) for line in report.layers] == [("softmax", "float"), ("linear", "quantized")]


@over_routes
def test_a_layer_type_of_the_users_own_is_quantized_on_every_route(
    route: Callable[[qt.QConfigMapping], nn.Module],
) -> None:
    model = route(qt.QConfigMapping().set_object_type(nn.Linear, W4))
    assert bits(model) == (4, 4, 8, 4, 4)


class Named(nn.Module):
    """A model with submodules of the names that prepare gives its own."""

    def __init__(self) -> None:
        super().__init__()
        self.activation_quantizers, self.weight_quantizers = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.weight_quantizers(self.activation_quantizers(x))
        return nn.functional.linear(x, self.weight)


def test_submodules_named_like_those_of_quantizers() -> None:
    model = Named().eval()
    x = torch.randn(4, 8)
    prepared = qt.prepare(model, x, backend="onnxruntime")
    names = set(qt.quantizers_of(prepared))
    assert {"activation_quantizers_1.x", "weight_quantizers_1.linear", "weight_quantizers.0.weight_quantizer"} <= names
    qt.calibrate(prepared, [x], progress=False)
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x))
    with qt.disable_quantization(prepared, "weights"):
        on = {name for name, quantizer in qt.quantizers_of(prepared).items() if quantizer.quantizing}
    assert on == {name for name in names if name.startswith("activation_quantizers_1.")}
    statuses = {line.name: line.status for line in qt.quantization_report(prepared).layers}
    assert set(statuses.values()) == {"quantized"}


# ---- the axis of transposed convolutions


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


EXPLICIT = {
    "name": lambda q: qt.QConfigMapping().set_module_name("up", q),
    "regex": lambda q: qt.QConfigMapping().set_module_name_regex(".*", q),
    "type": lambda q: qt.QConfigMapping().set_object_type(nn.ConvTranspose2d, q),
}


def quantized_up(mapping: qt.QConfigMapping | None, backend: str, route: str) -> nn.Module:
    if route == "prepare":
        return qt.prepare(Up(), backend=backend, qconfig_mapping=mapping)
    return qt.quant_modules.replace(Up(), mapping, backend=backend)


def scales_of(mapping: qt.QConfigMapping | None, backend: str, route: str) -> int:
    model = quantized_up(mapping, backend, route)
    return model.get_submodule("up").weight_quantizer.scale.numel()


@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("rule", EXPLICIT.values(), ids=EXPLICIT)
@pytest.mark.parametrize(("backend", "wrong", "channel"), [("tensorrt10", 0, "output"), ("tensorrt8", 1, "input")])
def test_an_axis_that_the_target_does_not_take_gives_a_warning(
    rule: Callable[[qt.QConfig], qt.QConfigMapping], backend: str, wrong: int, channel: str, route: str
) -> None:
    words = rf"axis={wrong} of a transposed .+; {backend} takes a scale for each {channel} channel: axis={1 - wrong}\."
    with pytest.warns(UserWarning, match=words):
        assert scales_of(rule(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=wrong))), backend, route) == (4, 6)[wrong]


@pytest.mark.filterwarnings("ignore:.*transposed convolution")
def test_lint_finds_an_axis_that_the_target_does_not_take() -> None:
    for axis, found in ((0, ["its weight has a scale along axis 0; tensorrt10 takes them along axis 1."]), (1, [])):
        mapping = EXPLICIT["name"](qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=axis)))
        assert [finding.rule for finding in lint(quantized_up(mapping, "tensorrt10", "prepare"))] == found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_the_axis_that_the_target_takes_gives_none(route: str) -> None:
    for rule in EXPLICIT.values():
        assert scales_of(rule(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=1))), "tensorrt10", route) == 6
        assert scales_of(rule(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0))), "tensorrt8", route) == 4
        assert scales_of(rule(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=None))), "tensorrt10", route) == 1
        assert scales_of(rule(qt.QConfig(qt.QuantSpec(), qt.QuantSpec())), "tensorrt10", route) == 6
        assert scales_of(rule(qt.QConfig(qt.QuantSpec(), qt.QuantSpec())), "tensorrt8", route) == 4
    for mapping in (None, qt.QConfigMapping().set_global(INT8)):  # axis 0 stands for the output channel
        assert scales_of(mapping, "tensorrt10", route) == 6


# ---- names


class Stages(nn.Module):
    """Submodules of all kinds: containers, one without layers, an empty one and a shared one."""

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) * 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), Stages.Doubles()), nn.Sequential(nn.Linear(8, 8))])
        self.heads, self.empty = nn.ModuleDict({"a": nn.Linear(8, 8)}), nn.ModuleList()
        self.again = self.blocks[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["a"](self.again(self.blocks[1](self.blocks[0](x))))


@pytest.mark.parametrize("name", [name for name, _ in Stages().named_modules(remove_duplicate=False) if name])
def test_every_route_takes_the_name_of_every_submodule(name: str) -> None:
    mapping = qt.QConfigMapping().set_module_name(name, None)
    model = Stages().eval()
    prepared = qt.prepare(model, torch.randn(2, 8), qconfig_mapping=mapping, backend="tensorrt10")
    replaced = qt.quant_modules.replace(model, mapping, backend="tensorrt10")
    floats = {f"{name}.{part}".strip(".") for part, _ in model.get_submodule(name).named_modules()}
    for ours in (prepared, replaced):
        quantized = {line.name for line in qt.quantization_report(ours).quantized}
        assert not quantized & floats
        assert quantized


def test_the_name_of_a_model_that_is_a_layer_is_empty() -> None:
    mapping = qt.QConfigMapping().set_module_name("", W4)
    for ours in (
        qt.prepare(nn.Linear(8, 8), torch.randn(2, 8), qconfig_mapping=mapping, backend="tensorrt10"),
        qt.quant_modules.replace(nn.Linear(8, 8), mapping, backend="tensorrt10"),
    ):
        assert qt.quantization_report(ours).layers[0].weight == "int4 per-channel(0)"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("blocks_0_0", "blocks.0.0"), ("heads_a", "heads.a"), ("_blocks_1_0", "blocks.1.0"), ("head.a", "heads.a")],
)
def test_names_of_nodes_are_answered_with_those_of_their_modules(given: str, meant: str) -> None:
    mapping = qt.QConfigMapping().set_module_name(given, None)
    for call in (
        lambda: qt.prepare(Stages(), qconfig_mapping=mapping, backend="tensorrt10"),
        lambda: qt.quant_modules.replace(Stages(), mapping, backend="tensorrt10"),
    ):
        with pytest.raises(ValueError, match=f"unknown layer '{given}'; did you mean '{meant}'"):
            call()


def test_a_node_name_wins_over_a_nearer_spelling() -> None:
    mapping = qt.QConfigMapping().set_module_name("layers_1_0", None)
    model = nn.ModuleDict(
        {"layers_1": nn.Linear(2, 2), "layers": nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])])}
    )
    with pytest.raises(ValueError, match=r"did you mean 'layers\.1\.0'"):
        qt.quant_modules.replace(model, mapping, backend="tensorrt10")


def test_the_names_of_a_report_are_names_of_a_config() -> None:
    model, x = Stages().eval(), torch.randn(2, 8)
    report = qt.quantization_report(qt.prepare(model, x, "onnxruntime"))
    names = (
        {line.name for line in report.layers}
        | {t.source for t in report.tensors}
        | {c for t in report.tensors for c in t.consumers}
    )
    mapping = qt.QConfigMapping()
    for name in names - {"x"}:  # the model's input
        mapping.set_module_name(name, None)
    assert qt.quantization_report(qt.prepare(model, x, "onnxruntime", mapping)).quantized == ()


class WithoutElements(nn.Module):
    """Two layers whose weights have no elements, as a search of architectures may make them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(4, 3), nn.Linear(0, 3), nn.Linear(4, 0), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.a(x) + self.b(x[:, :0]), self.c(x)], 1))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "route",
    [
        lambda m, x: qt.prepare(m, (x,), backend="tensorrt10"),
        lambda m, x: qt.quant_modules.replace(m, backend="tensorrt10"),
    ],
)
def test_a_weight_without_elements_stays_in_float(route: Callable[[nn.Module, Tensor], nn.Module]) -> None:
    x = torch.randn(5, 4)
    model = route(WithoutElements(), x)
    qt.calibrate(model, [x], progress=False)
    lines = {line.name: line for line in qt.quantization_report(model).layers}
    assert {lines[name].reason for name in "bc"} == {"float: its weight has no elements"}
    assert torch.equal(qt.convert(model)(x), model.eval()(x))
