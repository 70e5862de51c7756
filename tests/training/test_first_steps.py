"""The first steps after a calibration: ranges follow the data, gradients are the float model's, what is wrong is said."""

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.quantizers import first_steps
from qtoolkit.quantizers.first_steps import FOLLOWED_STEPS, MOMENTUM
from qtoolkit.quantizers.weights import weight_quantizer


def chain(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for i in range(layers):
        parts += [nn.Conv2d(16 if i else 3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 64, 10)).train()


def gradient_norm(model: nn.Module, x: Tensor) -> float:
    model.zero_grad()
    F.cross_entropy(model(x), torch.arange(len(x)) % 10).backward()
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def calibrated(model: nn.Module, *batches: Tensor, **spec: object) -> nn.Module:
    mapping = qt.QConfigMapping()
    if spec:
        mapping.set_global(qt.QConfig(qt.QuantSpec(**spec), qt.QuantSpec(axis=0, **spec)))
    prepared = qt.prepare(model, (batches[0],), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared, batches, progress=False)
    return prepared


@pytest.mark.slow
@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_gradients_of_a_deep_net_with_initial_statistics_are_those_without_quantizers(route: str) -> None:
    """With ranges by running statistics that are not the batch's, the error grew with each layer: to 1e20 behind 48."""
    model, x = chain(48), torch.randn(16, 3, 8, 8)
    if route == "prepare":
        quantized = calibrated(model, x)
    else:
        quantized = qt.quant_modules.replace(model, backend="tensorrt10")
        qt.calibrate(quantized, [x], progress=False)
    with qt.disable_quantization(quantized):
        wanted = gradient_norm(quantized, x)
    assert wanted / 2 < gradient_norm(quantized, x) < wanted * 2


def pooled() -> nn.Sequential:
    torch.manual_seed(0)
    channels = [3, 8, 8, 8, 8]
    parts = [
        part
        for ins, outs in itertools.pairwise(channels)
        for part in (nn.Conv2d(ins, outs, 3, padding=1, bias=False), nn.BatchNorm2d(outs), nn.ReLU())
    ]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).train()


def test_the_first_layer_behind_an_average_pool_gets_a_gradient() -> None:
    x = torch.randn(16, 3, 16, 16)
    prepared = calibrated(pooled(), x)
    F.cross_entropy(prepared(x), torch.arange(16) % 4).backward()
    assert prepared.get_parameter("0.weight").grad.abs().max() > 1e-3


def test_calibration_in_training_mode_leaves_statistics_and_modes() -> None:
    model = pooled()
    model[1].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    replaced = qt.quant_modules.replace(model, backend="tensorrt10")
    qt.calibrate(replaced, [torch.randn(4, 3, 16, 16)], progress=False)
    assert all(torch.equal(value, replaced.state_dict()[name]) for name, value in before.items())
    named = dict(replaced.named_modules())
    assert [named[name].training for name, _ in model.named_modules()] == modes


def test_a_batch_with_one_value_for_a_channel_takes_the_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).train()
    prepared = calibrated(model, torch.randn(1, 4))
    assert all(quantizer.ready for quantizer in qt.quantizers_of(prepared).values())
    assert int(prepared.get_submodule("1").num_batches_tracked) == 0


# ---- ranges that follow the data


def linear_net() -> tuple[nn.Module, qt.TensorQuantizer]:
    prepared = calibrated(nn.Sequential(nn.Linear(4, 2)).train(), torch.full((2, 4), 4.0))
    return prepared, prepared.get_submodule("activation_quantizers.input_1")


