"""What tests of a model's blocks share: calls one by one, and the code of a graph that is not divided."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, fx
from torch.nn.modules.module import register_module_forward_hook

import qtoolkit as qt
from qtoolkit.graph.program.units import BatchNormUnit, base
from qtoolkit.quantizers import codes
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.running import Run


@contextmanager
def called_one_by_one() -> Iterator[None]:
    """Register a hook of all modules: then every module of a graph is called as one."""
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()


def recorded_norms(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the arguments of each call of `qtoolkit.ops.batch_norm_fake_quant` from here on, alone or as a part of a unit."""
    found = recorded_calls(monkeypatch, "batch_norm_fake_quant")
    made = base.made

    def recorded(kind: Any, fields: dict[str, Any], varying: list[str]) -> Any:
        unit = made(kind, fields, varying)
        if kind is not BatchNormUnit.KIND:
            return unit

        def call(values: list[Tensor | None]) -> list[Tensor]:
            results: list[Tensor] = unit.call(values)
            if results:
                now = {**fields, **dict(zip(varying, values, strict=True))}
                grid = {} if now["y_start"] is None else {"scale": now["y_start"]}
                found.append({**now, **grid, "divisor": now["variance"]})
            return results

        return SimpleNamespace(call=call)

    monkeypatch.setattr(base, "made", recorded)
    return found


def units_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any], list[str]]]:
    """Return the class, the fields and the names of what varies of each unit of the library that is made from here on."""
    found: list[tuple[Any, dict[str, Any], list[str]]] = []
    made = base.made

    def recorded(*of_unit: Any) -> Any:
        found.append(of_unit)
        return made(*of_unit)

    monkeypatch.setattr(base, "made", recorded)
    return found


def recorded_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """Return the arguments, by name, of each call of an op of `qtoolkit.ops` from here on."""
    found: list[dict[str, Any]] = []
    op = getattr(qt.ops, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found.append(inspect.signature(op).bind(*args, **kwargs).arguments)
        return op(*args, **kwargs)

    monkeypatch.setattr(qt.ops, name, recorded)
    return found


def codes_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Quantizer | None, Tensor, codes.TensorCodes]]:
    """Return the layers' sources, inputs and the codes that came with them, for each layer that takes these from here on."""
    found: list[tuple[Quantizer | None, Tensor, codes.TensorCodes]] = []
    tensor_codes_of = codes.tensor_codes_of

    def recorded(run: Run, y: Tensor, quantizer: Quantizer | None, kept: codes.TensorCodes | None = None) -> Any:
        taken = tensor_codes_of(run, y, quantizer, kept)
        if taken is not None and taken is kept:
            found.append((quantizer, y, taken))
        return taken

    monkeypatch.setattr(codes, "tensor_codes_of", recorded)
    return found


def make_flat(gm: fx.GraphModule) -> fx.GraphModule:
    """Let a model run its graph as one list of nodes; return it."""
    code = gm.graph.python_code("self")
    scope = dict(code.globals)
    exec(code.src, scope)
    type(gm).forward = scope["forward"]
    return gm
