import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import qtoolkit as qt
from qtoolkit.quantizers.spec_ops import grid_of_range

LSQ = qt.QuantSpec(quantizer="lsq")


def calibrated(spec: qt.QuantSpec, x: torch.Tensor, **kwargs: object) -> qt.TensorQuantizer:
    quantizer = qt.TensorQuantizer(spec, **kwargs)
    with qt.calibrating(quantizer):
        quantizer(x)
    return quantizer


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_grid_covers_the_range_and_holds_zero(bits: int, signed: bool, symmetric: bool) -> None:
    spec = qt.QuantSpec(bits=bits, signed=signed, symmetric=symmetric)
    lo, hi = torch.tensor([-1.0, 0.5, 0.0, -3.0]), torch.tensor([2.0, 4.0, 7.0, -1.0])
    if symmetric and not signed:
        lo, hi = lo.clamp(min=0), hi.clamp(min=0.1)
    scale, zero_point = grid_of_range(lo, hi, spec)
    z = torch.zeros_like(scale) if zero_point is None else zero_point
    assert torch.equal(z, z.round())
    assert ((spec.qmin <= z) & (z <= spec.qmax)).all()
    slack = scale / 2 * 1.0001 + 1e-6
    assert ((spec.qmax - z) * scale >= hi.clamp(min=0) - slack).all()
    assert ((spec.qmin - z) * scale <= lo.clamp(max=0) + slack).all()


def test_symmetric_scale_is_amax_over_qmax() -> None:
    scale, zero_point = grid_of_range(torch.tensor(-3.0), torch.tensor(1.0), qt.QuantSpec())
    assert zero_point is None
    assert scale == np.float32(3) / np.float32(127)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_width_maps_zero_to_zero(symmetric: bool) -> None:
    quantizer = calibrated(qt.QuantSpec(symmetric=symmetric), torch.zeros(5))
    assert torch.isfinite(quantizer.scale)
    assert quantizer.scale > 0
    assert torch.equal(quantizer(torch.zeros(3)), torch.zeros(3))


def test_pow2_scales_are_powers_of_two() -> None:
    quantizer = calibrated(qt.QuantSpec(axis=0, pow2_scale=True), torch.randn(6, 9), channels=6)
    assert torch.equal(torch.log2(quantizer.scale), torch.log2(quantizer.scale).round())


def test_moving_average_takes_the_first_range_whole() -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(observer="moving_average", observer_args={"momentum": 0.25}))
    with qt.calibrating(quantizer):
        quantizer(torch.tensor([-4.0, 8.0]))
        quantizer(torch.tensor([0.0, 4.0]))
    assert (quantizer.observer.lo, quantizer.observer.hi) == (-3.0, 7.0)


def test_observing_and_quantizing_together_moves_the_scale() -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec())
    quantizer.observing = True
    for amax in (1.0, 4.0, 2.0):
        quantizer(torch.tensor([amax]))
    assert quantizer.amax == pytest.approx(4.0)


def test_no_range_yet_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="has no range yet: call qtoolkit.calibrate"):
        qt.TensorQuantizer(qt.QuantSpec())(torch.ones(3))
    with pytest.raises(RuntimeError, match="'act' saw no data"):
        qt.TensorQuantizer(qt.QuantSpec(), name="act").to_grid()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_scales_are_refused_where_they_are_set(bad: float) -> None:
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        qt.Grid(torch.tensor([1.0, bad]), None, qt.QuantSpec(axis=0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_named(bad: float) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(), name="conv1")
    with pytest.raises(ValueError, match="'conv1' has observed NaN or infinities"), qt.calibrating(quantizer):
        quantizer(torch.tensor([1.0, bad]))


def test_amax_sets_and_reads_the_range() -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(axis=0), channels=2)
    quantizer.amax = torch.tensor([1.0, 2.0])
    assert torch.allclose(quantizer.amax, torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="amax must not be negative"):
        quantizer.amax = -1.0
    with pytest.raises(ValueError, match="must have 1 or 2 elements, got 3"):
        quantizer.amax = torch.ones(3)