def steps(model: nn.Module, count: int, value: float = 8.0, accumulate: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(count):
        for _ in range(accumulate):
            model(torch.full((2, 4), value)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_range_is_the_moving_average_of_the_data_for_a_number_of_steps() -> None:
    model, quantizer = linear_net()
    wanted = 4.0
    for _ in range(3):
        steps(model, 1)  # each forward begins a step, and takes what the steps before have found
        assert float(quantizer.amax) == pytest.approx(wanted, rel=1e-5)
        wanted += MOMENTUM * (8.0 - wanted)
    steps(model, FOLLOWED_STEPS - 3)
    end = float(quantizer.amax)
    assert end == pytest.approx(8.0, rel=1e-3)
    assert not quantizer.follows_data
    steps(model, 5, value=100.0)
    assert float(quantizer.amax) == end


def test_the_scale_is_the_same_in_all_forwards_of_a_step() -> None:
    model, quantizer = linear_net()
    before = quantizer.scale.clone()
    model(torch.full((2, 4), 8.0)).sum().backward()
    steps(model, 1, accumulate=3)
    assert torch.equal(quantizer.scale, before)
    model(torch.full((2, 4), 8.0))
    assert float(quantizer.amax) == pytest.approx(8 - 4 * (1 - MOMENTUM) ** 4, rel=1e-5)


@pytest.mark.parametrize("how", ["freeze_ranges", "amax", "eval", "calibrated in eval mode", "histogram"])
def test_what_keeps_a_range(how: str) -> None:
    spec = {"observer": "histogram"} if how == "histogram" else {}
    model = nn.Sequential(nn.Linear(4, 2)).train()
    prepared = qt.prepare(
        model,
        qconfig_mapping=qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(**spec), qt.QuantSpec(axis=0))),
        backend="tensorrt10",
    )
    if how == "calibrated in eval mode":
        prepared.eval()
    qt.calibrate(prepared, [torch.linspace(1, 4, 8).reshape(2, 4)], progress=False)
    quantizer = prepared.get_submodule("activation_quantizers.input_1")
    if how == "freeze_ranges":
        qt.freeze_ranges(prepared).apply()
    if how == "amax":
        quantizer.amax = 5.0
    before = quantizer.scale.clone()
    steps(prepared.train(how != "eval"), 3)
    assert torch.equal(quantizer.scale, before)


def test_a_training_resumed_in_its_first_steps_goes_on_bit_for_bit() -> None:
    torch.manual_seed(0)
    model, quantizer = linear_net()
    steps(model, 7)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other, loaded = linear_net()
    other.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(model)
    for each in (model, other, copied):
        steps(each, 5, value=6.0)
        assert torch.equal(each.get_submodule("activation_quantizers.input_1").scale, quantizer.scale)
    assert (loaded.steps, quantizer.steps) == (12, 12)


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [False, True])
def test_an_average_of_the_model_keeps_its_buffers_by_their_places(buffers: bool) -> None:
    """Averages go through the buffers of both models in turn: behind the first steps as within them."""
    model = calibrated(pooled(), torch.randn(8, 3, 16, 16))
    names = [name for name, _ in model.named_buffers()]
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(FOLLOWED_STEPS + 3):
        model(torch.randn(2, 3, 4, 4)).sum().backward()
        optimizer.step()
        if step % 50 == 0:
            average.update_parameters(model)
    assert not any(quantizer.follows_data for quantizer in qt.quantizers_of(model).values())
    for found in (model, average.module):
        assert [name for name, _ in found.named_buffers()] == names
    average.update_parameters(model)
    assert all(torch.isfinite(buffer).all() for name, buffer in average.module.named_buffers() if "_scale" in name)


def test_a_copy_made_before_a_step_is_not_changed_by_it() -> None:
    model, _ = linear_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(torch.full((2, 4), 8.0)).sum().backward()
    copied, x = copy.deepcopy(model).eval(), torch.linspace(-8, 8, 8).reshape(2, 4)
    before = copied(x)
    optimizer.step()
    assert torch.equal(copied(x), before)


