"""torch's two ONNX exporters. Both return a ModelProto whose Q/DQ nodes carry the names of the model's quantizers."""

import contextlib
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.shared_modules import names_by_module

if TYPE_CHECKING:
    import onnx_ir

WRAPPED = "model"


@dataclass(frozen=True)
class Request:
    """The arguments of both exporters."""

    model: nn.Module
    inputs: tuple[Any, ...]
    opset: int
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None
    dynamic_shapes: Any


def _export_dynamo(request: Request) -> Any:
    from qtoolkit.export.translation import translation_table

    try:
        program = torch.onnx.export(
            request.model,
            _arguments(request.inputs),
            dynamo=True,
            opset_version=request.opset,
            custom_translation_table=dict(translation_table(request.opset)),
            input_names=request.input_names,
            output_names=request.output_names,
            dynamic_shapes=request.dynamic_shapes,
            verbose=False,
            optimize=False,
        )
    except torch.onnx.OnnxExporterError as error:
        if isinstance(request.model, QuantizedGraphModule):
            raise
        raise RuntimeError(_describe_failure(request.model, error)) from error
    if program is None:
        raise RuntimeError("export_onnx: torch.onnx.export returned no program.")
    # Before the optimizer, which merges scales of equal value.
    _name_by_quantizers(program.model, _first_names(request.model))
    program.optimize()
    return program.model_proto


def _describe_failure(model: nn.Module, error: Exception) -> str:
    reason = str(error.__cause__ or error).strip().partition("\n")[0]
    return (
        f"export_onnx: torch.export cannot export {type(model).__name__} ({reason}). If its forward branches on values, "
        f"use exporter='torchscript': it exports the branches that the example inputs take; export one file for each."
    )


class _Wrapper(nn.Module):
    """Hides the `graph` attribute of a model, which the TorchScript exporter would take for a TorchScript graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module(WRAPPED, model)

    def forward(self, *inputs: Any) -> Any:
        return self.get_submodule(WRAPPED)(*inputs)


def _export_torchscript(request: Request) -> Any:
    import onnx
    import onnx_ir

    from qtoolkit.export.translation import register_symbolic

    register_symbolic(request.opset)
    names = list(request.input_names) if request.input_names else _argument_names(request.model, len(request.inputs))
    with _temporary_file() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the caller chose the older exporter
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", "Constant folding", UserWarning)  # an optimization that does not apply
        torch.onnx.export(
            _Wrapper(request.model).eval(),
            _arguments(request.inputs),
            str(path),
            dynamo=False,
            opset_version=request.opset,
            input_names=names,
            output_names=list(request.output_names) if request.output_names else None,
            dynamic_axes=_dynamic_axes(names, request.dynamic_shapes),
        )
        model = onnx_ir.from_proto(onnx.load(str(path)))
        first = _first_names(request.model)
        _name_by_quantizers(model, {f"{WRAPPED}.{name}": first[name] for name in first})
        return onnx_ir.to_proto(model)


def _arguments(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # torch.onnx.export takes a dict at the end for keyword arguments.
    return (*inputs, {}) if inputs and isinstance(inputs[-1], dict) else inputs


def _argument_names(model: nn.Module, count: int) -> list[str]:
    if isinstance(model, QuantizedGraphModule):
        return [node.name for node in model.graph.nodes if node.op == "placeholder"]
    names: list[str] = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{i}" for i in range(count - len(names))] if variadic else [name]
    return names[:count]


def _dynamic_axes(names: Sequence[str], dynamic_shapes: Any) -> dict[str, dict[int, str]] | None:
    if dynamic_shapes is None:
        return None
    shapes = dynamic_shapes.values() if isinstance(dynamic_shapes, Mapping) else dynamic_shapes
    return {
        name: {axis: str(getattr(dim, "__name__", dim)) for axis, dim in shape.items()}
        for name, shape in zip(names, shapes, strict=True)
        if shape
    }


def _first_names(model: nn.Module) -> dict[str, str]:
    """Map every dotted name of each quantizer to its first one. Exporters may use any name of a shared module."""
    quantizers = (names for module, names in names_by_module(model).items() if isinstance(module, Grid))
    return {name: names[0] for names in quantizers for name in names}


def _name_by_quantizers(model: "onnx_ir.Model", names: Mapping[str, str]) -> None:
    """Name each QuantizeLinear and DequantizeLinear node after the quantizer whose scale it reads."""
    for node in model.graph:
        scale = node.inputs[1] if node.op_type in ("QuantizeLinear", "DequantizeLinear") else None
        owner = scale.name.removesuffix(".scale") if scale is not None and scale.name is not None else ""
        if owner in names:
            node.name = f"{names[owner]}.{'quantize' if node.op_type == 'QuantizeLinear' else 'dequantize'}"


@contextlib.contextmanager
def _temporary_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "model.onnx"


EXPORTERS: Mapping[str, Callable[[Request], Any]] = {"dynamo": _export_dynamo, "torchscript": _export_torchscript}
