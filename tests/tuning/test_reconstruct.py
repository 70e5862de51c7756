"""reconstruct(): rounding that is learned, against exhaustive search and independent formulas; what it leaves behind."""

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import qtoolkit as qt
from qtoolkit.nn import QuantWeighted
from qtoolkit.tuning.rounding.grids import CodeGrid, SoftRounding
from qtoolkit.tuning.rounding.learning import _beta
from tests import nets
from tests.copies import made_once
from tests.tuning.nets import LAYERS, W3, W3A4, Residual, correlated, prepared_on


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantWeighted)}
    return {name: CodeGrid(layer, name).nearest() for name, layer in layers.items()}


def small(steps: int = 100, **kwargs: object) -> dict[str, object]:
    return {"steps": steps, "learning_rate": 5e-2, "progress": False, **kwargs}


@made_once
def residual(train: bool = False, qconfig: qt.QConfig = W3A4) -> tuple[qt.graph.QuantizedGraphModule, list[Tensor]]:
    torch.manual_seed(0)
    model = nets.trained(Residual(), 8, 3, 8, 8).train(train)
    torch.manual_seed(1)
    batches = [torch.randn(8, 3, 8, 8) for _ in range(3)]
    return prepared_on(model, batches, qconfig), batches


# ---- the rounding


@pytest.mark.parametrize("kind", LAYERS)
def test_codes_move_by_one_at_most_and_the_error_falls(kind: str) -> None:
    make, shape, axis = LAYERS[kind]
    model = nn.Sequential(make()).eval()
    x = correlated(*shape)
    qconfig = qt.QConfig(activation=None, weight=qt.QuantSpec(bits=3, axis=axis))
    prepared = prepared_on(model, [x], qconfig)
    grid = CodeGrid(prepared.get_submodule("0"), "0")
    lower, nearest = torch.floor(grid.weight / grid.steps), grid.nearest()
    before = (prepared(x) - model(x)).square().mean().detach()
    report = qt.tuning.reconstruct(prepared, [x], **small(400))
    after = (prepared(x) - model(x)).square().mean().detach()
    codes = codes_of(prepared)["0"]
    assert after < before
    assert bool((codes != nearest).any())
    assert bool(((codes == grid.clamp(lower)) | (codes == grid.clamp(lower + 1))).all())
    torch.testing.assert_close(report.units[0].before, float(before), rtol=1e-4, atol=0)
    torch.testing.assert_close(report.units[0].after, float(after), rtol=1e-4, atol=0)


@pytest.mark.slow
def test_it_comes_near_to_exhaustive_search() -> None:
    better, gain = [], []
    for _ in range(6):
        model = nn.Sequential(nn.Linear(8, 1, bias=False)).eval()
        x = torch.randn(64, 8) @ torch.randn(8, 8)
        prepared = prepared_on(model, [x])
        grid = CodeGrid(prepared.get_submodule("0"), "0")
        lower = torch.floor(grid.weight / grid.steps)
        ups = torch.tensor(list(itertools.product([0.0, 1.0], repeat=8)))
        errors = (((grid.clamp(lower + ups) * grid.steps - grid.weight) @ x.T) ** 2).mean(1)
        unit = qt.tuning.reconstruct(prepared, [x], **small(400)).units[0]
        assert float(errors.min()) <= unit.after * 1.001
        better.append(float((errors < unit.after * 0.999).float().mean()))
        gain.append(unit.after / unit.before)
    assert sum(better) / 6 < 0.05  # of the 256 roundings
    assert sum(gain) / 6 < 0.8


