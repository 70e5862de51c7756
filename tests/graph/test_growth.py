"""What prepare, the report and convert do grows with the graph, and no faster: calls of functions are counted, not seconds."""

import copy
import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.graph.lint import lint
from qtoolkit.nn import QuantWeighted

X = torch.rand(2, 4, 8)


def shuffled(x: Tensor) -> Tensor:
    """Slices of a concat, and a concat of these."""
    return torch.cat([x[:, i : i + 1] for i in (2, 0, 3, 1)], 1)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "concats of slices": lambda x, y: shuffled(x),
    "adds of numbers": lambda x, y: x + 1,
    "adds of tensors": lambda x, y: x + y,
    "views": lambda x, y: x.flatten(1).unflatten(1, (4, 8)),
}


class Deep(nn.Module):
    def __init__(self, step: str, depth: int) -> None:
        super().__init__()
        self.step, self.depth, self.first, self.last = step, depth, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.first(x)
        for _ in range(self.depth):
            x = STEPS[self.step](x, y)
        return self.last(x)


def blocks(depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(depth)))


def calls_of(work: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(work)
    return pstats.Stats(profile).total_calls


def calls(model: nn.Module) -> tuple[int, ...]:
    """The calls of prepare, of the report, and of convert for both arithmetics."""
    prepared: list[nn.Module] = []
    of_prepare = calls_of(lambda: prepared.append(qt.prepare(model.eval(), X, backend="onnxruntime")))
    of_report = calls_of(lambda: qt.quantization_report(prepared[0]))
    qt.calibrate(prepared[0], [X], progress=False)
    of_convert = [calls_of(lambda how=how: qt.convert(prepared[0], how)) for how in ("float", "integer")]
    return of_prepare, of_report, *of_convert


@pytest.mark.slow
@pytest.mark.parametrize("step", [*STEPS, "blocks"])
def test_twice_the_graph_takes_twice_the_calls(step: str) -> None:
    models = [blocks(depth) if step == "blocks" else Deep(step, depth) for depth in (2, 2, 25, 50)]
    _, least, once, twice = map(calls, models)  # the first may import
    for few, one, two in zip(least, once, twice, strict=True):
        assert (two - few) / (one - few) == pytest.approx((50 - 2) / (25 - 2), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "depth"), [("concats of slices", 200), ("adds of tensors", 1000), ("blocks", 300)])
def test_the_calls_of_all_steps_grow_with_a_deep_graph(step: str, depth: int) -> None:
    def steps(depth: int) -> None:
        prepared = qt.prepare(
            (blocks(depth) if step == "blocks" else Deep(step, depth)).eval(), X, backend="onnxruntime"
        )
        qt.calibrate(prepared, [X], progress=False)
        qt.quantization_report(prepared)
        lint(prepared)
        qt.convert(prepared, "integer")

    steps(2)  # it may import
    least, once, twice = (calls_of(lambda depth=depth: steps(depth)) for depth in (2, depth // 2, depth))
    assert (twice - least) / (once - least) == pytest.approx(2, rel=0.1)


class Backwards(nn.Module):
    """Blocks that run from the last to the first: each layer refers to the blocks on the way to it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


@pytest.mark.parametrize("outer", [False, True], ids=["alone", "in another model"])
def test_copies_of_a_deep_model_stay_below_the_recursion_limit(outer: bool) -> None:
    model = qt.prepare(Backwards(100).eval(), (torch.ones(1, 2, 2, 2),), backend="onnxruntime")
    twin = copy.deepcopy(nn.Sequential(model, nn.Sequential(model)))[0] if outer else copy.deepcopy(model)
    own = set(twin.modules())
    sources = [m.layer_calls[0].source for m in twin.modules() if isinstance(m, QuantWeighted)]
    assert len(sources) == 100
    assert all(source is not None and own.issuperset(source.modules()) for source in sources)
