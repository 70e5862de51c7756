"""What ordinary training scripts do with a model, on both routes: a test each."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from tests.training.nets import ROUTES, SHAPE, Net, learned, loss_of, quantized, step

QUANTIZERS = ("lsq", "fixed")
each_route = pytest.mark.parametrize("route", ROUTES)
each_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS)


def batches(count: int, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SHAPE, generator=generator) for _ in range(count))


def saved(state: object) -> dict:
    """Through a file, as `torch.load` reads it by default."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    state = other.state_dict()
    assert one.state_dict().keys() == state.keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3, seed: int = 1) -> None:
    for x in batches(count, seed):
        step(model, optimizer, x)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(qt.parameter_groups(model, weight_decay=1e-3), 0.05, momentum=0.9)


# ---- copies and state


@pytest.mark.sweep(2)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@each_quantizer
@each_route
def test_copies_train_the_same(route: str, quantizer: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = learned(route, quantizer)
    train(model, sgd(model), 1)  # in the middle of a training
    twin = copied(model)
    for each in (model, twin):
        train(each, sgd(each))
    assert_same(model, twin)
    assert_same(model.eval(), twin.eval())


@each_quantizer
@each_route
def test_a_calibrated_state_is_loaded_strictly_both_ways(route: str, quantizer: str) -> None:
    model, fresh = learned(route, quantizer), quantized(route, quantizer)
    train(model, sgd(model))
    fresh.load_state_dict(saved(model.state_dict()), strict=True)
    x = torch.randn(SHAPE)
    assert torch.equal(fresh.eval()(x), copy.deepcopy(model).eval()(x))
    train(fresh.train(), sgd(fresh))
    model.load_state_dict(saved(fresh.state_dict()), strict=True)
    assert_same(model, fresh)
    floats = Net()
    floats.load_state_dict({k: v for k, v in model.state_dict().items() if k in floats.state_dict()}, strict=True)
    quantized(route, quantizer).load_state_dict(saved(floats.state_dict()), strict=True)


@each_quantizer
@each_route
def test_what_runs_in_inference_mode_leaves_the_training_as_it_is(route: str, quantizer: str) -> None:
    (x,) = batches(1, seed=0)
    models = [quantized(route, quantizer, Net()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, block in zip(models, (torch.no_grad, torch.inference_mode), strict=True):
        with block():
            qt.calibrate(model, [x], progress=False)
            model(x)
        train(model, sgd(model))
        with block():
            model.eval()(x)
            model.train()(x)
        train(model, sgd(model))
    assert_same(*models)


# ---- averages


@pytest.mark.sweep(2)
@pytest.mark.parametrize("buffers", [False, True])
@each_quantizer
@each_route
def test_an_average_is_evaluated_at_any_time(route: str, quantizer: str, buffers: bool) -> None:
    """Ranges that follow the weights are those of the averaged weights, each time."""
    model = learned(route, quantizer)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=buffers)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.5), torch.randn(SHAPE)
    for epoch in range(3):
        train(model, optimizer, 2, epoch)
        ema.update_parameters(model)
        y = ema.eval()(x)
        assert y.isfinite().all()
        assert torch.equal(y, qt.convert(ema.module)(x))
        if quantizer == "fixed":
            recalibrated = quantized(route, quantizer)
            recalibrated.load_state_dict({k: v for k, v in ema.module.state_dict().items() if k in Net().state_dict()})
            for name in ("stem", "conv", "fc"):
                scales = (each.get_submodule(f"{name}.weight_quantizer").scale for each in (ema.module, recalibrated))
                torch.testing.assert_close(*scales, rtol=1e-6, atol=0)
    update_bn(batches(2), ema)
    assert torch.equal(ema.eval()(x), qt.convert(ema.module)(x))


def scaled_in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(4)


def given_new_storage(weight: Tensor) -> None:
    weight.data = weight.data * 4


def scaled_unseen(weight: Tensor) -> None:
    weight.data.mul_(4)


@pytest.mark.parametrize("change", [scaled_in_place, given_new_storage, scaled_unseen])
@each_route
def test_a_weight_that_other_code_changes_is_converted_with_its_own_range(route: str, change) -> None:
    model = learned(route, "fixed").eval()
    names = ("stem", "fc") if route == "graph" else ("conv", "fc")
    before = {name: model.get_submodule(f"{name}.weight_quantizer").scale.clone() for name in names}
    for name in names:
        change(model.get_submodule(name).weight)
    forms = [qt.convert(model)] if change is scaled_unseen else [qt.convert(model), model.eval()]
    for name, form in itertools.product(names, forms):
        torch.testing.assert_close(form.get_submodule(f"{name}.weight_quantizer").scale, 4 * before[name])


class Functions(nn.Module):
    """Weights that functions take, one of them computed."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.gain = nn.Parameter(torch.randn(4, SHAPE[1], 3, 3)), nn.Parameter(torch.ones(4, 1, 1, 1))
        self.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.conv2d(x, self.kernel * self.gain).relu().mean((2, 3)), self.weight)


@pytest.mark.parametrize("copied", [lambda m: m, lambda m: pickle.loads(pickle.dumps(m))], ids=["itself", "pickle"])
def test_weights_of_functions_have_their_own_range_in_an_average(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = qt.prepare(Functions().train(), (torch.randn(SHAPE),), backend="tensorrt10")
    qt.calibrate(model, [torch.randn(SHAPE)], progress=False)
    ema = AveragedModel(copied(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer, x = torch.optim.SGD(model.parameters(), 0.01), torch.randn(SHAPE)
    for epoch in range(3):
        train(model, optimizer, 2, epoch)
        ema.update_parameters(model)
        y = ema.eval()(x)
        averaged = ema.module
        for node in averaged.graph.nodes:
            quantizer = averaged.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(quantizer, qt.TensorQuantizer) and quantizer.of_weight:
                weight = averaged.values_of([node.all_input_nodes[0]])[node.all_input_nodes[0]]
                amax = weight.abs().amax([d for d in range(weight.dim()) if d != quantizer.spec.axis])
                torch.testing.assert_close(quantizer.amax.flatten(), amax, rtol=1e-6, atol=0)
        assert torch.equal(y, qt.convert(averaged)(x))


# ---- gradients


@each_quantizer
@each_route
def test_accumulated_gradients_are_those_of_the_larger_batch(route: str, quantizer: str) -> None:
    model = learned(route, quantizer).double()
    qt.freeze_batch_norm(model)
    twin, x = copy.deepcopy(model), torch.randn(8, *SHAPE[1:], dtype=torch.float64)
    loss_of(model, x).backward()
    for part in x.split(2):
        (loss_of(twin, part) / 4).backward()
    for (name, wanted), found in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-9, msg=name)


@each_route
def test_clipped_gradients_have_the_norm(route: str) -> None:
    model = learned(route)
    (loss_of(model, torch.randn(SHAPE)) * 1e3).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert norm > 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name] / (norm + 1e-6), rtol=1e-5, atol=0, msg=name)


@each_quantizer
@each_route
def test_zeroed_gradients_train_like_none(route: str, quantizer: str) -> None:
    models = []
    for set_to_none in (True, False):
        model = learned(route, quantizer)
        optimizer = sgd(model)
        for x in batches(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) or not p.grad.any() for p in model.parameters())
            loss_of(model, x).backward()
            optimizer.step()
        models.append(model)
    assert_same(*models)


@each_quantizer
@each_route
def test_functional_call_differentiates_in_every_parameter(route: str, quantizer: str) -> None:
    model, x = learned(route, quantizer), torch.randn(SHAPE)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    twin = copy.deepcopy(model)
    y = torch.func.functional_call(model, parameters, (x,))
    y.square().mean().backward()
    loss_of(twin, x).backward()
    for name, wanted in twin.named_parameters():
        assert torch.equal(parameters[name].grad, wanted.grad), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("reentrant", [False, True])
@each_quantizer
@each_route
def test_a_checkpointed_training_is_the_plain_one(route: str, quantizer: str, reentrant: bool) -> None:
    model = learned(route, quantizer)
    if reentrant:
        # Its first forward, without gradients, computes in float, and ranges and statistics take its rounding.
        qt.freeze_batch_norm(model)
        qt.freeze_ranges(model, "activations").apply()
    twin = copy.deepcopy(model)
    optimizers = sgd(model), sgd(twin)
    for x in batches(3):
        step(model, optimizers[0], x)
        optimizers[1].zero_grad()
        checkpoint(loss_of, twin, x.clone().requires_grad_(), use_reentrant=reentrant).backward()
        optimizers[1].step()
    assert_same(model, twin)


def past_first_steps(model: nn.Module) -> nn.Module:
    """Return a model in which ranges and counts of steps are those of a training that goes on."""
    qt.freeze_ranges(model, "activations").apply()
    for each in qt.quantizers_of(model).values():
        each.steps = -1
    return model


@pytest.mark.slow
@pytest.mark.sweep(1)
@each_quantizer
@each_route
def test_a_checkpoint_in_compiled_code_is_the_plain_training(route: str, quantizer: str) -> None:
    """torch.compile would recompute it from statistics that have moved."""
    model = past_first_steps(learned(route, quantizer))
    twin = copy.deepcopy(model)
    optimizers = sgd(model), sgd(twin)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: checkpoint(twin, x, use_reentrant=False), backend="aot_eager")
    for x in batches(3):
        step(model, optimizers[0], x)
        optimizers[1].zero_grad()
        loss_of(compiled, x).backward()
        optimizers[1].step()
    assert_same(model, twin)


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("route", [ROUTES[0], pytest.param(ROUTES[1], marks=pytest.mark.sweep)])  # the same batch norm
def test_compiled_code_in_a_checkpoint_has_the_gradients_of_plain_code(route: str, quantizer: str) -> None:
    """The recomputation begins no step, so it folds with the variance of the forward. In the second step too."""
    model = past_first_steps(learned(route, quantizer))
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="aot_eager")
    optimizers = sgd(model), sgd(twin)
    for batch in batches(2):
        gradients = []
        for module, optimizer in zip((model, compiled), optimizers, strict=True):
            x = batch.clone().requires_grad_()
            optimizer.zero_grad()
            checkpoint(loss_of, module, x, use_reentrant=False).backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(model.buffers(), twin.buffers(), strict=True):
            other.copy_(one)  # compiled batch norms count a recomputed batch twice, as torch's own do


# ---- casts


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@each_quantizer
@each_route
def test_a_cast_between_steps(route: str, quantizer: str, dtype: torch.dtype) -> None:
    """Scales stay in float32 at least; the way back gives a model that trains, converts and resumes."""
    model = learned(route, quantizer)
    optimizer, groups = sgd(model), {id(p) for p in model.parameters()}
    train(model, optimizer)
    scales = {name: each.scale.clone() for name, each in qt.quantizers_of(model).items()}
    model.to(dtype)
    assert {id(p) for p in model.parameters()} == groups
    for name, each in qt.quantizers_of(model).items():
        assert each.scale.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert torch.equal(each.scale.float(), scales[name]), name
    optimizer.state.clear()
    for x in batches(2):
        step(model, optimizer, x.to(dtype))
    assert model(x.to(dtype)).dtype == dtype
    optimizer.state.clear()
    train(model.float(), optimizer)
    x = torch.randn(SHAPE)
    assert model(x).dtype == torch.float32
    assert torch.equal(qt.convert(model)(x), model.eval()(x))


@each_route
def test_a_model_goes_through_the_meta_device(route: str) -> None:
    """As scripts do that load a checkpoint without a second copy in memory."""
    model = learned(route)
    train(model, sgd(model))
    state = saved(model.state_dict())
    other = copy.deepcopy(model).to("meta")
    assert other.load_state_dict(state, assign=True) == ([], [])
    for each in (model, other):
        train(each, sgd(each))
    assert_same(model, other)


# ---- resuming


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("quantizer", "observing"),
    [("lsq", False), ("fixed", False), ("fixed", True)],
    ids=["lsq", "fixed", "moving ranges"],
)
@pytest.mark.parametrize("fused", [False, True])
@each_route
def test_a_resumed_training_goes_on_bit_for_bit(route: str, quantizer: str, fused: bool, observing: bool) -> None:
    """Model, optimizer, scheduler and random numbers, from a file that holds tensors and plain values only."""

    def script() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(3)
        model = quantized(route, quantizer, Net(0.3), "moving_average" if observing else "minmax")
        optimizer = torch.optim.AdamW(qt.parameter_groups(model, weight_decay=1e-2), 1e-2, fused=fused)
        return (
            model,
            optimizer,
            torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2] * len(optimizer.param_groups), 10),
        )

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object, seed: int) -> None:
        for x in batches(3, seed):
            step(model, optimizer, x)
            scheduler.step()

    parts = script()
    qt.calibrate(parts[0], batches(1, 7), progress=False)
    for each in qt.quantizers_of(parts[0]).values() if observing else ():
        each.observing = True
    run(*parts, 1)
    state = saved([part.state_dict() for part in parts] + [torch.get_rng_state()])
    run(*parts, 2)

    resumed = script()
    for part, each in zip(resumed, state, strict=False):
        part.load_state_dict(each)
    torch.set_rng_state(state[-1])
    run(*resumed, 2)
    assert_same(parts[0], resumed[0])
    for one, other in zip(parts[0].parameters(), resumed[0].parameters(), strict=True):
        for name, value in parts[1].state[one].items():
            assert torch.equal(value, resumed[1].state[other][name])
    assert parts[2].state_dict() == resumed[2].state_dict()


# ---- compiled and exported


class Compilations:
    """Count the graphs that torch.compile makes, and run them as they are."""

    count = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        self.count += 1
        return gm


@pytest.mark.sweep(1)
@each_quantizer
@each_route
def test_a_training_compiles_once_for_each_mode(route: str, quantizer: str) -> None:
    """fullgraph, with batch norms that move, weights that change, and batches of several sizes."""
    model, counter = learned(route, quantizer), Compilations()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    optimizers = sgd(model), sgd(twin)
    for size in (4, 4, 6, 9):
        x = torch.randn(size, *SHAPE[1:])
        losses = step(compiled, optimizers[0], x), step(twin, optimizers[1], x)
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)
    assert counter.count == 1
    for _ in range(2):
        for size in (3, 5):
            with torch.no_grad():
                compiled.eval()(torch.randn(size, *SHAPE[1:]))
        step(compiled.train(), optimizers[0], torch.randn(SHAPE))
    assert counter.count == 2


class CalledTwice(nn.Module):
    """A layer with a batch norm that a forward calls twice, as Siamese networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) + self.body(x * 0.5))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "symmetric"),
    [("lsq", True), ("lsq_plus", False), ("pact", True), ("learned_range", False), ("qil", True), ("fixed", True)],
)  # fmt: skip
def test_an_exported_training_calls_a_layer_twice(name: str, symmetric: bool) -> None:
    torch.manual_seed(0)
    weight = qt.QuantSpec(quantizer=name, axis=0, symmetric=symmetric, bits=4)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation=qt.QuantSpec(quantizer="lsq"), weight=weight))
    x = torch.randn(4, 3, 6, 6)
    model = qt.prepare(CalledTwice().train(), x, "onnxruntime", mapping)
    qt.calibrate(model, [x], progress=False)
    program = torch.export.export(model, (x,)).module()
    before = copy.deepcopy(program.state_dict())
    for each in (program, model):
        each(x).square().mean().backward()
    expected = dict(model.named_parameters())
    for key, parameter in program.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-3, atol=1e-5)
    assert not torch.equal(program.state_dict()["body.1.running_var"], before["body.1.running_var"])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("strict", [False, True])
@each_quantizer
@each_route
def test_prepared_and_converted_models_are_exported(route: str, quantizer: str, strict: bool) -> None:
    model = learned(route, quantizer).eval()
    batch = torch.export.Dim("batch", min=2)
    for each in (model, qt.convert(model)):
        program = torch.export.export(each, (torch.randn(SHAPE),), dynamic_shapes=({0: batch},), strict=strict)
        x = torch.randn(7, *SHAPE[1:])
        assert torch.equal(program.module()(x), each(x))
        names = {str(node.target) for node in program.graph.nodes}
        assert "qtoolkit.fake_quant.default" in names