def adversaries(route: str, calibrates: bool = True) -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator, which two optimizers train."""
    torch.manual_seed(0)
    floats = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, width)).train() for width in (4, 1)]
    models = [
        (qt.prepare if route == "prepare" else qt.quant_modules.replace)(model, backend="tensorrt10")
        for model in floats
    ]
    for model in models if calibrates else ():
        qt.calibrate(model, [torch.ones(2, 4)], progress=False)
    return models[0], models[1]


def adversarial_steps(generator: nn.Module, discriminator: nn.Module, begin: int, end: int) -> list[dict[str, Tensor]]:
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (discriminator, generator)]
    for step in range(begin, end):
        made = generator(torch.full((2, 4), 1.0 + step))
        for optimizer, fake in zip(optimizers, (made.detach(), made), strict=True):
            optimizer.zero_grad()
            discriminator(fake).square().sum().backward()
            optimizer.step()
    return [copy.deepcopy(model.state_dict()) for model in (generator, discriminator)]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "load_state_dict"])
@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_adversaries_resumed_in_their_first_steps_go_on_bit_for_bit(route: str, how: str) -> None:
    """Any optimizer's step ends one: the discriminator, which both losses call, has two where the generator has one."""
    models = adversaries(route)
    adversarial_steps(*models, 0, 4)
    if how == "load_state_dict":
        resumed = adversaries(route, calibrates=False)
        for new, old in zip(resumed, models, strict=True):
            new.load_state_dict(old.state_dict())
    else:
        resumed = copy.deepcopy(models) if how == "deepcopy" else pickle.loads(pickle.dumps(models))
    wanted, found = (adversarial_steps(*pair, 4, 8) for pair in (models, resumed))
    for one, other in zip(wanted, found, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert {quantizer.steps for model in resumed for quantizer in qt.quantizers_of(model).values()} == {-1, 8, 16}


def test_a_batch_with_nan_moves_no_range() -> None:
    model, quantizer = linear_net()
    before = quantizer.scale.clone()
    steps(model, 1, value=torch.nan)
    assert torch.equal(quantizer.scale, before)
    assert int(quantizer.observer.skipped) == 1


@pytest.mark.slow
def test_compiled_code_follows_without_a_graph_break() -> None:
    model, quantizer = linear_net()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(FOLLOWED_STEPS + 20):
        with torch._dynamo.config.patch(error_on_recompile=0 < step < FOLLOWED_STEPS):
            compiled(torch.full((2, 4), 8.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            assert float(quantizer.amax) == pytest.approx(8 - 4 * (1 - MOMENTUM) ** 3, rel=1e-5)
    assert quantizer.steps == FOLLOWED_STEPS + 20


# ---- what is said


def test_a_quantizer_that_clips_says_so_once() -> None:
    model = calibrated(nn.Sequential(nn.Linear(4, 2)).train(), torch.full((2, 4), 4.0), quantizer="lsq")
    with pytest.warns(
        UserWarning, match=r"'activation_quantizers.input_1' clips 100.0% of its input after 2 steps.*Cal"
    ):
        steps(model, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, 100)


def test_scales_with_an_optimizer_of_their_own_are_looked_at_too() -> None:
    model = calibrated(nn.Sequential(nn.Linear(4, 2)).train(), torch.full((2, 4), 4.0), quantizer="lsq")
    quantizer = qt.quantizers_of(model)["activation_quantizers.input_1"]
    scales = {*quantizer.parameters(), *qt.quantizers_of(model)["0.weight_quantizer"].parameters()}
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if (p in scales) is own], 1e-4) for own in (False, True)
    ]

    def train() -> None:
        for _ in range(12):
            model(torch.full((2, 4), 100.0)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    with pytest.warns(UserWarning, match=r"'activation_quantizers.input_1' clips 100.0% of its input after"):
        train()
    assert quantizer.steps == 24  # of both optimizers


def test_a_quantizer_that_rounds_all_to_zero_says_so() -> None:
    model = calibrated(nn.Sequential(nn.Linear(4, 2)).train(), torch.full((2, 4), 1e6), quantizer="lsq")
    with pytest.warns(UserWarning, match="rounds its whole input to zero after 2 steps"):
        steps(model, 3, value=1.0)


@pytest.mark.parametrize("route", [qt.prepare, qt.quant_modules.replace])
def test_a_branch_that_begins_with_zeros_says_nothing(route: Callable) -> None:
    """A last gamma of 0, as in residual blocks: in the second step its range is still that of zeros, and follows."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.branch, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            nn.init.zeros_(self.branch.weight)
            nn.init.zeros_(self.branch.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.last(y + self.branch(y))

    model = route(Residual().train(), backend="onnxruntime")
    x = torch.randn(16, 4)
    qt.calibrate(model, [x], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_scale_that_runs_away_says_so_once() -> None:
    model = calibrated(nn.Sequential(nn.Linear(4, 2)).train(), torch.randn(8, 4), quantizer="lsq", bits=4)
    quantizer = model.get_submodule("activation_quantizers.input_1")
    with torch.no_grad():
        quantizer.get_parameter("_relative_scale").fill_(9.0)
    with pytest.warns(
        UserWarning, match=r"'activation_quantizers.input_1' has a learned scale that is 9 times its.*scale_lr"
    ):
        steps(model, 1, value=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, 20, value=0.5)


@pytest.mark.slow
def test_ordinary_training_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("fixed", "lsq"):
            x = torch.randn(16, 3, 16, 16)
            model = calibrated(pooled(), x, quantizer=kind)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            for _ in range(110):
                optimizer.zero_grad()
                F.cross_entropy(model(x), torch.arange(16) % 4).backward()
                optimizer.step()


# ---- rates


def base_of(rows: Tensor, scale: Tensor, spec: qt.QuantSpec, factors: Tensor) -> Tensor:
    """Return the scale that SGD trains: the paper's, or so that one element at the end takes its own relative step."""
    end = scale / factors * spec.qmax
    return torch.maximum(2 * rows.abs().mean(1) / spec.qmax**0.5, end / (rows.size(1) * spec.qmax) ** 0.25)


@pytest.mark.parametrize("observer", ["minmax", "lsq", "histogram", "moving_average"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_calibration_keeps_the_rate_of_the_trained_weight(route: str, bits: int, observer: str) -> None:
    """Channels whose batch-norm factors are a hundredfold apart train their scales as the weight's own scales would."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 3, bias=False), nn.BatchNorm2d(2)).train()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.01, 1.0]))  # the factors, but for eps
    spec = qt.QuantSpec(bits=bits, quantizer="lsq", axis=0, observer=observer)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, spec))
    x = torch.randn(4, 3, 8, 8)
    if route == "prepare":
        quantized = qt.prepare(model, (x,), qconfig_mapping=mapping, backend="tensorrt10")
    else:
        quantized = qt.quant_modules.replace(
            qt.fuse_modules(model, [["0", "1"]]), qconfig_mapping=mapping, backend="tensorrt10"
        )
    factors = model[1].weight.detach() / (1 + model[1].eps) ** 0.5
    for calibrate in (False, True):
        if calibrate:
            qt.calibrate(quantized, [x], progress=False)
        quantizer = next(iter(qt.quantizers_of(quantized).values()))
        weight = model[0].weight.detach()
        base = base_of(weight.flatten(1), quantizer.scale, spec, factors)
        torch.testing.assert_close(quantizer.get_buffer("_rate"), (quantizer.scale / base).square(), rtol=1e-4, atol=0)
    before = quantizer.get_buffer("_rate") / quantizer.scale.square()
    quantizer.amax = quantizer.amax * 3  # another start, the same base
    torch.testing.assert_close(quantizer.get_buffer("_rate") / quantizer.scale.square(), before, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["lsq", "pact", "learned_range", "apot", "qil"])
def test_the_rate_of_an_activation_depends_on_its_scale_alone(kind: str) -> None:
    """So it is right whoever sets the range: calibrate, amax, or a file."""
    affine = kind == "learned_range"
    one, other = (
        qt.TensorQuantizer(qt.QuantSpec(bits=4, signed=False, symmetric=not affine, quantizer=kind)) for _ in range(2)
    )
    with qt.calibrating(one):
        one(torch.rand(100))
    other.load_grid(one.scale, one.zero_point) if kind not in ("apot", "qil") else other.load_state_dict(
        one.state_dict()
    )
    assert torch.equal(one.get_buffer("_rate"), other.get_buffer("_rate"))
    assert one.get_buffer("_rate") != 1


def test_a_weight_quantizer_built_for_a_function_has_the_papers_rate() -> None:
    weight, spec = torch.randn(4, 6), qt.QuantSpec(bits=4, quantizer="lsq", axis=0)
    quantizer = weight_quantizer(weight, spec, "layer")
    base = base_of(weight, quantizer.scale, spec, torch.ones(4))
    torch.testing.assert_close(quantizer.get_buffer("_rate"), (quantizer.scale / base).square(), rtol=1e-5, atol=0)


def test_constants_are_those_of_the_documentation() -> None:
    assert (FOLLOWED_STEPS, MOMENTUM, first_steps.FAR, max(first_steps.GROWTH_AT)) == (200, 0.1, 8.0, 100)