def test_soft_weights_start_at_the_float_weights() -> None:
    prepared = prepared_on(nn.Sequential(nn.Linear(12, 6)).eval(), [torch.randn(4, 12)])
    grid = CodeGrid(prepared.get_submodule("0"), "0")
    rounding = SoftRounding(grid)
    torch.testing.assert_close(rounding(), grid.weight, rtol=1e-5, atol=1e-6)
    soft = 1.2 * torch.sigmoid(rounding.variable) - 0.1
    h = soft.clamp(0, 1)
    torch.testing.assert_close(rounding.undecided(3.0), (1 - (2 * h - 1).abs() ** 3).sum())
    (gradient,) = torch.autograd.grad(rounding().sum(), rounding.variable)
    share = torch.sigmoid(rounding.variable)
    inside = (soft >= 0) & (soft <= 1) & (rounding.down + h <= grid.quantizer.spec.qmax)
    expected = torch.where(inside, grid.steps * 1.2 * share * (1 - share), 0)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_regularizer_is_annealed() -> None:
    assert _beta(0.1) is None
    assert [_beta(0.2), _beta(0.6), _beta(1.0)] == pytest.approx([20.0, 11.0, 2.0])


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("bits", [3, 8])
def test_state_dict_conversion_and_further_modes_keep_the_codes(train: bool, bits: int) -> None:
    # In training mode the batch norms are linked: the quantizer sees the weight times gamma / std.
    qconfig = qt.QConfig(activation=qt.QuantSpec(), weight=qt.QuantSpec(bits=bits, axis=0))
    prepared, batches = residual(train, qconfig)
    fresh = copy.deepcopy(prepared)
    report = qt.tuning.reconstruct(prepared, batches, **small(40))
    assert any(unit.moved for unit in report.units)
    assert prepared.training is train
    codes = codes_of(prepared)
    moved = {name for unit in report.units if not unit.kept for name in unit.layers}
    assert all(layer.weight_quantizer.follows == (name not in moved) for name, layer in layers_of(prepared))
    prepared.train()
    prepared.eval()
    assert all(torch.equal(new, codes[name]) for name, new in codes_of(prepared).items())
    fresh.load_state_dict(prepared.state_dict())
    fresh.eval()
    assert all(torch.equal(new, codes[name]) for name, new in codes_of(fresh).items())
    converted = qt.convert(prepared)
    for name, layer in layers_of(converted):
        grid = layer.weight_quantizer
        stored = grid.codes(layer.weight).float() - (0 if grid.zero_point is None else grid.zero_point)
        assert torch.equal(stored, codes[name]), name
    torch.testing.assert_close(converted(batches[0]), prepared(batches[0]), rtol=1e-4, atol=1e-5)


def layers_of(model: nn.Module) -> list[tuple[str, QuantWeighted]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, QuantWeighted)]


@pytest.mark.parametrize("spec", [
    qt.QuantSpec(bits=3), qt.QuantSpec(bits=3, signed=False, symmetric=False, axis=0),
    qt.QuantSpec(bits=3, axis=1, group_size=4), qt.QuantSpec(bits=3, axis=0, quantizer="lsq"),
    qt.QuantSpec(bits=3, axis=0, pow2_scale=True), qt.QuantSpec(bits=2, narrow=True, axis=0),
    qt.QuantSpec(bits=3, axis=0, observer="histogram", observer_args={"method": "mse"}),
], ids=lambda spec: spec.describe())  # fmt: skip
def test_every_integer_grid(spec: qt.QuantSpec) -> None:
    model, x = nn.Sequential(nn.Linear(12, 6)).eval(), correlated(64, 12)
    prepared = prepared_on(model, [x], qt.QConfig(activation=None, weight=spec))
    quantizer = prepared.get_submodule("0").weight_quantizer
    scale = quantizer.scale.clone()
    grid = CodeGrid(prepared.get_submodule("0"), "0")
    assert torch.equal(grid.values(grid.nearest()), quantizer(prepared.get_submodule("0").weight))
    report = qt.tuning.reconstruct(prepared, [x], **small(400))
    assert report.units[0].after < report.units[0].before
    assert torch.equal(quantizer.scale, scale)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_half_precision_holds_eight_bits(dtype: torch.dtype, bits: int) -> None:
    x = correlated(32, 12).to(dtype)
    model = nn.Sequential(nn.Linear(12, 6)).eval().to(dtype)
    prepared = prepared_on(model, [x], qt.QConfig(activation=None, weight=qt.QuantSpec(bits=bits, axis=0)))
    unit = qt.tuning.reconstruct(prepared, [x], **small(400)).units[0]
    assert unit.after < unit.before


