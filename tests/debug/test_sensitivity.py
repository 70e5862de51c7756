"""sensitivity() against scores computed by hand, and the configs that it gives."""

import copy
import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.graph.lint import lint
from tests import reference
from tests.nets import ConvNet, Residual, Shared, trained
from tests.replaced import Branches, Loops, calibrated, of_loops, ways

W2 = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=2, axis=0))


class Three(nn.Module):
    """Three linear layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def error_of(model: nn.Module, x: Tensor) -> Callable[[nn.Module], float]:
    """Return the mean squared error to a float model's output, as a function of a model."""
    expected = model(x).detach()

    def error(quantized: nn.Module) -> float:
        with torch.no_grad():
            return float(F.mse_loss(quantized(x), expected))

    return error


@pytest.fixture
def three() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Three().eval(), torch.randn(32, 8)
    prepared = qt.prepare(
        model, x[:1], qconfig_mapping=qt.QConfigMapping().set_module_name("b", W2), backend="tensorrt10"
    )
    qt.calibrate(prepared, [x], progress=False)
    return model, prepared, x


def by_hand(model: nn.Module, x: Tensor, on: str) -> float:
    """The error with the layers `on` alone quantized: int8 per tensor by the largest magnitude, weights per output."""
    y = h = x
    for name in "abc":
        layer = model.get_submodule(name)
        weight, bits = layer.weight.detach(), 2 if name == "b" else 8
        bound = 2 ** (bits - 1)
        if name in on:
            h = reference.fake_quant(h, y.abs().amax().float() / 127)
            weight = reference.fake_quant(weight, weight.abs().amax(1) / (bound - 1), None, -bound, bound - 1, 0)
        h = F.linear(h, weight, layer.bias)
        y = F.linear(y, layer.weight, layer.bias)  # the range is that of the float model
    return float(F.mse_loss(h.detach(), y.detach()))


@pytest.mark.parametrize("mode", ["one", "all_but_one"])
def test_scores_are_those_computed_by_hand(three, mode: str) -> None:
    model, prepared, x = three
    result = qt.debug.sensitivity(prepared, error_of(model, x), mode=mode, higher_is_better=False, progress=False)
    on = {name: name if mode == "one" else "abc".replace(name, "") for name in "abc"}
    expected = {name: by_hand(model, x, on[name]) for name in "abc"}
    assert {row.name: row.score for row in result.rows} == pytest.approx(expected, rel=1e-5)
    assert result.float_score == 0
    assert result.quantized_score == pytest.approx(by_hand(model, x, "abc"), rel=1e-5)
    drops = {n: s if mode == "one" else by_hand(model, x, "abc") - s for n, s in expected.items()}
    assert {row.name: row.drop for row in result.rows} == pytest.approx(drops, rel=1e-4, abs=1e-9)
    assert [row.name for row in result.rows] == sorted(drops, key=lambda name: -drops[name])
    assert result.rows[0].name == "b"  # 2 bits


def test_higher_is_better_turns_the_drop_round(three) -> None:
    model, prepared, x = three
    error = error_of(model, x)
    loss = qt.debug.sensitivity(prepared, error, higher_is_better=False, progress=False)
    score = qt.debug.sensitivity(prepared, lambda m: -error(m), progress=False)
    assert [(r.name, r.drop) for r in score.rows] == [(r.name, r.drop) for r in loss.rows]
    assert score.quantized_score == -loss.quantized_score


def test_ties_are_in_order_of_names_and_each_unit_is_one_call(three) -> None:
    _, prepared, _ = three
    calls = []
    result = qt.debug.sensitivity(prepared, lambda m: calls.append(m.training) or 1.0, progress=False)
    assert [row.name for row in result.rows] == ["a", "b", "c"]
    assert [row.drop for row in result.rows] == [0.0, 0.0, 0.0]
    assert calls == [False] * 5
    some = qt.debug.sensitivity(prepared, lambda m: 1, names=["c", "a"], progress=False)
    assert [row.name for row in some.rows] == ["a", "c"]


