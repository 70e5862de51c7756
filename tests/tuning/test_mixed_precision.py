"""Mixed precision: the solver against every combination, the estimates against their formulas, the bits in both routes."""

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import qtoolkit as qt
from qtoolkit.tuning.mixed_precision import MixedPrecision, Trace, hessian_traces
from qtoolkit.tuning.mixed_precision.solve import solve

pytest.importorskip("scipy", reason="needs scipy, which is not installed")


def config(weight: int, activation: int = 8, **fields: object) -> qt.QConfig:
    return qt.QConfig(
        qt.QuantSpec(bits=activation, signed=False, symmetric=False), qt.QuantSpec(bits=weight, axis=0, **fields)
    )


CHOICES = {"w8a8": config(8), "w4a8": config(4), "w4a4": config(4, 4)}


class Layers(nn.Module):
    """A layer of each kind, one of them in two places, and an add."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 12)
        self.conv, self.grouped = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=2)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2)
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
        self.shared, self.head = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        x = self.up(F.relu(self.grouped(F.relu(self.conv(x)))))
        x = self.inner(x.mean((2, 3))) + self.table(index)
        return self.head(self.shared(self.shared(x)))


def inputs(batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 8, 8), torch.arange(batch) % 7


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers().eval()


# ---- the solver


def combinations(errors: dict) -> Iterator[dict[str, str]]:
    for chosen in itertools.product(*(errors[layer] for layer in errors)):
        yield dict(zip(errors, chosen, strict=True))


def total(table: dict, chosen: dict[str, str]) -> float:
    return sum(table[layer][choice] for layer, choice in chosen.items())


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_the_solver_finds_what_brute_force_finds(seed: int, whole: bool) -> None:
    rng = np.random.default_rng(seed)
    layers, budgets = rng.integers(1, 7), ["size", "latency"][: 1 + seed % 2]
    names = {f"l{i}": [f"c{j}" for j in range(rng.integers(1, 5))] for i in range(layers)}

    def table(scale: float, integers: bool) -> dict:
        draw = (lambda: float(rng.integers(1, 1000))) if integers else rng.random
        return {layer: {choice: scale * draw() for choice in of} for layer, of in names.items()}

    errors = table(10.0 ** rng.integers(-12, 6), False)
    costs = {name: table(1e9 if whole else 0.1, whole) for name in budgets}
    every = list(combinations(errors))
    some = every[rng.integers(len(every))]
    limits = {name: total(costs[name], some) for name in budgets}  # met by at least one, exactly
    found = solve(errors, costs, limits)
    wanted = min(
        total(errors, each)
        for each in every
        if all(total(costs[name], each) <= limits[name] * (1 + 1e-14) for name in budgets)
    )
    assert all(total(costs[name], found) <= limits[name] * (1 + 1e-14) for name in budgets)
    assert total(errors, found) == pytest.approx(wanted, rel=1e-9)
    below = {name: 0.999 * min(total(costs[name], each) for each in every) for name in budgets}
    assert solve(errors, costs, below) is None


def test_a_budget_of_one_byte_less_is_kept() -> None:
    """Within the solver's tolerance of a billion there are many bytes."""
    errors = {f"l{i}": {"w4": 1.0 + i, "w8": 0.0} for i in range(4)}
    sizes = {f"l{i}": {"w4": 5 * 10**11, "w8": 10**12 + i} for i in range(4)}
    for budget in (2 * 10**12, 4 * 10**12 + 5, 4 * 10**12 + 6, 3_500_000_000_005, 3_500_000_000_006):
        found = solve(errors, {"size": sizes}, {"size": budget})
        every = [each for each in combinations(errors) if total(sizes, each) <= budget]
        assert total(sizes, found) <= budget
        assert total(errors, found) == min(total(errors, each) for each in every)


# ---- layers and costs