def test_a_weight_too_coarse_for_its_codes_says_so() -> None:
    model = nn.Sequential(nn.Linear(12, 6)).eval().to(torch.bfloat16)
    w16 = qt.QConfig(activation=None, weight=qt.QuantSpec(bits=16, axis=0))
    grid = CodeGrid(prepared_on(model, [torch.randn(2, 12).bfloat16()], w16).get_submodule("0"), "0")
    with pytest.raises(ValueError, match=r"layer '0': its torch\.bfloat16 weight is too coarse for 16"):
        grid.store(grid.clamp(grid.nearest() + 1))


# ---- methods


def test_blocks_are_found_without_names() -> None:
    prepared, batches = residual()
    report = qt.tuning.reconstruct(prepared, batches, "adaround", "block", **small(2))
    assert [unit.name for unit in report.units] == ["stem.0", "stage.0", "stage.1", "neck", "head"]
    assert report.units[1].layers == ("stage.0.conv1", "stage.0.conv2")
    assert report.units[3].layers == ("neck.0", "neck.2")


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("method", ["brecq", "qdrop"])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_scales_of_activations_are_learned(method: str, quantizer: str) -> None:
    activation = qt.QuantSpec(bits=4, signed=False, symmetric=False, quantizer=quantizer)
    prepared, batches = residual(qconfig=qt.QConfig(activation, W3.weight))
    scales = {name: q.scale.clone() for name, q in qt.quantizers_of(prepared).items() if not q.of_weight}
    report = qt.tuning.reconstruct(prepared, batches, method, **small(60))
    changed = [name for name, q in qt.quantizers_of(prepared).items() if name in scales and q.scale != scales[name]]
    assert len(changed) > len(scales) / 2  # but those of units that nothing improves
    assert sum(unit.after for unit in report.units) < sum(unit.before for unit in report.units)
    assert all(unit.after <= unit.before for unit in report.units)


@pytest.mark.slow
def test_learned_scales_of_activations_stay_in_the_first_steps_of_training() -> None:
    """Fixed ranges follow the data there: the first step of an optimizer put back what calibration had found."""
    prepared, batches = residual(train=True)
    qt.tuning.reconstruct(prepared, batches, **small(40, method="brecq", scale_learning_rate=2e-2))
    learned = {name: q for name, q in qt.quantizers_of(prepared).items() if not q.of_weight and not q.following}
    assert len(learned) > 2
    before = {name: q.scale.clone() for name, q in learned.items()}
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-4)
    for batch in batches:
        prepared(batch).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(q.scale, before[name]) for name, q in learned.items())


def test_adaround_leaves_the_scales_of_activations() -> None:
    prepared, batches = residual()
    scales = {name: q.scale.clone() for name, q in qt.quantizers_of(prepared).items()}
    qt.tuning.reconstruct(prepared, batches, **small(5))
    assert all(torch.equal(q.scale, scales[name]) for name, q in qt.quantizers_of(prepared).items())


def test_an_error_never_rises() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)).eval(), torch.randn(16, 4)
    prepared = prepared_on(model, [x])
    with torch.no_grad():  # already on the grid: nothing can be better
        layer = prepared.get_submodule("0")
        layer.weight.copy_(layer.weight_quantizer(layer.weight))
    prepared.eval()  # the range follows the weight
    before = copy.deepcopy(prepared.state_dict())
    report = qt.tuning.reconstruct(prepared, [x], steps=20, learning_rate=10.0, progress=False)
    assert report.units[0].kept
    assert report.units[0].moved == 0
    assert "kept" in str(report)
    torch.testing.assert_close(dict(prepared.state_dict()), dict(before), rtol=0, atol=0)


def test_a_network_with_integer_biases() -> None:
    model = nets.trained(nets.ConvNet(), 8, 3, 8, 8).eval()
    batches = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    qconfig = qt.QConfig(activation=qt.QuantSpec(signed=False, symmetric=False), weight=W3.weight)
    prepared = prepared_on(model, batches, qconfig, "onnxruntime")
    report = qt.tuning.reconstruct(prepared, batches, "brecq", **small())
    assert sum(unit.after for unit in report.units) < sum(unit.before for unit in report.units)


