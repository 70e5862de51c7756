"""MQBench's names of schemes, observers and fake quantizers, as fields of a QuantSpec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qtoolkit.config import QuantSpec
from qtoolkit.errors import check_known

Options = Mapping[str, Any]  # of the user, by MQBench's names


class QuantizeScheme:
    """The grid of a tensor in MQBench's terms, with options of the observer such as ema_ratio.

    With `symmetry` the integers are signed, without a zero point; otherwise unsigned with a zero point.

    Example:
        >>> QuantizeScheme(bit=4, symmetry=False).spec(QuantSpec(), is_weight=True).describe()
        'uint4 affine'
    """

    def __init__(
        self,
        symmetry: bool = True,
        per_channel: bool = False,
        pot_scale: bool = False,
        bit: int = 8,
        symmetric_range: bool = False,
        **kwargs: object,
    ) -> None:
        self.symmetry, self.per_channel, self.pot_scale = symmetry, per_channel, pot_scale
        self.bit, self.symmetric_range, self.kwargs = bit, symmetric_range, kwargs

    def spec(self, base: QuantSpec, is_weight: bool) -> QuantSpec:
        """Return a spec with this grid and another spec's other fields; channels: outputs of weights, axis 1 of activations."""
        return replace(
            base,
            bits=self.bit,
            signed=self.symmetry,
            symmetric=self.symmetry,
            narrow=self.symmetric_range,
            axis=(0 if is_weight else 1) if self.per_channel else None,
            pow2_scale=self.pot_scale,
        )


@dataclass(frozen=True)
class _Name:
    """The equivalent of a name of MQBench."""

    name: str  # the observer or quantizer of a QuantSpec
    fixed: Options = field(default_factory=dict)  # options that the name sets
    # each option in MQBench, with the option here and the conversion of its value
    options: Mapping[str, tuple[str, Callable[[Any], object]]] = field(default_factory=dict)

    def given(self, what: str, params: Options) -> dict[str, object]:
        """Convert options of MQBench to options here."""
        for name in params:
            check_known(f"option of {what}", name, self.options)
        return {**self.fixed, **{self.options[name][0]: self.options[name][1](value) for name, value in params.items()}}


def _same(value: object) -> object:
    return value


def _squared(power: object) -> str:
    if power != 2.0:
        raise ValueError(f"it must be 2.0, got {power!r}: errors are squared.")
    return "mse"


_EMA = {"ema_ratio": ("momentum", lambda ratio: round(1 - ratio, 12))}
_BINS = {"bins": ("bins", _same)}
_SQUARED = {"p": ("method", _squared)}
OBSERVERS = {
    "MinMaxObserver": _Name("minmax"),
    "EMAMinMaxObserver": _Name("moving_average", options=_EMA),
    "EMAQuantileObserver": _Name(
        "moving_histogram",
        {"method": "percentile", "percentile": 99.999},
        {**_EMA, **_BINS, "threshold": ("percentile", lambda share: 100 * share)},
    ),
    "ClipStdObserver": _Name("clip_std", options={"std_scale": ("deviations", _same)}),
    "LSQObserver": _Name("lsq"),
    "LSQPlusObserver": _Name("clip_std", {"deviations": 3.0}),
    "MSEObserver": _Name("histogram", {"method": "mse"}, _SQUARED),
    "EMAMSEObserver": _Name("moving_histogram", {"method": "mse"}, {**_SQUARED, **_EMA}),
    "MinMaxFloorObserver": _Name("pow2"),
    "PoTModeObserver": _Name("pow2_mode"),
    "ModeMinMaxFloorObserver": _Name("pow2_mode"),
}
FAKE_QUANTIZERS = {
    "FixedFakeQuantize": _Name("fixed"),
    "LearnableFakeQuantize": _Name("lsq"),
    "NNIEFakeQuantize": _Name("fixed"),
    "DoReFaFakeQuantize": _Name("dorefa"),
    "DSQFakeQuantize": _Name("dsq", options={"alpha": ("alpha", _same)}),
    "PACTFakeQuantize": _Name("pact"),
    "TqtFakeQuantize": _Name("tqt"),
    "AdaRoundFakeQuantize": _Name("fixed"),
    "QDropFakeQuantize": _Name("lsq"),
}
_WITH_ZERO_POINT = {"lsq": "lsq_plus", "pact": "learned_range"}


def spec_of(
    grid: QuantSpec,
    observer: str,
    fake_quantize: str,
    observer_args: Options,
    fakeq_params: Options,
) -> QuantSpec:
    """Return the spec of a grid with an observer and a fake quantizer of MQBench.

    Raises:
        ValueError: A name or an option is unknown, or does not fit the grid.

    Example:
        >>> spec_of(QuantSpec(), "EMAMinMaxObserver", "LearnableFakeQuantize", {"ema_ratio": 0.95}, {}).observer_args
        {'momentum': 0.05}
    """
    check_known("observer", observer, OBSERVERS)
    check_known("fake quantizer", fake_quantize, FAKE_QUANTIZERS)
    observes, quantizes = OBSERVERS[observer], FAKE_QUANTIZERS[fake_quantize]
    name = quantizes.name if grid.symmetric else _WITH_ZERO_POINT.get(quantizes.name, quantizes.name)
    if name == "dorefa" and grid.bits > 7:
        raise ValueError(
            f"fake quantizer {fake_quantize!r} supports at most 7 bits, got {grid.bits}: its values are on both sides of zero, "
            "without zero itself, and need integers of one more bit; set bit in w_qscheme."
        )
    return replace(
        grid,
        observer=observes.name,
        observer_args=observes.given(observer, observer_args),
        quantizer=name,
        quantizer_args=quantizes.given(fake_quantize, fakeq_params),
    )


__all__ = ["QuantizeScheme"]
