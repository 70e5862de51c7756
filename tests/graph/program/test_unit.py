"""A unit in one op is bit for bit what its ops are one by one, and is given up where a module is not what it was."""

import contextlib
import copy
import gc
import linecache
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit._native import library
from qtoolkit._snapshot import Snapshot
from qtoolkit.graph.program.units import BatchNormUnit, LayerUnit
from qtoolkit.graph.program.units.base import CachedFusedOp
from qtoolkit.nn.batch_norm import LinkedBatchNorm
from qtoolkit.quantizers.first_steps import Watched
from tests import processes
from tests.blocks import units_made
from tests.cases import floats
from tests.copies import made_once
from tests.nets import settled
from tests.ops import units
from tests.ops.test_every import sample
from tests.ops.test_fuzz import UNITS


class Network(nn.Module):
    """Two units in a row, one with a residual, one with a depthwise layer, and a linear unit at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.down = nn.Sequential(nn.Conv2d(8, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.down(torch.relu(self.second(self.first(x)) + x)))


def network() -> nn.Module:
    torch.manual_seed(0)
    model = Network()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.weight.uniform_(-1, 1)[0] = 0  # a channel that is not there
                module.bias.uniform_(-1, 1)
    return model.train()


@made_once
def prepared(
    weight: qt.QuantSpec | None = None, activation: qt.QuantSpec | None = None, forward: str = "float"
) -> nn.Module:
    x = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(1))
    weight, activation = weight or qt.QuantSpec(axis=0), activation or qt.QuantSpec(signed=False, symmetric=False)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    model = qt.prepare(network(), (x,), backend="academic", qconfig_mapping=mapping, training_arithmetic=forward)
    qt.calibrate(model, [x], progress=False)
    return settled(model).train()


def counting(found: dict[str, int], name: str) -> Callable[..., Any]:
    call = getattr(BatchNormUnit, name)

    def count(self: BatchNormUnit, *args: Any) -> Any:
        result = call(self, *args)
        found[name] += result is not None
        return result

    return count


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count the units that run as one op, and those whose ops run one by one."""
    found = {"by_op": 0, "_one_by_one": 0}
    with monkeypatch.context() as patch:
        for name in found:
            patch.setattr(BatchNormUnit, name, counting(found, name))
        yield found


@contextmanager
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(BatchNormUnit, "by_op", lambda self, *inputs: None)
        yield