def test_the_layers_are_those_with_a_weight(model) -> None:
    search = MixedPrecision(model, inputs(), CHOICES, backend="tensorrt10")
    assert list(search.layers) == ["table", "conv", "grouped", "up", "inner.0", "shared", "head"]
    assert {layer.name: layer.weights for layer in search.layers.values()} == {
        name: model.get_submodule(name).weight.numel() for name in search.layers
    }
    with FlopCounterMode(display=False) as counter:
        model(*inputs())
    assert sum(layer.macs for layer in search.layers.values()) == counter.get_total_flops() // 2
    assert search.layers["shared"].macs == 2 * 2 * 12 * 12
    assert search.layers["table"].macs == 0


def test_costs_are_those_of_the_formulas(model) -> None:
    groups = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=1, group_size=3))
    choices = {**CHOICES, "float": None, "weights": replace(config(4), activation=None), "groups": groups}
    fixed = dict.fromkeys(("table", "conv", "grouped", "up", "shared", "head"), "w8a8")
    search = MixedPrecision(model, inputs(), choices, fixed=fixed, backend="tensorrt10")
    sizes, products = (search.costs[name]["inner.0"] for name in ("size", "bit_operations"))
    macs = 2 * 6 * 12
    assert sizes == {
        "w8a8": 72 + 12 * 4,
        "w4a8": 36 + 12 * 4,
        "w4a4": 36 + 12 * 4,
        "float": 72 * 4,
        "weights": 36 + 12 * 4,
        "groups": 36 + 24 * 4,
    }
    bits = {"w8a8": 64, "w4a8": 32, "w4a4": 16, "float": 32 * 32, "weights": 4 * 32, "groups": 16}
    assert products == {choice: macs * product for choice, product in bits.items()}
    assert search.costs["size"]["up"] == {"w8a8": 8 * 3 * 9 + 6 * 4}, "a scale for each output channel of each group"
    affine = {"u4": qt.QConfig(None, qt.QuantSpec(bits=4, axis=0, signed=False, symmetric=False))}
    assert MixedPrecision(model, inputs(), affine, backend="tensorrt10").costs["size"]["inner.0"] == {"u4": 36 + 12 * 8}


# ---- the mapping


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_each_layer_has_the_bits_that_were_chosen(model, route: str) -> None:
    search = MixedPrecision(model, inputs(), CHOICES, backend="tensorrt10", fixed={"head": "w8a8"})
    rng = np.random.default_rng(0)
    errors = {name: dict(zip(CHOICES, np.sort(rng.random(3)), strict=True)) for name in search.layers}
    best = search.solve(
        errors, bit_operations=0.4 * sum(max(c.values()) for c in search.costs["bit_operations"].values())
    )
    assert len(set(best.choices.values())) > 1
    base = qt.QConfigMapping().set_object_type(torch.add, None)
    mapping = best.to_qconfig_mapping(base)
    assert mapping.rules["object_type"]
    assert not base.rules["module_name"]
    assert qt.QConfigMapping.from_json(mapping.to_json()) == mapping
    if route == "prepare":
        built = qt.prepare(model, inputs(), backend="tensorrt10", qconfig_mapping=best.to_qconfig_mapping())
    else:
        built = qt.quant_modules.replace(model, best.to_qconfig_mapping(), backend="tensorrt10")
    qt.calibrate(built, [inputs(4)], progress=False)
    assert built(*inputs()).isfinite().all()
    lines = {line.name: line for line in qt.quantization_report(built).layers}
    quantizers = qt.quantizers_of(built)
    for name, choice in best.choices.items():
        weight = built.get_submodule(f"{name}.weight_quantizer")
        assert weight.spec.bits == CHOICES[choice].weight.bits, name
        assert weight.scale.numel() == {"table": 7, "up": 6}.get(name, model.get_submodule(name).weight.size(0)), name
        inputs_of = [quantizers[of] for of in lines[name].quantizers if of != f"{name}.weight_quantizer"]
        assert {q.spec.bits for q in inputs_of} == ({CHOICES[choice].activation.bits} if name != "table" else set()), (
            name
        )


# ---- the estimates


