"""Each quantizer's values and gradients against the formula of its paper (formulas.py), in double precision."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qtoolkit as qt
from qtoolkit.quantizers.kinds.apot import LEVELS
from qtoolkit.quantizers.spec_ops import per_element
from tests import reference
from tests.quantizers import formulas

SHAPE = (6, 4, 5)
SHARING = {
    "tensor": ({}, 1),
    "channel": ({"axis": 0}, 1),
    "features": ({"axis": 1}, 1),
    "groups of channels": ({"axis": 1}, 2),
    "blocks": ({"axis": 1, "group_size": 2}, 1),
}
Quantities = dict[str, Tensor]  # the learned quantities of a formula, in double precision, each of one dimension


class Case:
    """A quantizer with a range, its input, and its parameters at values that are not those of the start."""

    def __init__(self, sharing: str, of_weight: bool, **fields: Any) -> None:
        fields, self.group = {**fields, **SHARING[sharing][0]}, SHARING[sharing][1]
        self.spec = qt.QuantSpec(**fields)
        axis = fields.get("axis")
        self.channel, self.count = reference.channels(SHAPE, axis, self.group, self.spec.block_size)
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SHAPE, generator=generator, dtype=torch.float64) + (0 if self.spec.signed else 0.7)
        shape = self.spec.scale_shape(SHAPE, self.group)
        self.quantizer = qt.TensorQuantizer(self.spec, shape, self.group, of_weight=of_weight).double()
        hi = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.6
        lo = -hi if self.spec.symmetric and self.spec.signed else torch.where(hi > 1, -0.4 * hi, torch.zeros_like(hi))
        self.quantizer.set_range(lo, hi)
        with torch.no_grad():
            for parameter in self.quantizer.parameters():
                parameter.mul_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 0.3 + 0.7)

    def spread(self, values: Tensor) -> Tensor:
        return values.reshape(-1)[torch.from_numpy(self.channel)]

    def compare(self, formula: Callable[..., Tensor], learned: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Compare with a formula of x and the learned quantities, each given with its unit: parameter = quantity / unit.

        The gradient of a ratio is that of the quantity, divided by the unit and multiplied by the rate of training.
        """
        x, wanted_x = (self.x.clone().requires_grad_() for _ in range(2))
        weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        y = self.quantizer(x)
        leaves = [quantity.detach().clone().reshape(-1).requires_grad_() for quantity, _ in learned.values()]
        wanted = formula(wanted_x, *map(self.spread, leaves))
        torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
        (y * weights).sum().backward()
        (wanted * weights).sum().backward()
        torch.testing.assert_close(x.grad, wanted_x.grad, rtol=1e-9, atol=1e-12)
        for (name, (_, unit)), leaf in zip(learned.items(), leaves, strict=True):
            rate = self.rate if name.startswith("_relative") else torch.ones_like(unit)
            gradient = self.quantizer.get_parameter(name).grad.reshape(-1) * (unit / rate).reshape(-1)
            torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            assert (leaf.grad != 0).any(), name

    @property
    def start(self) -> Tensor:
        return self.quantizer._scale

    @property
    def rate(self) -> Tensor:
        """What `FromStart` promises: 1 for a weight that was never seen, else the square of start to base."""
        base = 2 * (2 * np.pi) ** -0.5 / self.spec.qmax**0.5
        return torch.ones_like(self.start) if self.quantizer.of_weight else (self.start / base).square()

    def ratio(self, name: str) -> Tensor:
        return self.quantizer.get_parameter(name).detach().reshape(self.start.shape)

    def factor(self) -> float:
        features = np.prod(SHAPE) if self.quantizer.of_weight else np.prod(SHAPE[1:])
        return float(max(features // self.count, 1) * self.spec.qmax) ** -0.5


@pytest.fixture(params=SHARING)
def sharing(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_lsq(sharing: str, bits: int, signed: bool, symmetric: bool) -> None:
    case = Case(sharing, True, bits=bits, signed=signed, symmetric=symmetric, quantizer="lsq")
    zero = case.quantizer.zero_point
    z, ends = 0.0 if zero is None else case.spread(zero), (case.spec.qmin, case.spec.qmax)
    scale = case.start * case.ratio("_relative_scale")
    case.compare(lambda x, s: formulas.lsq(x, s, z, *ends, case.factor()), {"_relative_scale": (scale, case.start)})


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("signed", [True, False])
def test_lsq_plus(sharing: str, bits: int, signed: bool) -> None:
    case = Case(sharing, True, bits=bits, signed=signed, symmetric=False, quantizer="lsq_plus")
    scale, offset = (case.start * case.ratio(name) for name in ("_relative_scale", "_relative_offset"))
    case.compare(
        lambda x, s, beta: formulas.lsq_plus(x, s, beta, case.spec.qmin, case.spec.qmax, case.factor()),
        {"_relative_scale": (scale, case.start), "_relative_offset": (offset, case.start)},
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("signed", [True, False])
def test_tqt(sharing: str, bits: int, signed: bool) -> None:
    case = Case(sharing, True, bits=bits, signed=signed, quantizer="tqt")
    one = torch.ones_like(case.start)
    threshold = case.ratio("_log2_threshold")
    case.compare(lambda x, t: formulas.tqt(x, t, case.spec.qmin, case.spec.qmax), {"_log2_threshold": (threshold, one)})
    mantissa, _ = torch.frexp(case.quantizer.scale)
    assert bool((mantissa == 0.5).all())


@pytest.mark.parametrize("amax", [4.0, 4.0001, 3.0, 0.5, 1e-6])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_threshold_of_tqt_starts_at_the_largest_magnitude(amax: float, bits: int) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(bits=bits, quantizer="tqt"))
    quantizer.amax = amax
    assert quantizer.scale == 2 ** np.ceil(np.log2(amax)) / 2 ** (bits - 1)
    other = qt.TensorQuantizer(quantizer.spec)
    other.load_grid(quantizer.scale, None)
    assert other.scale == quantizer.scale


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("signed", [True, False])
def test_pact(sharing: str, bits: int, signed: bool) -> None:
    case = Case(sharing, False, bits=bits, signed=signed, quantizer="pact")
    unit = case.start * case.spec.qmax
    case.compare(
        lambda x, alpha: formulas.pact(x, alpha, case.spec.qmin, case.spec.qmax),
        {"_relative_bound": (unit * case.ratio("_relative_bound"), unit)},
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("signed", [True, False])
def test_learned_range(sharing: str, bits: int, signed: bool) -> None:
    case = Case(sharing, False, bits=bits, signed=signed, symmetric=False, quantizer="learned_range")
    unit = case.start * (case.spec.qmax - case.spec.qmin)
    low, high = (unit * case.ratio(name) for name in ("_relative_low", "_relative_high"))
    case.compare(
        lambda x, lo, hi: formulas.learned_range(x, lo, hi, case.spec.qmin, case.spec.qmax),
        {"_relative_low": (low, unit), "_relative_high": (high, unit)},
    )


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dsq(sharing: str, bits: int, symmetric: bool) -> None:
    case = Case(sharing, True, bits=bits, symmetric=symmetric, quantizer="dsq")
    spec, alpha = case.spec, case.ratio("_alpha")
    steps, one = spec.qmax - spec.qmin, torch.ones_like(case.start)
    if symmetric:
        unit = case.start * spec.qmax
        bound = unit * case.ratio("_relative_bound")
        case.compare(
            lambda x, b, a: formulas.dsq(x, b * (spec.qmin / spec.qmax), b, a, steps),
            {"_relative_bound": (bound, unit), "_alpha": (alpha, one)},
        )
        return
    unit = case.start * steps
    scale, zero = case.quantizer.scale, case.quantizer.zero_point

    def formula(x: Tensor, low: Tensor, high: Tensor, a: Tensor) -> Tensor:
        nudged = (case.spread((code - zero) * scale) for code in (spec.qmin, spec.qmax))
        return formulas.dsq(x, *map(formulas.ste, nudged, (low, high)), a, steps)

    names = ("_relative_low", "_relative_high")
    case.compare(formula, {**{n: (unit * case.ratio(n), unit) for n in names}, "_alpha": (alpha, one)})


def test_dsq_is_hard_forward_and_nearly_hard_backward_for_a_small_alpha() -> None:
    spec = qt.QuantSpec(bits=2, quantizer="dsq", quantizer_args={"alpha": 0.001})
    quantizer = qt.TensorQuantizer(spec)
    quantizer.amax = 1.0
    x = torch.tensor([-0.05, 0.05, 0.5, 0.501, 0.95], requires_grad=True)
    y = quantizer(x)
    assert y.tolist() == [0, 0, 0, 1, 1]
    y.sum().backward()
    assert (x.grad[[0, 1, 4]] < 0.1).all()
    assert (x.grad[[2, 3]] > 3).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 7])
def test_dorefa_weights(sharing: str, bits: int) -> None:
    case = Case(sharing, True, bits=bits, quantizer="dorefa")

    def largest(t: Tensor) -> Tensor:
        channel = torch.from_numpy(case.channel)
        found = torch.stack([t[channel == c].max() for c in range(case.count)])
        return found[channel]

    case.compare(lambda x: formulas.dorefa(x, bits, largest), {})
    codes = case.quantizer(case.x) * (2**bits - 1)
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-12)
    assert set(codes.round().abs().remainder(2).flatten().tolist()) == {1.0}


def test_dorefa_activations() -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(bits=3, signed=False, quantizer="dorefa"))
    quantizer.amax = 5.0
    x = torch.linspace(-0.5, 1.5, 41, dtype=torch.float64, requires_grad=True)
    y = quantizer.double()(x)
    clamped = x.detach().clamp(0, 1)
    torch.testing.assert_close(y.detach(), (clamped * 7).round() / 7, rtol=0, atol=1e-7)
    y.sum().backward()
    assert torch.equal(x.grad, ((x >= 0) & (x <= 1)).double())


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("magnitude", [1, 2, 3, 4, 5])
def test_apot(sharing: str, magnitude: int, signed: bool) -> None:
    bits = magnitude + signed
    if bits < 2:
        return
    wanted = torch.tensor(formulas.powers_of_two(magnitude), dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(LEVELS[magnitude]).double() / LEVELS[magnitude][-1], wanted)
    case = Case(sharing, True, bits=bits, signed=signed, quantizer="apot")
    unit = case.start * case.spec.qmax
    case.compare(
        lambda x, alpha: formulas.apot(x if signed else x.clamp(min=0), alpha, wanted),
        {"_relative_bound": (unit * case.ratio("_relative_bound"), unit)},
    )


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("gamma", [{}, {"gamma": 0.7}, {"gamma": 1.3, "learn_gamma": True}], ids=str)
@pytest.mark.parametrize("signed", [True, False])
def test_qil(sharing: str, bits: int, gamma: dict[str, Any], signed: bool) -> None:
    if gamma and not signed:
        return
    case = Case(sharing, True, bits=bits, signed=signed, quantizer="qil", quantizer_args=gamma)
    with torch.no_grad():
        case.quantizer.get_parameter("_relative_distance").mul_(0.6)  # an interval that does not begin at 0
    unit = case.start * (case.spec.qmax / 2)
    names = ("_relative_center", "_relative_distance")
    learned = {name: (unit * case.ratio(name), unit) for name in names}
    exponent = torch.full_like(case.start, gamma.get("gamma", 1.0))
    if "learn_gamma" in gamma:
        learned["_gamma"] = (case.ratio("_gamma"), torch.ones_like(unit))

    def formula(x: Tensor, c: Tensor, d: Tensor, g: Tensor | None = None) -> Tensor:
        g = case.spread(exponent) if g is None else g
        return formulas.qil(x if signed else x.clamp(min=0), c, d, g, case.spec.qmax)

    case.compare(formula, learned)


@pytest.mark.parametrize("sharing", SHARING)
def test_values_of_channels_broadcast(sharing: str) -> None:
    case = Case(sharing, True)
    values = torch.rand(case.spec.scale_shape(SHAPE, case.group))
    assert torch.equal(per_element(values, case.x, case.spec, case.group).expand(SHAPE), case.spread(values))
