"""Chains that become one op: with batch norms and activations, by the table and by the user's own patterns."""

import copy
from collections.abc import Callable
from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.graph.capture import trace
from qtoolkit.graph.passes import fuse_patterns, link_batch_norms, swap
from qtoolkit.layer_rules import LayerRules
from tests import nets

HEADS = {
    "conv1d": (lambda: nn.Conv1d(4, 8, 3), nn.BatchNorm1d, (4, 4, 6)),
    "conv2d": (lambda: nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d, (4, 4, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(4, 8, 2), nn.BatchNorm3d, (4, 4, 3, 4, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 8, 3, groups=2), nn.BatchNorm1d, (4, 4, 6)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 8, 3, stride=2), nn.BatchNorm2d, (4, 4, 5, 6)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 8, 2, groups=4), nn.BatchNorm3d, (4, 4, 3, 4, 3)),
    "linear": (lambda: nn.Linear(4, 8), nn.BatchNorm1d, (16, 4)),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": nn.Identity(),
    **{kind.__name__: kind() for kind in (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.ELU)},
    **{f"F.{f.__name__}": f for f in (F.relu, F.relu6, F.leaky_relu, F.silu, F.hardswish)},
    "torch.relu": torch.relu,
    "in place": nn.ReLU(inplace=True),
    "method": lambda x: x.relu(),
}


LAST = {
    3: lambda: nn.Conv1d(8, 2, 1),
    4: lambda: nn.Conv2d(8, 2, 1),
    5: lambda: nn.Conv3d(8, 2, 1),
    2: lambda: nn.Linear(8, 2),
}


class Chain(nn.Module):
    """Head, batch norm, activation, and a layer that wants its input quantized."""

    def __init__(self, head: str, activation: str, batch_norm: bool) -> None:
        super().__init__()
        make, norm, shape = HEADS[head]
        self.head, self.norm = make(), norm(8) if batch_norm else None
        self.activation, self.last = ACTIVATIONS[activation], LAST[len(shape)]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        return self.last(self.activation(y if self.norm is None else self.norm(y)))


def chain(front: tuple[str, bool], activation: str) -> tuple[nn.Module, Tensor]:
    """A head, with a batch norm or without, and an activation, after two steps of training; and an input."""
    (head, batch_norm), shape = front, HEADS[front[0]][2]
    return nets.trained(Chain(head, activation, batch_norm), *shape, steps=2), torch.randn(shape)


