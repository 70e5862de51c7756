"""What benchmarks/pages/accuracy.py trains: a network in float, by each quantizer of the library, and by other tools."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn

import qtoolkit as qt

# Quantizer of activations, quantizer of weights: "lsq" where the first is for activations alone.
QUANTIZERS: Mapping[str, tuple[str, str]] = {
    "fixed": ("fixed", "fixed"),
    "lsq": ("lsq", "lsq"),
    "lsq, paper's start": ("lsq", "lsq"),
    "lsq, float16 scales": ("lsq", "lsq"),
    "lsq_plus": ("lsq_plus", "lsq"),
    "pact": ("pact", "lsq"),
    "learned_range": ("learned_range", "lsq"),
    "dsq": ("dsq", "dsq"),
    "tqt": ("tqt", "tqt"),
    "dorefa": ("dorefa", "dorefa"),
    "apot": ("apot", "apot"),
    "qil": ("qil", "qil"),
}
OBSERVERS: Mapping[str, str] = {"lsq, paper's start": "lsq"}  # else the quantizers' own
SCALE_DTYPES: Mapping[str, str] = {"lsq, float16 scales": "float16"}  # else float32
AFFINE = ("lsq_plus", "learned_range")
POWERS_OF_TWO = ("tqt",)
# Other tools: the file in peers that has `few_bit_layer`, and its options. A tool whose scales are not trained by themselves
# has a function `learn` there.
PEERS: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "torch.ao": ("torch_ao", {"learned": False}),
    "torch.ao, learnable": ("torch_ao", {"learned": True}),
    "Brevitas": ("brevitas", {}),
}
FLOAT, FLOAT_BITS = "float", 32
SUBJECTS = (FLOAT, *QUANTIZERS, *PEERS)
LEARNED_8_BITS = qt.QuantSpec(quantizer="lsq")


def bits_of(subject: str, bits: Sequence[int]) -> Sequence[int]:
    """Return the numbers of bits that a subject is trained in."""
    return [FLOAT_BITS] if subject == FLOAT else bits


def build(subject: str, model: nn.Module, batches: Sequence[Tensor], bits: int, forward: str = "auto") -> nn.Module:
    """Return what is trained of a float model, calibrated on batches; its first and last layers have eight bits.

    Raises:
        ValueError: The subject does not take these bits.
        ModuleNotFoundError: The other tool is not installed.
    """
    if subject == FLOAT:
        return model
    if subject in PEERS:
        file, options = PEERS[subject]
        peer = import_module(f"benchmarks.peers.{file}")
        built = _with_layers(model, batches, bits, partial(peer.few_bit_layer, **options))
        if hasattr(peer, "learn"):
            peer.learn(built)
        return built
    activation, weight = QUANTIZERS[subject]
    scale_dtype = SCALE_DTYPES.get(subject, "float32")
    activations, weights = (
        _spec(quantizer, bits, scale_dtype, OBSERVERS.get(subject)) for quantizer in (activation, weight)
    )
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activations, replace(weights, axis=0)))
    first, last = ends(model)
    of_ends = replace(LEARNED_8_BITS, scale_dtype=scale_dtype)
    weights = replace(of_ends, axis=0)
    mapping.set_module_name(first, qt.QConfig(replace(of_ends, signed=_signed(batches)), weights))
    mapping.set_module_name(last, qt.QConfig(of_ends, weights))
    prepared = qt.prepare(
        model, (batches[0][:2],), backend="academic", qconfig_mapping=mapping, training_arithmetic=forward
    )
    qt.calibrate(prepared, batches, progress=False)
    return prepared


def _signed(batches: Sequence[Tensor]) -> bool:
    """Whether images have values below 0: normalised ones do, pixels of 0 to 255 do not."""
    return any(bool((batch < 0).any()) for batch in batches)


def _spec(quantizer: str, bits: int, scale_dtype: str, observer: str | None) -> qt.QuantSpec:
    symmetric, pow2_scale = quantizer not in AFFINE, quantizer in POWERS_OF_TWO
    grid = {"symmetric": symmetric, "pow2_scale": pow2_scale, "scale_dtype": scale_dtype}
    spec = qt.QuantSpec(bits=bits, quantizer=quantizer, **grid)
    return replace(spec, observer=observer) if observer else spec


def _layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]


def ends(model: nn.Module) -> tuple[str, str]:
    """Return the names of the first and the last layer, which have eight bits."""
    names = _layers(model)
    return names[0], names[-1]


def _with_layers(model: nn.Module, batches: Sequence[Tensor], bits: int, wrap: Callable[..., nn.Module]) -> nn.Module:
    """Replace each layer by another tool's: it quantizes the tensors that the backend "academic" does."""
    first, last = ends(model)
    for name in _layers(model):
        signed, replaced = name == first and _signed(batches), model.get_submodule(name)
        layer = wrap(replaced, 8 if name in (first, last) else bits, signed=signed).to(replaced.weight.device)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    model.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return model
