"""Models and arguments that the trace pass refuses, and whether the remedies in its errors help."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.wrapped import WRAPPERS
from tests import nets
from tests.nets import linear_of
from tests.processes import group_of_one

# ---- what is refused

REFUSED = {name: wrapper.remedy for name, wrapper in WRAPPERS.items() if wrapper.remedy is not None}


def wrapped_in(name: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    makers: dict[str, Callable[[], nn.Module]] = {
        "DataParallel": lambda: nn.DataParallel(nets.LinearNet()),
        "DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(nets.LinearNet()),
        "FullyShardedDataParallel": lambda: FullyShardedDataParallel(nets.LinearNet(), device_id=torch.device("cpu")),
        "FSDPModule": lambda: fully_shard(nets.LinearNet(), mesh=init_device_mesh("cpu", (1,))),
        "OptimizedModule": lambda: torch.compile(nets.LinearNet(), backend="eager"),
        "ScriptModule": lambda: torch.jit.trace(nets.LinearNet().eval(), torch.randn(2, 6)),
    }
    with group_of_one():
        return makers[name]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_wrapped_models_are_refused_with_what_to_do(name: str) -> None:
    model = wrapped_in(name)
    with pytest.raises(qt.UntraceableError, match=f"the model is wrapped in {name}; {re.escape(REFUSED[name])}"):
        qt.prepare(model, backend="tensorrt")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantize", [qt.prepare, qt.quant_modules.replace, qt.prepare_parts])
@pytest.mark.parametrize("wrapper", ["DataParallel", "OptimizedModule"])
def test_a_wrapped_submodule_is_named_with_what_to_put_in_its_place(wrapper: str, quantize: Callable) -> None:
    model, x = nn.Sequential(linear_of(), nn.Sequential(wrapped_in(wrapper))), torch.randn(2, 4)
    inputs = {} if quantize is qt.quant_modules.replace else {"example_inputs": x}
    with pytest.raises(
        qt.UntraceableError, match=rf"submodule '1\.0' is wrapped in {wrapper}; call model\.set_sub"
    ) as error:
        quantize(model, backend="tensorrt", **inputs)
    exec(re.search(r"call (.*) first", str(error.value))[1], {"model": model})
    assert isinstance(model[1][0], nets.LinearNet)


class Packs(nn.Module):
    """Packs sequences of several lengths, as models of speech do."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[..., 0] > -5).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


def test_packing_is_refused_and_a_leaf_module_packs() -> None:
    model, x = nn.Sequential(Packs(), linear_of()).eval(), torch.randn(3, 5, 4)
    x[1, 3:] = -9
    with pytest.raises(qt.UntraceableError, match="pack_padded_sequence packs traced values here") as error:
        qt.prepare(model, x, backend="onnxruntime")
    assert error.value.untraced == "0"
    nets.assert_float_when_off(qt.prepare(model, x, backend="onnxruntime", untraced=["0"]), model, x)


def test_scripted_submodules_are_leaf_modules() -> None:
    model = nn.Sequential(linear_of(), torch.jit.script(linear_of()))
    x = torch.randn(2, 4)
    prepared = qt.prepare(model, inplace=True, backend="tensorrt")
    nets.assert_float_when_off(prepared, model, x)
    assert [line.name for line in qt.quantization_report(prepared).left_float] == ["1"]


@pytest.mark.parametrize("quantize", [qt.prepare, qt.quant_modules.replace])
def test_scripted_submodules_are_trained_in_the_copy(quantize: Callable[[nn.Module], nn.Module]) -> None:
    prepared = quantize(nn.Sequential(linear_of(), torch.jit.script(linear_of())).train(), backend="tensorrt")
    qt.calibrate(prepared, [torch.randn(2, 4)], progress=False)
    copied = copy.deepcopy(prepared) if quantize is qt.prepare else prepared
    for model in (prepared, copied):
        model.train()(torch.randn(2, 4)).square().sum().backward()
        parameters = dict(model.named_parameters())
        assert all(parameter.is_leaf and parameter.grad is not None for parameter in parameters.values())
        assert {"1.weight", "1.bias"} <= set(parameters)
        before = parameters["1.weight"].detach().clone()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not torch.equal(model.state_dict()["1.weight"], before)


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4)


class NoGrad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        return y + x


class Autocast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.t()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average.to(x) * 0.9 + x.mean(0) * 0.1
        return x - self.average


def hooked(register: str) -> nn.Module:
    model = nn.Sequential(nn.Sequential(linear_of()))
    getattr(model[0], register)(lambda *args: None)
    return model


