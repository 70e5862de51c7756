"""Units and layers that are reached one after another: a model that goes on equals one that runs from its inputs each time."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import qtoolkit as qt
from qtoolkit.model_inputs import tensors_of
from qtoolkit.tuning.rounding import unit_samples
from qtoolkit.tuning.rounding.unit_samples import Importance
from qtoolkit.tuning.runs import stepwise
from qtoolkit.tuning.runs.batches import Batches
from qtoolkit.tuning.runs.cache import BatchCache
from qtoolkit.tuning.runs.stepwise import Stepwise
from tests.copies import made_once
from tests.tuning.nets import W3, W3A4, Residual, prepared_on


class Shared(nn.Module):
    """A layer that is called before and behind others."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.twice(torch.relu(self.a(self.twice(x)))))


class Tuples(nn.Module):
    """Tuples, sizes and numbers between layers, and a skip connection over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        size, width = x.shape, x.size(1)
        left, right = self.a(x).chunk(2, 1)
        right, _ = torch.max(torch.stack([right, self.b(right)]), 0)
        joined = torch.cat([self.c(left).reshape(size), right], 1)
        return self.d(joined) * width + x[: size[0]]


class InPlace(nn.Module):
    """Ops that change in place what others read before them, or what a later layer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x * 1)
        late = self.c(torch.sigmoid(x))  # reads x before the next line changes it
        early = self.b(x.relu_())
        early += x
        return self.d(late + early.mul_(0.5))


