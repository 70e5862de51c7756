"""What prepare, the report and convert do grows with the graph, and no faster: calls of functions are counted, not seconds."""

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.graph.lint import lint

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
