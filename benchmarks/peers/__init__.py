"""The same work on other tools, where they are installed: one file a peer, which gives its `TOOL`.

requirements.txt has the versions that were measured. pytorch-quantization is not among them: what PyPI has under that name
is a placeholder, and its sources do not build without a CUDA build of torch.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

from tools import Tool

# File here: the module that it needs, and the distribution that the module comes with.
PEERS = {
    "torch_ao": ("torch.ao", "torch"),
    "brevitas": ("brevitas", "brevitas"),
    "nncf": ("nncf", "nncf"),
    "aimet": ("aimet_torch", "aimet-torch"),
    "modelopt": ("modelopt", "nvidia-modelopt"),
}


def installed() -> list[Tool]:
    """Return the peers that can be imported here."""
    return [import_module(f"peers.{file}").TOOL for file, (module, _) in PEERS.items() if find_spec(module)]


def versions() -> dict[str, str]:
    """Return each peer's version, or that it is not installed."""
    return {name: version(name) if find_spec(module) else "not installed" for module, name in PEERS.values()}
