"""Constructs that hand a traced value to torch's C++: each is traced or refused in a sentence, never a crash."""

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import qtoolkit as qt
from tests import nets, processes
from tests.nets import linear_of


class RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return -gradient


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return -gradient


round_through = RoundThrough.apply


class Construct(nn.Module):
    """A submodule that applies a function to its input and its layers."""

    def __init__(self, function: Callable[["Construct", Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.Sequential(linear_of(), nn.ReLU(), linear_of(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Net(nn.Module):
    """A net whose middle submodule is a construct."""

    def __init__(self, function: Callable[[Construct, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.last = linear_of(), Construct(function), linear_of()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def with_hook(module: Construct, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        x.register_hook(lambda gradient: 2 * gradient)
    return module.layers(x)


def with_grad(module: Construct, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(module.layers(x).sum(), x)[0]


def by_functional_call(module: Construct, x: Tensor) -> Tensor:
    weights = {name: 2 * weight for name, weight in module.layers.named_parameters()}
    return torch.func.functional_call(module.layers, weights, (x,))


def with_dual(module: Construct, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        return torch.autograd.forward_ad.unpack_dual(dual * 2).primal


def below_torch_function(module: Construct, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.relu(x)


def with_data_assigned(module: Construct, x: Tensor) -> Tensor:
    x = x * 1
    x.data = x.data * 2
    return x


def matched(module: Construct, x: Tensor) -> Tensor:
    match x:
        case Tensor():
            return module.layers(x)
    return x


TRACED: dict[str, Callable[[Construct, Tensor], Tensor]] = {
    "checkpoint": lambda m, x: checkpoint(m.layers, x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(m.layers, x, use_reentrant=True),
    "checkpoint by its module": lambda m, x: checkpoints.checkpoint(m.layers, x, use_reentrant=False),
    "reentrant checkpoint_sequential": lambda m, x: checkpoint_sequential(m.layers, 2, x, use_reentrant=True),
    "checkpoint_sequential": lambda m, x: checkpoint_sequential(m.layers, 2, x, use_reentrant=False),
    "is_tensor": lambda m, x: m.layers(x) if torch.is_tensor(x) and isinstance(x, Tensor) else x,
    "match": matched,
    "format": lambda m, x: m.layers(x) if f"{x}" and f"{x!r}" else x,
    "copy": lambda m, x: m.layers(copy.copy(x)),
    "data": lambda m, x: m.layers(x.data) + x,
    "as_tensor": lambda m, x: torch.as_tensor(x) * 2,
    "asarray": lambda m, x: torch.asarray(x) * 2,
    "new_tensor": lambda m, x: x.new_tensor(x) * 2,
    "Parameter": lambda m, x: nn.Parameter(x) * 2,
    "_C": lambda m, x: torch._C._nn.gelu(x) + torch._C._VariableFunctions.relu(x),
    "aten": lambda m, x: torch.ops.aten.relu(x),
    "rank as a key": lambda m, x: {2: m.layers, 4: torch.relu}[x.ndim](x),
    "number of NumPy": lambda m, x: m.layers(x) * np.float64(np.log(2)) + x.reshape(np.int64(2), -1),
}
# For each construct that is refused: the function, and words of the error.
REFUSED: dict[str, tuple[Callable[[Construct, Tensor], Tensor], str]] = {
    "Function": (lambda m, x: RoundThrough.apply(x), "a torch.autograd.Function is called here"),
    "Function by a name": (lambda m, x: round_through(x), "a torch.autograd.Function is called here"),
    "Function that returns a view": (lambda m, x: Reverse.apply(x), "a torch.autograd.Function is called here"),
    "Function that returns its input": (lambda m, x: Same.apply(x), "a torch.autograd.Function is called here"),
    "torch.tensor": (lambda m, x: torch.tensor(x) * 2, "computed from a traced value in C"),
    "Tensor": (lambda m, x: torch.Tensor(x) * 2, "computed from a traced value in C"),
    "FloatTensor": (lambda m, x: torch.FloatTensor(x) * 2, "device=meta"),
    "tensor of a list": (lambda m, x: torch.tensor([x[0, 0], x[0, 1]]).sum() * x, "symbolically traced"),
    "as_subclass": (lambda m, x: x.as_subclass(nn.Parameter) * 2, "argument of type"),
    "vmap": (lambda m, x: torch.func.vmap(m.layers)(x), "computed from a traced value in C"),
    "jvp": (lambda m, x: torch.func.jvp(m.layers, (x,), (x,))[1], "_make_dual is called"),
    "vjp": (lambda m, x: torch.func.vjp(m.layers, x)[0], "computed from a traced value in C"),
    "grad": (lambda m, x: torch.func.grad(lambda y: m.layers(y).sum())(x), "computed from a traced value in C"),
    "dual": (with_dual, "_make_dual is called"),
    "autograd.grad": (with_grad, "grad is called here; a graph does not record gradients"),
    "hook": (with_hook, "register_hook is called here"),
    "functional_call": (by_functional_call, "parameter of 'inner.layers' is replaced"),
    "dlpack": (lambda m, x: torch.from_dlpack(x.detach()) * 2, "capsule"),
    "to_dlpack": (
        lambda m, x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach())),
        "Cannot pack tensors on meta",
    ),
    "numpy": (lambda m, x: torch.from_numpy(x.detach().numpy()), "expected np.ndarray"),
    "asarray of numpy": (lambda m, x: torch.from_numpy(np.asarray(x.detach())), "can't convert np.ndarray"),
    "tensor of sizes": (lambda m, x: x + torch.tensor(x.shape).sum(), "has no length"),
    "cond": (lambda m, x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), "torch.cond"),
    "jit": (lambda m, x: torch.jit.trace(m.layers, x)(x), "Tracer cannot infer type"),
    "make_subclass": (lambda m, x: torch.Tensor._make_subclass(Tensor, x) * 2, "computed from a traced value in C"),
    "below __torch_function__": (below_torch_function, "Tensor with dtype torch"),
    "assigned data": (with_data_assigned, "'data' of a tensor is assigned here"),
    "compile": (lambda m, x: torch.compile(m.layers, backend="eager")(x), "not installed as a submodule"),
}


def run(name: str, pipe: Connection) -> None:
    """Prepare the net of a construct, and send the error's text, or nothing."""
    torch.manual_seed(0)
    model, x = Net(TRACED.get(name) or REFUSED[name][0]), torch.randn(2, 4, requires_grad=True)
    expected, text = model(x), ""
    try:
        prepared = qt.prepare(model, (x,), backend="tensorrt")
    except qt.UntraceableError as error:
        text = str(error)
        prepared = qt.prepare(model, (x,), untraced=[error.untraced], backend="tensorrt")
    with qt.disable_quantization(prepared):
        y = prepared(x)
    assert torch.equal(y, expected)
    for ours, reference in zip(gradients(y, x, prepared), gradients(expected, x, model), strict=True):
        torch.testing.assert_close(ours, reference)
    pipe.send(text)


def gradients(y: Tensor, x: Tensor, model: nn.Module) -> list[Tensor | None]:
    """Return the gradients of an output with respect to the input and a layer's weight."""
    x.grad = None
    y.sum().backward()
    return [x.grad, *(model.get_parameter(f"{name}.weight").grad for name in ("first", "last", "inner.layers.0"))]


def text_of(name: str) -> str:
    """Return what `run` sends from a process of its own."""
    context = processes.context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(name, theirs))
    process.start()
    theirs.close()
    process.join()
    assert process.exitcode == 0, f"{name}: the process ends with {process.exitcode}."
    return ours.recv()


@pytest.mark.parametrize("name", TRACED)
def test_traced_constructs_keep_the_values_and_gradients(name: str) -> None:
    assert text_of(name) == ""


@pytest.mark.parametrize("name", REFUSED)
def test_refused_constructs_name_the_line_and_a_remedy_that_works(name: str) -> None:
    text = text_of(name)
    assert re.search(REFUSED[name][1], text)
    assert f"{__name__.rpartition('.')[2]}.py, line" in text
    assert "untraced=['inner']" in text


def layer_runs(model: nn.Module, name: str) -> int:
    """Return how often a layer runs in a forward and backward pass."""
    runs: list[None] = []
    model.get_submodule(name).register_forward_pre_hook(lambda *_: runs.append(None))
    with qt.disable_quantization(model):
        model(torch.randn(2, 4)).sum().backward()
    return len(runs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_lost_recomputation_is_reported(reentrant: bool) -> None:
    model = Net(lambda m, x: checkpoint(m.layers, x, use_reentrant=reentrant))
    with pytest.warns(
        UserWarning, match=r"prepare: Net uses torch\.utils\.checkpoint; .* stores .* leaf modules with `untraced`"
    ):
        prepared = qt.prepare(model, (torch.randn(2, 4),), backend="tensorrt")
    leaf = qt.prepare(model, (torch.randn(2, 4),), untraced=["inner"], backend="tensorrt")
    assert (layer_runs(prepared, "inner.layers.0"), layer_runs(leaf, "inner.layers.0")) == (1, 2)


def test_a_custom_function_is_refused_without_grad_and_example_inputs_too() -> None:
    with torch.no_grad(), pytest.raises(qt.UntraceableError, match="a torch.autograd.Function is called here"):
        qt.prepare(Net(lambda m, x: round_through(x)), backend="tensorrt")


@pytest.mark.parametrize("example", [None, (torch.randn(2, 4),)], ids=["plain", "sized"])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (with_data_assigned, "'data' of a tensor is assigned here, which a graph does not record"),
        (
            lambda m, x: m.layers(copy.deepcopy(x)),
            r"copy\.deepcopy of a traced value is called here.* use x\.clone\(\)",
        ),
    ],
)
def test_what_a_graph_would_lose_silently_is_refused(
    function: Callable[[Construct, Tensor], Tensor], words: str, example: object
) -> None:
    with pytest.raises(qt.UntraceableError, match=rf"{words}.*test_constructs\.py, line.*untraced=\['inner'\]"):
        qt.prepare(Net(function), example, backend="tensorrt")


def test_a_tensor_has_no_attributes_of_other_types() -> None:
    def unpacked(module: Construct, x: Tensor) -> Tensor:
        return module.layers(x.tensors if hasattr(x, "tensors") else getattr(x, "first", x))

    model, x = Net(unpacked), torch.randn(2, 4)
    nets.assert_float_when_off(qt.prepare(model, x, backend="tensorrt"), model, x)
    with pytest.raises(qt.UntraceableError, match="a traced value has no 'tensors'.*in <lambda>"):
        qt.prepare(Net(lambda module, x: module.layers(x.tensors)), x, backend="tensorrt")


def test_other_attributes_of_a_value_can_be_set() -> None:
    def marked(module: Construct, x: Tensor) -> Tensor:
        x = x * 2
        x.is_masked = True
        return module.layers(x) if x.is_masked else x

    model, x = Net(marked), torch.randn(2, 4)
    for example in (None, x):
        nets.assert_float_when_off(qt.prepare(model, example, backend="tensorrt"), model, x)


def test_the_report_names_the_leaf_module_of_a_custom_function() -> None:
    prepared = qt.prepare(
        Net(lambda m, x: m.layers(round_through(x))), (torch.randn(2, 4),), untraced=["inner"], backend="tensorrt"
    )
    line = next(line for line in qt.quantization_report(prepared).layers if line.name == "inner")
    assert line.reason == "a leaf module: 2 of 4 layers in it are quantized, by module replacement"


RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(-1, keepdim=True).values * x,
    "indices": lambda x: x.gather(-1, x.max(-1, keepdim=True).indices) * x,
    "topk": lambda x: torch.topk(x, 4, -1).values,
    "sort": lambda x: torch.sort(x, -1, descending=True).values,
    "min": lambda x: torch.min(x, dim=-1, keepdim=True).values + x,
    "median": lambda x: x.median(-1, keepdim=True).values + x,
    "cummax": lambda x: x.cummax(-1).values,
    "aminmax": lambda x: x * x.aminmax(dim=-1, keepdim=True).max,
}


@pytest.mark.parametrize("measured", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_read_by_their_names(name: str, measured: bool) -> None:
    model, x = (
        nn.Sequential(Construct(lambda self, x: RESULTS[name](self.layers(x))), linear_of()).eval(),
        torch.randn(3, 4),
    )
    nets.assert_float_when_off(qt.prepare(model, (x,) if measured else None, "onnxruntime"), model, x)


@dataclass
class Features:
    last: Tensor
    hidden: tuple[Tensor, ...]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = linear_of(), linear_of()

    def forward(self, x: Tensor) -> Features:
        y = self.fc(x)
        return Features(self.out(y), (x, y))


@pytest.mark.parametrize("untraced", [(), ("0.layers",)], ids=["traced", "leaf"])
def test_results_of_a_submodule_are_read_by_their_names(untraced: tuple[str, ...]) -> None:
    model = nn.Sequential(Construct(lambda self, x: self.layers(x).hidden[1] + self.layers(x).last), linear_of()).eval()
    model[0].layers = Backbone()
    x = torch.randn(3, 4)
    nets.assert_float_when_off(qt.prepare(model, (x,), "onnxruntime", untraced=untraced), model, x)


class Centers(nn.Module):
    """Casts a tensor that is no buffer, and one that is, as super-resolution nets do with the mean of their images."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mean = linear_of(), torch.rand(4)
        self.register_buffer("deviation", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean, self.last = self.mean.type_as(x), x
        self.deviation = self.deviation.to(x.dtype)
        return self.fc((x - self.mean) * self.deviation) + self.mean


@pytest.mark.parametrize("measured", [True, False], ids=["example", "no example"])
def test_a_tensor_that_the_forward_casts_is_a_local_value(measured: bool) -> None:
    model, x = nn.Sequential(Centers(), linear_of()).eval(), torch.randn(3, 4)
    prepared = qt.prepare(model, (x,) if measured else None, "onnxruntime")
    nets.assert_float_when_off(prepared, model, x)
    assert set(prepared.state_dict()) >= set(model.state_dict())
    assert not any(isinstance(value, torch.fx.Proxy) for m in prepared.modules() for value in vars(m).values())
    qt.calibrate(prepared, [x], progress=False)
    assert torch.equal(qt.convert(prepared)(x), prepared(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_hooks_by_which_transformers_collects_outputs_are_traced() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 1, 1],
        decoder_hidden_size=16,
    )
    model, x = transformers.SegformerForSemanticSegmentation(config).eval(), torch.rand(1, 3, 32, 32)
    prepared = qt.prepare(model, {"pixel_values": x}, "onnxruntime")
    with qt.disable_quantization(prepared), torch.no_grad():
        torch.testing.assert_close(prepared(pixel_values=x)["logits"], model(pixel_values=x).logits, rtol=0, atol=1e-6)


def check_or_call(condition: Tensor | bool | Callable[[], bool]) -> None:
    """Check a number, a tensor or what a function returns, as the detectors of transformers do."""
    condition = condition() if callable(condition) else condition
    if isinstance(condition, Tensor):
        torch._check_tensor_all(condition)
    else:
        torch._check(condition, "the sizes do not fit")


CHECKS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "size": lambda self, x: [check_or_call(x.shape[-1] == 4), self.layers(x)][1],
    "tensor": lambda self, x: [check_or_call(x.abs().sum() < 100), self.layers(x)][1],
    "data": lambda self, x: [check_or_call(torch.tensor([2, 2]).prod() == x.shape[-1]), self.layers(x)][1],
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_traced_values_are_traced(name: str) -> None:
    model, x = nn.Sequential(Construct(CHECKS[name]), linear_of()).eval(), torch.randn(3, 4)
    nets.assert_float_when_off(qt.prepare(model, (x,), "onnxruntime"), model, x)


def test_a_check_that_fails_in_tracing_is_named() -> None:
    model = nn.Sequential(Construct(lambda self, x: [check_or_call(x.shape[-1] == 5), self.layers(x)][1])).eval()
    with pytest.raises(qt.UntraceableError, match="the sizes do not fit"):
        qt.prepare(model, (torch.randn(3, 4),), "onnxruntime")


FINITE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "isfinite": lambda self, x: x if torch.isfinite(x).all() else x.clamp(-9, 9),
    "not isfinite": lambda self, x: x.clamp(-9, 9) if not x.isfinite().all() else x,
    "isinf or isnan": lambda self, x: x.clamp(-9, 9) if torch.isinf(x).any() or torch.any(torch.isnan(x)) else x,
}


@pytest.mark.parametrize("name", FINITE)
def test_tests_of_values_give_what_they_give_for_finite_ones(name: str) -> None:
    model = nn.Sequential(Construct(lambda self, x: FINITE[name](self, self.layers(x))), linear_of()).eval()
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match="Python tests whether values are finite in 0;.*stop_on_nonfinite.*untraced"):
        prepared = qt.prepare(model, (x,), "onnxruntime")
    assert not [node for node in prepared.graph.nodes if "is" in str(node.target) or "all" in str(node.target)]
    nets.assert_float_when_off(prepared, model, x)
    with qt.disable_quantization(prepared):
        assert prepared(x / 0).isnan().all()  # it goes on, and is found by stop_on_nonfinite


def test_a_loss_that_the_forward_builds_is_traced() -> None:
    model = nn.Sequential(Construct(lambda self, x: nn.MSELoss()(nn.ReLU()(self.layers(x)), x))).train()
    x = torch.randn(3, 4)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    nets.assert_float_when_off(prepared, model, x)
    with pytest.raises(qt.UntraceableError, match="the forward builds a Linear.*build it in __init__"):
        qt.prepare(nn.Sequential(Construct(lambda self, x: nn.Linear(4, 4)(x))), (x,), backend="tensorrt")


SLICES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "slice": lambda self, x: self.layers[2:](self.layers[:2](x)) + self.layers[:2][0](x),
    "nested": lambda self, x: nn.Sequential(self.layers[:3], nn.Tanh(), self.layers[3:])(x),
    "empty": lambda self, x: self.layers(self.layers[:0](x)),
    "list": lambda self, x: nn.Sequential(*list(self.layers.children())[:-1])(x),
}


@pytest.mark.parametrize("capture", ["trace", "export"])
@pytest.mark.parametrize("name", SLICES)
def test_a_slice_of_a_sequential_is_its_layers(name: str, capture: str) -> None:
    model, x = nn.Sequential(Construct(SLICES[name]), linear_of()).eval(), torch.randn(3, 4)
    prepared = qt.prepare(model, (x,), "onnxruntime", capture=capture)
    nets.assert_float_when_off(prepared, model, x)
    assert {line.name for line in qt.quantization_report(prepared).quantized} >= {"0.layers.0", "0.layers.2", "1"}
    assert set(prepared.state_dict()) >= set(model.state_dict())


@dataclass
class Scores(dict):
    """A dict with attributes, as transformers has them for outputs."""

    logits: Any = None
    loss: Any = None
    inner: Any = None

    def __post_init__(self) -> None:
        self.update((name, value) for name, value in vars(self).items() if value is not None)


class Scorer(nn.Module):
    """Returns an object with attributes, and with another such object; in training mode it has more entries."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = linear_of(), linear_of()

    def forward(self, x: Tensor) -> Scores:
        x = self.fc(x)
        logits = self.head(x)
        return Scores(logits, logits.mean() if self.training else None, Scores(x))


def test_dicts_with_attributes_keep_their_class() -> None:
    model, x = Scorer().train(), torch.randn(3, 4)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), qt.convert(prepared)):
        for mode in (True, False) if ours.training else (False,):
            with qt.disable_quantization(ours):
                y, expected = ours.train(mode)(x), model.train(mode)(x)
            assert type(y) is type(y.inner) is Scores
            assert y["logits"] is y.logits
            assert y.inner.logits is y["inner"]["logits"]
            assert list(y) == list(expected)
            torch.testing.assert_close(y.logits, expected.logits)


class Decode(nn.Module):
    """A head of a detector: a dict in training mode, a tuple in eval mode."""

    def forward(self, x: Tensor) -> Any:
        return {"scores": x} if self.training else (x.softmax(1), {"scores": x})


def test_what_a_leaf_module_returns_is_no_container_of_the_graph() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), Decode()).train(), torch.randn(3, 4)
    prepared = qt.prepare(model, (x,), leaf_modules=[Decode], backend="tensorrt")
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x))
        torch.testing.assert_close(prepared.eval()(x), model.eval()(x))


def test_an_object_that_a_graph_cannot_hold_is_named() -> None:
    class Cache:
        pass

    def forward(self: nn.Module, x: Tensor) -> Any:
        return self.layers(x), Cache()

    with pytest.raises(qt.UntraceableError, match="the forward returns a Cache, or passes it to an op"):
        qt.prepare(Construct(forward), (torch.randn(3, 4),), backend="tensorrt")
