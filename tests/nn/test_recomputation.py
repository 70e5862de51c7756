"""Gradient checkpointing runs a forward again in backward: it must see what the first one saw, or raise."""

import copy
import dataclasses
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit import running
from qtoolkit.nn.batch_norm import STRATEGIES
from qtoolkit.quantizers.step_clock import CLOCK
from tests.copies import made_once


@made_once
def prepared_net(strategy: str = "unscale", bits: int = 4, quantizer: str = "fixed") -> nn.Module:
    torch.manual_seed(1)  # with 0 a code flips in the second step, by the rounding of the first
    parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*parts).train()
    for bn in (model[1], model[4]):
        nn.init.uniform_(bn.running_var, 0.05, 4.0)  # far from those of the batch: they move with each forward
    specs = qt.QConfig(qt.QuantSpec(bits=8, quantizer=quantizer), qt.QuantSpec(bits=bits, axis=0, quantizer=quantizer))
    mapping = qt.QConfigMapping().set_global(specs)
    backend = dataclasses.replace(qt.backends.get("onnxruntime"), batch_norm=strategy)
    prepared = qt.prepare(model, backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [torch.rand(4, 3, 10, 10)], progress=False)
    return prepared


def twice_shared(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Two forwards before the backward, which recomputes the second one first."""
    return run(x).square().mean() + run(x.flip(0) * 2).square().mean()


def once(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return run(x).square().mean()


def gradients(model: nn.Module, use: Callable, checkpointed: bool, reentrant: bool, steps: int = 2) -> list[Tensor]:
    found = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.rand(4, 3, 10, 10, requires_grad=True)
        optimizer.zero_grad()
        state = copy.deepcopy({name: b for name, b in model.named_buffers() if "running" in name or "num_b" in name})
        use((lambda y: checkpoint(model, y, use_reentrant=reentrant)) if checkpointed else model, x).backward()
        found += [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        with torch.no_grad():  # torch's batch norm counts a recomputed batch twice: not what is tested here
            for name, buffer in model.named_buffers():
                if name in state:
                    buffer.copy_(state[name] * 0.5 + 0.5)
    return found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("use", [once, twice_shared])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_without_checkpointing(
    strategy: str, reentrant: bool, use: Callable, quantizer: str
) -> None:
    model = prepared_net(strategy, quantizer=quantizer)
    wanted = gradients(copy.deepcopy(model), use, False, reentrant)
    found = gradients(model, use, True, reentrant)
    largest = max(
        float(want.abs().max()) for want in wanted
    )  # biases before a batch norm get what rounding leaves of it
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7 * max(largest, 10))


def test_the_variance_of_a_step_moves_on_with_each_step_and_mode() -> None:
    model, x = prepared_net(), torch.rand(4, 3, 10, 10)
    bn = model.get_submodule("1")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def seen() -> Tensor:
        model(x).sum().backward()
        return bn._variance_of_step.clone()

    first = seen()
    assert torch.equal(seen(), first)
    optimizer.step()
    second = seen()
    assert not torch.equal(second, first)
    model.train()
    assert not torch.equal(seen(), second)
    assert "_variance_of_step" not in dict(bn.to_float().named_buffers())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [True, False], ids=["fixed ranges", "ranges that follow"])
@pytest.mark.parametrize("strategy", ["unscale", "std_correction"])
def test_another_models_step_begins_a_step_and_changes_no_gradient(
    strategy: str, frozen: bool, reentrant: bool
) -> None:
    """It lies between two forwards and their backward, which sees what each of them saw."""

    def trained(checkpointed: bool) -> tuple[list[Tensor], list[Tensor]]:
        model, other = prepared_net(strategy), nn.Linear(10, 2)
        if frozen:
            qt.freeze_ranges(model, "activations").apply()
        bn, of_other = model.get_submodule("1"), torch.optim.SGD(other.parameters(), 0.1)
        torch.manual_seed(3)
        batch, variances = torch.rand(4, 3, 10, 10, requires_grad=True), []
        for _ in range(2):
            y = checkpoint(model, batch, use_reentrant=reentrant) if checkpointed else model(batch)
            variances.append(bn._variance_of_step.clone())
            if len(variances) == 1:
                y.square().mean().backward()
            of_other.step()
        y.square().mean().backward()
        return variances, [batch.grad, *(parameter.grad for parameter in model.parameters())]

    (first, second), found = trained(checkpointed=True)
    (of_plain, _), wanted = trained(checkpointed=False)
    assert torch.equal(first, of_plain)
    assert not torch.equal(first, second)
    for got, want in zip(found, wanted, strict=True):
        largest = max(float(each.abs().max()) for each in wanted)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7 * max(largest, 10))


def test_the_variance_of_parameters_without_an_optimizer_moves_on_with_each_step() -> None:
    model, x = prepared_net(), torch.rand(4, 3, 10, 10)
    head = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for _ in range(2):
        head(model(x).mean((2, 3))).sum().backward()
        first = model.get_submodule("1")._variance_of_step.clone()
        optimizer.step()
        model(x)
        assert not torch.equal(model.get_submodule("1")._variance_of_step, first)


def test_the_step_after_a_calibration_takes_the_running_variance() -> None:
    """A calibration in training mode begins a step too, whose variance it puts back."""
    model, x = prepared_net(), torch.rand(4, 3, 10, 10)
    bn = model.get_submodule("1")
    bn.running_var.mul_(4)  # as a loader sets it
    running = bn.running_var.clone()
    qt.calibrate(model, [x], progress=False)
    model(x)
    assert torch.equal(bn._variance_of_step, running)


@pytest.mark.parametrize("behind", [-1, 1, 5])
def test_ranks_whose_clocks_differ_quantize_with_one_variance(behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each forward, DistributedDataParallel gives all ranks the buffers of rank 0."""
    ranks = [model := prepared_net(quantizer="lsq"), copy.deepcopy(model)]
    for step in range(3):
        held = []
        for _ in range(2):  # micro-batches
            buffers = {name: buffer.clone() for name, buffer in ranks[0].named_buffers()}
            for rank, model in enumerate(ranks):
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
                clock = {torch.device("cpu"): torch.tensor(step + 10 - rank * behind)}
                monkeypatch.setattr(CLOCK, "_clocks", clock)
                model(torch.rand(4, 3, 10, 10)).sum().backward()
                held.append(model.get_submodule("1")._variance_of_step.clone())
        assert all(torch.equal(variance, held[0]) for variance in held)
        scales = [{n: p for n, p in model.named_parameters() if n.endswith("_scale")} for model in ranks]
        assert scales[0]
        for name, scale in scales[0].items():
            assert torch.equal(scale, scales[1][name]), name


def test_observing_raises_in_a_recomputation() -> None:
    model = prepared_net()
    quantizer = model.get_submodule("activation_quantizers.input_1")
    quantizer.observing = True
    x = torch.rand(4, 3, 10, 10, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False)
    with pytest.raises(
        RuntimeError, match=r"'activation_quantizers.input_1' observes .* gradient checkpointing .*freeze_"
    ):
        y.sum().backward()
    qt.freeze_ranges(model, "activations").apply()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert x.grad.abs().sum() > 0


def test_without_the_private_function_nothing_counts_as_recomputation(monkeypatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    spec = importlib.util.spec_from_file_location("running_without_it", running.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, found = torch.ones(2, requires_grad=True), []
    x.register_hook(lambda _: found.append((module.running().name, running.running().name)))
    x.sum().backward()
    assert found == [("EAGER", "RECOMPUTING")]