def step(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the result of two forwards, the gradients of both, and all buffers afterwards."""
    model.zero_grad()
    device = next(model.parameters()).device
    x = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    y = torch.zeros(())
    for factor in (1.0, 0.5):  # of one step: both forwards fold with the same statistics
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = model(x * factor)
        y.float().pow(2).sum().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        **dict(model.named_buffers()),
    }


LSQ = qt.QuantSpec(quantizer="lsq", observer="histogram")
SPECS = {
    "fixed": (qt.QuantSpec(axis=0), qt.QuantSpec()),
    "affine": (qt.QuantSpec(axis=0), qt.QuantSpec(signed=False, symmetric=False)),
    "affine weights": (qt.QuantSpec(symmetric=False, axis=None), qt.QuantSpec()),
    "histogram": (qt.QuantSpec(observer="histogram", axis=None), qt.QuantSpec(observer="histogram")),
    "lsq": (qt.QuantSpec(quantizer="lsq", observer="histogram", axis=0), LSQ),
    "lsq, one scale": (LSQ.with_(axis=None), LSQ),
    "lsq, 4 bits": (qt.QuantSpec(bits=4, quantizer="lsq", axis=0), qt.QuantSpec(bits=4, quantizer="lsq")),
    "lsq_plus": (qt.QuantSpec(bits=4, quantizer="lsq", axis=0), qt.QuantSpec(quantizer="lsq_plus", symmetric=False)),
    "tqt": (qt.QuantSpec(quantizer="tqt", axis=None), qt.QuantSpec(quantizer="tqt")),
}
SPECS |= {
    f"{name}, float16": tuple(spec.with_(scale_dtype="float16") for spec in SPECS[name]) for name in ("affine", "lsq")
}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("forward", ["float", "integer"])
@pytest.mark.parametrize("name", SPECS)
def test_one_op_has_the_bits_of_its_ops(name: str, forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(*SPECS[name], forward)
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found:
        results = step(model)
    assert found == {"by_op": 10, "_one_by_one": 0}
    with one_by_one(monkeypatch):
        same(results, step(other))


def of_first(model: Any) -> Any:
    """Return the quantizer of the output of the first unit with a residual."""
    return model.activation_quantizers.first_2


CALLED: dict[str, Callable[[Any], Any]] = {
    "its range follows the data": lambda m: of_first(m).begin_steps(following=True),
    "it looks at what it clips": lambda m: setattr(of_first(m), "watched", Watched(1, clip_check_due=True)),
    "it has a hook": lambda m: of_first(m).register_forward_hook(lambda module, args, y: y.clone()),
    "it has a hook of backward": lambda m: of_first(m).register_full_backward_hook(lambda *a: None),
    "it is off": lambda m: of_first(m).disable(),
    "it observes": lambda m: setattr(of_first(m), "observing", True),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_quantizer_that_must_be_called_is_called_behind_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared()
    step(model)
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-2) for net in (model, other)]
    for net in (model, other):
        CALLED[name](net)
    for _ in range(3):
        with counted(monkeypatch) as found:
            results = step(model)
        # The layer that takes its output: it is on no grid, or a hook may have taken it off one.
        without_codes = 2 if name in ("it is off", "it has a hook", "it has a hook of backward") else 0
        assert found == {"by_op": 10 - without_codes, "_one_by_one": without_codes}
        with one_by_one(monkeypatch):
            same(results, step(other))
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("spec", [qt.QuantSpec(quantizer="dsq"), qt.QuantSpec(quantizer="pact", signed=False)])
def test_quantizers_that_no_op_computes(spec: qt.QuantSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(activation=spec)
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found:
        results = step(model)
    assert found == {"by_op": 10, "_one_by_one": 0}
    with one_by_one(monkeypatch):
        same(results, step(other))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SPECS)
def test_one_op_has_the_bits_of_its_ops_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(*SPECS[name]).cuda()
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found, torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        results = step(model)
        assert found["by_op"] > 0
        with one_by_one(monkeypatch):
            same(results, step(other))


@pytest.mark.parametrize("quantizer", ["lsq", "fixed"])
@pytest.mark.parametrize("forward", ["float", "integer"])
def test_no_image_of_four_bits_in_channels_last_is_copied(quantizer: str, forward: str) -> None:
    """Packed codes are in the order of the image, and so are the values and the gradients of backward."""
    spec = qt.QuantSpec(bits=4, quantizer=quantizer)
    model = prepared(replace(spec, axis=0), replace(spec, signed=False), forward).to(memory_format=torch.channels_last)
    x = torch.randn(4, 8, 8, 8).contiguous(memory_format=torch.channels_last)
    model(x).sum().backward()
    grad = torch.ones(4, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        model(x).backward(grad)
    copies = [event.input_shapes[0] for event in profile.events() if event.name == "aten::clone"]
    assert [4, 8, 8, 8] not in copies  # the head flattens smaller ones


def test_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(*SPECS["lsq"])
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found:
        results = step(model, torch.bfloat16)
    assert found["by_op"] > 0
    with one_by_one(monkeypatch):
        same(results, step(other, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_other_types(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(*SPECS["lsq"]).to(dtype)
    other = copy.deepcopy(model)
    x = torch.randn(4, 8, 8, 8, dtype=dtype)
    with counted(monkeypatch) as found:
        y = model(x)
    assert found["by_op"] == 5
    with one_by_one(monkeypatch):
        wanted = other(x)
    for result, net in ((y, model), (wanted, other)):
        result.sum().backward()
        assert net.first[0].weight.grad.dtype == dtype
    same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in other.named_parameters()})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook of a layer": lambda m: m.get_submodule("first.0").register_forward_hook(lambda *a: None),
    "hook of a batch norm": lambda m: m.get_submodule("first.1").register_forward_pre_hook(lambda *a: None),
    "hook of an activation": lambda m: m.get_submodule("first.2").register_forward_hook(lambda *a: None),
    "backward hook": lambda m: m.get_submodule("first.0").register_full_backward_hook(lambda *a: None),
    "another activation": lambda m: m.set_submodule("first.2", nn.Tanh()),
    "forward of its own": lambda m: setattr(m.get_submodule("first.1"), "forward", nn.Identity().forward),
    "quantizer off": lambda m: qt.disable_quantization(m.get_submodule("first.0")),
    "observing": lambda m: setattr(m.get_submodule("first.0").weight_quantizer, "observing", True),
    "cumulative average": lambda m: setattr(m.get_submodule("first.1"), "momentum", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_module_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared()
    step(model)
    other = copy.deepcopy(model)
    for net in (model, other):
        CHANGES[name](net)
    with counted(monkeypatch) as found:
        results = step(model)
    assert found["_one_by_one"] > 0
    with one_by_one(monkeypatch):
        same(results, step(other))


def test_what_is_no_plain_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = prepared()
    step(model)
    for net in (model, other := copy.deepcopy(model)):
        register_parametrization(net.get_submodule("first.0"), "weight", Scaled())
    with counted(monkeypatch) as found:
        results = step(model)
    assert found["_one_by_one"] == 2
    with one_by_one(monkeypatch):
        same(results, step(other))


def test_new_parameters_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared()
    step(model)
    other = copy.deepcopy(model)
    for net in (model, other):
        torch.manual_seed(3)
        net.get_submodule("first.0").weight = nn.Parameter(torch.randn(8, 1, 3, 3))
        net.get_submodule("second.1").bias = nn.Parameter(torch.randn(8))
        net.load_state_dict({**net.state_dict(), "second.1.eps": None}, strict=False)
    with one_by_one(monkeypatch):
        wanted = step(other)
    same(step(model), wanted)


def test_a_copy_has_units_of_its_own() -> None:
    model = prepared()
    step(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    before = step(model)["y"]
    step(other)
    torch.testing.assert_close(step(model)["y"].isnan(), before.isnan())
    assert not step(other)["y"].any()


def test_parts_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qt.prepare(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train(), backend="tensorrt")
    x = torch.randn(2, 8, 70, 6)
    qt.calibrate(model, [x], progress=False)
    for size in range(3, 70):  # more sizes than plans are kept for
        assert model.train()(x[:, :, :size]).shape == (2, 8, size - 2, 4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(x[:1, :, :3, :3])


def test_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared()
    with torch.no_grad(), counted(monkeypatch) as found:
        model(torch.randn(2, 8, 8, 8))
    assert found["by_op"] == 0
    model.requires_grad_(False)
    assert not model(torch.randn(2, 8, 8, 8)).requires_grad
    x = torch.randn(2, 8, 8, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.isfinite().all()


def test_second_derivatives_are_refused() -> None:
    model = prepared()
    x = torch.randn(2, 8, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


@contextmanager
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each unit call its ops."""
    with monkeypatch.context() as patch:
        patch.setattr(CachedFusedOp, "by_op", lambda self, *inputs: None)
        yield


class Ops(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[op.name()] += 1
        return op(*args, **(kwargs or {}))


def ops_of(units: int, change: Callable[[nn.Module], object] = lambda model: None) -> tuple[Counter[str], Counter[str]]:
    """Return the ops of a forward and of a backward of so many units."""
    layers = [
        m for _ in range(units) for m in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return ops_of_step(nn.Sequential(*layers), torch.randn(2, 8, 4, 4), change, backend="academic")


def ops_of_step(
    layers: nn.Module, x: Tensor, change: Callable[[nn.Module], object] = lambda model: None, **options: Any
) -> tuple[Counter[str], Counter[str]]:
    """Return the ops of a forward and of a backward of a changed model with learned scales, after two steps."""
    mapping = qt.QConfigMapping().set_global(qt.QConfig(LSQ, SPECS["lsq"][0]))
    model = qt.prepare(layers.train(), (x,), qconfig_mapping=mapping, **{"backend": "tensorrt", **options})
    qt.calibrate(model, [x], progress=False)
    change(model)
    for _ in range(2):
        model(x).sum().backward()
    with Ops() as forward:
        y = model(x).sum()
    with Ops() as backward:
        y.backward()
    return forward.found, backward.found


def test_changes_of_buffers_are_counted() -> None:
    model = prepared(*SPECS["fixed"])
    step(model)
    buffers = dict(model.get_submodule("first").named_buffers())
    before = {name: buffer._version for name, buffer in buffers.items()}
    model(torch.randn(2, 8, 8, 8))
    changed = {name.rsplit(".", 1)[-1] for name, buffer in buffers.items() if buffer._version > before[name]}
    assert changed == {"running_mean", "running_var", "num_batches_tracked", "_variance_of_step", "_scale", "lo", "hi"}


def fields_of_units(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what the units with a batch norm of a model are told in a step."""
    with monkeypatch.context() as patch:
        made = units_made(patch)
        model(torch.randn(2, 8, 8, 8))
    return [fields for kind, fields, _ in made if kind is BatchNormUnit.KIND]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["fixed", "lsq", "affine weights"])
@pytest.mark.parametrize("norms", ["live", "frozen"])
def test_opcheck(norms: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = (frozen if norms == "frozen" else prepared)(*SPECS[name])
    for fields in fields_of_units(model, monkeypatch)[:3]:  # one with a residual among them
        checks = ("test_autograd_registration",)  # the others look at tensors alone, or pass no plain ones
        held = {name: held_apart(value) for name, value in fields.items()}
        torch.library.opcheck(library.unit.default, (units.made("unit", held), held["x"]), test_utils=checks)


def held_apart(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("variance", torch.ones(9), "variance must have one dimension of 8 elements"),
        ("gamma", torch.ones(7), "gamma must have the shape of variance"),
        ("ratio", torch.ones(3), "as many elements as the scale of the weight, 8, got 3"),
        ("y_rate", torch.ones(2), "as many elements as the scale of y, 1, got 2"),
        ("y_ratio", None, None),
        ("codes", torch.zeros(1, dtype=torch.int8), "codes"),
        ("residual", torch.zeros(1), "residual"),
        ("running_var", torch.ones(5), "running_var"),
        ("running_var", None, "running_mean and running_var belong together"),
        ("channels_last", -1, "BatchNormUnit: channels_last must be a bool, got Int"),
        ("dtype", -1, "BatchNormUnit: dtype must be a torch.dtype, got Int"),
        ("low", None, "BatchNormUnit: low must be a float, got None"),
        ("stride", [1.0], "BatchNormUnit: stride must be a sequence of ints, got GenericList"),
        ("weight", None, "BatchNormUnit: weight must be a tensor, got None"),
        ("lo", torch.ones(8), "lo requires hi, and a symmetric grid without a ratio"),
    ],
)
def test_bad_arguments(argument: str, value: Any, error: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {name: detached(a) for name, a in fields_of_units(prepared(*SPECS["lsq"]), monkeypatch)[0].items()}
    args[argument] = value
    if error is None:
        units.call("unit", **args)
    else:
        with pytest.raises((ValueError, TypeError), match=error):
            units.call("unit", **args)


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def bound(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the first unit of a model, the tensors with which it is called, and all that it was told."""
    with monkeypatch.context() as patch:
        made = units_made(patch)
        model(torch.randn(2, 8, 8, 8))
    kind, fields, varying = next(each for each in made if each[0] is BatchNormUnit.KIND)
    return kind(fields, varying), {name: fields[name] for name in varying}, fields


@pytest.mark.parametrize(
    "change", ["size", "strides", "dtype", "requires_grad", "frozen weight", "no gradients", "autocast", "residual"]
)
def test_a_call_refuses_what_it_was_not_made_for(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unit, given, fields = bound(prepared(*SPECS["lsq"]), monkeypatch)
    assert unit.call([*given.values()])[0].shape == fields["x"].shape
    x = fields["x"].detach()
    changed = {
        "size": {"x": torch.cat([x, x])},
        "strides": {"x": x.contiguous(memory_format=torch.channels_last)},
        "dtype": {"x": x.double()},
        "requires_grad": {"x": x.requires_grad_(not fields["x"].requires_grad)},
        "residual": {"residual": x},
    }
    if change == "frozen weight":
        fields["weight"].requires_grad_(False)
    modes = {"no gradients": torch.no_grad(), "autocast": torch.autocast("cpu", torch.bfloat16)}
    with modes.get(change, contextlib.nullcontext()):
        assert unit.call([*{**given, **changed.get(change, {})}.values()]) == []


def test_a_call_names_what_it_cannot_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    unit, given, fields = bound(prepared(*SPECS["lsq"]), monkeypatch)
    with pytest.raises(ValueError, match=f"varying must have {len(given)} tensors, got 1"):
        unit.call([None])
    with pytest.raises(ValueError, match="varying must be names of tensors of a BatchNormUnit, got 'y'"):
        BatchNormUnit.KIND(fields, ["y"])


def test_a_unit_names_fields_that_are_missing_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = fields_of_units(prepared(*SPECS["lsq"]), monkeypatch)[0]
    with pytest.raises(ValueError, match="BatchNormUnit: there is no field slop"):
        units.made("unit", fields | {"slop": 0.1})
    for name in ("slope", "residual_scale", "axis"):
        with pytest.raises(ValueError, match=f"BatchNormUnit: the field {name} is missing"):
            units.made("unit", {other: value for other, value in fields.items() if other != name})


WRONG = (
    *(None, -1, 0, 2**40, 0.5, -0.0, float("nan"), True, [], [0, 0], [1, 2, 3, 4]),
    *(torch.zeros(0), torch.ones(()), torch.ones(3), torch.ones(8, 8, 8, 8), torch.ones(8, dtype=torch.float16)),
    *(
        torch.zeros(2, 8, 8, 8, dtype=torch.int8),
        torch.ones(8, device="meta"),
        torch.ones(16)[::2],
    ),
)


def call_with_wrong_arguments(seed: int, count: int) -> None:
    """Call the ops of units with one to three arguments of something else: each call returns or raises an error."""
    drawn = random.Random(seed)
    x = floats(torch.float32)(4, 6, 32)
    for number in range(count):
        op = UNITS[number % len(UNITS)]
        given = {name: copy.deepcopy(value) for name, value in sample(op, x).items()}
        for name in drawn.sample(list(given), drawn.randint(1, 3)):
            given[name] = drawn.choice(WRONG)
        with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            units.OPS.get(op, getattr(torch.ops.qtoolkit, op))(**given)


@pytest.mark.slow
def test_wrong_arguments_never_crash() -> None:
    """In a process of its own, so that a crash is a failure and not the end of the suite."""
    program = "from tests.graph.program.test_unit import call_with_wrong_arguments; call_with_wrong_arguments(0, 3000)"
    ran = processes.python("-c", f"import faulthandler; faulthandler.enable(); {program}")
    assert ran.returncode == 0, f"exit status {ran.returncode}\n{ran.stderr[-3000:]}"


def test_a_unit_is_one_op_in_each_direction() -> None:
    few, many = ops_of(2), ops_of(3)
    assert many[0] - few[0] == {"qtoolkit::unit": 1, "qtoolkit::batch_norm_rescale_": 1, "aten::detach": 3}
    # The five gradients are those of the weight, of its scales, of the batch norm's two parameters and of the output's scale.
    assert many[1] - few[1] == {"qtoolkit::unit_backward": 1, "aten::add_.Tensor": 5}


class Reader(nn.Module):
    """Reads an image by a layer with a batch norm, or by one without."""

    def __init__(self, normalized: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(8) if normalized else nn.Identity()
        self.first, self.norm, self.act = nn.Conv2d(3, 8, 3, 2, bias=not normalized), norm, nn.ReLU()
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.norm(self.first(x))))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("forward", ["float", "integer"])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_reads_an_image_is_in_its_unit(
    dtype: torch.dtype, normalized: bool, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale of the image is trained by the image, without the gradient of the image."""
    torch.manual_seed(0)
    x = torch.rand(2, 3, 9, 9)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(LSQ, SPECS["lsq"][0]))
    model = qt.prepare(
        Reader(normalized).train(), (x,), qconfig_mapping=mapping, training_arithmetic=forward, backend="tensorrt"
    )
    qt.calibrate(model, [x], progress=False)
    model = settled(model).train().to(dtype)
    other = copy.deepcopy(model)
    made = units_made(monkeypatch)
    for net in (model, other):
        with contextlib.nullcontext() if net is model else apart(monkeypatch):
            net(x.to(dtype)).float().pow(2).sum().backward()
    raw = [
        fields["raw"] is not None
        for kind, fields, _ in made
        if kind is (BatchNormUnit if normalized else LayerUnit).KIND
    ]
    assert raw == [True] if normalized else [True, False]
    gradients, wanted = ({n: p.grad for n, p in net.named_parameters()} for net in (model, other))
    assert "activation_quantizers.x._relative_scale" in gradients
    same(gradients, wanted)


def test_the_page_shows_the_code_of_units() -> None:
    page = (Path(__file__).parents[3] / "docs" / "design" / "step.md").read_text()
    network, code = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(network, scope)
    x = torch.randn(2, 3, 8, 8)
    model = qt.prepare(scope["Net"]().train(), (x,), backend="tensorrt")
    qt.calibrate(model, [x], progress=False)
    model(x)
    last = [name for name in linecache.cache if name.startswith("<forward of the model>")][-1]
    lines = [line.split(";  ")[0].rstrip() for line in linecache.getlines(last)]
    assert [line for line in lines if line.strip()] == code.splitlines()


def test_a_snapshot_takes_objects() -> None:
    with pytest.raises(TypeError, match="must be tuple"):
        Snapshot(3, frozenset())  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        Snapshot((3,), frozenset())
    module = nn.Linear(1, 1)
    module.own = module  # type: ignore[assignment]  # a cycle
    snapshot, alive = Snapshot((module, {"a": 1}), frozenset({"b"})), ref(module)
    assert snapshot.holds()
    module.b = 2  # type: ignore[assignment]
    assert not snapshot.holds()
    module.snapshot = snapshot  # type: ignore[assignment]
    del module, snapshot
    gc.collect()
    assert alive() is None


def test_a_snapshot_sees_another_type() -> None:
    module = nn.Linear(1, 1)
    snapshot = Snapshot((module,), frozenset())
    module.__class__ = type("Other", (nn.Linear,), {})
    assert not snapshot.holds()


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


SHORTCUTS: dict[str, tuple[nn.Module, bool]] = {
    "identity": (nn.Identity(), True),
    "average pool": (nn.AvgPool2d(3, 1, 1), True),
    "changes the layer's input": (nn.ReLU(inplace=True), False),
    "unknown": (Unknown(), False),
}


@pytest.mark.parametrize("kind", SHORTCUTS)
def test_a_layer_runs_with_its_batch_norm_behind_a_shortcut(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs between a layer and the add may wait for it, unless it changes tensors or nobody knows what it does."""
    shortcut, fused = SHORTCUTS[kind]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
            self.shortcut = shortcut

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.body(x) + self.shortcut(x))

    torch.manual_seed(0)
    x = torch.randn(4, 8, 8, 8)
    model = qt.prepare(Block(), (x,), backend="academic", leaf_modules=[Unknown])
    qt.calibrate(model, [x], progress=False)
    other = copy.deepcopy(settled(model))
    with counted(monkeypatch) as found:
        y = model.train()(x)
    assert found == {"by_op": int(fused), "_one_by_one": 0}
    with one_by_one(monkeypatch):
        assert torch.equal(other.train()(x), y)


# ---- frozen batch norms


def frozen(weight: qt.QuantSpec | None = None, activation: qt.QuantSpec | None = None, forward: str = "float") -> Any:
    """Return a prepared model whose batch norms have constant statistics."""
    model = prepared(weight, activation, forward)
    for seed, module in enumerate(module for module in model.modules() if isinstance(module, LinkedBatchNorm)):
        generator = torch.Generator().manual_seed(seed)
        module.running_mean.uniform_(-0.5, 0.5, generator=generator)
        module.running_var.uniform_(0.5, 2, generator=generator)
    qt.freeze_batch_norm(model)
    return model


def same_but_for_sums(
    model: nn.Module, found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 2e-5
) -> None:
    """Compare the bits of all but the gradients that are sums, which the op adds up in another order."""
    summed = {name for name, parameter in model.named_parameters() if parameter.dim() <= 1} & wanted.keys()
    assert summed <= found.keys()
    same(*({k: v for k, v in results.items() if k not in summed} for results in (found, wanted)))
    for name in summed:
        atol = rtol * float(wanted[name].abs().max())
        torch.testing.assert_close(found[name], wanted[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("forward", ["float", "integer"])
@pytest.mark.parametrize("name", SPECS)
def test_a_frozen_batch_norm_is_in_its_unit(name: str, forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where a sum that nearly cancels is still known to nine digits."""
    model = frozen(*SPECS[name], forward).double()
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found:
        results = step(model)
    assert found == {"by_op": 10, "_one_by_one": 0}
    with one_by_one(monkeypatch):
        same_but_for_sums(model, results, step(other), rtol=1e-9)


class FrozenBatchNorm2d(nn.Module):
    """As torchvision and detectron2 have it: its parameters are buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        for name, low in (("weight", -1), ("bias", -1), ("running_mean", -1), ("running_var", 0.5)):
            self.register_buffer(name, torch.empty(channels).uniform_(low, 1))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.weight * torch.rsqrt(self.running_var + self.eps)
        return x * factor.reshape(-1, 1, 1) + (self.bias - self.running_mean * factor).reshape(-1, 1, 1)


class Residual(nn.Module):
    """Units with an activation, with a residual alone, and with nothing."""

    def __init__(self, norm: Callable[[int], nn.Module], bias: bool = True, affine: bool = True) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=bias), norm(8), nn.Hardtanh(-0.5, 0.7))
        self.shortcut = nn.Sequential(nn.ConvTranspose2d(8, 8, 1, bias=bias), norm(8))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=bias), norm(8))
        self.last = nn.Sequential(nn.Conv2d(8, 2, 1, bias=bias), norm(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.second(x) + self.shortcut(x))


def residual(norm: Callable[[int], nn.Module] = nn.BatchNorm2d, bias: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 6)
    model = qt.prepare(Residual(norm, bias).train(), (x,), **{"backend": "tensorrt", **options})
    qt.calibrate(model, [x], progress=False)
    return settled(model).train()


def step_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().pow(2).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients, **{f"buffer {name}": b for name, b in model.named_buffers()}}


KINDS: dict[str, Callable[[], Any]] = {
    "frozen": residual,
    "without biases": lambda: residual(bias=False),
    "without parameters": lambda: residual(lambda n: nn.BatchNorm2d(n, affine=False)),
    "synchronized": lambda: residual(nn.SyncBatchNorm),
    "of another package": lambda: residual(FrozenBatchNorm2d),
    "strategy": lambda: residual(backend=replace(qt.backends["academic"], batch_norm="frozen")),
    "another strategy": lambda: residual(backend=replace(qt.backends["academic"], batch_norm="std_correction")),
    "biases on the grid of sums": lambda: residual(backend="onnxruntime"),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_constant_statistics(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = KINDS[name]().to(dtype)
    if name != "strategy":
        qt.freeze_batch_norm(model)
    other, x = copy.deepcopy(model), torch.randn(3, 4, 6, 6, dtype=dtype)
    with counted(monkeypatch) as found:
        results = step_of(model, x)
    assert found == {"by_op": 4, "_one_by_one": 0}
    with one_by_one(monkeypatch):
        same_but_for_sums(model, results, step_of(other, x), 1e-12 if dtype is torch.float64 else 2e-5)


@pytest.mark.parametrize("samples", [0, 1])
def test_few_values_of_a_frozen_batch_norm(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its statistics need none, where those of a batch need two values of each channel."""
    model = frozen(*SPECS["lsq"])
    other, x = copy.deepcopy(model), torch.randn(samples, 8, 8, 8)
    with counted(monkeypatch) as found:
        results = step_of(model, x)
    assert found == {"by_op": 5, "_one_by_one": 0}
    with one_by_one(monkeypatch):
        same_but_for_sums(model, results, step_of(other, x))


def test_a_mode_is_decided_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(*SPECS["fixed"])
    other = copy.deepcopy(model)
    for change in (qt.freeze_batch_norm, qt.unfreeze_batch_norm, lambda m: m.first.eval(), nn.Module.train):
        for net in (model, other):
            change(net)
        with counted(monkeypatch) as found:
            results = step(model)
        assert found == {"by_op": 10, "_one_by_one": 0}
        with one_by_one(monkeypatch):
            same_but_for_sums(model, results, step(other))


def test_what_freezes_nothing_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that do not train, of a frozen batch norm, get no gradients, and the others the same ones."""
    model = frozen(*SPECS["lsq"])
    other = copy.deepcopy(model)
    for net in (model, other):
        net.first.requires_grad_(False)
        net.second[1].requires_grad_(False)
        net.down[0].weight.requires_grad_(False)
    with counted(monkeypatch) as found:
        results = step(model)
    assert found == {"by_op": 10, "_one_by_one": 0}
    with one_by_one(monkeypatch):
        same_but_for_sums(model, results, step(other))


def test_constants_may_be_sent_in_place_before_backward() -> None:
    """DistributedDataParallel writes the buffers of rank 0 into those of the others at each forward."""
    model, other = frozen(*SPECS["fixed"]), frozen(*SPECS["fixed"])
    x = torch.randn(2, 8, 8, 8)
    for net in (model, other):
        y = net(x)
        if net is model:
            for buffer in (b for n, b in net.named_buffers() if n.endswith(("running_mean", "running_var"))):
                buffer.add_(1)
        y.sum().backward()
    same(*({n: p.grad for n, p in net.named_parameters()} for net in (model, other)))


def test_frozen_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum with a residual is not rounded before its quantizer, where the ops one by one do that."""
    model = frozen(*SPECS["fixed"])
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found:
        results = step(model, torch.bfloat16)
    assert found == {"by_op": 10, "_one_by_one": 0}
    with one_by_one(monkeypatch):
        wanted = step(other, torch.bfloat16)
    torch.testing.assert_close(results["y"], wanted["y"], rtol=0.05, atol=0.05 * float(wanted["y"].abs().max()))
    for name, tensor in wanted.items():
        assert float((results[name] - tensor).float().norm()) <= 0.2 * float(tensor.float().norm()), name


@pytest.mark.parametrize("way", ["checkpoint", pytest.param("compile", marks=pytest.mark.slow), "two backwards"])
def test_frozen_units_are_recomputed_compiled_and_used_twice(way: str) -> None:
    model = frozen(*SPECS["fixed"])
    other, x = copy.deepcopy(model), torch.randn(2, 8, 8, 8)
    y = other(x)
    y.pow(2).sum().backward()
    if way == "checkpoint":
        checkpoint(model, x, use_reentrant=False).pow(2).sum().backward()
    elif way == "compile":
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(x).pow(2).sum().backward()
    else:
        y = model(x)
        torch.autograd.grad(y.pow(2).sum(), list(model.parameters()), retain_graph=True, allow_unused=True)
        y.pow(2).sum().backward()
    gradients, wanted = ({n: p.grad for n, p in net.named_parameters()} for net in (model, other))
    same_but_for_sums(model, gradients, wanted)


def test_a_frozen_unit_is_one_op_in_each_direction() -> None:
    few, many = (ops_of(units, qt.freeze_batch_norm) for units in (2, 3))
    assert many[0] - few[0] == {"qtoolkit::unit": 1, "qtoolkit::batch_norm_rescale_": 1, "aten::detach": 3}
    assert many[1] - few[1] == {"qtoolkit::unit_backward": 1, "aten::add_.Tensor": 5}


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("frozen_mean", torch.zeros(7), "frozen_mean must have one dimension with 1 element per output channel, 8"),
        ("beta", torch.zeros(1), "beta must have one dimension with 1 element per output channel, 8"),
        ("bias", torch.zeros(3), "bias must have one dimension with 1 element per output channel, 8"),
        ("frozen_mean", torch.zeros(8, dtype=torch.int64), "frozen_mean must be"),
    ],
)
def test_bad_constants(argument: str, value: Tensor, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {name: detached(a) for name, a in fields_of_units(frozen(*SPECS["lsq"]), monkeypatch)[0].items()}
    with pytest.raises((ValueError, TypeError), match=error):
        units.call("unit", **{**args, argument: value})


@pytest.mark.parametrize(("quantizer", "floats_kept"), [("fixed", 0), ("lsq", 1)])
def test_a_frozen_unit_with_a_quantizer_alone_keeps_a_bit_an_element(quantizer: str, floats_kept: int) -> None:
    """A learned scale needs the values before."""
    x = torch.randn(2, 8, 16, 16)
    spec = qt.QuantSpec(quantizer=quantizer)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, replace(spec, axis=0)))
    net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    model = qt.prepare(net.train(), (x,), backend="academic", qconfig_mapping=mapping)
    qt.calibrate(model, [x], progress=False)
    qt.freeze_batch_norm(settled(model).train())
    model(x).sum().backward()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        model(x)
    floats = {t.data_ptr() for t in kept if t.dtype == torch.float32 and t.numel() == x.numel()} - {x.data_ptr()}
    assert len(floats) == floats_kept
