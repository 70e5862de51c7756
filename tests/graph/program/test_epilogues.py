"""Batch norms in one op with what follows them: the values, gradients and statistics of the ops called one by one."""

import copy
import operator
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.graph.program import epilogue
from qtoolkit.nn.batch_norm import NEEDS_BATCH_STATISTICS, LinkedBatchNorm
from tests.blocks import called_one_by_one, codes_taken, recorded_norms

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Identity()
            if channels == out
            else nn.Sequential(nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A stem with a pool, and residual blocks with and without a shortcut of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(ResidualBlock(4, 4), ResidualBlock(4, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.pool(F.relu(self.bn(self.conv(x))))).mean((2, 3)))


class MobileNet(nn.Module):
    """ReLU6, a depthwise convolution, and a linear bottleneck with an add."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6(inplace=True))
        self.expand = nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.project = nn.Sequential(nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.project(self.depthwise(self.expand(x))))


class Upscaler(nn.Module):
    """A transposed convolution, leaky and no activations, and a linear layer's kind of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
        self.narrow = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.SiLU())
        self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.norm, self.last = nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3)
        self.fc, self.fc_norm = nn.Linear(3, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.up(self.narrow(self.body(x)))))
        return self.fc_norm(self.fc(y.mean((2, 3))))


NETS = {"resnet": ResNet, "mobilenet": MobileNet, "upscaler": Upscaler}


def prepared_of(model: nn.Module, x: Tensor = X, quantizer: str = "fixed", backend: str = "tensorrt", **options):
    torch.manual_seed(0)
    for bn in model.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm) and bn.weight is not None:
            nn.init.uniform_(bn.weight, 0.5, 1.5)
            nn.init.normal_(bn.bias, std=0.2)
            with torch.no_grad():
                bn.weight[:2] = torch.tensor([0.0, -0.7])
    spec = qt.QuantSpec(quantizer=quantizer)
    specs = qt.QConfig(spec, qt.QuantSpec(axis=0, quantizer=quantizer))
    mapping = None if quantizer == "fixed" else qt.QConfigMapping().set_global(specs)
    target = replace(qt.backends[backend], **options)
    prepared = qt.prepare(model.to(x.dtype), (x,), backend=target, qconfig_mapping=mapping).to(x.dtype)
    qt.calibrate(prepared.eval(), [x], progress=False)  # in training mode, ranges would follow the data and look at it
    return prepared.train()


