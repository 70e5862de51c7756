"""Exports of the tests share torch.onnx's table of translations, from torch's ops to functions of ONNX ops.

Each `torch.onnx.export(dynamo=True)` reads this table again: it parses the sources of 500 functions of onnxscript, which is two
fifths of the time of a small export. `read_once` keeps the table that the first export of a process reads. torch has no public
argument for it, so `read_once` replaces the method that reads it; a torch without a method of that name is left as it is.
"""

import copy
import functools
from importlib import import_module
from typing import Any


def read_once() -> None:
    """Keep the table of each opset; every export gets a copy, to which it adds the translations it is given."""
    try:
        registry = import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
        read = functools.cache(registry.from_torchlib)
    except (ImportError, AttributeError):
        return

    def copied(*args: Any, **kwargs: Any) -> Any:
        table = copy.copy(read(*args, **kwargs))
        table.functions = {target: list(found) for target, found in table.functions.items()}
        return table

    registry.from_torchlib = staticmethod(copied)
