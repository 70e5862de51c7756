"""MQBench's backends as backends of qtoolkit, with their default observers and fake quantizers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from qtoolkit.backends import Backend, backends
from qtoolkit.compat.mqbench.scheme import Options, QuantizeScheme, spec_of
from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.errors import check_known, check_mapping


@dataclass(frozen=True)
class Platform:
    """A backend of MQBench."""

    backend: str  # the name of qtoolkit's
    # the fake quantizers of weights and activations
    fake_quantize: tuple[str, str] = ("LearnableFakeQuantize", "LearnableFakeQuantize")
    observer: tuple[str, str] = ("MinMaxObserver", "EMAMinMaxObserver")  # their observers
    narrow: bool = False  # whether codes are symmetric around zero
    defaults: bool = True  # whether there are defaults; without, the config must name everything
    # whether convert_deploy writes a file with Q/DQ nodes, which do not exist for the logarithmic grids of NNIE
    qdq: bool = True
    own_files: bool = True  # whether it writes the files of the target's own compiler


_MINMAX = ("MinMaxObserver", "MinMaxObserver")
PLATFORMS: Mapping[str, Platform] = {
    "Academic": Platform("academic", defaults=False, own_files=False),
    "Academic_NLP": Platform("academic-nlp", defaults=False, own_files=False),
    "Tensorrt": Platform("tensorrt10", narrow=True),
    "Tensorrt_NLP": Platform("tensorrt-nlp", narrow=True, own_files=False),
    "QDQ": Platform("tensorrt10", narrow=True, own_files=False),
    "NNIE": Platform("nnie", ("NNIEFakeQuantize", "NNIEFakeQuantize"), qdq=False),
    "OPENVINO": Platform("openvino"),
    "SNPE": Platform("snpe"),
    "PPLW8A16": Platform("ppl-w8a16"),
    "PPLCUDA": Platform("ppl", observer=_MINMAX),
    "STPU": Platform("stpu", ("FixedFakeQuantize", "FixedFakeQuantize")),
    "ONNX_QNN": Platform("qnn", observer=_MINMAX),
    "Tengine_u8": Platform("tengine"),
    "Vitis": Platform("vitis", ("TqtFakeQuantize", "TqtFakeQuantize"), ("MinMaxFloorObserver", "PoTModeObserver")),
}
# mypy asks for a literal; the class statement would repeat each name
BackendType = Enum("BackendType", {name: name for name in PLATFORMS}, module=__name__)  # type: ignore[misc]
_KINDS = ("observer", "fakequantize", "qscheme", "fakeq_params", "observer_extra_args")
QCONFIG_KEYS = tuple(f"{side}_{kind}" for side in "wa" for kind in _KINDS)


def checked(what: str, value: Options, keys: Iterable[str]) -> Options:
    """Return a mapping; ValueError if it is not a mapping, or has other keys."""
    check_mapping(what, value)
    for key in value:
        check_known(f"key of {what}", key, keys)
    return value


def platform_of(deploy_backend: object) -> Platform:
    """Return a backend by its BackendType, or by its name; ValueError for an unknown backend."""
    name = deploy_backend.value if isinstance(deploy_backend, BackendType) else deploy_backend
    check_known("backend", name, PLATFORMS)
    return PLATFORMS[str(name)]


def backend_of(platform: Platform, academic_mode: bool) -> Backend:
    """Return qtoolkit's backend, with float32 scales as in MQBench.

    In academic mode it quantizes the ops of the academic setting, with 8-bit weights.
    """
    backend = replace(backends[platform.backend], float_type="float32")
    if not academic_mode:
        return backend
    weight = replace(present_weight(backend), bits=8)
    return replace(backend, roles=backends["academic"].roles, qconfig=replace(backend.qconfig, weight=weight))


def present_weight(backend: Backend) -> QuantSpec:
    """Return the spec of weights."""
    return backend.qconfig.weight or QuantSpec()


def qconfig_of(platform: Platform, backend: Backend, extra: Options) -> QConfig:
    """Return the config for an `extra_qconfig_dict`; ValueError for unknown, missing or incompatible values."""
    checked("extra_qconfig_dict", extra, QCONFIG_KEYS)
    missing = [f"{side}_{kind}" for side in "wa" for kind in _KINDS[:3] if f"{side}_{kind}" not in extra]
    if missing and not platform.defaults:
        raise ValueError(
            f"extra_qconfig_dict must have {', '.join(missing)}: the backend {platform.backend!r} has no defaults."
        )
    base = (present_weight(backend), backend.qconfig.activation or QuantSpec())
    weight, activation = (_spec(platform, base[side], side, extra) for side in (0, 1))
    return QConfig(activation=activation, weight=weight)


def _spec(platform: Platform, base: QuantSpec, side: int, extra: Options) -> QuantSpec:
    given = {kind: extra.get(f"{'wa'[side]}_{kind}") for kind in _KINDS}
    grid, options = replace(base, narrow=platform.narrow or base.narrow), dict(given["observer_extra_args"] or {})
    if given["qscheme"] is not None and base.format == "nnie":
        raise ValueError(f"{'wa'[side]}_qscheme must be omitted for the backend 'nnie', which has a logarithmic grid.")
    if given["qscheme"] is not None:
        scheme = given["qscheme"]
        scheme = scheme if isinstance(scheme, QuantizeScheme) else QuantizeScheme(**scheme)
        grid, options = scheme.spec(base, is_weight=side == 0), {**scheme.kwargs, **options}
        if side == 0 and platform.backend == "openvino" and base.bits == 7:  # sums of more overflow on its CPUs
            grid = replace(grid, bits=min(grid.bits, 7))
    fake_quantize = given["fakequantize"] or platform.fake_quantize[side]
    if (base.format == "nnie") != (fake_quantize == "NNIEFakeQuantize"):
        raise ValueError(f"fake quantizer {fake_quantize!r} does not fit the backend {platform.backend!r}.")
    observer = given["observer"] or platform.observer[side]
    return spec_of(grid, observer, fake_quantize, options, given["fakeq_params"] or {})
