"""Trained ends, soft staircases, levels and intervals: values and gradients against the oracle, and against autograd."""

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests import reference
from tests.cases import CHANNELS, FLOATS, LAYOUTS, Channels, assert_same, floats, leaf, name_of, scales, zero_points
from tests.reference_shaped import Shaped

native = torch.ops.qtoolkit
LEVELS = [0, 1, 2, 3, 4, 6, 8, 10]
KINDS = {
    "clip": {"shape": "clip", "qmin": -9, "qmax": 8},
    "affine": {"shape": "clip", "qmin": 0, "qmax": 15, "zero_point": True},
    "soft": {"shape": "clip", "qmin": -8, "qmax": 8, "steepness": True},
    "soft_affine": {"shape": "clip", "qmin": -8, "qmax": 7, "zero_point": True, "steepness": True},
    "levels": {"shape": "levels", "qmin": -10, "qmax": 10, "levels": LEVELS},
    "unsigned_levels": {"shape": "levels", "qmin": 0, "qmax": 10, "levels": LEVELS},
    "interval": {"shape": "interval", "qmin": -1, "qmax": 1, "zero_point": True},
    "unsigned_interval": {"shape": "interval", "qmin": 0, "qmax": 1, "zero_point": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def arguments(kind: str, x: Tensor, channels: Channels, dtype: torch.dtype = torch.float32) -> dict:
    """Scales such that elements lie inside and on both sides."""
    count, given = channels.count(x), dict(KINDS[kind])
    is_interval = given["shape"] == "interval"
    scale = (scales(count) * (15 if is_interval else 1)).to(dtype)
    zero_point = scale * 1.5 if is_interval else zero_points(count).clamp(given["qmin"], given["qmax"]).to(dtype)
    steepness = torch.linspace(1.1, 7.6, count).to(dtype)
    given["zero_point"] = zero_point if given.get("zero_point") else None
    given["steepness"] = steepness if given.get("steepness") else None
    return {"scale": scale, **given, **channels.named}


def tensors_of(given: dict) -> tuple[Tensor | None, ...]:
    return given["scale"], given["zero_point"], given["steepness"]


def check(x: Tensor, grad: Tensor, given: dict) -> None:
    wanted = Shaped(x, **given)
    y = native.fake_quant_shaped(x, **given)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert_same(y + 0, reference.tensor(wanted.values(), x.dtype) + 0)
    wanted.check(native.fake_quant_shaped_backward(grad, x, **given), grad, tensors_of(given))


CUTS = {"tensor": Channels(), "first": Channels(0), "features": Channels(1), "last": Channels(-1)}
CUTS |= {"groups": Channels(1, 2), "blocks": Channels(1, 1, 3)}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("cut", CUTS)
@kinds
def test_every_kind(kind: str, cut: str, dtype: torch.dtype) -> None:
    x = floats(dtype)(4, 6, 5, 37)
    check(x, floats(dtype, 7)(*x.shape), arguments(kind, x, CUTS[cut]))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@kinds
def test_every_layout(kind: str, layout: str) -> None:
    x = LAYOUTS[layout](floats(torch.float32))
    for cut in (c for c in CHANNELS.values() if c.fit(x)):
        check(x, floats(torch.float32, 7)(*x.shape), arguments(kind, x, cut))


@kinds
def test_many_elements_on_many_threads(kind: str) -> None:
    """More than one segment of a sum; twice the same bits."""
    x, grad = floats(torch.float32)(3, 6, 50_000), floats(torch.float32, 7)(3, 6, 50_000)
    for cut in (Channels(), Channels(1)):
        given = arguments(kind, x, cut)
        check(x, grad, given)
        runs = [native.fake_quant_shaped_backward(grad, x, **given) for _ in range(2)]
        for one, two in zip(*runs, strict=True):
            assert torch.equal(one, two)


@kinds
def test_infinities_and_nan(kind: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e30, -1e30, 0.3])
    given = arguments(kind, x, Channels())
    y = native.fake_quant_shaped(x, **given)
    assert_same(y + 0, reference.tensor(Shaped(x, **given).values(), x.dtype) + 0)
    dx, *sums = native.fake_quant_shaped_backward(torch.ones_like(x), x, **given)
    assert bool((dx[[0, 1, 2, 5, 6]] == 0).all())
    if given["shape"] != "levels":  # as of LSQ's scale, the sum has what is no number
        assert all(bool(t.isfinite().all()) for t in sums)


def composed(x: Tensor, scale: Tensor, zero_point: Tensor | None, steepness: Tensor | None, kind: str) -> Tensor:
    """A differentiable function with the gradients of the op, between places where those jump."""
    given = KINDS[kind]
    low, high = given["qmin"], given["qmax"]
    if given["shape"] == "interval":
        place = ((x.abs() if low < 0 else x) - zero_point) / (2 * scale) + 0.5
        inside = torch.where(place < 0, 0.0, torch.where(place > 1, 1.0, place))
        return inside * (x.sign() if low < 0 else 1)
    if given["shape"] == "levels":
        quotient = x / scale
        inside = torch.where(quotient < low, float(low), torch.where(quotient > high, float(high), quotient))
        level = native.fake_quant_shaped(x.detach(), scale.detach(), None, None, low, high, "levels", LEVELS)
        return ((level / scale).detach() + inside - inside.detach()) * scale
    zero = 0 if zero_point is None else zero_point
    ends = (low - zero) * scale, (high - zero) * scale
    inner = x
    if steepness is not None:
        step, quotient = scale.detach(), x / scale.detach()
        place = quotient - quotient.detach().floor() - 0.5
        inner = step * (torch.tanh(steepness * place) / torch.tanh(steepness / 2)) / 2 + (x - step * place).detach()
    return torch.where(x < ends[0], ends[0], torch.where(x > ends[1], ends[1], inner))


@kinds
def test_gradients_are_those_of_a_composition(kind: str) -> None:
    x = leaf(floats(torch.float64)(2000))
    given = arguments(kind, x, Channels(), torch.float64)
    names = [name for name in ("scale", "zero_point", "steepness") if given[name] is not None]
    for name in names:
        given[name] = leaf(given[name])
    weights = floats(torch.float64, 7)(2000)
    inputs = [x, *(given[name] for name in names)]
    found = torch.autograd.grad((native.fake_quant_shaped(x, **given) * weights).sum(), inputs)
    parts = (x, given["scale"], given["zero_point"], given["steepness"])
    wanted = torch.autograd.grad((composed(*parts, kind) * weights).sum(), inputs)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11 * float(want.abs().max() + 1))
        assert bool((want != 0).any())


