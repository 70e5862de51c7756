"""Exports of the tests share what each `torch.onnx.export(dynamo=True)` makes anew, two thirds of the time of a small export.

- torch.onnx's table of translations, from torch's ops to functions of ONNX ops: torch parses the sources of 500 functions of
  onnxscript.
- Its table of decompositions, of the ops that have no translation.
- The composite ops: torch looks up all names of the dispatcher, again for each namespace.
- 6,000 rules that it overrides for the time of a decomposition, by a function whose annotations Python evaluates in each call.

`read_once` keeps what the first export of a process makes. torch has no public arguments for it, so `read_once` replaces its
functions; in a torch without functions of these names, they are left as they are.
"""

import __future__

import copy
import functools
import inspect
import sys
import textwrap
from importlib import import_module
from typing import Any

import torch


def read_once() -> None:
    """Keep the tables; every export gets copies."""
    for keep in (_translations, _decompositions, _composites, _rules):
        try:
            keep()
        except (ImportError, AttributeError):
            continue


def _translations() -> None:
    """Each export adds the translations it is given to its copy."""
    registry = import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    read = functools.cache(registry.from_torchlib)

    def copied(*args: Any, **kwargs: Any) -> Any:
        table = copy.copy(read(*args, **kwargs))
        table.functions = {target: list(found) for target, found in table.functions.items()}
        return table

    registry.from_torchlib = staticmethod(copied)


def _decompositions() -> None:
    exporter = import_module("torch.onnx._internal.exporter._decomp")
    make, tables = exporter.create_onnx_friendly_decomposition_table, {}

    def copied(translated: set[Any]) -> dict[Any, Any]:
        key = frozenset(translated), _names_of_composites()
        if key not in tables:
            tables[key] = make(translated)
        return dict(tables[key])

    exporter.create_onnx_friendly_decomposition_table = copied


def _composites() -> None:
    """They are looked up again when one more is registered."""
    name, kept = "_collect_all_valid_cia_ops", {}
    look_up = getattr(import_module("torch._export.utils"), name)

    def once() -> set[Any]:
        key = _names_of_composites()
        if key not in kept:
            kept[key] = look_up()
        return kept[key]

    for module in ("torch._export.utils", "torch.export.decomp_utils", "torch.export.exported_program"):
        if hasattr(import_module(module), name):
            setattr(import_module(module), name, once)


def _names_of_composites() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))


def _rules() -> None:
    """The same function, whose annotations are not evaluated."""
    op = torch._ops.OperatorBase
    source, found = textwrap.dedent(inspect.getsource(op.py_impl)), {}
    code = compile(source, inspect.getsourcefile(op), "exec", __future__.annotations.compiler_flag)
    exec(code, vars(sys.modules[op.__module__]), found)
    op.py_impl = found["py_impl"]
