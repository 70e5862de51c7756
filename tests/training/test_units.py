"""A change of units changes nothing: the input, or a tensor in the middle, times a constant that a batch norm divides out.

The float model then has the same function and the same trajectory under SGD, up to the eps of its batch norms, which is tiny
here. Times a power of two, every product is exact, and so is the comparison.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.quantizers.table import OBSERVERS, QUANTIZERS

STEPS, RATE = 20, 5e-4
LEARNED = [name for name, kind in QUANTIZERS.items() if kind.LEARNED]
AFFINE = ("lsq_plus", "learned_range")  # they train both bounds, or the zero point
OF_WEIGHTS = {"lsq_plus": "lsq", "learned_range": "lsq"}
POW2 = ("pow2", "pow2_mode")
# Their gradients have no factor, so the ranges of weights need a low rate to stay near their start.
RATES = {"tqt": 5e-4, "qil": 2e-5, "dsq": 2e-5}
AT_A_JUMP = [
    ("tqt", observer) for observer in POW2
]  # thresholds start where their scale jumps: rounding decides which way
# A code of this net lies on a tie in its second step: factors of 1/256 and 1/250 give one training, 1/255 and 1/100 another.
ON_A_TIE = ("dsq", 8, "moving_average", "prepare", "input")
Result = tuple[Tensor, Tensor]  # the losses, and how far the parameters of quantizers, ratios or logarithms, have moved


class Times(nn.Module):
    """Multiplies by a constant. It is a tensor, as times the number 1 is no op."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def block(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.BatchNorm2d(out, eps=1e-18), nn.ReLU()]


def in_units(bn: nn.BatchNorm2d, conv: nn.Conv2d, factor: float) -> None:
    """Change a layer for an input times a factor, so that the batch norm returns what it returned before."""
    with torch.no_grad():
        conv.bias.mul_(factor)
        bn.running_mean.mul_(factor)
        bn.running_var.mul_(factor * factor)


def net(of_input: float, of_middle: float) -> nn.Sequential:
    """Return a net with settled batch norms, for inputs times a factor and a tensor in the middle times another."""
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)]
    model = nn.Sequential(*block(3, 8), Times(1.0), *block(8, 8), *head)
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-0.5, 0.5, 8).view(8, 1, 1, 1))  # so that factors of channels differ
    model.train()
    for _ in range(50):
        model(images())
    in_units(model[1], model[0], of_input)
    in_units(model[5], model[4], of_middle)
    for conv in model[0], model[4]:
        conv.bias.requires_grad_(
            False
        )  # its gradient is 0 but for rounding, of which a factor of 2^-8 makes 2^8 times more
    model[3].factor.fill_(of_middle)
    return model


@functools.cache
def images() -> Tensor:
    return torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@functools.cache
def labels() -> Tensor:
    return torch.randint(5, (32,), generator=torch.Generator().manual_seed(2))


def spec(kind: str, bits: int, observer: str, axis: int | None = None) -> qt.QuantSpec:
    pow2 = kind == "tqt" or observer in POW2
    return qt.QuantSpec(
        bits=bits,
        signed=kind != "qil" or axis is not None,
        symmetric=kind not in AFFINE,
        pow2_scale=pow2,
        axis=axis,
        observer=observer,
        quantizer=kind,
    )


def quantized(kind: str, bits: int, observer: str, route: str, model: nn.Module, x: Tensor) -> nn.Module:
    weights = spec(OF_WEIGHTS.get(kind, kind), bits, observer, axis=0)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec(kind, bits, observer), weights))
    if route == "prepare":
        made = qt.prepare(model, (x[:2],), backend="academic", qconfig_mapping=mapping, training_arithmetic="float")
    else:
        made = qt.quant_modules.replace(
            model, qconfig_mapping=mapping, training_arithmetic="float", backend="tensorrt10"
        )
    qt.calibrate(made, x.split(8), progress=False)
    return made.train()


def by_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD at a rate at which the float net's trajectory does not multiply the differences of rounding."""
    rate = min(RATES.get(quantizer.spec.quantizer, RATE) for quantizer in qt.quantizers_of(model).values())
    return torch.optim.SGD(qt.parameter_groups(model, lr=RATE, scale_lr=rate), momentum=0.9)


def by_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(qt.parameter_groups(model, lr=1e-3, scale_lr=1e-3), eps=1e-20)