def step(model: nn.Module, x: Tensor = X, run: Callable | None = None) -> dict[str, Tensor]:
    """Return the output, all gradients and all buffers of a training step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = (model if run is None else run)(x)
    (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    found = {"output": y.detach(), "input": x.grad}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def plain_step(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    with called_one_by_one():
        return step(model, x)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-7, atol=1e-9, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """The arguments of each call of the op."""
    return recorded_norms(monkeypatch)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


# ---- the same numbers


@pytest.mark.sweep(2)
@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime", "openvino"])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("name", NETS)
def test_a_step_is_that_of_the_ops_one_by_one(name: str, quantizer: str, backend: str, calls: list[dict]) -> None:
    prepared = prepared_of(NETS[name](), quantizer=quantizer, backend=backend)
    plain = copy.deepcopy(prepared)
    for x in (X, X.flip(0) * 0.5):
        ours, theirs = step(prepared, x), plain_step(plain, x)
        assert_close(ours, theirs)
    assert len(calls) == 2 * len(batch_norms(prepared))
    linked = [bn for bn in batch_norms(prepared) if isinstance(bn, LinkedBatchNorm)]
    assert sum(call["divisor"] is not None for call in calls) == 2 * len(linked)
    assert {n: b.tolist() for n, b in prepared.named_buffers() if "num_batches" in n} == {
        n: b.tolist() for n, b in plain.named_buffers() if "num_batches" in n
    }


def test_what_is_in_one_op(calls: list[dict]) -> None:
    step(prepared_of(ResNet()))
    # The stem; a block of two; another one, whose shortcut runs before the add that is one op with the second.
    assert [call["residual"] is not None for call in calls] == [False, False, True, False, False, True]
    assert [call["low"] == 0 for call in calls] == [True, True, True, True, False, True]
    assert all("scale" in call for call in calls)
    calls.clear()
    step(prepared_of(MobileNet()))
    assert [call["high"] for call in calls] == [6.0, 6.0, 6.0, torch.inf]
    assert [call["residual"] is None for call in calls] == [True, True, True, False]
    calls.clear()
    step(prepared_of(Upscaler()))
    assert [call["slope"] for call in calls] == [0.1, 0.0, 0.0, 0.0]
    assert "scale" not in calls[1]  # before SiLU


def test_the_gradient_of_a_bias_before_a_batch_norm_is_zero() -> None:
    prepared = prepared_of(ResNet())
    found = step(prepared)
    for name in ("conv", "blocks.0.conv2"):
        gradient = found[f"gradient of {name}.bias"]
        assert torch.equal(gradient, torch.zeros_like(gradient))
        assert prepared.get_parameter(f"{name}.bias").abs().min() > 0


ACTIVATIONS = {
    "relu": (F.relu, (0.0, torch.inf, 0.0)),
    "relu_in_place": (lambda x: F.relu(x, inplace=True), (0.0, torch.inf, 0.0)),
    "torch_relu": (torch.relu, (0.0, torch.inf, 0.0)),
    "torch_relu_": (torch.relu_, (0.0, torch.inf, 0.0)),
    "method": (lambda x: x.relu(), (0.0, torch.inf, 0.0)),
    "method_": (lambda x: x.relu_(), (0.0, torch.inf, 0.0)),
    "relu6": (F.relu6, (0.0, 6.0, 0.0)),
    "hardtanh": (F.hardtanh, (-1.0, 1.0, 0.0)),
    "hardtanh_numbers": (lambda x: F.hardtanh(x, -0.5, max_val=2), (-0.5, 2, 0.0)),
    "leaky": (F.leaky_relu, (0.0, torch.inf, 0.01)),
    "leaky_slope": (lambda x: F.leaky_relu(x, 0.2, True), (0.0, torch.inf, 0.2)),
    "hardtanh_module": (nn.Hardtanh(-0.25, 0.75), (-0.25, 0.75, 0.0)),
    "leaky_module": (nn.LeakyReLU(0.3, inplace=True), (0.0, torch.inf, 0.3)),
    "relu_module": (nn.ReLU(inplace=True), (0.0, torch.inf, 0.0)),
}
ADDS = {
    "none": lambda y, x: y,
    "operator": lambda y, x: y + x,
    "reflected": lambda y, x: x + y,
    "in_place": operator.iadd,
    "torch": lambda y, x: torch.add(y, x, alpha=1),
    "method": lambda y, x: y.add(x),
    "method_": lambda y, x: y.add_(x),
}


class Chain(nn.Module):
    def __init__(self, activate: Callable, add: Callable = ADDS["none"], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), norm or nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 1)
        self.activation = activate if isinstance(activate, nn.Module) else None
        self.functions = activate, add

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        activate, add = self.functions
        return self.last((self.activation or activate)(add(self.norm(self.conv(x)), x)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_as_modules_functions_and_methods(name: str, calls: list[dict]) -> None:
    activate, bounds = ACTIVATIONS[name]
    prepared = prepared_of(Chain(activate))
    assert_close(step(copy.deepcopy(prepared)), plain_step(prepared))
    (call,) = calls
    assert (call["low"], call["high"], call["slope"]) == bounds
    assert call["scale"] is not None


@pytest.mark.parametrize("name", ADDS)
def test_adds_as_operators_functions_and_methods(name: str, calls: list[dict]) -> None:
    prepared = prepared_of(Chain(torch.relu, ADDS[name]))
    assert_close(step(copy.deepcopy(prepared)), plain_step(prepared))
    (call,) = calls
    assert (call["residual"] is None) == (name == "none")
    assert call["low"] == 0


NOT_ADDED = {
    "weighted": lambda y, x: torch.add(y, x, alpha=2),
    "broadcast": lambda y, x: y + x.mean((2, 3), keepdim=True),
    "itself": lambda y, x: y + y,
    "number": lambda y, x: y + 1.5,
    "onto the other": lambda y, x: x.add_(y) * 0.5,
}


@pytest.mark.parametrize("name", NOT_ADDED)
def test_other_adds_are_not_fused(name: str, calls: list[dict]) -> None:
    prepared = prepared_of(Chain(torch.relu, NOT_ADDED[name]))
    assert_close(step(copy.deepcopy(prepared)), plain_step(prepared))
    (call,) = calls
    assert call["residual"] is None
    assert call["low"] == -torch.inf
    assert call["divisor"] is not None


@pytest.mark.parametrize(
    "activate", [F.silu, lambda x: x.clamp(0, 1), lambda x: F.relu(x) * x], ids=["silu", "clamp", "two users"]
)
def test_a_batch_norm_before_anything_else_does_without_the_division(activate: Callable, calls: list[dict]) -> None:
    prepared = prepared_of(Chain(activate))
    assert_close(step(copy.deepcopy(prepared)), plain_step(prepared))
    (call,) = calls
    assert call["divisor"] is not None
    assert call["low"] == -torch.inf


@pytest.mark.parametrize("options", [{"momentum": None}, {"momentum": 0.3, "eps": 0.1}, {"affine": False}], ids=str)
def test_options_of_batch_norms(options: dict, calls: list[dict]) -> None:
    prepared = prepared_of(Chain(torch.relu, norm=nn.BatchNorm2d(4, **options)))
    plain = copy.deepcopy(prepared)
    for x in (X, X * 2, X.flip(1)):
        assert_close(step(prepared, x), plain_step(plain, x))
    assert len(calls) == 3


# ---- batch norms without a layer


class PreActivation(nn.Module):
    """Batch norms that no layer folds, one of them called twice."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.first, self.conv = nn.BatchNorm2d(3, **options), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(3, **options), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(torch.relu(self.first(x)))
        x = x + self.conv(torch.relu(self.norm(x)))
        return self.last(torch.relu(self.norm(x)))


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}, {"affine": False}], ids=str)
def test_batch_norms_that_no_layer_folds(options: dict, calls: list[dict]) -> None:
    prepared = prepared_of(PreActivation(**options))
    plain = copy.deepcopy(prepared)
    for x in (X, X * 2):
        assert_close(step(prepared, x), plain_step(plain, x))
    assert [call["divisor"] for call in calls] == [None] * 6
    assert all(call["scale"] is not None for call in calls)
    calls.clear()
    with qt.disable_quantization(prepared):
        plain = copy.deepcopy(prepared)
        assert_equal(step(prepared), plain_step(plain))
    assert not calls


