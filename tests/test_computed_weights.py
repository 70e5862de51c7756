"""Pruned, normed and parametrized weights: quantized as they are computed, trained, and made plain by convert."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import qtoolkit as qt

LAYERS = ("0", "3", "5")


class Squashed(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight)


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.random_structured(layer, "weight", 0.25, dim=0)
    prune.random_unstructured(layer, "bias", 0.5)


def squashed(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Squashed())


KINDS: dict[str, Callable[[nn.Module], object]] = {
    "pruned": pruned,
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "squashed": squashed,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
}


def net(kind: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    conv = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    model = nn.Sequential(*conv, nn.Flatten(), nn.Linear(8 * 16, 5))
    apply(kind, model)
    for _ in range(10):  # each is a step of spectral norm's power iteration
        model(X)
    return model


def apply(kind: str, model: nn.Module) -> None:
    for name in LAYERS if kind else ():
        KINDS[kind](model.get_submodule(name))


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROUTES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "prepare": lambda model: qt.prepare(model, (X,), "onnxruntime"),
    "replace": lambda model: qt.quant_modules.replace(model, backend="onnxruntime"),
    "fuse and replace": lambda model: qt.quant_modules.replace(
        qt.fuse_modules(model, [["0", "1", "2"]]), backend="onnxruntime"
    ),
}


def zeros(model: nn.Module) -> list[Tensor]:
    return [model.get_submodule(name).weight == 0 for name in LAYERS]


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_computed_weights_go_through_every_step(kind: str, route: str, training: bool, late: bool) -> None:
    model = net("" if late else kind).train(training)
    before = copy.deepcopy(model.state_dict())
    expected = twin_output(model)
    ours = ROUTES[route](model)
    if late:
        apply(kind, ours)
        with qt.disable_quantization(ours):
            for _ in range(10):  # each is a step of spectral norm's power iteration
                ours.train()(X)
    else:
        with qt.disable_quantization(ours):
            torch.testing.assert_close(ours.eval()(X), expected, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    ours.train(training)
    qt.calibrate(ours, [X], progress=False)
    if training:
        at_start = {name: p.detach().clone() for name, p in ours.named_parameters()}
        train(ours)
        sources = [
            name for name in at_start if name.startswith(LAYERS) and "weight" in name and "quantizer" not in name
        ]
        assert sources
        assert "0.weight" not in sources
        assert all(not torch.equal(at_start[name], ours.get_parameter(name)) for name in sources)
    y = ours.eval()(X)
    converted = qt.convert(ours)
    assert torch.equal(converted(X), y)
    assert torch.equal(ours(X), y)  # it is not changed
    assert all(type(converted.get_submodule(name).weight) is nn.Parameter for name in LAYERS)
    assert not [key for key in converted.state_dict() if "orig" in key or "mask" in key]
    if kind == "pruned":
        assert [round(z.float().mean().item(), 2) > 0.5 for z in zeros(converted)] == [True] * 3
    assert torch.equal(pickle.loads(pickle.dumps(converted))(X), y)


def twin_output(model: nn.Module) -> Tensor:
    """Return a model's output in eval mode; its state does not change."""
    modes = [(module, module.training) for module in model.modules()]
    y = model.eval()(X).detach()
    for module, training in modes:
        module.training = training
    return y


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["pruned", "weight_norm", "squashed"])
def test_they_are_exported(kind: str, tmp_path) -> None:
    ours = qt.prepare(net(kind), backend="onnxruntime", inplace=True)
    qt.calibrate(ours, [X], progress=False)
    assert qt.export_onnx(ours.eval(), X, str(tmp_path / "model.onnx")).verification is not None


@pytest.mark.parametrize("route", ROUTES)
def test_masks_stay_in_training(route: str) -> None:
    ours = ROUTES[route](net("pruned").train())
    qt.calibrate(ours, [X], progress=False)
    before = zeros(ours)
    train(ours)
    assert all(torch.equal(a, b) for a, b in zip(zeros(ours), before, strict=True))
    assert set(net("pruned").state_dict()) <= set(ours.state_dict())


def test_a_mask_stays_where_a_batch_norm_is_folded() -> None:
    model = net("pruned").eval()
    ours = qt.prepare(model, (X,), "onnxruntime")
    assert prune.is_pruned(ours.get_submodule("0"))
    before = zeros(ours)
    qt.calibrate(ours.train(), [X], progress=False)
    train(ours)
    assert all(torch.equal(a, b) for a, b in zip(zeros(ours), before, strict=True))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["pruned", "weight_norm", "squashed"])
@pytest.mark.parametrize("route", ROUTES)
def test_eval_takes_the_range_of_the_weight_after_the_last_step(kind: str, route: str) -> None:
    ours = ROUTES[route](net(kind).train())
    qt.calibrate(ours, [X], progress=False)
    train(ours, 1)
    layer = ours.eval().get_submodule("3")
    quantizer = layer.weight_quantizer
    ours(X)  # computes the weights anew
    largest = layer.weight.detach().abs().amax((1, 2, 3))
    torch.testing.assert_close(quantizer.amax.flatten()[largest > 0], largest[largest > 0])


@pytest.mark.parametrize("kind", ["squashed", "parametrized weight_norm"])
def test_a_parametrized_layer_is_reported_as_quantized_and_loads_float_weights(kind: str) -> None:
    model = net(kind)
    ours = qt.prepare(model, (X,), "onnxruntime")
    assert {line.name for line in qt.quantization_report(ours).quantized} >= set(LAYERS)
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in model.named_parameters()}
    other = net(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    ours.load_state_dict(other.state_dict(), strict=False)
    with qt.disable_quantization(ours):
        torch.testing.assert_close(ours.eval()(X), other.eval()(X))


class Dropped(nn.Module):
    """DropConnect: weights that are left out at random in training."""

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.dropout(weight, 0.5, self.training)


DRAWN: dict[str, Callable[[nn.Module], object]] = {
    "dropped": lambda layer: parametrize.register_parametrization(layer, "weight", Dropped()),
    "spectral_norm": parametrizations.spectral_norm,
}


def in_training(kind: str, route: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).train()
    for name in ("0", "3"):
        DRAWN[kind](model.get_submodule(name))
    ours = ROUTES[route](model)
    qt.calibrate(ours, [X], progress=False)
    return model, ours.train()


def output(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    return model(X)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("kind", DRAWN)
def test_a_forward_in_training_computes_each_weight_once(kind: str, route: str, compiled: bool) -> None:
    """Several draws were taken for the range, for the codes and for the size of a weight, which have to be of one."""
    torch.compiler.reset()
    model, ours = in_training(kind, route)
    str(qt.quantization_report(ours))  # and asking changes nothing
    called = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    expected, y = output(model), output(called)
    error, power = (y - expected).square().mean(), expected.square().mean()
    assert error < 1e-3 * power
    y.sum().backward()
    with qt.disable_quantization(ours):
        torch.testing.assert_close(output(called), output(model), rtol=1e-4, atol=1e-5)
    state = ours.state_dict()
    assert all(
        torch.equal(value, state[key]) for key, value in model.state_dict().items() if key.endswith(("_u", "_v"))
    )


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_loading_takes_the_range_of_a_weight_without_a_step_of_its_parametrization(route: str) -> None:
    model, ours = in_training("spectral_norm", route)
    output(model)
    ours.load_state_dict(model.state_dict())
    state = ours.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
