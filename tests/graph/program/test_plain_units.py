"""Units without a batch norm have the bits of their ops, keep less for backward, and are given up where a module changes."""

import copy
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit._native import library
from qtoolkit.graph.program.units import FunctionUnit, LayerUnit
from qtoolkit.graph.program.units.base import CachedFusedOp
from tests.blocks import units_made
from tests.copies import made_once
from tests.graph.program.test_unit import LSQ, SPECS, Ops, held_apart, ops_of_step, same
from tests.nets import settled
from tests.ops import units


class Block(nn.Module):
    """A convolution with an activation, a transposed convolution, and a small transformer's linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2)
        self.silu = nn.SiLU()
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.0)
        self.first, self.gelu, self.second = nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6, bias=False)
        self.after = nn.RMSNorm((6,), eps=1e-6, elementwise_affine=False)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.silu(self.up(self.act(self.conv(x)))).flatten(2).transpose(1, 2)
        y = self.second(self.drop(self.gelu(self.first(self.norm(x)))))
        y = F.gelu(self.after(x + y))
        return self.last(torch.relu(y))


@made_once
def prepared(name: str = "lsq", forward: str = "float", backend: str = "onnxruntime") -> nn.Module:
    torch.manual_seed(0)
    model, x = Block().train(), torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(1))
    weight, activation = SPECS[name]
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    model = qt.prepare(model, (x,), backend=backend, qconfig_mapping=mapping, training_arithmetic=forward)
    qt.calibrate(model, [x], progress=False)
    return settled(model).train()


def step(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the result, the gradients and all buffers of a step of two forwards."""
    model.zero_grad()
    x = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(2)).to(next(model.parameters()).dtype)
    x.requires_grad_()
    for factor in (1.0, 0.5):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = model(x * factor)
        y.float().pow(2).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients, **dict(model.named_buffers())}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the calls of the ops of units."""
    found = Counter[str]()
    with monkeypatch.context() as patch:
        for kind in (LayerUnit, FunctionUnit):
            results_of = kind.results_of

            def count(self: Any, *args: Any, of: Callable[..., Any] = results_of, name: str = kind.__name__) -> Any:
                results = of(self, *args)
                found[name] += results is not None
                return results

            patch.setattr(kind, "results_of", count)
        yield found


@contextmanager
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(CachedFusedOp, "plan_of", lambda self, run, *inputs: None)
        yield


@pytest.mark.sweep(2)
@pytest.mark.parametrize("forward", ["float", "integer"])
@pytest.mark.parametrize("backend", ["onnxruntime", "academic"])
@pytest.mark.parametrize("name", SPECS)
def test_units_have_the_bits_of_their_ops(
    name: str, backend: str, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepared(name, forward, backend)
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found:
        results = step(model)
    assert found["LayerUnit"] == 2 * 5
    assert found["FunctionUnit"] >= 2 * 5
    with one_by_one(monkeypatch):
        same(results, step(other))


@pytest.mark.parametrize("name", ["fixed", "lsq"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_other_types(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(name).to(dtype)
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found:
        results = step(model)
    assert found["LayerUnit"] == 10
    with one_by_one(monkeypatch):
        same(results, step(other))


@pytest.mark.parametrize("name", ["fixed", "lsq"])
def test_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(name)
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found:
        results = step(model, torch.bfloat16)
    assert found["LayerUnit"] == 10
    with one_by_one(monkeypatch):
        same(results, step(other, torch.bfloat16))


class Residuals(nn.Module):
    """Branches behind norms of float32, which autocast leaves between the layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.second = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        self.last = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return self.last(x + self.second(x))