@pytest.mark.parametrize("steepness", [1e-3, 0.5, 7.6, 80.0, 2000.0])
def test_slopes_of_any_steepness_are_those_of_tanh(steepness: float) -> None:
    x = torch.linspace(-3.49, 3.49, 4001, dtype=torch.float64)
    k, scale = torch.tensor(steepness, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    dx, _, _, dk = native.fake_quant_shaped_backward(torch.ones_like(x), x, scale, None, k, -4, 4, "clip")
    place = x - x.floor() - 0.5
    wanted = k * (1 - torch.tanh(k * place) ** 2) / torch.tanh(k / 2) / 2
    torch.testing.assert_close(dx, wanted, rtol=1e-11, atol=1e-11 * steepness)
    assert bool(dk.isfinite())


def test_clipped_values_are_those_of_fake_quant() -> None:
    for dtype in FLOATS:
        x = floats(dtype)(4, 6, 70)
        grid = (scales(6), zero_points(6), -8, 7, 1)
        assert_same(ops.fake_quant_clipped(x, *grid), ops.fake_quant(x, *grid))


def test_only_the_input_and_the_parameters_are_saved() -> None:
    x, scale = leaf(floats(torch.float32)(1000)), leaf(scales(1))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.fake_quant_clipped(x * 1, scale, steepness=torch.ones(1))
    assert sorted(t.numel() for t in kept) == [1, 1, 1000]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shape": "clipped"}, "shape must be 'clip', 'levels' or 'interval', got 'clipped'."),
        ({"levels": [0, 1]}, "shape='clip' takes no levels; leave it out."),
        ({"shape": "levels"}, "shape='levels' needs levels, got None."),
        ({"shape": "levels", "levels": [0, 8], "zero_point": torch.ones(1)}, "shape='levels' takes no zero_point"),
        ({"shape": "interval"}, "shape='interval' needs zero_point, got None."),
        ({"shape": "levels", "levels": [0, 8], "steepness": torch.ones(1)}, "shape='levels' takes no steepness"),
        ({"steepness": torch.ones(2)}, "steepness must have 1 element if axis is None, got 2"),
        ({"steepness": torch.ones(1), "axis": 0}, None),
        ({"scale": torch.ones(4), "steepness": torch.ones(1), "axis": 0}, "steepness must have as many elements as"),
        ({"shape": "levels", "levels": [0, 3, 3, 8]}, "levels must ascend, got [0, 3, 3, 8]."),
        ({"shape": "levels", "levels": [1, 8]}, "levels must begin at 0 and end at qmax, below 2^24, got [1, 8]"),
        ({"shape": "levels", "levels": [0]}, "levels must be 2 to 32 magnitudes, got 1."),
        ({"shape": "levels", "levels": [0, 8], "qmin": -3}, "qmin must be 0 or -qmax with shape='levels', got qmin=-3"),
        ({"qmin": 9}, "qmin must be smaller than qmax, got qmin=9 and qmax=8."),
    ],
)
def test_errors_are_sentences(change: dict, sentence: str | None) -> None:
    x = torch.ones(4)
    plain = {"scale": torch.ones(1), "zero_point": None, "steepness": None, "qmin": -8, "qmax": 8, "shape": "clip"}
    calls = {
        "fake_quant_shaped": native.fake_quant_shaped,
        "fake_quant_shaped_backward": lambda t, **given: native.fake_quant_shaped_backward(t, t, **given),
    }
    for op, call in calls.items():
        if sentence is None:
            call(x, **plain | change)
            continue
        with pytest.raises(ValueError) as raised:
            call(x, **plain | change)
        assert str(raised.value).startswith(f"{op}: {sentence}")


def test_double_backward_says_what_to_do() -> None:
    x, scale = leaf(floats(torch.float32)(9)), leaf(scales(1))
    (dx,) = torch.autograd.grad(ops.fake_quant_clipped(x, scale).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="^fake_quant_shaped: double backward is not supported; compute the"):
        dx.sum().backward()