class StopsError(Exception):
    pass


@pytest.mark.parametrize("stop", [None, 1, 3])
def test_the_model_is_afterwards_as_it_was(three, stop: int | None) -> None:
    _, prepared, x = three
    prepared.train()
    prepared.b.eval()
    quantizers = qt.quantizers_of(prepared)
    first, second, *_ = quantizers.values()
    first.quantizing, second.observing = False, True
    before = [(q.observing, q.quantizing) for q in quantizers.values()]
    modes = [module.training for module in prepared.modules()]
    state = copy.deepcopy(prepared.state_dict())
    count = 0

    def evaluate(model: nn.Module) -> float:
        nonlocal count
        count += 1
        model.train()
        model(100 * x)  # an observer that were on would take this in
        if count == stop:
            raise StopsError
        return 1.0

    if stop is None:
        qt.debug.sensitivity(prepared, evaluate, progress=False)
    else:
        with pytest.raises(StopsError):
            qt.debug.sensitivity(prepared, evaluate, progress=False)
    assert [(q.observing, q.quantizing) for q in quantizers.values()] == before
    assert [module.training for module in prepared.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in prepared.state_dict().items())


def states_of(prepared: nn.Module, mode: str, **options: object) -> dict[str, set[str]]:
    """Return by unit the quantizers that were on when it was measured."""
    seen: list[set[str]] = []

    def evaluate(model: nn.Module) -> float:
        seen.append({name for name, q in qt.quantizers_of(model).items() if q.quantizing})
        return float(-len(seen))  # so that rows stand in the order of evaluation

    result = qt.debug.sensitivity(prepared, evaluate, mode=mode, progress=False, **options)
    rows = sorted(result.rows, key=lambda row: -row.score)
    assert seen[0] == set(qt.quantizers_of(prepared))
    assert seen[1] == set()
    return dict(zip([row.name for row in rows], seen[2:], strict=True))