class Leaf(nn.Module):
    """Layers in a submodule that is not traced, which changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x += self.first(x)
        return self.second(x)


class WithLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.leaf, self.behind = nn.Linear(4, 4), Leaf(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.leaf(self.before(x)))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.position = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = self.a(x) + self.position[:4].mean(0)
        hidden = torch.relu(self.b(hidden)) + self.position[:4].mean(0)
        return self.c(hidden) + (x if y is None else y)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "residual": (Residual, lambda: torch.randn(4, 3, 8, 8)),
    "shared": (Shared, lambda: torch.randn(4, 4)),
    "tuples": (Tuples, lambda: torch.randn(4, 4)),
    "in place": (InPlace, lambda: torch.randn(4, 4)),
    "two inputs": (TwoInputs, lambda: {"y": torch.randn(4, 4), "x": torch.randn(4, 4)}),
}


@made_once
def prepared_net(name: str) -> tuple[qt.graph.QuantizedGraphModule, list[Any]]:
    torch.manual_seed(0)
    make, batch = NETS[name]
    batches = [batch() for _ in range(3)]
    return prepared_on(make().eval(), batches, W3A4), batches


class FromTheInputs:
    """Like a Stepwise, but every goal is computed from the inputs of the model."""

    def __init__(self, gm: Any, goals: Sequence[Sequence[fx.Node]], data: Batches, limit: float) -> None:
        self.make = lambda place: Stepwise(gm, [goals[place]], data, float("inf"))
        self.batches: Any = data.batches

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...

    def begin(self, place: int, up_to: str = "") -> None:
        self.stepwise = self.make(place)
        self.stepwise.begin(0, up_to)

    def run(self, index: int, batch: Any) -> Any:
        return self.stepwise.run(index, self.batches[index])


def assert_equal_states(first: nn.Module, second: nn.Module) -> None:
    torch.testing.assert_close(dict(first.state_dict()), dict(second.state_dict()), rtol=0, atol=0)


# ---- the values


@pytest.mark.sweep(1)
@pytest.mark.parametrize("limit", [0.0, 1e9])
@pytest.mark.parametrize("name", NETS)
def test_values_are_those_of_one_run_of_the_model(name: str, limit: float) -> None:
    prepared, batches = prepared_net(name)
    layers = [node for node in prepared.graph.nodes if node.op == "call_module"]
    expected: list[dict[str, Tensor]] = []
    for batch in batches:
        values: dict[str, Tensor] = {}
        interpreter = Keeping(prepared, values)
        args = copy.deepcopy(batch)
        interpreter.run(*(args[n.target] if isinstance(args, dict) else args for n in inputs_of(prepared)))
        expected.append(values)
    data = Batches(batches, None, "test")
    with torch.no_grad(), Stepwise(prepared, [[node] for node in layers], data, limit) as stepwise:
        for place, node in enumerate(layers):
            stepwise.begin(place)
            for index, batch in data.each():
                (found,) = stepwise.run(index, batch)
                assert torch.equal(found, expected[index][node.name]), node.name


def inputs_of(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


class Keeping(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, values: dict[str, Tensor]) -> None:
        super().__init__(gm)
        self.values = values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n.name] = result.detach().clone() if isinstance(result, Tensor) else result
        return result


def test_goals_out_of_the_order_of_the_graph() -> None:
    # The goal behind the in-place op comes first; the layer that reads the tensor before it runs afterwards.
    prepared, batches = prepared_net("in place")
    nodes = {str(node.target): node for node in prepared.graph.nodes if node.op == "call_module"}
    data = Batches(batches, None, "test")
    found: dict[str, Tensor] = {}
    with torch.no_grad(), Stepwise(prepared, [[nodes["b"]], [nodes["c"]], [nodes["d"]]], data, 1e9) as stepwise:
        for place, name in enumerate("bcd"):
            stepwise.begin(place)
            for index, batch in data.each():
                (found[name],) = stepwise.run(index, batch)
    values: dict[str, Tensor] = {}
    Keeping(prepared, values).run(batches[-1])
    assert all(torch.equal(found[name], values[nodes[name].name]) for name in "bcd")


# ---- bias_correction and gptq


def watched(prepared: nn.Module, block: str) -> nn.Module:
    """Return a copy whose block has a hook: the model then runs from its inputs."""
    other = copy.deepcopy(prepared)
    other.get_submodule(block).register_forward_hook(lambda *args: None)
    return other


@pytest.mark.sweep(1)
@pytest.mark.parametrize("memory", [0, 2**31])
@pytest.mark.parametrize("name", NETS)
def test_biases_are_those_of_runs_from_the_inputs(name: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, batches = prepared_net(name)
    other = copy.deepcopy(prepared)
    monkeypatch.setattr(stepwise, "MEMORY", memory)
    report = qt.tuning.bias_correction(prepared, batches, progress=False)
    monkeypatch.setattr(stepwise, "_calls_of", lambda model, names: {})
    assert qt.tuning.bias_correction(other, batches, progress=False) == report
    assert len(report.shifts) > 1
    assert_equal_states(prepared, other)


def test_layers_in_a_leaf_module_that_changes_its_input() -> None:
    batches = [torch.randn(4, 4) for _ in range(2)]
    mapping = qt.QConfigMapping().set_global(W3)
    prepared = qt.prepare(
        WithLeaf().eval(), batches[0], qconfig_mapping=mapping, leaf_modules=[Leaf], backend="tensorrt10"
    )
    leaf = qt.quant_modules.replace(prepared.get_submodule("leaf"), mapping, backend="tensorrt10")
    prepared.set_submodule("leaf", leaf)
    qt.calibrate(prepared, batches, progress=False)
    other = watched(prepared, "")
    report = qt.tuning.bias_correction(prepared, batches, progress=False)
    assert list(report.shifts) == ["before", "leaf.first", "leaf.second", "behind"]
    assert qt.tuning.bias_correction(other, batches, progress=False) == report
    assert_equal_states(prepared, other)


def test_a_hook_of_a_block_takes_part() -> None:
    prepared, batches = prepared_net("residual")
    plain, doubled = copy.deepcopy(prepared), copy.deepcopy(prepared)
    doubled.get_submodule("stage.0").register_forward_hook(lambda module, args, y: 2 * y)
    first, second = (qt.tuning.bias_correction(model, batches, progress=False) for model in (plain, doubled))
    assert first.shifts["stem.0"] == second.shifts["stem.0"]
    assert first.shifts["stage.1.conv1"] != second.shifts["stage.1.conv1"]


def test_codes_of_gptq_are_those_of_runs_from_the_inputs() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))).eval()
    batches = [torch.randn(64, 8) for _ in range(3)]
    prepared = prepared_on(model, batches, W3A4)
    other = watched(prepared, "1")
    assert qt.tuning.gptq(prepared, batches, progress=False) == qt.tuning.gptq(other, batches, progress=False)
    assert_equal_states(prepared, other)


def test_the_context_that_forward_sets_is_there() -> None:
    def in_bfloat16(model: nn.Module, batch: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    prepared, batches = prepared_net("residual")
    other, in_float = watched(prepared, "stage.0"), copy.deepcopy(prepared)
    report = qt.tuning.bias_correction(prepared, batches, forward=in_bfloat16, progress=False)
    assert qt.tuning.bias_correction(other, batches, forward=in_bfloat16, progress=False) == report
    assert qt.tuning.bias_correction(in_float, batches, progress=False) != report
    assert_equal_states(prepared, other)


# ---- reconstruct


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("method", "granularity"), [("adaround", "layer"), ("qdrop", "block")])
@pytest.mark.parametrize("name", NETS)
def test_codes_are_those_of_runs_from_the_inputs(
    name: str, method: str, granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, batches = prepared_net(name)
    other, in_files = copy.deepcopy(prepared), copy.deepcopy(prepared)
    options = {"method": method, "granularity": granularity, "steps": 8, "learning_rate": 0.1, "progress": False}
    report = qt.tuning.reconstruct(prepared, batches, **options)
    assert len(report.units) > 1
    assert qt.tuning.reconstruct(in_files, batches, cache_gib=0, **options) == report
    assert_equal_states(prepared, in_files)
    monkeypatch.setattr(unit_samples, "Stepwise", FromTheInputs)
    assert qt.tuning.reconstruct(other, batches, **options) == report
    assert_equal_states(prepared, other)


def test_importances_are_those_of_a_backward_pass_for_each_unit() -> None:
    prepared, batches = prepared_net("residual")
    qt.disable_quantization(prepared).apply()
    nodes = [node for node in prepared.graph.nodes if str(node.target) in ("stem.0", "stage.1.conv1", "head")]
    data = Batches(batches, None, "test")

    def of(chosen: list[fx.Node]) -> list[list[Tensor]]:
        return Importance(prepared, chosen, lambda output, batch: output.square().sum(), 0).of(data, batches[0])

    for node, (found,) in zip(nodes, of(nodes), strict=True):
        assert torch.equal(found, of([node])[0][0])
        assert found.any()


# ---- the time


def chain(depth: int) -> tuple[qt.graph.QuantizedGraphModule, list[Tensor]]:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(depth)]
    batches = [torch.randn(4, 4) for _ in range(2)]
    return prepared_on(nn.Sequential(*layers).eval(), batches, W3A4), batches


def calls_in(depth: int, function: Callable[[nn.Module, list[Tensor]], object]) -> Counter[str]:
    """Return how often a function runs each layer of a chain, and the copies of it."""
    prepared, batches = chain(depth)
    counts: Counter[str] = Counter()
    for index in range(depth):
        prepared.get_submodule(f"{index}.0").register_forward_hook(
            lambda *args, index=index: counts.update([str(index)])
        )
    function(prepared, batches)
    return counts


METHODS: dict[str, Callable[[nn.Module, list[Tensor]], object]] = {
    "bias_correction": lambda model, batches: qt.tuning.bias_correction(model, batches, progress=False),
    "bias_correction with forward": lambda model, batches: qt.tuning.bias_correction(
        model, batches, forward=lambda model, batch: model(batch), progress=False
    ),
    "gptq": lambda model, batches: qt.tuning.gptq(model, batches, progress=False),
    "reconstruct": lambda model, batches: qt.tuning.reconstruct(model, batches, steps=2, progress=False),
    "qdrop": lambda model, batches: qt.tuning.reconstruct(model, batches, "qdrop", steps=2, progress=False),
    "with a loss": lambda model, batches: qt.tuning.reconstruct(
        model, batches, steps=2, loss=lambda output, batch: output.square().sum(), progress=False
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_runs_as_often_in_a_deep_model_as_in_a_shallow_one(method: str) -> None:
    shallow, deep = (calls_in(depth, METHODS[method]) for depth in (4, 12))
    assert len(deep) == 12
    assert max(deep.values()) == max(shallow.values())


# ---- the cache and the batches


class Output(OrderedDict[str, Tensor]):
    pass


@pytest.mark.parametrize("limit", [0.0, 1e9])
def test_a_cache_keeps_types_and_only_what_a_view_shows(limit: float) -> None:
    view, generator = torch.zeros(1000, 1000)[:2, :3], (i for i in range(2))
    value = [torch.Size([2, 3]), (view, {"a": 1}), Output(x=torch.ones(2)), generator, None]
    with BatchCache(limit, torch.device("cpu")) as cache:
        cache.append(value)
        cache.append([torch.ones(3)])
        files = [] if cache._folder is None else [file.stat().st_size for file in paths(cache)]
        assert all(size < 10_000 for size in files)
        assert len(files) == (2 if limit == 0 else 0)
        size, (tensor, number), output, same, nothing = cache[0]
        assert isinstance(size, torch.Size)
        assert type(output) is Output
        assert torch.equal(tensor, view)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert (number, nothing) == ({"a": 1}, None)
        assert same is generator
        cache[0] = [torch.zeros(5)]
        assert torch.equal(cache[0][0], torch.zeros(5))
        assert cache.bytes == (32 if limit else 0)
        assert [len(tensors_of(item)) for item in cache] == [1, 1]


def paths(cache: BatchCache) -> Iterator[Path]:
    assert cache._folder is not None
    return Path(cache._folder.name).iterdir()


class Shrinking:
    """Batches whose number changes each time that they are read."""

    def __init__(self, *counts: int) -> None:
        self.counts = iter(counts)

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.randn(4, 4)] * next(self.counts))


@pytest.mark.parametrize(("counts", "found"), [((3, 3, 2), "2"), ((3, 3, 4), "more")])
def test_another_number_of_batches_is_an_error(counts: tuple[int, ...], found: str) -> None:
    prepared, _ = chain(3)
    before = copy.deepcopy(prepared)
    with pytest.raises(
        ValueError, match=f"the same number of batches each time they are read, got 3 first, and now {found}"
    ):
        qt.tuning.bias_correction(prepared, Shrinking(*counts), forward=lambda m, x: m(x), progress=False)
    assert_equal_states(prepared, before)