# ---- the plain route


def with_hook(name: str) -> Callable[[nn.Module], None]:
    return lambda model: model.get_submodule(name).register_forward_hook(lambda m, args, y: None)


def observing(model: nn.Module) -> None:
    qt.calibrating(model.activation_quantizers).apply()


def convert_sync(model: nn.Module) -> None:
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.train()


NOT_FUSED = {
    "eval": lambda model: model.eval(),
    "hook of the batch norm": with_hook("norm"),
    "backward hook": lambda model: model.get_submodule("norm").register_full_backward_hook(lambda m, gi, go: None),
    "sync": convert_sync,
    "forward of its own": lambda model: setattr(model.norm, "forward", model.norm.forward),
    "compiled": lambda model: model.norm.compile(backend="eager"),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_the_plain_route_has_the_bits_of_the_ops_one_by_one(name: str, calls: list[dict]) -> None:
    prepared = prepared_of(Chain(nn.ReLU(), ADDS["operator"]))
    plain = copy.deepcopy(prepared)
    for model in (prepared, plain):
        NOT_FUSED[name](model)
    assert_equal(step(prepared), plain_step(plain))
    assert not calls


@pytest.mark.parametrize("strategy", NEEDS_BATCH_STATISTICS)
def test_other_strategies(strategy: str, calls: list[dict]) -> None:
    prepared = prepared_of(Chain(nn.ReLU()), batch_norm=strategy)
    plain = copy.deepcopy(prepared)
    for _ in range(2):
        assert_equal(step(prepared), plain_step(plain))
    assert not calls


def test_parts_that_are_watched_run_by_themselves(calls: list[dict]) -> None:
    for name, kept in (("conv", "all"), ("activation", "add"), ("activation_quantizers.activation", "activation")):
        calls.clear()
        prepared = prepared_of(Chain(nn.ReLU(), ADDS["operator"]))
        seen: list[Tensor] = []
        prepared.get_submodule(name).register_forward_hook(
            lambda m, args, y, seen=seen: seen.append(y.detach().clone())
        )
        plain = copy.deepcopy(prepared)
        assert_close(step(prepared), plain_step(plain))
        torch.testing.assert_close(seen[0], seen[1], rtol=1e-9, atol=1e-9)
        (call,) = calls
        assert (call["divisor"] is None) == (name == "conv")
        assert call["residual"] is not None
        assert (call["low"] == 0) == (kept != "add")
        assert ("scale" in call) == (kept == "all")


@pytest.mark.parametrize("change", [observing, qt.stop_on_nonfinite, qt.disable_quantization], ids=lambda f: f.__name__)
def test_a_quantizer_that_is_switched_runs_after_the_op(change: Callable, calls: list[dict]) -> None:
    prepared = prepared_of(Chain(nn.ReLU()))
    plain = copy.deepcopy(prepared)
    with contextlib_of(change, prepared), contextlib_of(change, plain):
        assert_close(step(prepared), plain_step(plain))
    (call,) = calls
    assert "scale" not in call
    assert call["low"] == 0


def contextlib_of(change: Callable, model: nn.Module):
    found = change(model)
    return found if hasattr(found, "__enter__") else nullcontext()


@pytest.mark.slow
def test_eval_is_the_converted_model() -> None:
    for make in NETS.values():
        prepared = prepared_of(make()).float()
        step(prepared, X.float())
        converted = qt.convert(prepared)
        assert torch.equal(prepared.eval()(X.float()), converted(X.float()))
        assert prepared.state_dict().keys() == prepared_of(make()).state_dict().keys()


def test_a_batch_of_one_value_and_an_empty_batch() -> None:
    prepared = prepared_of(Chain(nn.ReLU()))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got input size"):
        prepared(X[:1, :, :1, :1])
    plain = copy.deepcopy(prepared)
    assert_equal(step(prepared, X[:0]), plain_step(plain, X[:0]))


# ---- copies, changes and other callers of the code


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(copied: Callable, calls: list[dict]) -> None:
    prepared = prepared_of(ResNet(), quantizer="lsq")
    again = copied(prepared)
    assert_equal(step(again), step(prepared))
    assert len(calls) == 2 * len(batch_norms(prepared))
    assert again.conv.batch_norm is again.bn


def test_a_sequential(calls: list[dict]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    prepared = prepared_of(model)
    assert_close(step(copy.deepcopy(prepared)), plain_step(prepared))
    assert len(calls) == 1


def test_a_changed_graph_is_compiled_anew(calls: list[dict]) -> None:
    prepared = prepared_of(Chain(nn.ReLU(), ADDS["operator"]))
    (node,) = (node for node in prepared.graph.nodes if node.target == "activation")
    with prepared.graph.inserting_after(node):
        doubled = prepared.graph.call_function(torch.mul, (node, 2.0))
    node.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    prepared.recompile()
    assert_close(step(copy.deepcopy(prepared)), plain_step(prepared))
    (call,) = calls
    assert call["low"] == 0
    assert "scale" not in call


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_gradients_under_checkpointing(quantizer: str, reentrant: bool) -> None:
    prepared = prepared_of(ResNet(), quantizer=quantizer)
    again = copy.deepcopy(prepared)
    wanted = step(copy.deepcopy(prepared))
    found = step(prepared, run=lambda x: checkpoint(prepared, x, use_reentrant=reentrant))
    wanted, found = ({n: v for n, v in each.items() if "gradient" in n or n == "input"} for each in (wanted, found))
    assert_close(found, wanted)
    block = again.blocks[0]
    inner = block.forward
    block.forward = lambda x: checkpoint(inner, x, use_reentrant=reentrant)
    found = step(again)
    assert_close({name: found[name] for name in wanted}, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["fixed", pytest.param("lsq", marks=pytest.mark.sweep)])  # below, with lsq
def test_compiled_without_breaks_and_recompiles(quantizer: str) -> None:
    model = ResNet()
    del model.blocks[0]
    prepared = prepared_of(model, X.float(), quantizer=quantizer)
    twin = copy.deepcopy(prepared)
    torch._dynamo.reset()
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager", dynamic=False)
    for turn in range(3):
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            found = step(twin, X.float(), run=compiled)
        wanted = step(prepared, X.float())
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, equal_nan=True, msg=name)


@pytest.mark.slow
def test_compiled_for_batches_of_any_size() -> None:
    prepared = prepared_of(Chain(nn.ReLU(), ADDS["operator"]), X.float(), quantizer="lsq")
    twin = copy.deepcopy(prepared)
    torch._dynamo.reset()
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")

    def run(x: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return compiled(x)

    for turn, size in enumerate((4, 3, 2)):
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            found = step(twin, X[:size].float(), run=run)
        for name, value in step(prepared, X[:size].float()).items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, equal_nan=True, msg=name)


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict: bool, training: bool) -> None:
    prepared = prepared_of(ResNet(), X.float()).train(training)
    program = torch.export.export(prepared, (X.float(),), strict=strict)
    wanted = copy.deepcopy(prepared)
    with called_one_by_one():
        torch.testing.assert_close(program.module()(X.float()), wanted(X.float()), rtol=1e-4, atol=1e-4)