FRONTS = [
    pytest.param((head, norm), id=f"{head}-{'bn' if norm else 'no-bn'}") for head in HEADS for norm in (True, False)
]
over_fronts = pytest.mark.parametrize("front", FRONTS)
over_activations = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.mark.sweep(1)
@over_fronts
@over_activations
def test_fuse_eval_output_equal_to_1e_6(front: tuple[str, bool], activation: str) -> None:
    model, x = chain(front, activation)
    prepared = qt.prepare(model.eval(), x, backend="tensorrt")
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in prepared.modules())
    with qt.disable_quantization(prepared):
        ours, theirs = prepared(x), model(x)
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.sweep(1)
@over_fronts
@over_activations
def test_fuse_train_output_equal(front: tuple[str, bool], activation: str) -> None:
    model, x = chain(front, activation)
    prepared = qt.prepare(model, backend="tensorrt")
    with qt.disable_quantization(prepared):
        ours, theirs = prepared(x), model(x)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()  # scaled and un-scaled in float32
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(prepared.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep(1)
@over_fronts
@over_activations
@pytest.mark.parametrize("training", [True, False])
def test_nothing_stands_within_a_chain(front: tuple[str, bool], activation: str, training: bool) -> None:
    model, x = chain(front, activation)
    prepared = qt.prepare(model.train(training), x, backend="tensorrt")
    layer = prepared.get_submodule("head")
    assert type(layer) is qt.nn.QAT_MODULES[type(model.head)]
    quantizers = [line.source for line in qt.quantization_report(prepared).tensors]
    end = next(n for n in prepared.graph.nodes if n.target == "last").args[0]
    if isinstance(model.activation, nn.Identity):  # its quantizer stands before it
        end = end.args[0]
    assert quantizers == ["x", end.args[0].name]


@pytest.mark.parametrize("training", [True, False])
def test_fuse_leaves_chains_with_a_second_user_untouched(training: bool) -> None:
    model = nets.trained(nets.SecondUser(), 2, 3, 4, 4).train(training)
    prepared = qt.prepare(model, backend="tensorrt")
    assert type(prepared.get_submodule("bn")) is nn.BatchNorm2d
    assert prepared.get_submodule("conv").batch_norm is None
    reasons = {line.name: line.reason for line in qt.quantization_report(prepared).layers}
    assert "its layer's output has a second user" in reasons["bn"]
    x = torch.randn(2, 3, 4, 4)
    nets.assert_float_when_off(prepared, model, x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [(nn.Linear(6, 4), nn.BatchNorm1d(4), (8, 4, 6)), (nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), (3, 4))],
    ids=["linear", "conv without a batch"],
)
def test_the_example_inputs_show_which_dimension_a_batch_norm_normalizes(
    layer: nn.Module, norm: nn.Module, shape: tuple[int, ...], training: bool
) -> None:
    model = nets.trained(nn.Sequential(copy.deepcopy(layer), copy.deepcopy(norm), nn.ReLU()), *shape).train(training)
    x = torch.randn(shape)
    prepared = qt.prepare(model, x, backend="tensorrt")
    reasons = {line.name: line.reason for line in qt.quantization_report(prepared).layers}
    assert f"normalizes dimension 1 of its input of {len(shape)} dimensions" in reasons["1"]
    nets.assert_float_when_off(prepared, model, x)
    qt.calibrate(prepared, [x], progress=False)
    torch.testing.assert_close(qt.convert(prepared)(x), prepared.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_swapping_and_fusing_twice_changes_nothing(training: bool) -> None:
    rules = LayerRules(qt.backends["tensorrt"], table=qt.nn.QAT_MODULES)
    model = nets.trained(nets.ConvNet(), 4, 3, 8, 8).train(training)
    once = link_batch_norms.run(swap.run(trace.run(copy.deepcopy(model)).gm, rules), rules)
    before, modules, state = str(once.graph), dict(once.named_modules()), copy.deepcopy(once.state_dict())
    again = link_batch_norms.run(swap.run(once, rules), rules)
    assert str(again.graph) == before
    assert dict(again.named_modules()) == modules
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


# ---- the user's own patterns


class Scale(nn.Module):
    """A module of the user's own, that tracing must not go into."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class Stack(nn.Module):
    """Linear -> Scale -> tanh, thrice: plain, with a second user in the middle, and with a shared Scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.one, self.two, self.shared = Scale(2.0), Scale(3.0), Scale(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(self.a(x)))
        y = self.b(x)
        x = torch.tanh(self.two(y)) + y
        return torch.tanh(self.shared(self.c(x))) + torch.tanh(self.shared(self.d(x)))


def into_linear(linear: nn.Linear, scale: Scale, function: None) -> nn.Module:
    assert function is None
    with torch.no_grad():
        linear.weight.mul_(scale.value)
        linear.bias.mul_(scale.value)
    return nn.Sequential(linear, nn.Tanh(), nn.Dropout())


PATTERN = (nn.Linear, Scale, torch.tanh)


def test_a_pattern_replaces_the_chains_that_stand_alone() -> None:
    model = Stack().eval()
    x = torch.randn(3, 4)
    expected = model(x)
    prepared = qt.prepare(model, x, fuse_patterns={PATTERN: into_linear}, backend="tensorrt")
    targets = [str(node.target) for node in prepared.graph.nodes if node.op == "call_module"]
    assert isinstance(prepared.get_submodule("a"), nn.Sequential)
    assert "one" not in targets
    assert targets.count("shared") == 2
    assert "two" in targets
    assert not prepared.get_submodule("a").training  # as the model, dropout included
    assert all(not module.training for module in prepared.get_submodule("a").modules())
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), expected)
    assert torch.equal(model(x), expected)  # the fuser had a copy


def test_a_pattern_may_give_a_layer_that_is_then_quantized() -> None:
    def merge(first: nn.Linear, second: nn.Linear) -> nn.Linear:
        merged = nn.Linear(first.in_features, second.out_features)
        merged.weight.data = second.weight.detach() @ first.weight.detach()
        merged.bias.data = second(first.bias).detach()
        return merged

    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)).eval()
    prepared = qt.prepare(model, fuse_patterns={(nn.Linear, nn.Linear): merge}, backend="tensorrt")
    assert [type(m) for m in prepared.children()][:1] == [qt.nn.QuantLinear]
    x = torch.randn(2, 4)
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x))


