"""What is installed: versions, instruction set, CUDA, runtimes."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from qtoolkit import _native
from qtoolkit.version import __version__

PACKAGES = ("numpy", "onnx", "onnxscript", "onnxruntime", "openvino", "torchvision", "timm", "rich")


def environment() -> dict[str, Any]:
    """Return the versions and the hardware that the package finds.

    Example:
        >>> sorted(environment())
        ['cuda', 'instruction_set', 'packages', 'python', 'qtoolkit', 'threads', 'torch']
    """
    devices = range(torch.cuda.device_count())
    return {
        "qtoolkit": __version__,
        "python": platform.python_version(),
        "torch": {"version": str(torch.__version__), "library_built_for": _native.built_for(_native.FILE)},
        "instruction_set": _native.library.instruction_set(),
        "threads": torch.get_num_threads(),
        "cuda": {"torch": torch.version.cuda, "devices": [torch.cuda.get_device_name(i) for i in devices]},
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