def test_ops_have_rows_and_quantizers_that_others_share_stay_on() -> None:
    model, x = Residual(True).eval(), torch.randn(4, 4, 8, 8)
    prepared = qt.prepare(model, x, backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    alone, others = states_of(prepared, "one"), states_of(prepared, "all_but_one")
    assert set(alone) == {"stem", "conv1", "conv2", "shortcut", "add"}
    common = alone["conv1"] & alone["shortcut"]  # they take the same tensor
    assert common == {"activation_quantizers.relu"}
    assert alone["conv1"] == {"conv1.weight_quantizer", *common}
    assert alone["add"]
    every = set(qt.quantizers_of(prepared))
    assert others["conv1"] == every - {"conv1.weight_quantizer"}
    assert others["stem"] == every - alone["stem"]


def test_a_layer_that_is_called_twice_has_one_row() -> None:
    model, x = Shared().eval(), torch.randn(8, 4)
    prepared = qt.prepare(model, backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    assert states_of(prepared, "one") == {"fc": set(qt.quantizers_of(prepared))}


def test_by_type_layers_of_a_type_are_switched_together() -> None:
    model, x = trained(ConvNet(), 4, 3, 8, 8).eval(), torch.randn(4, 3, 8, 8)
    prepared = qt.prepare(model, x, backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    by_layer, by_type = states_of(prepared, "one"), states_of(prepared, "one", by="type")
    layers = {
        "torch.nn.modules.conv:Conv2d": {"conv1", "conv2"},
        "torch.nn.modules.conv:ConvTranspose2d": {"up"},
        "torch.nn.modules.pooling:AdaptiveAvgPool2d": {"average"},
        "torch.nn.modules.linear:Linear": {"head"},
        "_operator:add": {"add"},
    }
    assert by_type == {kind: set().union(*(by_layer[name] for name in of)) for kind, of in layers.items()}
    for kind, of in layers.items():
        row = qt.debug.sensitivity(prepared, lambda m: 1.0, by="type", names=[kind], progress=False)
        mapping = row.to_qconfig_mapping(keep_float=1)
        assert qt.QConfigMapping.from_json(mapping.to_json()) == mapping
        report = qt.quantization_report(qt.prepare(model, x, qconfig_mapping=mapping, backend="tensorrt10"))
        quantized = {line.name for line in report.quantized}
        # The pool is of int8 only between int8 ops.
        assert set(by_layer) - of - {"average"} <= quantized <= set(by_layer) - of


def test_attention_is_one_unit_with_all_that_it_quantizes_itself() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.attn(x, x, x, need_weights=False)[0])

    prepared, x = qt.prepare(Attends().eval(), backend="tensorrt10"), torch.randn(2, 3, 8)
    qt.calibrate(prepared, [x], progress=False)
    alone = states_of(prepared, "one")
    inner = {name for name in qt.quantizers_of(prepared) if name.startswith("attn.")}
    assert len(inner) == 7  # two weights, five tensors between its ops
    assert alone["attn"] == {*inner, "activation_quantizers.x"}
    assert not alone["fc"] & alone["attn"]


@pytest.mark.parametrize("train", [True, False])
def test_the_mapping_leaves_exactly_the_worst_in_float(three, train: bool) -> None:
    model, prepared, x = three
    result = qt.debug.sensitivity(prepared, error_of(model, x), higher_is_better=False, progress=False)
    base = qt.QConfigMapping().set_global(W2)
    mapping = result.to_qconfig_mapping(keep_float=2, base=base)
    worst = [row.name for row in result.rows[:2]]
    again = qt.prepare(model.train(train), x[:1], qconfig_mapping=mapping, backend="tensorrt10")
    report = qt.quantization_report(again)
    assert {line.name for line in report.left_float} == set(worst)
    assert [line.weight for line in report.quantized] == ["int2 per-channel(0)"]
    assert not [finding for finding in lint(again) if finding.where in worst]
    assert base == qt.QConfigMapping().set_global(W2)
    assert result.to_qconfig_mapping(keep_float=0) == qt.QConfigMapping().set_module_name("b", W2)


@pytest.mark.parametrize("mode", ["one", "all_but_one"])
def test_a_replaced_models_scores_are_those_computed_by_hand(mode: str) -> None:
    model, x = Three().eval(), torch.randn(32, 8)
    replaced = calibrated(model, [x], qconfig_mapping=qt.QConfigMapping().set_module_name("b", W2))
    result = qt.debug.sensitivity(replaced, error_of(model, x), mode=mode, higher_is_better=False, progress=False)
    on = {name: name if mode == "one" else "abc".replace(name, "") for name in "abc"}
    expected = {name: by_hand(model, x, on[name]) for name in "abc"}
    assert {row.name: row.score for row in result.rows} == pytest.approx(expected, rel=1e-5)
    again = qt.quant_modules.replace(model, result.to_qconfig_mapping(keep_float=1), backend="tensorrt10")
    lines = {line.name: (line.status, line.reason) for line in qt.quantization_report(again).layers}
    assert lines.pop(result.rows[0].name) == ("float", "float: the qconfig_mapping leaves it in float")
    assert {status for status, _ in lines.values()} == {"quantized"}
    assert (
        qt.prepare(model, x[:1], qconfig_mapping=result.to_qconfig_mapping(keep_float=1), backend="tensorrt10").plan
        is not None
    )


def test_by_type_of_a_replaced_model() -> None:
    far, near = ways()
    replaced = calibrated(Branches().eval(), [far, near])
    by_type = states_of(replaced, "one", by="type")
    conv = "torch.nn.modules.conv:Conv2d"
    parts = ("weight_quantizer", "input_quantizer")
    assert by_type[conv] == {f"{name}.{part}" for name in ("model", "near") for part in parts}
    result = qt.debug.sensitivity(replaced, lambda m: 1.0, by="type", progress=False)
    kinds = {row.name: row.kind for row in result.rows}
    assert kinds == {
        conv: "conv",
        "torch.nn.modules.conv:ConvTranspose2d": "conv_transpose",
        "torch.nn.modules.linear:Linear": "linear",
    }
    mapping = result.to_qconfig_mapping(keep_float=1)  # Conv2d, by its name
    left = {
        line.name
        for line in qt.quantization_report(
            qt.quant_modules.replace(Branches(), mapping, backend="tensorrt10")
        ).left_float
    }
    assert left == {"model", "near", "bn"}


def test_quantizers_that_a_module_calls_itself_have_no_row() -> None:
    """No config reaches them; they are on with all, and off with each alone."""
    replaced = calibrated(Loops(), [of_loops()])
    assert set(states_of(replaced, "one")) == {"first", "head"}
    assert all("ours" in on for on in states_of(replaced, "all_but_one").values())
    own = nn.Sequential(qt.TensorQuantizer(qt.QuantSpec()))
    qt.calibrate(own, [torch.ones(2)], progress=False)
    with pytest.raises(ValueError, match="no layer is quantized by a config"):
        qt.debug.sensitivity(own, lambda m: 1.0, progress=False)


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_a_converted_model_has_the_same_scores(three, route: str) -> None:
    model, prepared, x = three
    if route == "replace":
        prepared = calibrated(model, [x])
    error = error_of(model, x)
    results = [
        qt.debug.sensitivity(m, error, higher_is_better=False, progress=False) for m in (prepared, qt.convert(prepared))
    ]
    assert results[0] == results[1]
    converted = qt.convert(prepared)
    before = error(converted)
    qt.debug.sensitivity(converted, error, progress=False)
    assert error(converted) == before > 0


def of_drops(*drops: float) -> qt.debug.Sensitivity:
    rows = tuple(qt.debug.Row(f"layer{i}", "linear", 90 - drop, drop) for i, drop in enumerate(drops))
    return qt.debug.Sensitivity(90.0, 80.0, rows, "layer", {})


@pytest.mark.parametrize(
    ("budget", "kept"), [(0.0, 3), (0.9, 3), (1.0, 2), (2.9, 2), (3.0, 1), (7.9, 1), (8.0, 0), (100, 0)]
)
def test_a_budget_bounds_the_sum_of_the_others(budget: float, kept: int) -> None:
    mapping = of_drops(5.0, 2.0, 1.0).to_qconfig_mapping(budget=budget)
    expected = qt.QConfigMapping()
    for i in range(kept):
        expected.set_module_name(f"layer{i}", None)
    assert mapping == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "pass exactly one of keep_float and budget, got keep_float=None and budget=None"),
        ({"keep_float": 1, "budget": 1.0}, "got keep_float=1 and budget=1.0"),
        ({"keep_float": 3}, r"keep_float must lie in \[0, 2\], got 3"),
        ({"keep_float": -1}, r"keep_float must lie in \[0, 2\], got -1"),
        ({"budget": -0.1}, "budget must be finite and at least 0, got -0.1"),
        ({"budget": math.nan}, "got nan"),
    ],
)
def test_a_mapping_asked_for_wrongly(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        of_drops(2.0, 1.0).to_qconfig_mapping(**options)


def test_table_and_data(three) -> None:
    model, prepared, x = three
    result = qt.debug.sensitivity(prepared, error_of(model, x), higher_is_better=False, progress=False)
    head, _, titles, first, *_ = str(result).splitlines()
    assert head.startswith("score 0 in float, ")
    assert titles.split() == ["layer", "kind", "score", "drop"]
    assert first.split()[:2] == ["b", "linear"]
    data = json.loads(json.dumps(result.to_dict()))
    assert data["rows"][0] == {
        "name": "b",
        "kind": "linear",
        "score": result.rows[0].score,
        "drop": result.rows[0].drop,
    }
    assert data["quantized_score"] == result.quantized_score


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"by": "node"}, ValueError, "unknown by 'node'"),
        ({"mode": "ones"}, ValueError, "unknown mode 'ones'; did you mean 'one'"),
        ({"names": ["bb"]}, ValueError, "unknown layer 'bb'"),
        ({"evaluate": lambda m: math.nan}, ValueError, "a finite score, got nan with all layers quantized"),
        ({"evaluate": lambda m: math.inf}, ValueError, "a finite score, got inf"),
        ({"evaluate": lambda m: None}, TypeError, "evaluate must return a number, got NoneType"),
        ({"evaluate": lambda m: torch.zeros(2)}, TypeError, "evaluate must return a number, got Tensor"),
    ],
)
def test_bad_arguments(three, options: dict[str, object], error: type[Exception], words: str) -> None:
    arguments = {"evaluate": lambda m: 1.0, "progress": False, **options}
    with pytest.raises(error, match=words):
        qt.debug.sensitivity(three[1], **arguments)