# ---- what it leaves behind


@pytest.mark.slow
def test_the_exported_file_has_the_codes(tmp_path) -> None:
    prepared, batches = residual(qconfig=qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=4, axis=0)))
    qt.tuning.reconstruct(prepared, batches, **small(20))
    result = qt.export_onnx(qt.convert(prepared), batches[0], tmp_path / "model.onnx")
    assert "weights:          0 of" in str(result)


@pytest.mark.slow
def test_equal_seeds_give_equal_bits_wherever_the_cache_is() -> None:
    prepared, batches = residual()
    models = [copy.deepcopy(prepared) for _ in range(3)]
    for model, seed, gib in zip(models, (0, 0, 1), (2.0, 0.0, 2.0), strict=True):
        torch.rand(3)  # the global generator has no influence
        qt.tuning.reconstruct(model, iter(batches), "qdrop", seed=seed, cache_gib=gib, **small(20))
    first, second, third = (dict(model.state_dict()) for model in models)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert any(not torch.equal(third[name], first[name]) for name in first)


def test_resuming_equals_an_uninterrupted_run(tmp_path) -> None:
    prepared, batches = residual()
    whole, part = copy.deepcopy(prepared), copy.deepcopy(prepared)
    expected = qt.tuning.reconstruct(whole, batches, "qdrop", **small(20))
    before = copy.deepcopy(part.state_dict())
    part.stem[0].weight.requires_grad_(False)
    part.train()
    handle = part.get_submodule("head").register_forward_hook(lambda *args: None)
    runs = 0

    def interrupted(model: nn.Module, batch: Tensor) -> object:
        nonlocal runs
        runs += 1
        if runs > 2 * 6 + 1:
            raise KeyboardInterrupt
        return model(batch)

    with pytest.raises(KeyboardInterrupt):
        qt.tuning.reconstruct(part, batches, "qdrop", forward=interrupted, path=tmp_path / "run", **small(20))
    torch.testing.assert_close(dict(part.state_dict()), dict(before), rtol=0, atol=0)
    assert part.training
    assert not part.stem[0].weight.requires_grad
    assert part.stage[0].conv1.weight.requires_grad
    assert all(parameter.grad is None for parameter in part.parameters())
    assert all(not quantizer._forward_hooks for quantizer in qt.quantizers_of(part).values())
    assert handle.id in part.get_submodule("head")._forward_hooks
    part.eval()
    assert len(list((tmp_path / "run").iterdir())) == 2
    report = qt.tuning.reconstruct(part, batches, "qdrop", path=tmp_path / "run", **small(20))
    assert report == expected == pickle.loads(pickle.dumps(report))
    torch.testing.assert_close(dict(part.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)
    with pytest.raises(
        ValueError, match=r"unit-0000\.pt' belongs to another model, calibration or set of options; pass"
    ):
        qt.tuning.reconstruct(prepared, batches, "qdrop", path=tmp_path / "run", **small(21))


def test_batches_of_every_form() -> None:
    prepared, batches = residual()
    forms = [
        ([{"x": x} for x in batches], None),
        ([(x,) for x in batches], None),
        ([(x, "label") for x in batches], lambda model, batch: model(batch[0]).sum()),
    ]
    models = [copy.deepcopy(prepared) for _ in forms]
    reports = [
        qt.tuning.reconstruct(model, data, forward=forward, **small(5))
        for model, (data, forward) in zip(models, forms, strict=True)
    ]
    assert reports[0] == reports[1] == reports[2]


# ---- layers that cannot be taken


class Awkward(nn.Module):
    """A layer that is called twice, a weight with two owners, and a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.a, self.b = (nn.Linear(4, 4) for _ in range(4))
        self.b.weight = self.a.weight
        self.unused, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(self.a(self.twice(torch.relu(self.twice(self.first(x)))))))


def awkward() -> qt.graph.QuantizedGraphModule:
    mapping = qt.QConfigMapping().set_global(W3).set_module_name("last", None)
    prepared = qt.prepare(Awkward().eval(), torch.randn(2, 4), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared, [torch.randn(8, 4)], progress=False)
    return prepared


def test_what_is_left_out_is_in_the_report() -> None:
    report = qt.tuning.reconstruct(awkward(), [torch.randn(8, 4)], **small(5))
    assert [unit.name for unit in report.units] == ["first"]
    assert report.skipped["twice"] == "the model calls it 2 times, so it has several outputs"
    assert report.skipped["a"] == "it shares its weight with 'b'"
    assert report.skipped["last"] == "its weight is not quantized; give it a config in the QConfigMapping"
    assert "twice: skipped: the model calls it 2 times" in str(report)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["twice"], r"layer 'twice' is not supported: the model calls it 2 times.*supported layers are first"),
        (["unused"], r"layer 'unused' is not supported: the graph does not call it"),
        (["b"], r"layer 'b' is not supported: it shares its weight with 'a'"),
        (["frist"], r"unknown layer of reconstruct 'frist'; did you mean 'first'\?"),
    ],
)
def test_a_layer_that_cannot_be_taken(layers: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        qt.tuning.reconstruct(awkward(), [torch.randn(8, 4)], layers=layers, **small(5))


def test_a_weight_that_a_function_reads_too_is_left_out() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(nn.functional.linear(x, self.b.weight)))

    report = qt.tuning.reconstruct(prepared_on(Net().eval(), [torch.randn(8, 4)]), [torch.randn(8, 4)], **small(5))
    assert [unit.name for unit in report.units] == ["a"]
    assert report.skipped["b"] == "it shares its weight with 'linear'"


def test_a_pruned_layer_says_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    prune.l1_unstructured(model[0], "weight", 0.5)
    report = qt.tuning.reconstruct(prepared_on(model, [torch.randn(8, 4)]), [torch.randn(8, 4)], **small(5))
    assert report.skipped["0"].startswith("its weight is computed from other tensors")


def test_attentions_and_functions_are_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.weight, self.fc = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x, x, x, need_weights=False)[0]
            return self.fc(nn.functional.linear(x, self.weight))

    x = torch.randn(8, 5, 4)
    report = qt.tuning.reconstruct(prepared_on(Net().eval(), [x]), [x], **small(5))
    assert [unit.name for unit in report.units] == ["fc"]
    assert report.skipped["attention"].startswith("it is of kind 'attention'; only convolutions")
    assert report.skipped["linear"].startswith("it is a function with a weight argument; use a layer")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), ["0", "1", "2", "3", "4", "5"]),
        (
            lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), nn.Linear(4, 4)),
            ["0", "1"],
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4), TwoBranches(2), nn.Linear(4, 4)), ["0", "1.layers", "2"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), TwoBranches(13), nn.Linear(4, 4)), None),
    ],
)
def test_more_blocks(make: Callable[[], nn.Module], names: list[str] | None) -> None:
    x = torch.randn(4, 4)
    report = qt.tuning.reconstruct(prepared_on(make().eval(), [x]), [x], granularity="block", **small(2))
    if names is None:  # too many layers between two branches: each by itself
        assert all(len(unit.layers) == 1 for unit in report.units)
        assert len(report.units) == 15
    else:
        assert [unit.name for unit in report.units] == names


class TwoBranches(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = torch.relu(layer(y))
        return x + y


def test_nothing_to_learn() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    e4m3 = qt.QConfig(activation=None, weight=qt.QuantSpec(format="e4m3", axis=None))
    prepared = prepared_on(model, [torch.randn(8, 4)], e4m3)
    with pytest.raises(
        ValueError, match=r"no layer with a weight that can be rounded \(0: its weight is quantized as e4m3"
    ):
        qt.tuning.reconstruct(prepared, [torch.randn(8, 4)])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"method": "adarond"}, ValueError, "unknown method of reconstruct 'adarond'; did you mean 'adaround'"),
        ({"granularity": "net"}, ValueError, "unknown granularity of reconstruct 'net'"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"cache_gib": -1}, ValueError, "cache_gib must not be negative"),
        ({"layers": "0"}, TypeError, r"layers must be a sequence of names, got the string '0'; write \['0'\]"),
        ({"batches": []}, ValueError, "reconstruct: batches must hold at least one batch, got none"),
        ({"batches": torch.ones(2, 4)}, TypeError, "reconstruct: batches must be an iterable of batches"),
        (
            {"batches": [torch.ones(2, 5)]},
            ValueError,
            "the model does not run on a batch up to '0': .*qtoolkit.calibrate",
        ),
        ({"batches": [(torch.ones(2, 4), 1, 1)]}, TypeError, "reconstruct: a batch does not match"),
        ({"forward": lambda model, batch: batch}, ValueError, r"forward\(model, batch\) must call the given model"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    prepared = prepared_on(nn.Sequential(nn.Linear(4, 4)).eval(), [torch.randn(8, 4)])
    before = copy.deepcopy(prepared.state_dict())
    with pytest.raises(error, match=words):
        qt.tuning.reconstruct(prepared, **{"batches": [torch.ones(2, 4)], "progress": False, **arguments})
    torch.testing.assert_close(dict(prepared.state_dict()), dict(before), rtol=0, atol=0)


def test_models_without_ranges_or_without_a_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    x = [torch.randn(8, 4)]
    with pytest.raises(TypeError, match=r"must be the result of qtoolkit\.prepare.*qtoolkit\.tuning\.gptq"):
        qt.tuning.reconstruct(qt.quant_modules.replace(model, backend="tensorrt10"), x)
    for layers in (["0"], ["1"]):
        with pytest.raises(RuntimeError, match="has no range yet: call qtoolkit.calibrate"):
            qt.tuning.reconstruct(qt.prepare(model, backend="tensorrt10"), x, layers=layers, **small(2))


# ---- errors weighted by a loss


@made_once
def with_labels(count: int = 3) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], qt.graph.QuantizedGraphModule]:
    torch.manual_seed(0)
    model = nets.trained(Residual(), 8, 3, 8, 8).eval()
    torch.manual_seed(1)
    batches = [(torch.randn(8, 3, 8, 8), torch.randint(5, (8,))) for _ in range(count)]
    return model, batches, prepared_on(model, [x for x, _ in batches], W3)


def cross_entropy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def of_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0])


def test_the_error_is_weighted_by_the_squared_gradient_of_the_loss() -> None:
    model, batches, prepared = with_labels()
    quantized, total, count = copy.deepcopy(prepared), 0.0, 0
    for x, labels in batches:
        first = model.stage[0](model.stem(x)).detach().requires_grad_()  # plain torch, without the graph
        (gradient,) = torch.autograd.grad(cross_entropy(rest(model, first), (x, labels)), first)
        kept: list[Tensor] = []
        handle = quantized.stage[1].register_forward_pre_hook(lambda m, args, kept=kept: kept.append(args[0]))
        quantized(x)
        handle.remove()
        total += float((gradient * (kept[0] - first)).detach().double().square().sum())
        count += first.numel()
    layers = ["stage.0.conv1", "stage.0.conv2"]
    options = {"layers": layers, "forward": of_images, "granularity": "block", "loss": cross_entropy, **small(60)}
    report = qt.tuning.reconstruct(prepared, batches, "brecq", **options)
    assert [unit.layers for unit in report.units] == [tuple(layers)]
    assert report.units[0].before == pytest.approx(total / count, rel=1e-3)
    assert report.units[0].after < report.units[0].before


def rest(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(model.neck(model.stage[1](x)).mean((2, 3)))


@pytest.mark.slow
def test_elements_without_influence_on_the_loss_do_not_count() -> None:
    w2 = qt.QConfig(activation=None, weight=qt.QuantSpec(bits=2, axis=None))

    def error_of_first(seed: int, **options: object) -> float:
        torch.manual_seed(seed)
        model, x = nn.Sequential(nn.Sequential(nn.Linear(16, 3), nn.Linear(3, 12))).eval(), correlated(64, 16)
        prepared = prepared_on(model, [x], w2)
        qt.tuning.reconstruct(prepared, [x], "brecq", **small(150), **options)
        return float((prepared(x) - model(x))[:, 0].detach().square().mean())

    weighted = sum(error_of_first(seed, loss=lambda output, batch: output[:, 0].sum()) for seed in range(5))
    assert weighted < 0.7 * sum(error_of_first(seed) for seed in range(5))


def test_a_unit_without_influence_on_the_loss_stays_rounded_to_nearest() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    x = correlated(64, 16)
    prepared = prepared_on(TwoHeads().eval(), [x])
    report = qt.tuning.reconstruct(prepared, [x], loss=lambda output, batch: output[0].square().sum(), **small())
    first, second = report.units
    assert first.after < first.before
    assert second.kept
    assert second.before == second.after == 0


def test_without_labels_the_importance_is_that_of_the_kl_divergence() -> None:
    from qtoolkit.tuning.rounding.unit_samples import Importance
    from qtoolkit.tuning.runs.batches import Batches

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    x = torch.randn(1, 4).expand(40_000, 4)
    prepared = prepared_on(model, [x[:1]], W3)
    qt.disable_quantization(prepared).apply()
    nodes = {str(node.target): node for node in prepared.graph.nodes if node.op == "call_module"}
    hidden, logits = torch.relu(model[0](x[0])), model(x[0])

    def divergence(z: Tensor) -> Tensor:
        return nn.functional.kl_div(model[2](z).log_softmax(0), logits.log_softmax(0), reduction="sum", log_target=True)

    second = torch.autograd.functional.hessian(divergence, hidden.detach()).diagonal()
    ((found,),) = Importance(prepared, [nodes["1"]], "kl", seed=0).of(Batches([x], None, "reconstruct"), x)
    torch.testing.assert_close(found.mean(0), second, rtol=0.05, atol=1e-4)


def test_units_that_were_learned_with_other_switches_are_refused(tmp_path) -> None:
    prepared, batches = residual()
    weights_alone = copy.deepcopy(prepared)
    qt.disable_quantization(weights_alone, "activations")
    qt.tuning.reconstruct(weights_alone, batches, path=tmp_path, **small(2))
    with pytest.raises(ValueError, match="belongs to another model, calibration or set of options"):
        qt.tuning.reconstruct(prepared, batches, path=tmp_path, **small(2))


def test_a_weighted_reconstruction_goes_on_after_an_interruption(tmp_path) -> None:
    _, batches, prepared = with_labels()
    options = {"forward": of_images, "loss": "kl", "cache_gib": 0.0, **small(10)}
    whole, resumed, other = prepared, copy.deepcopy(prepared), copy.deepcopy(prepared)
    qt.tuning.reconstruct(whole, batches, "brecq", **options, path=tmp_path)
    for file in sorted(tmp_path.iterdir())[2:]:
        file.unlink()
    qt.tuning.reconstruct(resumed, batches, "brecq", **options, path=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(codes_of(whole).values(), codes_of(resumed).values(), strict=True))
    with pytest.raises(ValueError, match="belongs to another model, calibration or set of options"):
        qt.tuning.reconstruct(other, batches, "brecq", **{**options, "loss": cross_entropy}, path=tmp_path)


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        ("fisher", TypeError, "loss must be a function of the output and the batch, 'kl' or None, got 'fisher'"),
        (lambda output, batch: output.detach().sum(), ValueError, r"got a tensor of shape \(\) without a gradient"),
        (lambda output, batch: output, ValueError, r"must return a tensor with one element .* got a tensor of shape"),
        (lambda output, batch: 1.0, ValueError, "got a float; write a function such as lambda output, batch"),
    ],
)
def test_a_loss_that_gives_no_gradient(loss: object, error: type[Exception], words: str) -> None:
    _, batches, prepared = with_labels(1)
    before = codes_of(prepared)
    with pytest.raises(error, match=words):
        qt.tuning.reconstruct(prepared, batches, "brecq", forward=of_images, loss=loss, **small(2))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), codes_of(prepared).values(), strict=True))


def test_no_logits_for_the_divergence() -> None:
    _, batches, prepared = with_labels(1)
    with pytest.raises(ValueError, match=r"loss='kl' needs models that return logits as one tensor .* got a list"):
        qt.tuning.reconstruct(prepared, batches, forward=lambda m, b: [m(b[0])], loss="kl", **small(2))