def test_under_autocast() -> None:
    prepared = prepared_of(ResNet(), X.float(), quantizer="lsq")
    plain = copy.deepcopy(prepared)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = step(prepared, X.float()), plain_step(plain, X.float())
    assert ours["output"].dtype == theirs["output"].dtype
    torch.testing.assert_close(ours["output"], theirs["output"], rtol=0.2, atol=0.2)
    assert all(value.isfinite().all() for name, value in ours.items() if "gradient" in name)


def test_transforms_of_torch_func_run_the_ops_one_by_one() -> None:
    prepared = prepared_of(Chain(nn.ReLU()))
    with qt.disable_quantization(prepared):
        wanted = plain_step(copy.deepcopy(prepared))["gradient of stem.weight"]
        weights = {name: p.detach() for name, p in prepared.named_parameters()}

        def loss(weights: dict[str, Tensor]) -> Tensor:
            rest = {name: b.clone() for name, b in prepared.named_buffers()}
            y = torch.func.functional_call(prepared, (weights, rest), (X,))
            return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()

        torch.testing.assert_close(torch.func.grad(loss)(weights)["stem.weight"], wanted)


# ---- codes


def test_layers_take_the_codes_of_ops_before_them(monkeypatch) -> None:
    """One in a block whose first layer has a hook, too, which is called by itself."""
    prepared, taken = prepared_of(ResNet(), X.float(), quantizer="lsq"), codes_taken(monkeypatch)
    prepared.get_submodule("blocks.0.conv1").register_forward_pre_hook(lambda m, args: None)
    prepared(X.float())
    sources = [prepared.get_submodule(f"blocks.{name}").source for name in ("0.conv1", "0.conv2", "1.conv1")]
    found = {id(source): (y, codes) for source, y, codes in taken}
    for source in sources:
        y, codes = found[id(source)]
        assert torch.equal(qt.ops.dequantize(codes.codes, codes.scale, codes.zero_point), y)