class Small(nn.Module):
    """Two layers, whose Hessian is small enough to be written out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(2, 3, 2), nn.Linear(9, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.conv(x)).flatten(1))


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


@pytest.fixture
def small() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Small().double()
    inputs_of = [torch.randn(5, 2, 4).double() for _ in range(2)]
    return model, [(x, model(x).detach() + 0.1 * torch.randn(5, 2)) for x in inputs_of]  # near a minimum


@pytest.mark.slow
def test_traces_are_those_of_the_exact_hessian(small) -> None:
    model, batches = small
    weights = {name: model.get_submodule(name).weight for name in ("conv", "fc")}
    found = hessian_traces(model, squared, batches, weights, probes=500)
    for name, weight in weights.items():
        exact = 0.0
        for batch in batches:

            def loss_of(value: Tensor, name: str = name, batch: tuple = batch) -> Tensor:
                return F.mse_loss(torch.func.functional_call(model, {f"{name}.weight": value}, batch[0]), batch[1])

            size = weight.numel()
            hessian = torch.autograd.functional.hessian(loss_of, weight.detach()).reshape(size, size)
            exact += float(hessian.trace()) / len(batches)
        assert abs(found[name].value - exact) < 5 * found[name].error, name
        assert found[name].error < 0.05 * exact, name


def test_traces_of_a_quadratic_are_exact_and_leave_the_model_as_it_was() -> None:
    """The Hessian is diagonal: each probe gives its trace."""
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Dropout()).train()
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones(1, 3)
    x = torch.tensor([[2.0, 0, 0], [0, 3.0, 0]])
    found = hessian_traces(model, lambda m, b: m(b).square().mean(), [x], {"0": model[0].weight}, probes=3)["0"]
    assert found.value == pytest.approx((2 * 4 + 2 * 9) / 2)
    assert found.error == pytest.approx(0, abs=1e-6)
    assert not model[0].weight.requires_grad
    assert torch.equal(model[0].weight.grad, torch.ones(1, 3))
    assert model.training
    linear = hessian_traces(model, lambda m, b: m(b).sum(), [x], {"0": model[0].weight}, probes=2)["0"]
    assert linear.value == 0


def test_a_trace_in_the_noise_is_not_zero() -> None:
    assert Trace(-3.0, 0.5).at_least == 0.5
    assert Trace(3.0, 0.5).at_least == 3.0
    assert Trace(-3.0, float("nan")).at_least == 0.0


def quantized_by_hand(x: Tensor, spec: qt.QuantSpec) -> Tensor:
    quantizer = qt.TensorQuantizer(spec)
    with qt.calibrating(quantizer):
        quantizer(x)
    return quantizer(x).detach()


class SelfAttention(nn.Module):
    """Attention by torch's fused function, or written out."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.qkv = fused, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1) @ v


def test_traces_behind_fused_attention() -> None:
    torch.manual_seed(0)
    fused, plain = SelfAttention(True), SelfAttention(False)
    plain.load_state_dict(fused.state_dict())
    batches = [torch.randn(2, 1, 5, 8)]
    found, wanted = (
        hessian_traces(m, lambda m, x: m(x).square().mean(), batches, {"w": m.qkv.weight}, 4, progress=False)["w"]
        for m in (fused, plain)
    )
    assert found.value == pytest.approx(wanted.value, rel=1e-4)


def test_hessian_errors_are_the_formula(small) -> None:
    model, batches = small
    choices = {"w8": config(8), "w3": config(3), "float": None}
    search = MixedPrecision(model, batches[0][0], choices, backend="tensorrt10")
    errors = search.hessian_errors(squared, batches, probes=4, seed=3)
    weights = {name: model.get_submodule(name).weight for name in ("conv", "fc")}
    traces = hessian_traces(model, squared, batches, weights, probes=4, seed=3)
    for name, weight in weights.items():
        for choice, of in choices.items():
            change = 0 * weight if of is None else quantized_by_hand(weight, of.weight) - weight
            square = float(change.detach().square().sum())
            wanted = max(traces[name].value, traces[name].error) / weight.numel() * square / 2
            assert errors[name][choice] == pytest.approx(wanted, rel=1e-6)
        assert errors[name]["float"] == 0
    assert search.hessian_errors(squared, [], traces=traces) == errors


