"""What is trained beside the float model: ours in each mode, and other tools' models."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

import qtoolkit as qt
from benchmarks import peers

Build = Callable[[nn.Module, Tensor], nn.Module]  # float model in training mode, images -> the model that is trained

FLOAT, COMPILED_FLOAT = "float", "float, compiled"
PLAIN, CODES, INTEGER = "ours, plain", "ours, codes", "ours, integer"
COMPILED, FIXED, OFF = "ours, compiled", "ours, fixed scales", "ours, quantizers off"
PARTIAL = {"ours, codes, partial": CODES, "ours, integer, partial": INTEGER}
"""Those that update a share of the channels, and what they are besides."""
MEANING = {
    PLAIN: 'learned scales, training_arithmetic="float", save="float"',
    CODES: 'learned scales, training_arithmetic="float", save="codes"',
    INTEGER: 'learned scales, training_arithmetic="integer", save="codes"',
    FIXED: 'scales as calibrated, training_arithmetic="float", save="codes"',
    OFF: 'every quantizer off, training_arithmetic="float", save="codes"',
    COMPILED: "integer, under torch.compile(fullgraph=True)",
    **{name: f"{of.removeprefix('ours, ')}, with qtoolkit.tuning.PartialUpdates" for name, of in PARTIAL.items()},
}


def names(compiled: bool, with_peers: bool, partial: bool) -> list[str]:
    """Return what is measured; the float model comes first."""
    result = [FLOAT, PLAIN, CODES, INTEGER, FIXED, OFF]
    return result + [*PARTIAL] * partial + [COMPILED_FLOAT, COMPILED] * compiled + list(peers.MODEL_PEERS) * with_peers


def kind_of(name: str) -> str:
    """Return "float", "ours" or "peer"."""
    if name in (FLOAT, COMPILED_FLOAT):
        return "float"
    return "ours" if name in MEANING else "peer"


def builder(name: str, backend: str) -> Build:
    """Return what builds a subject.

    Raises:
        ModuleNotFoundError: A peer is not installed.
    """
    learned = _learned(backend)
    builds: Mapping[str, Build] = {
        FLOAT: lambda model, x: model,
        COMPILED_FLOAT: lambda model, x: _compiled(model),
        PLAIN: lambda model, x: _ours(model, x, learned, "float", "float"),
        CODES: lambda model, x: _ours(model, x, learned, "float", "codes"),
        INTEGER: lambda model, x: _ours(model, x, learned, "integer", "codes"),
        COMPILED: lambda model, x: _compiled(_ours(model, x, learned, "integer", "codes")),
        FIXED: lambda model, x: _ours(model, x, backend, "float", "codes"),
        OFF: lambda model, x: _off(_ours(model, x, learned, "float", "codes")),
    }
    name = PARTIAL.get(name, name)
    return builds[name] if name in builds else peers.model_builder(name)


def _learned(backend: str) -> qt.Backend:
    """Return the backend with learned scales in its default config."""
    default = qt.backends[backend].qconfig
    learned = (
        None if spec is None else replace(spec, quantizer="lsq") for spec in (default.activation, default.weight)
    )
    return replace(qt.backends[backend], qconfig=qt.QConfig(*learned))


def _ours(model: nn.Module, x: Tensor, backend: str | qt.Backend, forward: str, save: str) -> nn.Module:
    prepared = qt.prepare(model, (x,), backend=backend, training_arithmetic=forward, save=save)
    qt.calibrate(prepared, [x], progress=False)
    return prepared


def _off(prepared: nn.Module) -> nn.Module:
    qt.disable_quantization(prepared).apply()
    return prepared


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, fullgraph=True, dynamic=False)