def with_own_forward() -> nn.Module:
    model = linear_of()
    model.forward = lambda x: x
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Draws, "draws random numbers, by torch, random or numpy, that every run of the graph would repeat"),
        (NoGrad, r"no_grad is entered here.*line \d+, in forward: `y = x \* 2`"),
        (Autocast, r"autocast is entered here.*`with torch\.autocast"),
        (
            Counts,
            "assigns to buffer 'count', which a graph does not record; write into the buffer with copy_ or add_",
        ),
        (
            lambda: nn.Sequential(Averages()),
            "assigns to attribute '0.average', which a graph does not record; register a buffer for it, and write into that "
            "with copy_ or add_",
        ),
        (
            lambda: hooked("register_forward_hook"),
            "submodule '0' .*forward hooks, which a graph does not record; remove them"
            ".*by prune.remove\\), or quantize the model without tracing it, by qtoolkit.quant_modules.replace",
        ),
        (lambda: hooked("register_forward_pre_hook"), "submodule '0' .*forward hooks"),
        (lambda: hooked("register_forward_hook")[0], "Sequential.forward: this module has forward hooks"),
        (with_own_forward, "forward was replaced on this instance of Linear; define forward in the class"),
        (lambda: nn.LazyLinear(3), "parameter 'weight' has no shape yet; run the model once on a batch first"),
        (nn.Module, "forward"),
    ],
)
def test_what_a_graph_would_lose_is_refused(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(qt.UntraceableError, match=words):
        qt.prepare(model(), backend="tensorrt")


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"untraced": ["bloc"]}, ValueError, "untraced: unknown submodule 'bloc'; did you mean 'block'"),
        ({"untraced": [""]}, ValueError, 'untraced must name submodules, got "", which is the model itself'),
        (
            {"untraced": "block"},
            TypeError,
            r"untraced must be a sequence of names, got the string 'block'; write untraced=\['block'\]",
        ),
        (
            {"leaf_modules": ["block"]},
            TypeError,
            "leaf_modules must contain subclasses of torch.nn.Module, got 'block'; name a submodule in untraced",
        ),
        (
            {"leaf_modules": [torch.relu]},
            TypeError,
            "leaf_modules must contain subclasses of torch.nn.Module, got a builtin_function_or_method; name",
        ),
        (
            {"leaf_modules": [nn.ReLU()]},
            TypeError,
            "leaf_modules must contain subclasses of torch.nn.Module, got a ReLU; name",
        ),
        (
            {"concrete_args": {"y": 1}},
            ValueError,
            "unknown argument of forward in prepare's concrete_args 'y'. Known: x",
        ),
        ({"preserve_attributes": [5]}, TypeError, "preserve_attributes must contain dotted names, got 5"),
        ({"preserve_attributes": ["firs"]}, ValueError, "the model has no attribute 'firs'"),
        ({"preserve_attributes": ["blok.fc"]}, ValueError, "unknown submodule 'blok'; did you mean 'block'"),
        ({"preserve_attributes": ["block.strid"]}, ValueError, "submodule 'block' has no attribute 'strid'"),
        (
            {"example_inputs": (1, 2)},
            TypeError,
            r"example_inputs do not match ControlFlow.forward\(x: .*got the shape \(1, 2\); pass a tensor",
        ),
        ({"example_inputs": {"y": 2}}, TypeError, "example_inputs do not match .*missing a required argument: 'x'"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        qt.prepare(nets.ControlFlow(), backend="tensorrt", **kwargs)


# ---- remedies


@pytest.mark.parametrize("example", [None, (torch.randn(2, 4),)], ids=["plain", "sized"])
def test_following_the_advice_ends_in_success(example: object) -> None:
    untraced: list[str] = []
    for _ in range(3):
        with pytest.raises(qt.UntraceableError) as error:
            qt.prepare(nets.TwoBad(), example, untraced=untraced, backend="tensorrt")
        assert f"make that submodule a leaf module with untraced=[{error.value.untraced!r}]" in str(error.value)
        untraced.append(error.value.untraced)
    assert untraced == ["loops.block", "loops", "stage.0"]
    prepared = qt.prepare(nets.TwoBad(), example, untraced=untraced, backend="tensorrt")
    quantized = {line.name for line in qt.quantization_report(prepared).quantized}
    assert {"first", "loops.fc", "loops.block.fc", "stage.0.fc"} <= quantized


def test_at_the_root_the_error_says_which_parts_can_be_prepared() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head, self.act = nn.Sequential(linear_of()), linear_of(), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.backbone(x)
            return self.act(self.head(y) if y.sum() > 0 else y)

    model, x = Root().eval(), torch.randn(2, 4)
    with pytest.raises(qt.UntraceableError) as error:
        qt.prepare(model, backend="tensorrt")
    assert error.value.untraced == ""
    advice = re.findall(r"model\.(\w+) = qtoolkit\.prepare\(model\.\1, backend=\.\.\.\)", str(error.value))
    assert advice == ["backbone", "head"]
    expected = model(x)
    for name in advice:
        setattr(model, name, qt.prepare(getattr(model, name), backend="tensorrt"))
    with qt.disable_quantization(model):
        assert torch.equal(model(x), expected)
    assert qt.calibrate(model, [x, -x], progress=False).unreached == ()


def test_a_function_at_fault_can_be_wrapped() -> None:
    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return bends(x)

    with pytest.raises(qt.UntraceableError, match=r"make it a single op with torch\.fx\.wrap\('bends'\)"):
        qt.prepare(Calls(), backend="tensorrt")


def bends(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x
