"""The same work on other tools, where they are installed: one file a peer.

It gives the peer's quantizer as `TOOL`, and `qat_model(model, images)`, which builds what the peer trains for a float model.
Those that write ONNX files have `export(model, images, path)` too, which returns the model that the file has.

requirements.txt has the versions that were measured. pytorch-quantization is not among them: what PyPI has under that name
is a placeholder, and its sources do not build without a CUDA build of torch.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn

from benchmarks.tools import Tool

# File here: the module that it needs, and the distribution that the module comes with.
PEERS = {
    "torch_ao": ("torch.ao", "torch"),
    "brevitas": ("brevitas", "brevitas"),
    "nncf": ("nncf", "nncf"),
    "aimet": ("aimet_torch", "aimet-torch"),
    "modelopt": ("modelopt", "nvidia-modelopt"),
}
PT2E = ("torchao", "torchao")
# Peers that train models: their names, and their entries of the table above. pt2e has no quantizer of its own.
MODEL_PEERS = {
    "torch.ao FX": "torch_ao",
    "torchao pt2e": "torchao_pt2e",
    "Brevitas": "brevitas",
    "AIMET": "aimet",
    "NNCF": "nncf",
    "Model Optimizer": "modelopt",
}


def installed() -> list[Tool]:
    """Return the peers that can be imported here."""
    return [import_module(f"benchmarks.peers.{file}").TOOL for file, (module, _) in PEERS.items() if find_spec(module)]


def versions() -> dict[str, str]:
    """Return each peer's version, or that it is not installed."""
    return {name: version(name) if find_spec(module) else "not installed" for module, name in (*PEERS.values(), PT2E)}


def model_builder(name: str) -> Callable[[nn.Module, Tensor], nn.Module]:
    """Return what builds the model that a peer of MODEL_PEERS trains.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    return import_module(f"benchmarks.peers.{MODEL_PEERS[name]}").qat_model


def model_exporter(name: str) -> Callable[[nn.Module, Tensor, Path], nn.Module]:
    """Return what writes the trained model of a peer of MODEL_PEERS as an ONNX file, and returns the model that the file has.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    return import_module(f"benchmarks.peers.{MODEL_PEERS[name]}").export