def test_learned_scale_trains_to_the_best_grid_and_stays_positive() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 1)
    quantizer = qt.TensorQuantizer(qt.QuantSpec(bits=3, quantizer="lsq"))
    quantizer.set_range(x.min(), x.max())  # a start far from the best grid
    before = (quantizer(x) - x).square().mean().item()
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        (quantizer(x) - x).square().mean().backward()
        optimizer.step()
    after = (quantizer(x) - x).square().mean().item()
    assert after < 0.6 * before
    # The best uniform 8-level grid for a normal distribution has a step near 0.586 (Max, 1960); ours is not centred.
    assert 0.45 < quantizer.scale.item() < 0.75


@pytest.mark.parametrize("value", [-3.0, -0.5, 0.0, 0.2])
def test_a_scale_is_positive_for_every_value_of_its_parameter(value: float) -> None:
    quantizer = calibrated(LSQ, torch.tensor([1.0]))
    (parameter,) = quantizer.parameters()
    start = float(quantizer.scale)
    with torch.no_grad():
        parameter.fill_(value)
    assert quantizer.scale == pytest.approx(start * max(abs(value), 2**-24))
    assert quantizer.to_grid().scale == quantizer.scale
    quantizer(torch.tensor([1e9])).backward()  # clamped: a larger scale gives a larger value
    assert parameter.grad.isfinite().all()
    assert (parameter.grad > 0) == (value >= 0)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
def test_adam_changes_small_and_large_scales_by_the_same_factor(optimizer: str) -> None:
    """1e-3 is more than the scale of a usual weight in 8 bits, which it must not drive through zero."""
    torch.manual_seed(0)
    small, large = (calibrated(LSQ, factor * torch.randn(1000)) for factor in (1e-3, 1e3))
    for quantizer, factor in ((small, 1e-3), (large, 1e3)):
        before = float(quantizer.scale)
        trained = getattr(torch.optim, optimizer)(quantizer.parameters(), 1e-3)
        for _ in range(20):
            trained.zero_grad()
            quantizer(factor * torch.randn(1000)).div(factor).square().sum().backward()
            trained.step()
        assert 0.95 * before < quantizer.scale < before


