"""A schedule of phases: what holds in each, on both routes, with averages, when it is resumed, in two processes."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import qtoolkit as qt
from qtoolkit.nn import QuantModule
from qtoolkit.nn.batch_norm import LinkedBatchNorm
from qtoolkit.tuning.schedule import OBSERVED_STEPS
from tests import processes
from tests.training.nets import ROUTES, SHAPE, Net, learned, quantized, step

Schedule = qt.tuning.QuantizationSchedule
each_route = pytest.mark.parametrize("route", ROUTES)
each_quantizer = pytest.mark.parametrize("quantizer", ["lsq", "fixed"])


def batch(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(qt.parameter_groups(model), 0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, steps: int) -> None:
    for _ in range(steps):
        step(model, optimizer, batch(schedule.steps))
        schedule.step()


def modes(model: nn.Module) -> set[tuple[bool, bool]]:
    return {(q.observing, q.quantizing) for q in qt.quantizers_of(model).values()}


def same(one: nn.Module, other: nn.Module) -> None:
    state = other.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, state[name]), name


@each_quantizer
@each_route
def test_the_first_steps_are_those_of_the_float_model(route: str, quantizer: str) -> None:
    torch.manual_seed(0)
    floats = Net()
    model = quantized(route, quantizer, copy.deepcopy(floats))
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (floats.train(), model)]
    schedule = Schedule(model, observe=4)
    for i in range(4):
        assert schedule.observing
        assert modes(model) == {(True, False)}
        for each, optimizer in zip((floats, model), optimizers, strict=True):
            step(each, optimizer, batch(i))
        schedule.step()
    for name, parameter in floats.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-5, atol=1e-6)
    assert modes(model) == {(False, True)}
    step(model, optimizers[1], batch(4))


@each_quantizer
@each_route
def test_the_ranges_are_those_of_all_steps_and_of_the_last_weights(route: str, quantizer: str) -> None:
    torch.manual_seed(0)
    model = quantized(route, quantizer)
    schedule, optimizer, seen = Schedule(model, observe=3), sgd(model), []
    name = "activation_quantizers.x" if route == "graph" else "stem.input_quantizer"
    for i in range(3):
        seen.append(batch(i))
        step(model, optimizer, seen[-1])
        schedule.step()
    fixed = qt.QuantSpec(signed=False, symmetric=False, quantizer=quantizer)
    wanted = qt.TensorQuantizer(fixed)
    with qt.calibrating(wanted):
        for x in seen:
            wanted(x)
    torch.testing.assert_close(qt.quantizers_of(model)[name].scale, wanted.scale)
    again = copy.deepcopy(model)
    for layer in again.modules():
        if isinstance(layer, QuantModule):
            layer.reset_weight_range()
    for name, quantizer in qt.quantizers_of(model).items():
        if quantizer.of_weight:
            assert torch.equal(quantizer.scale, again.get_submodule(name).scale), name


@each_route
def test_frozen_ranges_and_batch_norms_stay(route: str) -> None:
    model = learned(route, "fixed")
    schedule, optimizer = Schedule(model, freeze_ranges=4, freeze_batch_norm=2), sgd(model)
    bn = model.get_submodule("bn")
    weight = model.get_submodule("stem.weight_quantizer")
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, schedule, 2)
    assert not torch.equal(bn.running_mean, before["bn.running_mean"])
    mean, scale = bn.running_mean.clone(), weight.scale.clone()
    assert bn.frozen
    train(model.train(), optimizer, schedule, 2)
    assert torch.equal(bn.running_mean, mean)
    assert not torch.equal(weight.scale, scale), "the range followed the weight"
    scale = weight.scale.clone()
    train(model, optimizer, schedule, 2)
    assert torch.equal(weight.scale, scale)
    model.eval()
    assert torch.equal(weight.scale, scale)


def test_a_phase_may_begin_at_once() -> None:
    model = learned("graph", "fixed")
    Schedule(model, freeze_ranges=0, freeze_batch_norm=0)
    assert not any(q.following for q in qt.quantizers_of(model).values())
    assert model.get_submodule("bn").frozen


def test_a_quantizer_that_is_off_stays_off() -> None:
    model = quantized("graph", "fixed")
    off = model.get_submodule("stem.weight_quantizer")
    off.disable()
    schedule, optimizer = Schedule(model, observe=2), sgd(model)
    assert not off.active
    train(model, optimizer, schedule, 3)
    assert not off.active
    on = [q for q in qt.quantizers_of(model).values() if q is not off]
    assert all(q.quantizing and not q.observing for q in on)


def test_without_observing_the_modes_are_the_users() -> None:
    model = learned("graph", "fixed")
    moving = next(q for q in qt.quantizers_of(model).values() if not q.of_weight)
    moving.observing = True
    schedule = Schedule(model, freeze_ranges=2)
    assert moving.observing
    train(model, sgd(model), schedule, 2)
    assert not moving.observing


def test_it_says_what_comes_next() -> None:
    model = quantized("graph", "fixed")
    schedule, optimizer = Schedule(model, observe=2, freeze_ranges=4, freeze_batch_norm=3), sgd(model)
    texts = [repr(schedule)]
    for _ in range(4):
        train(model, optimizer, schedule, 1)
        texts.append(repr(schedule))
    coming = "quantizes at step 2, freezes the batch norms at step 3, freezes the ranges at step 4"
    assert texts[0] == f"QuantizationSchedule(step 0: in float for 2 steps; next: {coming})"
    assert texts[1] == texts[0].replace("step 0", "step 1")
    assert texts[3] == (
        "QuantizationSchedule(step 3: quantizes since step 2, batch norms are frozen since step 3; "
        "next: freezes the ranges at step 4)"
    )
    assert texts[4].endswith("next: no more changes)")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("observer", ["minmax", "moving_average", "histogram", "clip_std"])
@each_route
def test_a_resumed_schedule_goes_on_bit_for_bit(route: str, observer: str, at: int) -> None:
    """In each phase, from a file."""
    plan = {"observe": 3, "freeze_ranges": 5, "freeze_batch_norm": 4}
    torch.manual_seed(0)
    model = quantized(route, "fixed", observer=observer)
    fresh = copy.deepcopy(model)
    schedule, optimizer = Schedule(model, **plan), sgd(model)
    train(model, optimizer, schedule, at)
    file = io.BytesIO()
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict(), "s": schedule.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed, other = Schedule(fresh, **plan), sgd(fresh)
    fresh.load_state_dict(state["m"])
    other.load_state_dict(state["o"])
    resumed.load_state_dict(state["s"])
    for each in ((model, optimizer, schedule), (fresh, other, resumed)):
        train(*each, 6 - at)
    same(model, fresh)
    assert modes(model) == modes(fresh) == {(False, True)}
    same(model.eval(), fresh.eval())
    assert repr(schedule) == repr(resumed)


def test_long_float_phases_observe_their_last_steps() -> None:
    """The first ones have the values of another network, if the weights were random."""
    model = qt.prepare(nn.Sequential(nn.Linear(4, 2)).train(), backend="tensorrt10")
    qt.calibrate(model, [torch.full((2, 4), 200.0)], progress=False)
    schedule, seen = Schedule(model, observe=OBSERVED_STEPS + 3), []
    for step_of_training in range(OBSERVED_STEPS + 3):
        seen.append(modes(model))
        model(torch.ones(2, 4) * (100 if step_of_training < 3 else 1))
        schedule.step()
    assert seen == 3 * [{(False, False)}] + OBSERVED_STEPS * [{(True, False)}]
    assert modes(model) == {(False, True)}
    (range_of_input,) = [q for name, q in qt.quantizers_of(model).items() if name.startswith("activation")]
    assert range_of_input.amax == pytest.approx(1, rel=0.01)


def test_a_schedule_made_after_loading_goes_on_too() -> None:
    model = quantized("graph", "fixed")
    schedule = Schedule(model, observe=3)
    train(model, sgd(model), schedule, 1)
    fresh = quantized("graph", "fixed")
    fresh.load_state_dict(model.state_dict())
    resumed = Schedule(fresh, observe=3)
    resumed.load_state_dict(schedule.state_dict())
    train(fresh, sgd(fresh), resumed, 2)
    assert modes(fresh) == {(False, True)}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("buffers", [False, True])
@each_quantizer
@each_route
def test_an_average_goes_through_the_phases(route: str, quantizer: str, buffers: bool) -> None:
    torch.manual_seed(0)
    model = quantized(route, quantizer)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=buffers)
    schedule, optimizer = Schedule(model, 2, freeze_ranges=6, freeze_batch_norm=4, averages=[ema]), sgd(model)
    x = batch(99)
    for i in range(8):
        step(model, optimizer, batch(i))
        schedule.step()
        ema.update_parameters(model)
        assert modes(ema) == modes(model)
        if schedule.observing:
            continue
        y = ema.eval()(x)
        assert y.isfinite().all()
        assert torch.equal(y, qt.convert(ema.module)(x))
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, ema.module.get_parameter(name)) or "_relative" in name
    frozen = [m.frozen for m in ema.modules() if isinstance(m, LinkedBatchNorm)]
    assert frozen
    assert all(frozen)
    assert not any(q.following for q in qt.quantizers_of(ema).values())


@pytest.mark.parametrize("buffers", [False, True])
def test_an_average_learns_the_number_of_channels(buffers: bool) -> None:
    spec = qt.QuantSpec(axis=1, quantizer="lsq")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, qt.QuantSpec(axis=0)))
    model = qt.quant_modules.replace(nn.Sequential(nn.Linear(4, 2)).train(), mapping, backend="tensorrt10")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=buffers)
    schedule, optimizer = Schedule(model, observe=2, averages=[ema]), sgd(model)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()
        ema.update_parameters(model)
    assert ema.module.get_submodule("0.input_quantizer").scale.shape == (4,)
    assert ema.eval()(torch.randn(8, 4)).isfinite().all()


def test_a_compiled_or_wrapped_model_is_scheduled() -> None:
    model = quantized("graph", "fixed")
    schedule = Schedule(torch.compile(model, backend="eager"), observe=1)
    train(model, sgd(model), schedule, 2)
    assert modes(model) == {(False, True)}


def test_a_learning_rate_is_scheduled_beside_it() -> None:
    """Both are stepped after the optimizer, and neither needs the other."""
    model = learned()
    optimizer = sgd(model)
    schedule, rates = Schedule(model, freeze_batch_norm=1), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    train(model, optimizer, schedule, 1)
    rates.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_bad_batches_are_named_when_the_ranges_are_set() -> None:
    model = quantized("graph", "fixed")
    schedule = Schedule(model, observe=1)
    model(torch.full(SHAPE, torch.nan))
    with pytest.raises(ValueError, match=r"quantizer 'activation_quantizers.x' has observed NaN or infinities"):
        schedule.step()


def test_plans_that_cannot_be() -> None:
    model = learned()
    with pytest.raises(TypeError, match="observe must be a whole number, got 1.5"):
        Schedule(model, observe=1.5)
    with pytest.raises(ValueError, match="freeze_ranges must be at least 0, got -1"):
        Schedule(model, freeze_ranges=-1)
    with pytest.raises(ValueError, match=r"after observe=9 steps. Set freeze_ranges to at least 9."):
        Schedule(model, observe=9, freeze_ranges=3)
    with pytest.raises(ValueError, match="the model has no quantizers to switch"):
        Schedule(Net())
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got str"):
        Schedule("model")
    with pytest.raises(ValueError, match="each of averages must be a copy of the model"):
        Schedule(model, averages=[Net()])
    plain = qt.prepare(nn.Sequential(nn.Linear(4, 2)).train(), backend="tensorrt10")
    with pytest.warns(UserWarning, match="freeze_batch_norm=3, but no batch norm in the model is linked"):
        schedule = Schedule(plain, freeze_batch_norm=3)
    for _ in range(4):
        schedule.step()
    other = Schedule(qt.prepare(nn.Sequential(nn.Linear(4, 2)).train(), backend="tensorrt10"), observe=2)
    with pytest.raises(ValueError, match="the state belongs to another model: only one of the two has the quantizer"):
        Schedule(model, observe=2).load_state_dict(other.state_dict())


# ---- two processes


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = quantized("graph", "lsq")
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)  # scales have no gradient at first
    schedule, optimizer = Schedule(wrapped, observe=2), sgd(model)
    for i in range(4):
        step(wrapped, optimizer, batch(2 * i + rank))
        schedule.step()
        if i == 1:
            scales = {name: quantizer.scale for name, quantizer in qt.quantizers_of(model).items()}
    torch.save({"scales": scales, "model": model.state_dict()}, Path(folder) / f"{rank}.pt")


def test_all_ranks_have_the_ranges_of_all_data(tmp_path) -> None:
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    processes.spawn(work, (str(tmp_path),), 2)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, value in one["scales"].items():
        if name != "conv.weight_quantizer":  # each rank has its own statistics until the next forward
            assert torch.equal(value, other["scales"][name]), name
    for name, value in one["model"].items():
        if "running" not in name:
            assert torch.equal(value, other["model"][name]), name
    spec = qt.QuantSpec(signed=False, symmetric=False, quantizer="lsq")
    wanted = qt.TensorQuantizer(spec)
    with qt.calibrating(wanted):
        for i in range(4):
            wanted(batch(i))
    torch.testing.assert_close(one["scales"]["activation_quantizers.x"], wanted.scale)