def test_gradient_errors_are_the_formula(small) -> None:
    model, batches = small
    choices = {"a": config(8, 8), "b": config(3, 4), "float": None, "weights": replace(config(3), activation=None)}
    search = MixedPrecision(model, batches[0][0], choices, backend="tensorrt10")
    errors = search.gradient_errors(squared, batches)
    inputs_of = {"conv": [x for x, _ in batches]}
    with torch.no_grad():
        inputs_of["fc"] = [torch.tanh(model.conv(x)).flatten(1) for x, _ in batches]
    for name, choice in itertools.product(inputs_of, choices):
        wanted, of, weight = 0.0, choices[choice], model.get_submodule(name).weight
        for i, (x, y) in enumerate(batches):
            given = inputs_of[name][i].clone().requires_grad_()
            loss = F.mse_loss(model(given) if name == "conv" else model.fc(given), y)
            of_weight, of_input = torch.autograd.grad(loss, (weight, given))
            if of is not None:
                wanted += float((of_weight * (quantized_by_hand(weight, of.weight) - weight).detach()).square().sum())
                if of.activation is not None:
                    change = quantized_by_hand(torch.cat(inputs_of[name]), of.activation).split(len(x))[i] - given
                    wanted += float((of_input * change).square().sum())
        assert errors[name][choice] == pytest.approx(5 / 2 * wanted / len(batches), rel=1e-6), (name, choice)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradient_errors_see_each_call_and_no_indices(model) -> None:
    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return m(*batch).square().mean()

    search = MixedPrecision(model, inputs(), CHOICES, backend="tensorrt10")
    errors = search.gradient_errors(loss, [inputs(8), inputs(8)])
    assert all(error > 0 for of in errors.values() for error in of.values())
    assert all(of["w8a8"] < of["w4a8"] for of in errors.values())
    assert all(of["w4a8"] <= of["w4a4"] for of in errors.values())
    assert errors["table"]["w4a8"] == errors["table"]["w4a4"]


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_measured_errors_are_those_of_the_sensitivity(model, route: str) -> None:
    batch = inputs(16)
    expected = model(*batch).detach()

    def build(mapping: qt.QConfigMapping) -> nn.Module:
        built = (
            qt.prepare(model, batch, qconfig_mapping=mapping, backend="tensorrt10")
            if route == "prepare"
            else qt.quant_modules.replace(model, mapping, backend="tensorrt10")
        )
        qt.calibrate(built, [batch], progress=False)
        return built.eval()

    def error(built: nn.Module) -> float:
        with torch.no_grad():
            return float(F.mse_loss(built(*batch), expected))

    search = MixedPrecision(model, inputs(), {**CHOICES, "float": None}, fixed={"conv": "w8a8"}, backend="tensorrt10")
    errors = search.measured_errors(build, error, higher_is_better=False, progress=False)
    for choice in CHOICES:
        names = [name for name in search.layers if choice in errors[name]]
        mapping = qt.QConfigMapping().set_global(None)
        for name in names:
            mapping.set_module_name(name, search.configs[name][choice])
        rows = qt.debug.sensitivity(build(mapping), error, names=names, higher_is_better=False, progress=False).rows
        assert {row.name: row.drop for row in rows} == {name: errors[name][choice] for name in names}
    assert errors["conv"].keys() == {"w8a8"}
    assert all(of["float"] == 0 for name, of in errors.items() if name != "conv")
    with pytest.raises(ValueError, match=r"the layer 'table' is not quantized with the choice 'w8a8' \(.*config"):
        search.measured_errors(lambda mapping: build(mapping.set_module_name("table", None)), error, progress=False)


# ---- what comes out