@pytest.mark.parametrize(
    "how", [{}, {"momentum": 0.9}, {"weight_decay": 0.01}, {"momentum": 0.9, "nesterov": True}], ids=str
)
def test_sgd_trains_the_scale_as_if_it_were_the_parameter(how: dict) -> None:
    torch.manual_seed(0)
    start = torch.tensor([0.02, 0.3, 2.0], dtype=torch.float64)
    scale, ratio = start.clone().requires_grad_(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    of_scale, of_ratio = torch.optim.SGD([scale], 1e-3, **how), torch.optim.SGD([ratio], 1e-3, **how)
    for _ in range(20):
        target = torch.randn(3, dtype=torch.float64)
        for optimizer, value in ((of_scale, lambda: scale), (of_ratio, lambda: qt.ops.positive_scale(start, ratio))):
            optimizer.zero_grad()
            (value() * target).square().sum().backward()
            optimizer.step()
    assert not torch.allclose(scale, start, rtol=1e-3)
    torch.testing.assert_close(qt.ops.positive_scale(start, ratio), scale)


@pytest.mark.parametrize("axis", [None, 0])
def test_a_learned_quantizer_has_no_nan_parameter_before_data(axis: int | None) -> None:
    model = nn.Sequential(qt.TensorQuantizer(qt.QuantSpec(axis=axis, quantizer="lsq")))
    assert all(p.isfinite().all() and p.dim() == 1 for p in model.parameters())  # fully_shard takes no 0-d parameters
    assert model[0].scale.isnan().all()


def gradient_of_scale(quantizer: qt.TensorQuantizer) -> torch.Tensor:
    """Return the gradient of the scale from that of the parameter; see `qtoolkit.ops.positive_scale`."""
    start, rate = (quantizer.get_buffer(name) for name in ("_scale", "_rate"))
    return quantizer.get_parameter("_relative_scale").grad.reshape(start.shape) * start / rate


def gradient_factor(quantizer: qt.TensorQuantizer, x: torch.Tensor) -> float:
    """Return the factor by which forward multiplied the gradient of the scale."""
    quantizer.zero_grad()
    quantizer(x).sum().backward()
    spec, scale = quantizer.spec, quantizer.scale.requires_grad_()
    found = gradient_of_scale(quantizer)
    qt.ops.fake_quant(x, scale, None, spec.qmin, spec.qmax, spec.axis).sum().backward()
    return float(found.sum() / scale.grad.sum())


PER_TENSOR, PER_CHANNEL = (qt.QuantSpec(bits=4, axis=axis, quantizer="lsq") for axis in (None, 0))


@pytest.mark.parametrize(
    ("spec", "of_weight", "sharing"),
    [
        (PER_CHANNEL, True, 36),
        (PER_TENSOR, True, 8 * 36),
        (PER_CHANNEL, False, 36),
        (PER_TENSOR, False, 36),
        (qt.QuantSpec(bits=4, axis=1, quantizer="lsq"), False, 9),
        (qt.QuantSpec(bits=4, axis=1, quantizer="lsq"), True, 8 * 9),
    ],
)
def test_lsq_gradient_factor_is_the_papers(spec: qt.QuantSpec, of_weight: bool, sharing: int) -> None:
    x = torch.randn(8, 4, 3, 3)
    quantizer = calibrated(spec, x, of_weight=of_weight)
    assert gradient_factor(quantizer, x) == pytest.approx((sharing * 7) ** -0.5, rel=1e-4)


def test_lsq_gradient_factor_is_that_of_each_batch() -> None:
    quantizer = calibrated(PER_TENSOR, torch.randn(4, 10))
    quantizer(torch.empty(0, 10))  # the first batch in training
    for shape, features in (((16, 10), 10), ((3, 10), 10), ((4, 40), 40), ((4, 10), 10)):
        assert gradient_factor(quantizer, torch.randn(shape)) == pytest.approx((features * 7) ** -0.5, rel=1e-4)


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize(("dynamic", "sizes"), [(None, [4, 4, 4]), (True, [4, 5, 6, 9])])
def test_lsq_compiles_once(axis: int | None, dynamic: bool | None, sizes: list[int]) -> None:
    torch._dynamo.reset()
    quantizer = calibrated(qt.QuantSpec(bits=4, axis=axis, quantizer="lsq"), torch.randn(2, 3, 4, 4))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(quantizer, fullgraph=True, backend=counter, dynamic=dynamic)
    scale = quantizer.get_parameter("_relative_scale")
    for size in sizes:
        x = torch.randn(2, 3, size, size)
        (found,), (wanted,) = (torch.autograd.grad(f(x).square().sum(), [scale]) for f in (compiled, quantizer))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert counter.frame_count == 1


GROUPED = qt.QuantSpec(bits=4, axis=1, group_size=8)


def group_ranges(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = weight.unflatten(1, (-1, 8))
    return blocks.amin(2), blocks.amax(2)


@pytest.mark.parametrize("shape", [(6, 24), (4, 16, 3, 3)])
def test_each_group_has_the_scale_of_its_own_range(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    quantizer = calibrated(GROUPED, weight)
    lo, hi = group_ranges(weight)
    wanted = torch.maximum(-lo, hi) / 7
    assert torch.equal(quantizer.scale, wanted)
    wide = wanted.repeat_interleave(8, 1)
    assert torch.equal(quantizer(weight), (weight / wide).round().clamp(-8, 7) * wide)
    affine = calibrated(qt.QuantSpec(bits=4, symmetric=False, axis=1, group_size=8), weight)
    assert affine.zero_point is not None
    assert affine.zero_point.shape == wanted.shape
    assert (affine(weight) - weight).abs().le(affine.scale.repeat_interleave(8, 1)).all()


def test_moving_average_of_groups() -> None:
    first, second = torch.randn(2, 6, 24)
    quantizer = qt.TensorQuantizer(
        qt.QuantSpec(axis=1, group_size=8, observer="moving_average", observer_args={"momentum": 0.25})
    )
    with qt.calibrating(quantizer):
        quantizer(first)
        quantizer(second)
    for found, a, b in zip(quantizer.observer.range(), group_ranges(first), group_ranges(second), strict=True):
        torch.testing.assert_close(found, 0.75 * a + 0.25 * b, rtol=1e-6, atol=1e-6)


def test_lsq_gradient_of_groups_is_the_papers() -> None:
    weight = torch.randn(6, 24)
    quantizer = calibrated(qt.QuantSpec(bits=4, axis=1, group_size=8, quantizer="lsq"), weight)
    with torch.no_grad():
        quantizer.get_parameter("_relative_scale").mul_(0.7)
    grad = torch.randn(6, 24)
    quantizer(weight).backward(grad)
    scale = quantizer.scale.repeat_interleave(8, 1)
    codes = (weight / scale).round()
    terms = torch.where((codes >= -8) & (codes <= 7), codes - weight / scale, codes.clamp(-8, 7))
    wanted = (grad * terms).unflatten(1, (3, 8)).sum(2) * (8 * 7) ** -0.5
    torch.testing.assert_close(gradient_of_scale(quantizer), wanted, rtol=1e-4, atol=1e-5)


def test_groups_survive_state_dict_copies_casts_and_freezing() -> None:
    weight = torch.randn(4, 16, 3, 3)
    for spec in (GROUPED, qt.QuantSpec(axis=1, group_size=8, symmetric=False, quantizer="lsq")):
        one, other = calibrated(spec, weight), qt.TensorQuantizer(spec)
        other.load_state_dict(one.state_dict())
        grid = one.to_grid()
        assert grid.scale.shape == (4, 2, 3, 3)
        assert torch.equal(grid.values(grid.codes(weight)), one(weight))
        for copied in (other, copy.deepcopy(one), pickle.loads(pickle.dumps(one)), grid, nn.Sequential(one).half()):
            assert torch.equal(copied(weight), grid(weight))


def test_amax_of_groups_in_their_shape_or_in_a_row() -> None:
    quantizer = qt.TensorQuantizer(GROUPED, channels=(6, 3))
    for amax in (torch.rand(6, 3), torch.rand(18), torch.tensor(2.0)):
        quantizer.amax = amax
        torch.testing.assert_close(quantizer.amax, amax.expand(18).view(6, 3) if amax.dim() < 2 else amax)


@pytest.mark.parametrize("shape", [(), (5,), (0, 3)])
def test_odd_shapes_have_a_gradient_factor(shape: tuple[int, ...]) -> None:
    quantizer = calibrated(LSQ, torch.ones(4))
    x = torch.ones(shape, requires_grad=True)
    quantizer(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(shape))


def test_switches_restore_after_an_error() -> None:
    quantizer = calibrated(qt.QuantSpec(), torch.ones(3))
    with pytest.raises(KeyError), qt.disable_quantization(quantizer), qt.calibrating(quantizer):
        raise KeyError
    assert (quantizer.observing, quantizer.quantizing) == (False, True)
    qt.disable_quantization(quantizer).apply()
    assert not quantizer.quantizing
    with qt.enable_quantization(quantizer):
        assert quantizer.quantizing
    assert not quantizer.quantizing


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_copies_compute_the_same(copy_of, quantizer: str) -> None:
    x = torch.randn(3, 7)
    one = calibrated(qt.QuantSpec(axis=1, symmetric=False, quantizer=quantizer), x, channels=7)
    assert torch.equal(copy_of(one)(x), one(x))


def test_state_dict_carries_the_range() -> None:
    x = torch.randn(3, 7)
    one, other = calibrated(qt.QuantSpec(axis=0), x), qt.TensorQuantizer(qt.QuantSpec(axis=0))
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(x), one(x))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casting_a_model_keeps_the_scales_precision(cast: str) -> None:
    x = torch.randn(9)
    quantizer = calibrated(qt.QuantSpec(symmetric=False, quantizer="lsq"), x)
    scale = quantizer.scale
    model = getattr(nn.Sequential(quantizer), cast)()
    assert quantizer.scale.dtype in (torch.float32, torch.float64)
    assert torch.equal(quantizer.scale.float(), scale)
    assert model(getattr(x, cast)()).dtype == getattr(x, cast)().dtype


def test_compiles_without_graph_breaks() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    for spec in (qt.QuantSpec(), qt.QuantSpec(axis=1, quantizer="lsq"), qt.QuantSpec(symmetric=False)):
        quantizer = calibrated(spec, x.detach())
        compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), quantizer(x))