def test_a_score_that_is_not_finite_is_named_with_its_layer(three) -> None:
    _, prepared, _ = three
    scores = iter([1.0, 1.0, 1.0, math.nan])
    with pytest.raises(ValueError, match="got nan with 'b' alone quantized"):
        qt.debug.sensitivity(prepared, lambda m: next(scores), progress=False)


def test_models_without_ranges_or_switches(three) -> None:
    model, _, _ = three
    calls = []
    with pytest.raises(RuntimeError, match="has no range yet: call qtoolkit.calibrate"):
        qt.debug.sensitivity(qt.prepare(model, backend="tensorrt10"), lambda m: calls.append(m) or 1.0, progress=False)
    assert not calls
    with pytest.raises(ValueError, match="the model has no quantizers to switch; pass the result of qtoolkit.prepare"):
        qt.debug.sensitivity(model, lambda m: 1.0, progress=False)
    with pytest.raises(TypeError, match="sensitivity: model must be a torch.nn.Module, got str"):
        qt.debug.sensitivity("model", lambda m: 1.0)


# ---- the configs of the other layers


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_the_other_layers_keep_their_specs_and_observers(route: str) -> None:
    """By default the mapping extends the one that the model was prepared with."""
    torch.manual_seed(0)
    model, x = Three().eval(), torch.randn(32, 8)
    activation = qt.QuantSpec(observer="histogram", observer_args={"method": "percentile"})
    given = qt.QConfigMapping().set_global(qt.QConfig(activation, qt.QuantSpec(bits=4, axis=0)))

    def quantized(mapping: qt.QConfigMapping) -> nn.Module:
        made = (
            qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt10")
            if route == "prepare"
            else qt.quant_modules.replace(model, mapping, backend="tensorrt10")
        )
        qt.calibrate(made, [x], progress=False)
        return made

    result = qt.debug.sensitivity(quantized(given), error_of(model, x), higher_is_better=False, progress=False)
    mapping = result.to_qconfig_mapping(keep_float=1)
    assert given == qt.QConfigMapping().set_global(qt.QConfig(activation, qt.QuantSpec(bits=4, axis=0))), "not changed"
    specs = [quantizer.spec for quantizer in qt.quantizers_of(quantized(mapping)).values()]
    assert len(specs) == 4
    assert {spec.observer_args.get("method") for spec in specs if spec.bits == 8} == {"percentile"}
    assert {spec.bits for spec in specs} == {4, 8}
    assert result.to_qconfig_mapping(keep_float=0, base=qt.QConfigMapping()) == qt.QConfigMapping()


def test_a_type_is_no_function_of_a_model(three: tuple[nn.Module, nn.Module, Tensor]) -> None:
    with pytest.raises(TypeError, match=r"^sensitivity: evaluate must be a function of a model, got <class 'int'>\."):
        qt.debug.sensitivity(three[1], int, progress=False)
