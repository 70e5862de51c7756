"""The methods of the table: a name, a group, and what quantizes ResNet-20 with the bits of a column."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

import qtoolkit as qt
from benchmarks.training.algorithms import ends

Forward = Callable[[Tensor], Tensor]
OBSERVERS: Mapping[str, Mapping[str, Any]] = {
    "minmax": {"observer": "minmax"},
    "moving_average": {"observer": "moving_average"},
    "clip_std": {"observer": "clip_std"},
    "lsq": {"observer": "lsq"},
    **{
        f"histogram, {method}": {"observer": "histogram", "observer_args": {"method": method}}
        for method in ("mse", "l2", "entropy", "percentile")
    },
    **{
        f"moving_histogram, {method}": {"observer": "moving_histogram", "observer_args": {"method": method}}
        for method in ("mse", "percentile")
    },
    "minmax, powers of two": {"observer": "minmax", "pow2_scale": True},
    "pow2": {"observer": "pow2", "pow2_scale": True},
    "pow2_mode": {"observer": "pow2_mode", "pow2_scale": True},
}
PLAIN, BEST = OBSERVERS["minmax"], OBSERVERS["histogram, mse"]


@dataclass(frozen=True)
class Bits:
    """The bits of weights and activations of all layers but the first and the last, which have eight."""

    weights: int
    activations: int

    def __str__(self) -> str:
        return f"W{self.weights}A{self.activations}"


W8A8, W4A8, W4A4 = ALL_BITS = (Bits(8, 8), Bits(4, 8), Bits(4, 4))


@dataclass(frozen=True)
class Network:
    """The float network in eval mode, the images that calibrate it, and how long rounding is learned."""

    model: nn.Module
    images: Tensor
    steps: int

    def batches(self, size: int) -> list[Tensor]:
        """Return the images in batches."""
        return list(self.images.split(size))


@dataclass(frozen=True)
class Method:
    """A line of the table.

    Attributes:
        group: The part of the table.
        quantize: Takes the network and the bits; returns what computes the logits of images.
        bits: The columns that it has.
    """

    group: str
    quantize: Callable[[Network, Bits], Forward]
    bits: Sequence[Bits] = field(default=ALL_BITS)


def prepared(
    network: Network,
    bits: Bits,
    activation: Mapping[str, Any] = BEST,
    weight: Mapping[str, Any] = BEST,
    axis: int | None = 0,
    backend: str = "academic",
    model: nn.Module | None = None,
) -> Any:
    """Return the network, or another float model in its place, quantized with the ranges of two observers."""
    model = network.model if model is None else model
    first, last = ends(model)
    mapping = qt.QConfigMapping().set_global(_qconfig(bits, activation, weight, axis))
    for name in (first, last):
        mapping.set_module_name(name, _qconfig(W8A8, activation, weight, axis, signed=name == first))
    result = qt.prepare(model, (network.images[:2],), backend=backend, qconfig_mapping=mapping)
    qt.calibrate(result, network.batches(64), progress=False)
    return result.eval()


def _qconfig(
    bits: Bits, activation: Mapping[str, Any], weight: Mapping[str, Any], axis: int | None, signed: bool = False
) -> qt.QConfig:
    """Return a config: a zero point for activations, or where the scale is a power of two, a sign for those that need it."""
    pow2 = activation.get("pow2_scale", False)
    return qt.QConfig(
        qt.QuantSpec(bits=bits.activations, signed=signed and pow2, symmetric=pow2, **activation),
        qt.QuantSpec(bits=bits.weights, axis=axis, **weight),
    )


def _observed(**options: Any) -> Callable[[Network, Bits], Forward]:
    return lambda network, bits: prepared(network, bits, **options)


def _equalized(axis: int | None) -> Callable[[Network, Bits], Forward]:
    def quantize(network: Network, bits: Bits) -> Forward:
        model = qt.tuning.equalize(network.model, network.images[:8]).model
        return prepared(network, bits, axis=axis, model=model)

    return quantize


def _biases(network: Network, bits: Bits) -> Forward:
    result = prepared(network, bits)
    qt.tuning.bias_correction(result, network.batches(64), progress=False)
    return result


def _biases_by_batch_norms(network: Network, bits: Bits) -> Forward:
    result = prepared(network, bits, model=copy.deepcopy(network.model).train())
    qt.tuning.bias_correction(result, method="analytic", progress=False)
    return result


def _batch_norms(network: Network, bits: Bits) -> Forward:
    result = prepared(network, bits, model=copy.deepcopy(network.model).train())
    qt.tuning.reestimate_batch_norm(result, network.batches(256), progress=False)
    return result


def _reconstructed(method: str, granularity: Any, **options: Any) -> Callable[[Network, Bits], Forward]:
    def quantize(network: Network, bits: Bits) -> Forward:
        result = prepared(network, bits)
        given = {"steps": network.steps, "progress": False, **options}
        qt.tuning.reconstruct(result, network.batches(32), method, granularity, **given)
        return result

    return quantize


def _not_here(why: str) -> Callable[[Network, Bits], Forward]:
    def quantize(network: Network, bits: Bits) -> Forward:
        raise ValueError(why)

    return quantize


ACTIVATIONS, WEIGHTS, TUNING, PLACEMENT = (
    "observer of activations (weights minmax)",
    "observer of weights (activations minmax)",
    "method (histogram, mse for both)",
    "placement of a runtime (minmax)",
)
OURS: Mapping[str, Method] = {
    **{name: Method(ACTIVATIONS, _observed(activation=of, weight=PLAIN)) for name, of in OBSERVERS.items()},
    **{
        f"weights {name}": Method(WEIGHTS, _observed(activation=PLAIN, weight=of), (W4A8,))
        for name, of in OBSERVERS.items()
        if name != "minmax"
    },
    "weights minmax, per tensor": Method(WEIGHTS, _observed(activation=PLAIN, weight=PLAIN, axis=None)),
    "none": Method(TUNING, _observed()),
    "none, per tensor": Method(TUNING, _observed(axis=None)),
    "equalize, per tensor": Method(TUNING, _equalized(None)),
    "equalize": Method(TUNING, _equalized(0)),
    "bias_correction": Method(TUNING, _biases),
    "bias_correction, analytic": Method(TUNING, _biases_by_batch_norms),
    "reestimate_batch_norm": Method(TUNING, _batch_norms),
    "adaround": Method(TUNING, _reconstructed("adaround", "layer")),
    "adaround, block": Method(TUNING, _reconstructed("adaround", "block")),
    "brecq": Method(TUNING, _reconstructed("brecq", "block")),
    'brecq, loss="kl"': Method(TUNING, _reconstructed("brecq", "block", loss="kl")),
    "brecq, layer": Method(TUNING, _reconstructed("brecq", "layer")),
    "qdrop": Method(TUNING, _reconstructed("qdrop", "block")),
    "qdrop, layer": Method(TUNING, _reconstructed("qdrop", "layer")),
    "gptq": Method(
        TUNING, _not_here("it takes linear layers, and the only one here is the last, which has eight bits")
    ),
    "smooth_quant": Method(TUNING, _not_here("it takes norms before linear layers, and there is none here")),
    "onnxruntime's": Method(PLACEMENT, _observed(activation=PLAIN, weight=PLAIN, backend="onnxruntime")),
    "openvino's": Method(PLACEMENT, _observed(activation=PLAIN, weight=PLAIN, backend="openvino")),
}