def test_frozen_form_equals_the_quantizer() -> None:
    x = torch.randn(5, 4)
    for spec in (qt.QuantSpec(axis=1, bits=4), qt.QuantSpec(symmetric=False, signed=False)):
        quantizer = calibrated(spec, x)
        grid = quantizer.to_grid()
        assert torch.equal(grid(x), quantizer(x))
        assert torch.equal(grid.values(grid.codes(x)), grid(x))
        assert not list(grid.parameters())


@pytest.mark.parametrize("facts", [{"of_weight": True}, {"inserted": True}, {}])
def test_copies_pickles_and_frozen_forms_keep_what_a_quantizer_is_for(facts: dict[str, bool]) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(), name="conv.weight_quantizer", **facts)
    quantizer.amax = 1.0
    for one in (quantizer, quantizer.to_grid()):
        for same in (one, copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert (same.of_weight, same.inserted) == ("of_weight" in facts, "inserted" in facts)
            assert (same.name, same.group, same.quantizing) == ("conv.weight_quantizer", 1, True)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_range_upside_down_is_an_error(symmetric: bool) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(axis=0, symmetric=symmetric), channels=2, name="conv1")
    quantizer.set_range(-1.0, 3.0)
    scale = quantizer.scale
    for lo, hi in ((5.0, -5.0), (torch.tensor([-1.0, 5.0]), torch.tensor([1.0, -5.0]))):
        with pytest.raises(
            ValueError, match=r"quantizer 'conv1': lo must not be above hi, got the range \[5, -5\]; pass"
        ):
            quantizer.set_range(lo, hi)
    assert torch.equal(quantizer.scale, scale)
    quantizer.set_range(torch.tensor([-1.0, 2.0]), 2.0)
    assert quantizer.scale.shape == (2,)


