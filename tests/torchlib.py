"""Reads torch.onnx's table of translations once in a process, and not in each export, of whose time it is two fifths.

`torch.onnx.export(dynamo=True)` parses the sources of 500 functions of onnxscript for it, whatever the model. No public way
gives it the table, so the method that makes it is replaced; where torch has none of that name, each export reads its own.
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