@pytest.mark.parametrize("name", ["fixed", "lsq"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_float32_under_autocast(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, activation = SPECS[name]
    mapping, x = qt.QConfigMapping().set_global(qt.QConfig(activation, weight)), torch.randn(2, 8, 4, 4)
    model = qt.prepare(Residuals().train(), (x,), backend="tensorrt", qconfig_mapping=mapping)
    qt.calibrate(model, [x], progress=False)
    other = copy.deepcopy(settled(model).train())
    with counted(monkeypatch) as found:
        results = step(model, dtype)
    assert found["FunctionUnit"] == 2 * 4
    with one_by_one(monkeypatch):
        same(results, step(other, dtype))
    given = list[torch.dtype]()
    for name in ("first.1", "second.1", "last.1"):
        model.get_submodule(name).register_forward_pre_hook(lambda _, args: given.append(args[0].dtype))
    step(model, dtype)
    assert given == [dtype] * 6  # the op wrote what autocast would round to


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook of a layer": lambda m: m.get_submodule("first").register_forward_hook(lambda *a: None),
    "hook of an activation": lambda m: m.get_submodule("gelu").register_forward_hook(lambda *a: None),
    "hook of a quantizer": lambda m: m.get_submodule("activation_quantizers.norm").register_forward_hook(
        lambda *a: None
    ),
    "another approximation": lambda m: setattr(m.get_submodule("gelu"), "approximate", "tanh"),
    "another activation": lambda m: m.set_submodule("gelu", nn.Tanh()),
    "a dropout that drops": lambda m: setattr(m.get_submodule("drop"), "p", 0.5),
    "a layer in eval mode": lambda m: m.get_submodule("first").eval(),
    "quantizers off": lambda m: qt.disable_quantization(m).apply(),
    "observing": lambda m: setattr(m.get_submodule("first").weight_quantizer, "observing", True),
    "frozen scales": lambda m: m.get_submodule("activation_quantizers").requires_grad_(requires_grad=False),
    "another layer norm": lambda m: setattr(m.get_submodule("norm"), "weight", nn.Parameter(torch.full((6,), 2.0))),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["fixed", "lsq"])
def test_a_changed_module_is_asked(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(name)
    step(model)
    other = copy.deepcopy(model)
    for net in (model, other):
        CHANGES[change](net)
    torch.manual_seed(3)
    results = step(model)
    torch.manual_seed(3)
    with one_by_one(monkeypatch):
        same(results, step(other))


def test_a_unit_is_one_op_in_each_direction() -> None:
    def ops_of(blocks: int) -> tuple[Counter[str], Counter[str]]:
        kinds = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)
        layers = [copy.deepcopy(module) for _ in range(blocks) for module in kinds]
        return ops_of_step(nn.Sequential(*layers), torch.randn(4, 8))

    few, many = ops_of(2), ops_of(3)
    assert many[0] - few[0] == {"qtoolkit::layer_fake_quant": 2, "qtoolkit::function_fake_quant": 2}
    ours = {name: count for name, count in (many[1] - few[1]).items() if name.startswith("qtoolkit")}
    assert ours == {"qtoolkit::layer_fake_quant_backward": 2, "qtoolkit::function_fake_quant_backward": 2}


class Rearranged(nn.Module):
    """A layer whose input is a quantized tensor in another shape or order."""

    def __init__(self, rearranged: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.rearranged = nn.Linear(8, 8), nn.Linear(8, 4), rearranged

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rearranged(torch.relu(self.first(x))))


REARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "heads": lambda y: y.reshape(y.shape[0], 6, 2, 4).transpose(1, 2).reshape(y.shape[0], 6, 8),
    "permute": lambda y: y.permute(1, 0, 2).contiguous(),
    "view": lambda y: y.view(y.size(0) * 6, 8),
    "flip, roll": lambda y: torch.roll(torch.flip(y, (1,)), 2, -1),
    "flatten": lambda y: torch.flatten(y, 0, 1).unsqueeze(1).squeeze(1),
    "as another": lambda y: y.reshape(6, -1, 8).reshape_as(y),
    "repeat": lambda y: y.repeat(1, 2, 1).expand(-1, -1, -1),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("forward", ["float", "integer"])
@pytest.mark.parametrize("name", ["lsq", "affine", "lsq, 4 bits"])
@pytest.mark.parametrize("how", REARRANGED)
def test_integers_are_rearranged_with_their_tensor(
    how: str, name: str, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients are those of integers that are computed anew, which only packed ones are."""
    torch.manual_seed(0)
    (weight, activation), x = SPECS[name], torch.randn(2, 6, 8)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    options: Any = {"backend": "onnxruntime", "qconfig_mapping": mapping, "training_arithmetic": forward}
    model = qt.prepare(Rearranged(REARRANGED[how]).train(), (x,), **options)
    qt.calibrate(model, [x], progress=False)
    model = settled(model).train()
    other = copy.deepcopy(model)
    results = []
    for net, changed in ((model, False), (other, True)):
        with monkeypatch.context() as patch:
            if changed:
                patch.setattr("qtoolkit.graph.program.epilogue.TensorCodes.hold_for", lambda self, y: False)
            net(x.requires_grad_()).square().sum().backward()  # makes the plans
            net.zero_grad()
            with Ops() as ops:
                y = net(x)
            y.square().sum().backward()
        anew = sum(ops.found[f"qtoolkit::{op}"] for op in ("quantize", "quantize_int4"))
        assert bool(anew) == (changed or "4 bits" in name)
        results.append({"y": y, **{n: p.grad for n, p in net.named_parameters() if p.grad is not None}})
    same(*results)


def test_a_function_whose_sizes_are_read_is_one_op_with_its_quantizer() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            count, length, width = y.shape
            return self.last(y.reshape(count * length, width))

    forward, _ = ops_of_step(nn.Sequential(nn.Linear(8, 8), Sizes()), torch.randn(2, 6, 8, requires_grad=True))
    assert forward["qtoolkit::function_fake_quant"] == 2  # of the input, and of the norm
    assert forward["aten::native_layer_norm"] == forward["qtoolkit::quantize"] == 0


@pytest.mark.parametrize("of", [nn.GELU(), nn.LayerNorm(64), nn.RMSNorm(64), nn.SiLU()])
def test_the_function_is_kept_once(of: nn.Module) -> None:
    """Op by op, the function keeps its input and a learned quantizer its output."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    mapping = qt.QConfigMapping().set_global(qt.QConfig(LSQ, SPECS["lsq"][0]))
    x = torch.randn(256, 64)
    model = qt.prepare(
        nn.Sequential(nn.Linear(64, 64), of, nn.Linear(64, 64)).train(),
        (x,),
        qconfig_mapping=mapping,
        backend="tensorrt",
    )
    qt.calibrate(model, [x], progress=False)
    model(x).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    floats = sum(size for size in kept.values() if size == 4 * x.numel())
    assert floats <= 2 * 4 * x.numel()  # the input of the function, and that of the quantizer behind the last layer


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("name", ["fixed", "lsq"])
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = units_made(monkeypatch)
    prepared(name)(torch.randn(2, 8, 4, 4, requires_grad=True))
    assert len(made) >= 10
    for kind, fields, _ in made:
        held = {name: held_apart(value) for name, value in fields.items()}
        if kind is LayerUnit.KIND:  # the other checks look at tensors alone, or pass no plain ones
            args = units.made("layer_fake_quant", held), held["x"]
            torch.library.opcheck(library.layer_fake_quant.default, args, test_utils=CHECKS[1])
        else:
            op = library.function_fake_quant.default
            if held["residual"] is None:
                held.pop("residual")
                held["keeps_x"] = held["learned"] or held["function"] != "none"
            else:
                op = library.add_norm_fake_quant.default
                held["y_range"] = [held.pop("y_qmin"), held.pop("y_qmax")]
            torch.library.opcheck(op, (), held, test_utils=CHECKS)


class Stream(nn.Module):
    """Residual streams: how a norm takes the sum of two tensors, and what else takes it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8) if kind == "RMS norm" else nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).float()  # autocast leaves the stream in float32
        y = self.branch(x)
        match self.kind:
            case "norm first" | "RMS norm":
                x = y + x
                return x + self.last(self.norm(x))
            case "norm alone":  # takes the sum
                return self.last(self.norm(torch.add(x, y)))
            case "sum returned":
                x = x + y
                return x, self.last(self.norm(x))
            case "norm unused":
                x = x + y
                return x + 0 * self.last(self.norm(x)).detach()
            case "sizes read":  # before the norm, as torch's TransformerEncoderLayer does
                x = x + y
                if x.dim() != 2 or x.shape[0] > 8:
                    raise ValueError
                return (x + self.last(self.norm(x))).reshape(x.shape[1], -1)
            case "read before":
                x = x + y
                z = self.norm(x * 2)
                return self.last(self.norm(x)) + z
            case "in place":
                x += y
                return x + self.last(self.norm(x))
            case "broadcast":
                x = x + y[:1]
                return x + self.last(self.norm(x))
            case "scaled":
                x = torch.add(x, y, alpha=2)
                return x + self.last(self.norm(x))
            case "number":
                x = x + 0.5
                return x + self.last(self.norm(x)) + y
            case "two types":
                x = x + y.double()
                return x + self.last(self.norm(x.float()))
            case "twice":
                x = x + x
                return x + self.last(self.norm(x)) + y
        raise NotImplementedError


OF_SUMS = {"norm first", "RMS norm", "norm alone", "sum returned", "norm unused", "in place", "twice", "sizes read"}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["fixed", "lsq"])
@pytest.mark.parametrize("kind", [*sorted(OF_SUMS), "read before", "broadcast", "scaled", "number", "two types"])
def test_a_norm_of_a_sum_has_the_bits_of_torchs_ops(
    kind: str, name: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, activation = SPECS[name]
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = qt.prepare(Stream(kind).train(), (x,), backend="tensorrt", qconfig_mapping=mapping)
    qt.calibrate(model, [x], progress=False)
    model = settled(model).train()

    def results(model: nn.Module) -> dict[str, Tensor]:
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            found = model(given)
        ys = found if isinstance(found, tuple) else (found,)
        sum(y.float().square().sum() for y in ys).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {**{f"y{i}": y.detach() for i, y in enumerate(ys)}, "x": given.grad, **gradients}

    other = copy.deepcopy(model)
    with Ops() as ops:
        found = results(model)
    assert bool(ops.found["qtoolkit::add_norm_fake_quant"]) == (kind in OF_SUMS)
    with one_by_one(monkeypatch), Ops() as ops:
        wanted = results(other)
    assert not ops.found["qtoolkit::add_norm_fake_quant"]
    same(found, wanted)


def test_second_derivatives_are_refused() -> None:
    model = prepared()
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="double backward is not supported"):
        gradient.sum().backward()


@pytest.mark.slow
def test_random_chains_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(0)
    kinds: list[Callable[[], nn.Module]] = [
        nn.GELU,
        nn.SiLU,
        nn.ReLU,
        nn.Tanh,
        lambda: nn.LayerNorm(6),
        lambda: nn.RMSNorm(6),
    ]
    kinds += [lambda: nn.ReLU(inplace=True), lambda: nn.GELU("tanh"), lambda: nn.Linear(6, 6), lambda: nn.Dropout(0.0)]
    for seed in range(12):
        torch.manual_seed(seed)
        chain = [drawn.choice(kinds)() for _ in range(6)]
        while any(nn.ReLU in map(type, pair) and getattr(pair[1], "inplace", False) for pair in pairwise(chain)):
            chain = [drawn.choice(kinds)() for _ in range(6)]  # torch cannot train a ReLU whose result is changed
        modules, x = [nn.Linear(6, 6), *chain, nn.Linear(6, 2)], torch.randn(5, 6)
        mapping = qt.QConfigMapping().set_global(qt.QConfig(*SPECS[drawn.choice(["fixed", "affine", "lsq"])][::-1]))
        backend = drawn.choice(["onnxruntime", "tensorrt", "academic"])
        model = qt.prepare(nn.Sequential(*modules).train(), (x,), backend=backend, qconfig_mapping=mapping)
        qt.calibrate(model, [x], progress=False)
        other = copy.deepcopy(model)
        results = []
        for net in (model, other):
            x.requires_grad_().grad = None
            if net is other:
                monkeypatch.setattr(CachedFusedOp, "by_op", lambda self, run, *inputs: None)
            net(x).square().sum().backward()
            results.append({"x": x.grad, **{n: p.grad for n, p in net.named_parameters() if p.grad is not None}})
        monkeypatch.undo()
        same(*results)


@pytest.mark.parametrize("at_rest", ["backbone", "backbone.0", "quantizers"])
@pytest.mark.parametrize("normalized", [True, False])
def test_fixed_ranges_follow_weights_where_a_part_is_in_eval_mode(at_rest: str, normalized: bool) -> None:
    torch.manual_seed(0)
    parts = {"0": nn.Conv2d(3, 8, 3), **({"1": nn.BatchNorm2d(8)} if normalized else {}), "2": nn.ReLU()}
    net = nn.Sequential(OrderedDict(backbone=nn.Sequential(OrderedDict(parts)), head=nn.Conv2d(8, 4, 1)))
    x = torch.randn(8, 3, 6, 6)
    model = qt.prepare(net.train(), x, backend="onnxruntime")
    qt.calibrate(model, [x], progress=False)
    qt.freeze_ranges(model, "activations")
    for part in qt.quantizers_of(model).values() if at_rest == "quantizers" else [model.get_submodule(at_rest)]:
        part.eval()
    conv = model.get_submodule("backbone.0")
    for factor in (4.0, 0.5):
        model(x)
        with torch.no_grad():
            conv.weight.mul_(factor)
            plain = copy.deepcopy(model)(x)
        torch.testing.assert_close(model(x).detach(), plain, rtol=1e-4, atol=1e-5)