def test_a_front_has_the_best_of_each_size(model) -> None:
    search = MixedPrecision(model, inputs(), CHOICES, backend="tensorrt10")
    rng = np.random.default_rng(1)
    errors = {name: dict(zip(CHOICES, np.sort(rng.random(3)), strict=True)) for name in search.layers}
    front = search.front(errors, "bit_operations", points=9)
    costs = [point.costs["bit_operations"] for point in front.points]
    assert costs == sorted(set(costs))
    assert [point.error for point in front.points] == sorted((point.error for point in front.points), reverse=True)
    every = [(total(search.costs["bit_operations"], each), total(errors, each)) for each in combinations(errors)]
    assert costs[0] == min(cost for cost, _ in every)
    for point in front.points:
        within = [error for cost, error in every if cost <= point.costs["bit_operations"]]
        assert point.error == pytest.approx(min(within))
    assert front.points[-1].error == pytest.approx(min(error for _, error in every))
    scored = front.measured(lambda mapping: len(mapping.rules["module_name"]))
    assert scored.scores == (7.0,) * len(front.points)
    assert str(scored).splitlines()[0].split() == ["bit_operations", "error", "score"]
    assert "w4a4" in str(front.points[0])


def test_a_front_is_plotted(model, tmp_path, monkeypatch) -> None:
    search = MixedPrecision(model, inputs(), CHOICES, backend="tensorrt10")
    errors = {name: {"w8a8": 0.0, "w4a8": 1.0, "w4a4": 2.0} for name in search.layers}
    front = search.front(errors, points=3)
    with pytest.raises(ValueError, match=r"must end in one of .svg, .png, .pdf, got 'front.txt'"):
        front.plot("front.txt")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match="plot needs .*, which is not installed; run: pip install "):
            front.plot(tmp_path / "front.svg")
    pytest.importorskip("matplotlib", reason="needs matplotlib, which is not installed")
    front.plot(tmp_path / "new" / "front.svg")
    picture = (tmp_path / "new" / "front.svg").read_text()
    assert "<svg" in picture
    front.measured(lambda mapping: 91.0).plot(tmp_path / "front.png", score="accuracy")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_scipy_is_named_where_it_lacks(model, monkeypatch) -> None:
    search = MixedPrecision(model, inputs(), CHOICES, backend="tensorrt10")
    errors = {name: dict.fromkeys(CHOICES, 0.0) for name in search.layers}
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match="mixed precision needs scipy.*, which is not installed; run: pip install "):
        search.solve(errors, size=1e6)


def test_budgets_that_nothing_meets_say_what_can_be_reached(model) -> None:
    latency = {
        name: {"w8a8": 1.0, "w4a8": 2.0, "w4a4": 3.0}
        for name in MixedPrecision(model, inputs(), CHOICES, backend="tensorrt10").layers
    }
    search = MixedPrecision(model, inputs(), CHOICES, latency=latency, backend="tensorrt10")
    errors = {name: {"w8a8": 0.0, "w4a8": 1.0, "w4a4": 2.0} for name in search.layers}
    least = sum(min(of.values()) for of in search.costs["size"].values())
    with pytest.raises(ValueError, match=f"size=10 cannot be met: the smallest of these choices is {least:.0f} bytes"):
        search.solve(errors, size=10)
    assert search.solve(errors, size=least).costs["size"] == least
    with pytest.raises(ValueError, match=f"size={least - 1:.0f} cannot be met"):
        search.solve(errors, size=least - 1)
    with pytest.raises(ValueError, match=r"latency=6.5 cannot be met: the smallest of these choices is 7\. Raise"):
        search.solve(errors, latency=6.5)
    assert search.solve(errors, latency=7).choices == dict.fromkeys(search.layers, "w8a8")
    with pytest.raises(
        ValueError, match="cannot be met together: within the other budgets, the smallest size is"
    ) as error:
        search.solve(errors, size=least, latency=7)
    reachable = float(re.search(r"smallest size is ([\d.]+)\. Raise", str(error.value))[1])
    assert search.solve(errors, size=reachable, latency=7).costs["size"] == reachable