def test_a_residual_is_kept_as_its_codes(calls: list[dict]) -> None:
    """That of the first block comes from a max pool; the shortcut of the second one is quantized by itself."""
    step(prepared_of(ResNet(), quantizer="lsq"))
    assert [call["residual_codes"] is not None for call in calls if call["residual"] is not None] == [True, True]


# ---- max pools


class Pools(nn.Module):
    def __init__(self, pool: Callable) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        self.pool = pool if isinstance(pool, nn.Module) else None
        self.function = pool

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.pool or self.function)(torch.relu(self.norm(self.conv(x)))))


POOLS = {
    "module": (nn.MaxPool2d(3, 2, 1), True),
    "ceil": (nn.MaxPool2d((2, 3), ceil_mode=True, dilation=2), True),
    "function": (lambda x: F.max_pool2d(x, 2, padding=1), True),
    "keywords": (lambda x: F.max_pool2d(input=x, kernel_size=(3, 2), stride=1), True),
    "torch": (lambda x: torch.max_pool2d(x, 2), True),
    "indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], False),
    "adaptive": (nn.AdaptiveMaxPool2d(2), False),
}


@pytest.mark.parametrize("name", POOLS)
def test_max_pools(name: str, monkeypatch) -> None:
    pool, ours = POOLS[name]
    prepared = prepared_of(Pools(pool), X.float())
    plain, found = copy.deepcopy(prepared), []
    op = qt.ops.max_pool
    monkeypatch.setattr(qt.ops, "max_pool", lambda *args: found.append(args) or op(*args))
    with called_one_by_one() if not ours else nullcontext():
        taken = step(prepared, X.float())
    assert len(found) == ours
    monkeypatch.setattr(epilogue, "LARGEST_WINDOW", 0)
    assert_equal(taken, plain_step(plain, X.float()) if not ours else step(plain, X.float()))
    assert len(found) == ours


