"""watch(writer=...): what a writer gets equals a plain computation, in the sampled steps and no other; TensorBoard reads it."""

from typing import Any

import pytest
import torch
from torch import nn

import qtoolkit as qt
from tests.training.nets import ROUTES, SHAPE, learned, step


class Recorded:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}
        self.histograms: dict[str, dict[int, torch.Tensor]] = {}

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
        self.scalars.setdefault(tag, {})[global_step] = scalar_value

    def add_histogram(self, tag: str, values: Any, global_step: int) -> None:
        self.histograms.setdefault(tag, {})[global_step] = values


@pytest.mark.parametrize("route", ROUTES)
def test_a_writer_gets_each_sampled_step_by_itself(route: str) -> None:
    model, writer = learned(route), Recorded()
    quantizers = qt.quantizers_of(model)
    first = next(name for name, quantizer in quantizers.items() if not quantizer.of_weight)
    seen: dict[int, dict[str, float]] = {}
    handle = quantizers[first].register_forward_pre_hook(lambda q, args: note(q, args[0]))

    def note(quantizer: qt.TensorQuantizer, x: torch.Tensor) -> None:
        zero_point = 0 if quantizer.zero_point is None else quantizer.zero_point
        codes = torch.round(x / quantizer.scale) + zero_point
        clipped = (codes < quantizer.spec.qmin) | (codes > quantizer.spec.qmax)
        values = {"lowest": x.min(), "highest": x.max(), "clipped": clipped.float().mean()}
        seen[len(seen)] = {name: float(value) for name, value in values.items()}

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scales = {}
    with qt.debug.watch(model, every=2, writer=writer) as watched:
        for number in range(5):
            step(model, optimizer, torch.randn(SHAPE) * (1 + number))
            scales[number] = {name: q.scale.detach().clone() for name, q in quantizers.items()}
    handle.remove()
    assert watched.sampled == 3
    for what in ("lowest", "highest", "clipped"):
        expected = {number: pytest.approx(seen[number][what], rel=1e-6) for number in (0, 2, 4)}
        assert writer.scalars[f"{what}/{first}"] == expected
    for name, quantizer in quantizers.items():
        written = (writer.scalars if quantizer.scale.numel() == 1 else writer.histograms)[f"scale/{name}"]
        assert list(written) == [0, 2, 4]
        for number, value in written.items():
            assert torch.equal(torch.as_tensor(value).reshape(-1), scales[number][name].reshape(-1))
        assert set(writer.scalars[f"grid_highest/{name}"]) == {0, 2, 4}


def test_between_sampled_steps_there_are_no_hooks_and_nothing_is_written() -> None:
    model, writer = learned(), Recorded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with qt.debug.watch(model, every=3, writer=writer):
        for number in range(5):
            hooks = sum(len(q._forward_hooks) for q in qt.quantizers_of(model).values())
            assert (hooks > 0) == (number % 3 == 0)
            step(model, optimizer, torch.randn(SHAPE))
    assert {number for steps in writer.scalars.values() for number in steps} == {0, 3}


@pytest.mark.parametrize("writer", ["runs", Recorded, object(), nn.Linear(1, 1)])
def test_what_cannot_be_written_to_is_an_error(writer: object) -> None:
    with pytest.raises(TypeError, match=r"watch: writer must have the methods add_scalar and add_histogram"):
        qt.debug.watch(learned(), writer=writer)


def test_tensorboard_reads_what_was_written(tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard, which is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = learned()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with SummaryWriter(tmp_path) as writer, qt.debug.watch(model, every=1, writer=writer):
        for _ in range(2):
            step(model, optimizer, torch.randn(SHAPE))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    tags = read.Tags()
    assert {f"clipped/{name}" for name in qt.quantizers_of(model)} <= set(tags["scalars"])
    assert tags["histograms"]
    name = tags["histograms"][0].removeprefix("scale/")
    assert [event.step for event in read.Scalars(f"clipped/{name}")] == [0, 1]
    assert read.Histograms(f"scale/{name}")[-1].histogram_value.num == qt.quantizers_of(model)[name].scale.numel()