@pytest.mark.parametrize("name", ["0.weight_quantizer", "activation_quantizers.input_1"])
def test_a_spec_with_other_codes_is_refused_where_it_would_take_effect(name: str) -> None:
    x = torch.rand(8, 4)
    model = qt.prepare(nn.Sequential(nn.Linear(4, 4)).eval(), x, backend="tensorrt")
    qt.calibrate(model, [x], progress=False)
    quantizer = model.get_submodule(name)
    quantizer.spec = replace(quantizer.spec, observer="moving_average")
    qt.convert(model)
    quantizer.spec = replace(quantizer.spec, bits=4)
    words = rf"quantizer '{name}': its spec was changed \(made for bits=8, in the model bits=4\), .* by QConfigMapping"
    for use in (qt.convert, lambda m: qt.calibrate(m, [x], progress=False)):
        with pytest.raises(ValueError, match=words):
            use(model)


@pytest.mark.parametrize("name", ["bits", "num_bits", "bitwidth", "signed", "symmetric", "narrow", "axis"])
def test_options_of_the_spec_cannot_be_set_where_they_would_do_nothing(name: str) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(), name="act")
    quantizer.amax = 1.0
    for each in (quantizer, quantizer.to_grid()):
        with pytest.raises(
            AttributeError, match=rf"quantizer 'act': {name} cannot be set on a quantizer, got 4; pass a QuantSpec"
        ):
            setattr(each, name, 4)
        assert not hasattr(each, name)


@pytest.mark.parametrize("kind", ["fixed", "lsq"])
@pytest.mark.parametrize("name", ["scale", "zero_point"])
def test_a_part_of_the_grid_cannot_be_set_alone(kind: str, name: str) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(quantizer=kind), name="act")
    quantizer.amax = 12.7
    with pytest.raises(
        AttributeError, match=rf"quantizer 'act': {name} cannot be set alone, .* call set_range\(lo, hi\)"
    ):
        setattr(quantizer, name, torch.tensor(0.5))
    assert float(quantizer.amax) == pytest.approx(12.7)