def test_max_pools_stay_as_they_are_in_eval_and_under_hooks(monkeypatch) -> None:
    prepared = prepared_of(Pools(nn.MaxPool2d(2)))
    monkeypatch.setattr(qt.ops, "max_pool", None)
    prepared.eval()(X)
    prepared.train().pool.register_forward_hook(lambda m, args, y: None)
    prepared(X)


# ---- the report


def said_of(prepared: nn.Module) -> dict[str, str]:
    lines = qt.quantization_report(prepared).layers
    return {line.name: line.training for line in lines if line.kind == "batch_norm"}


@pytest.mark.slow
def test_the_report_says_what_is_in_one_op() -> None:
    said = said_of(prepared_of(ResNet()))
    assert said["bn"] == "fused with relu, its quantizer"
    assert said["blocks.0.bn2"] == "fused with add, blocks.0.relu, its quantizer"
    silu = said_of(prepared_of(Upscaler()))["narrow.1"]
    assert silu == "not fused; 'narrow_2' follows, which cannot be fused"
    frozen = prepared_of(ResNet())
    qt.freeze_batch_norm(frozen)
    assert said_of(frozen) == said_of(frozen.eval()) == said_of(prepared_of(ResNet()))
    assert said_of(prepared_of(Chain(nn.ReLU()), batch_norm="frozen"))["norm"] == "fused with activation, its quantizer"


def test_the_report_says_why_not() -> None:
    def reason(change: Callable[[nn.Module], object], **options: str) -> str:
        prepared = prepared_of(Chain(nn.ReLU()), **options)
        change(prepared)
        return said_of(prepared)["norm"]

    one_process = "computed by torch: a SyncBatchNorm without a process group of several ranks"
    assert reason(convert_sync) == one_process
    assert reason(with_hook("norm")) == "computed by torch: it has hooks"
    frozen = "computed by torch: its layer folds it, and is not fused: its layer has hooks"
    assert reason(lambda m: (qt.freeze_batch_norm(m), with_hook("conv")(m))) == frozen
    assert reason(nn.Module.train, batch_norm="std_correction") == "computed by torch: its strategy is 'std_correction'"
    assert reason(with_hook("activation")) == "not fused; its activation has hooks"
    assert reason(observing) == "fused with activation; its quantizer observes its input"
    assert reason(with_hook("conv")).endswith("; its layer is not fused: its layer has hooks")
    with called_one_by_one():
        assert reason(nn.Module.train) == "computed by torch: hooks of all modules are registered"
    prepared = prepared_of(PreActivation())
    assert said_of(prepared)["first"] == "fused with relu, its quantizer"
    with qt.disable_quantization(prepared):
        assert said_of(prepared)["first"].startswith(
            "computed by torch: no quantizer is fused with it (its quantizer is disabled"
        )


def test_the_report_says_that_a_block_is_watched() -> None:
    prepared = prepared_of(ResNet())
    prepared.blocks[0].register_forward_hook(lambda m, args, y: None)
    assert said_of(prepared)["blocks.0.bn2"] == "fused with add, blocks.0.relu; a block returns 'blocks_0_relu_1'"


def test_a_batch_norm_with_a_parametrized_weight_trains() -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 6)
    prepared = qt.prepare(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train(), x, backend="tensorrt"
    )
    qt.calibrate(prepared, [x], progress=False)
    qt.freeze_ranges(prepared)
    plain = copy.deepcopy(prepared)
    with torch.no_grad():
        plain.get_submodule("1").weight.mul_(2)
    nn.utils.parametrize.register_parametrization(prepared.get_submodule("1"), "weight", Twice())
    torch.testing.assert_close(prepared(x), plain(x), rtol=1e-4, atol=1e-5)