def test_a_pattern_of_functions_and_methods() -> None:
    class Clip(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x).neg()

    model = Clip()
    prepared = qt.prepare(
        model, fuse_patterns={(F.relu, Tensor.neg): lambda *_: nn.Threshold(0.0, 0.0)}, backend="tensorrt"
    )
    (node,) = [n for n in prepared.graph.nodes if n.op == "call_module"]
    assert (node.target, type(prepared.get_submodule("relu"))) == ("relu", nn.Threshold)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([PATTERN], TypeError, "fuse_patterns must map patterns to fusers, got a list"),
        ({nn.Linear: into_linear}, ValueError, "must be a tuple of two or more module types or functions, got <class"),
        ({(nn.Linear,): into_linear}, ValueError, "must be a tuple of two or more module types or functions"),
        ({("fc", nn.ReLU): into_linear}, ValueError, "must be a module type or a function, got 'fc' in ('fc', ReLU)"),
        ({PATTERN: "merge"}, TypeError, "the fuser of (Linear, Scale, tanh) must be callable, got 'merge'"),
        ({(nn.Linear, nn.GELU): into_linear}, ValueError, "(Linear, GELU) matches no chain in the model"),
        (
            {PATTERN: lambda *_: None},
            TypeError,
            "(Linear, Scale, tanh) at a -> one -> tanh must return a module, got a None",
        ),
        (
            {PATTERN: lambda *_: 1 / 0},
            ValueError,
            "the fuser of (Linear, Scale, tanh) at a -> one -> tanh failed: division",
        ),
    ],
)
def test_bad_patterns_leave_the_model_untouched(given: object, error: type[Exception], words: str) -> None:
    model = Stack()
    before, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    with pytest.raises(error) as caught:
        qt.prepare(model, fuse_patterns=given, backend="tensorrt")
    assert words in str(caught.value)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_pattern_is_looked_for_once() -> None:
    gm = fuse_patterns.run(trace.run(Stack(), leaf_modules=[Scale]).gm, {PATTERN: into_linear})
    before = str(gm.graph)
    with pytest.raises(ValueError, match="matches no chain"):
        fuse_patterns.run(gm, {PATTERN: into_linear})
    assert str(gm.graph) == before


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("index", "register"),
    [(0, "register_forward_hook"), (1, "register_forward_hook"), (1, "register_forward_pre_hook")],
)
def test_hooks_between_a_layer_and_its_batch_norm_are_refused(training: bool, index: int, register: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train(training)
    handle = getattr(model[index], register)(lambda *args: None)
    x = torch.randn(2, 3, 5, 5)
    with pytest.raises(ValueError, match=f"prepare: '{index}' has forward hooks.* batch norm '1' .* layer '0'"):
        qt.prepare(model, x, backend="onnxruntime")
    handle.remove()
    model[2].register_forward_hook(lambda module, args, y: 2 * y)
    model[0].register_forward_pre_hook(lambda module, args: (3 * args[0],))
    prepared = qt.prepare(model.eval(), x, backend="onnxruntime")
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x))


class ReadsBoth(nn.Module):
    """A layer and its batch norm, of both of which forward reads a tensor."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.layer, self.norm, self.reads = nn.Linear(6, 6), nn.BatchNorm1d(6), reads

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) * attrgetter(self.reads)(self).sum()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reads", ["layer.weight", "norm.weight"])
def test_a_batch_norm_stays_where_forward_reads_what_folding_would_change(training: bool, reads: str) -> None:
    torch.manual_seed(0)
    model, x = nets.trained(ReadsBoth(reads), 8, 6, steps=2).train(training), torch.randn(8, 6)
    prepared = qt.prepare(model, x, backend="onnxruntime")
    reasons = {line.name: line.reason for line in qt.quantization_report(prepared).left_float}
    assert f"reads '{reads}', which folding would change" in reasons["norm"]
    qt.calibrate(prepared, [x], progress=False)
    assert torch.equal(qt.convert(prepared)(x), prepared.eval()(x))
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model.eval()(x))
