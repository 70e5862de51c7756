"""What runs a forward, as `running` says it inside of each of them."""

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from qtoolkit.running import Run, running


def number_of(run: Run) -> int:
    return 1 + [*Run].index(run)


class Asks(nn.Module):
    """Adds to its input the number of what runs, and notes that, where it is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Run] = []

    def forward(self, x: Tensor) -> Tensor:
        run = running()
        if not run.compiled:
            self.found.append(run)
        return x.sin() + number_of(run)  # a recomputation needs a value to recompute


def by_transform(model: Asks, x: Tensor) -> None:
    torch.func.vmap(model)(x)


def by_forward_ad(model: Asks, x: Tensor) -> None:
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, x))


def in_backward_of_a_transform(model: Asks, x: Tensor) -> None:
    with forward_ad.dual_level():
        checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()


WAYS: dict[str, tuple[Callable[[Asks, Tensor], object], list[Run]]] = {
    "eager": (lambda model, x: model(x), [Run.EAGER]),
    "checkpoint": (
        lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward(),
        [Run.EAGER, Run.RECOMPUTING],
    ),
    "vmap": (by_transform, [Run.TRANSFORMED]),
    "forward-mode AD": (by_forward_ad, [Run.TRANSFORMED]),
    "checkpoint in forward-mode AD": (in_backward_of_a_transform, [Run.TRANSFORMED, Run.TRANSFORMED]),
    "torch.jit.trace": (lambda model, x: torch.jit.trace(model, x, check_trace=False), [Run.TRACED]),
    "torch.onnx.export by TorchScript": (
        lambda model, x: torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False),
        [Run.TRACED_FOR_ONNX],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_what_runs(way: str) -> None:
    call, expected = WAYS[way]
    model = Asks().eval()
    call(model, torch.zeros(2))
    assert model.found == expected
    assert running() is Run.EAGER


COMPILERS: dict[str, tuple[Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]], Run]] = {
    "torch.compile": (lambda model, x: torch.compile(model, backend="eager", fullgraph=True), Run.COMPILED),
    "torch.export": (lambda model, x: torch.export.export(model, (x,)).module(), Run.EXPORTED),
    "strict torch.export": (lambda model, x: torch.export.export(model, (x,), strict=True).module(), Run.EXPORTED),
}


@pytest.mark.parametrize("way", COMPILERS)
def test_what_compiles(way: str) -> None:
    """The compiler takes the answer for a constant."""
    compiles, expected = COMPILERS[way]
    x = torch.zeros(2)
    assert torch.equal(compiles(Asks().eval(), x)(x), x + number_of(expected))
    assert running() is Run.EAGER


def test_what_is_exported_to_onnx() -> None:
    pytest.importorskip("onnxscript")
    program: Any = torch.onnx.export(Asks().eval(), (torch.zeros(2),), dynamo=True, verbose=False)
    constants = [value.const_value.numpy() for value in program.model.graph.initializers.values()]
    assert constants == [number_of(Run.EXPORTED_FOR_ONNX)]


def test_another_thread_has_its_own_answer() -> None:
    found: list[Run] = []

    def other(gradient: Tensor) -> None:
        thread = threading.Thread(target=lambda: found.append(running()))
        thread.start()
        thread.join()
        found.append(running())

    x = torch.ones(2, requires_grad=True)
    x.register_hook(other)
    x.sum().backward()
    assert found == [Run.EAGER, Run.RECOMPUTING]


def test_the_facts_of_each() -> None:
    assert {run for run in Run if run.own_ops} == {Run.EAGER, Run.RECOMPUTING, Run.COMPILED}
    assert {run for run in Run if run.compiled} == {Run.COMPILED, Run.EXPORTED, Run.EXPORTED_FOR_ONNX}
    traced = {Run.TRACED, Run.TRACED_FOR_ONNX}
    assert {run for run in Run if run.recorded} == {Run.EXPORTED, Run.EXPORTED_FOR_ONNX} | traced
    assert {run for run in Run if run.exported} == {run for run in Run if run.compiled and run.recorded}
    assert {run for run in Run if run.for_onnx} == {Run.EXPORTED_FOR_ONNX, Run.TRACED_FOR_ONNX}
    assert [run for run in Run if run.recomputes or run.transformed] == [Run.TRANSFORMED, Run.RECOMPUTING]