def test_arguments_that_do_not_fit(model) -> None:
    errors = {
        name: dict.fromkeys(CHOICES, 0.0)
        for name in MixedPrecision(model, inputs(), CHOICES, backend="tensorrt10").layers
    }
    search = MixedPrecision(model, inputs(), CHOICES, backend="tensorrt10")
    for arguments, sentence in (
        (({"conv": errors["conv"]},), "errors has no entry for the layer 'table'"),
        (({**errors, "up": {"w8a8": 0.0}},), "no entry for the choice 'w4a8' of layer 'up'"),
        (({**errors, "up": dict.fromkeys(CHOICES, np.nan)},), "choice 'w8a8' of layer 'up' must be finite, got nan"),
    ):
        with pytest.raises(ValueError, match=sentence):
            search.solve(*arguments, size=1e9)
    with pytest.raises(ValueError, match="give at least one budget: size, bit_operations"):
        search.solve(errors)
    with pytest.raises(ValueError, match="a latency budget needs a table"):
        search.solve(errors, latency=1.0)
    with pytest.raises(ValueError, match="unknown cost 'sise'; did you mean 'size'"):
        search.front(errors, "sise")
    with pytest.raises(ValueError, match="points must be at least 2, got 1"):
        search.front(errors, points=1)
    with pytest.raises(ValueError, match="unknown layer in fixed 'cov'; did you mean 'conv'"):
        MixedPrecision(model, inputs(), CHOICES, fixed={"cov": "w8a8"}, backend="tensorrt10")
    with pytest.raises(ValueError, match="unknown choice of layer 'conv' in fixed 'w2'"):
        MixedPrecision(model, inputs(), CHOICES, fixed={"conv": "w2"}, backend="tensorrt10")
    with pytest.raises(ValueError, match="latency has no entry for the choice 'w4a8' of layer 'table'"):
        MixedPrecision(model, inputs(), CHOICES, latency={"table": {"w8a8": 1.0}}, backend="tensorrt10")
    with pytest.raises(ValueError, match="the model has no convolution, linear layer or embedding"):
        MixedPrecision(nn.ReLU(), torch.zeros(1), CHOICES, backend="tensorrt10")
    with pytest.raises(ValueError, match="choices must have at least one config"):
        MixedPrecision(model, inputs(), {}, backend="tensorrt10")
    with pytest.raises(TypeError, match="the choice 'w8' must be a QConfig or None, got 8"):
        MixedPrecision(model, inputs(), {"w8": 8}, backend="tensorrt10")
    with pytest.raises(ValueError, match=r"layer 'table': group_size must divide dimension 1"):
        MixedPrecision(
            model, inputs(), {"g": qt.QConfig(None, qt.QuantSpec(bits=4, axis=1, group_size=5))}, backend="tensorrt10"
        )
    with pytest.raises(ValueError, match=r"'w8a8' and 'w4a4' of layer 'table' differ in their activations"):
        search.hessian_errors(lambda m, b: m(*b).mean(), [inputs()])
    with pytest.raises(ValueError, match="runs the batches twice; pass a list"):
        search.gradient_errors(lambda m, b: m(*b).mean(), iter([inputs()]))
    with pytest.raises(ValueError, match="at least one batch, got none"):
        search.gradient_errors(lambda m, b: m(*b).mean(), [])
    with pytest.raises(TypeError, match=r"must return a scalar tensor, got a tensor of shape \(2, 4\)"):
        search.gradient_errors(lambda m, b: m(*b), [inputs()])
    weights = {"head": model.head.weight}
    with pytest.raises(ValueError, match="batches must hold at least one batch, got none"):
        hessian_traces(model, lambda m, b: m(*b).mean(), [], weights)
    with pytest.raises(ValueError, match="probes must be at least 1, got 0"):
        hessian_traces(model, lambda m, b: m(*b).mean(), [inputs()], weights, probes=0)
    with pytest.raises(ValueError, match="the loss of a batch is nan; it must be finite"):
        hessian_traces(model, lambda m, b: m(*b).mean() * torch.nan, [inputs()], weights)


def test_layers_whose_weights_are_computed_are_named() -> None:
    """They were left out of the costs without a word, or an AttributeError of torch."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    torch.nn.utils.parametrizations.weight_norm(model[1])
    torch.nn.utils.spectral_norm(model[2])
    with pytest.warns(UserWarning, match=r"the weights of '0', '1', '2' are computed from other tensors"):
        search = MixedPrecision(
            model, torch.randn(2, 8), {"w8": qt.QConfig(None, qt.QuantSpec())}, backend="tensorrt10"
        )
    assert list(search.layers) == ["3"]