def trained(model: nn.Module, x: Tensor, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Result:
    """Return the losses of some steps, and how far the learned parameters of quantizers have moved."""
    learned = [p for quantizer in qt.quantizers_of(model).values() for p in quantizer.parameters()]
    starts = [parameter.detach().clone() for parameter in learned]
    steps, losses = optimizer(model), []
    for _ in range(STEPS):
        steps.zero_grad()
        loss = F.cross_entropy(model(x), labels())
        loss.backward()
        steps.step()
        losses.append(loss.detach())
    moved = (parameter.detach() - start for parameter, start in zip(learned, starts, strict=True))
    return torch.stack(losses), torch.cat([each.flatten() for each in moved])


def cases() -> list[tuple[str, str]]:
    """Return each learned kind with each observer that it takes."""
    found = []
    for kind in LEARNED:
        for observer in (name for name in OBSERVERS if name != "constant"):  # its range has the units of the tensor
            if (kind, observer) in AT_A_JUMP:
                continue
            try:
                spec(kind, 4, observer, axis=0)
                found.append((kind, observer))
            except ValueError:
                pass
    return found


@functools.cache
def plain(kind: str, bits: int, observer: str, route: str, optimizer: Callable) -> Result:
    return trained(quantized(kind, bits, observer, route, net(1.0, 1.0), images()), images(), optimizer)


def same_start(one: nn.Module, other: nn.Module, factors: tuple[float, ...]) -> None:
    """Let two nets start at one range in their units, after a look that their own differ by no more than a histogram's bins.

    No value lies at an end of that range, where rounding would decide whether it counts as clipped.
    """
    for (name, first), second in zip(qt.quantizers_of(one).items(), qt.quantizers_of(other).values(), strict=True):
        ratio = second._scale / first._scale
        factor = min(factors, key=lambda factor: float((ratio / factor).log().abs().max()))
        assert float((ratio / factor).log().abs().max()) < 0.025, name
        assert float((second._rate / first._rate / factor**2).log().abs().max()) < 0.05, name
        zero_point = None if second._zero_point is None else second._zero_point.clone()
        second.write_grid(second._scale * 0.97, zero_point)
        first.write_grid(second._scale / factor, zero_point)
        first._rate.copy_(second._rate / factor**2)


def check(case: tuple, of_input: float, of_middle: float, optimizer: Callable, rtol: float) -> None:
    """Compare the trainings of a kind, bits, observer and route in two units."""
    x = images() * of_input
    compare(
        trained(quantized(*case, net(of_input, of_middle), x), x, optimizer), plain(*case, optimizer), case[0], rtol
    )


def compare(result: Result, wanted_result: Result, kind: str, rtol: float) -> None:
    rtol = max(rtol, 0.2 * (kind == "qil"))  # its center starts at its distance: rounding decides the side
    (losses, moved), (wanted_losses, wanted) = result, wanted_result
    torch.testing.assert_close(losses, wanted_losses, rtol=rtol, atol=0)
    # together, since one code on a tie moves its own scale alone; a logarithm of 8 has steps of 1e-6
    assert float((moved - wanted).norm()) <= 2e-5 + rtol * float(wanted.norm())
    assert bool(wanted.abs().max() > 1e-4)


def bits_of(kind: str, bits: int) -> int:
    return min(bits, QUANTIZERS[kind].most_bits(qt.QuantSpec(bits=4)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("where", ["input", "middle"])
@pytest.mark.parametrize("factor", [2.0**-8, 2.0**-4, 2.0**4, 2.0**8])
@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("kind", "observer"), cases())
def test_a_power_of_two_changes_nothing(
    kind: str, observer: str, bits: int, route: str, factor: float, where: str
) -> None:
    factors = (factor, 1.0) if where == "input" else (1.0, factor)
    check((kind, bits_of(kind, bits), observer, route), *factors, by_sgd, rtol=2e-3)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("where", ["input", "middle"])
@pytest.mark.parametrize("factor", [1 / 255, 255.0])
@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("kind", "observer"), [case for case in cases() if case[0] != "tqt" and case[1] not in POW2])
def test_any_factor_changes_nothing_but_rounding(
    kind: str, observer: str, bits: int, route: str, factor: float, where: str
) -> None:
    """But for the codes that lie on ties, and the bins of histograms, which are powers of two. Scales of tqt are, too."""
    of_input, of_middle = (factor, 1.0) if where == "input" else (1.0, factor)
    case, x = (kind, bits_of(kind, bits), observer, route), images() * of_input
    if (*case, where) == ON_A_TIE:
        pytest.skip("rounding decides about a code")
    one, other = quantized(*case, net(1.0, 1.0), images()), quantized(*case, net(of_input, of_middle), x)
    same_start(one, other, (1.0, factor, 1 / factor))
    compare(trained(other, x, by_sgd), trained(one, images(), by_sgd), kind, rtol=0.1)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("where", ["input", "middle"])
@pytest.mark.parametrize("factor", [2.0**-8, 2.0**8])
@pytest.mark.parametrize("kind", LEARNED)
def test_adam_changes_nothing_either(kind: str, factor: float, where: str) -> None:
    factors = (factor, 1.0) if where == "input" else (1.0, factor)
    check((kind, 4, "minmax", "prepare"), *factors, by_adam, rtol=1e-3)
