"""torch's two ONNX exporters. Both return an onnx_ir.Model with placeholders that name their quantizers."""

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir
import torch
from onnx_ir.passes import PassError
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor, nn

from qtoolkit.errors import first_line, present, warn
from qtoolkit.export.exporters.quantized_constants import QuantizedConstants
from qtoolkit.export.exporters.simplify import simplify
from qtoolkit.export.exporters.translation import QUANTIZER, TRANSLATIONS, keep_quantizers, placeholders_in
from qtoolkit.export.inputs import DynamicShapes, Inputs, by_name
from qtoolkit.export.rounded_once import RoundedOnce
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_inputs import naming_misfits, with_tensors
from qtoolkit.op_kinds.recorded import sizes_asked
from qtoolkit.ops.recording import ops_taken
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.shared_modules import names_by_module

WRAPPED = "model"
# What follows the advice to use the other exporter.
IF_THAT_FAILS = (
    " If that fails too, torch cannot export the op, not even in a float model: replace it by other ops, or quantize the "
    "submodules before and after it with qtoolkit.prepare_parts and export them."
)


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of both exporters."""

    model: nn.Module
    inputs: Inputs
    opset: int
    output_names: Sequence[str] | None
    dynamic_shapes: DynamicShapes | None

    @property
    def what(self) -> str:
        """The name of the public function, for error messages."""
        return self.inputs.what

    @torch.no_grad()
    def run(self) -> object:
        """Return the outputs of the model for its inputs."""
        with naming_misfits(self.model, self.inputs.given, f"{self.what}: example_inputs do"), RoundedOnce():
            return self.model(*self.inputs.args, **self.inputs.kwargs)


def _export_dynamo(request: ExportRequest) -> onnx_ir.Model:
    constants, axes = QuantizedConstants(request.model, request.run), _names_of_axes(request)
    with constants.kept_out(), ops_taken(), sizes_asked() as asked:
        program = _dynamo_program(request)
    _check_asked(asked, request.what)
    constants.put_back(program.model)
    _name_axes(program.model, axes)
    # Before the optimizer, which merges scales of equal value.
    _name_by_quantizers(program.model, _quantizers_of_scales(request.model))
    try:
        simplify(program.model)
    except PassError as error:
        raise RuntimeError(f"{request.what}: {_describe_failure(request.model, error)}") from error
    # A tensor that is returned twice has been one value, with the last of its names.
    for value, name in zip(program.model.graph.outputs, request.output_names or (), strict=False):
        value.name = name
    keep_quantizers(program.model)
    return program.model


def _check_asked(asked: Sequence[tuple[object, str]], what: str) -> None:
    """Warn about branches on dynamic sizes, which the file does not check.

    Raises RuntimeError: a Python number computed from a dynamic size would become a constant in the file.
    """
    remedy = (
        "make that dimension static (dynamic_batch=False, or no entry in dynamic_shapes), or prepare with that submodule in "
        "untraced"
    )
    for value, where in asked:
        if not isinstance(value, bool):
            raise RuntimeError(
                f"{what}: a Python number depends on a dynamic size, at {where}: the file would use {value!r}, its value for "
                f"the example inputs, for all sizes; {remedy}."
            )
    if asked:
        warn(
            f"{what}: Python branches on a dynamic size, at {asked[0][1]}: the file contains only the branch for the example "
            f"inputs, and does not check sizes; {remedy}.",
        )


def _dynamo_program(request: ExportRequest) -> torch.onnx.ONNXProgram:
    inputs = request.inputs
    # torch.onnx.export takes a dict at the end for keyword arguments.
    ends_with_dict = bool(inputs.args) and isinstance(inputs.args[-1], dict)
    try:
        program = torch.onnx.export(
            by_name(request.model, inputs.kwargs),
            (*inputs.args, {}) if ends_with_dict else inputs.args,
            kwargs=inputs.kwargs,
            dynamo=True,
            opset_version=request.opset,
            custom_translation_table=dict(TRANSLATIONS),
            input_names=inputs.given_names or None,
            output_names=request.output_names,
            dynamic_shapes=request.dynamic_shapes,
            verbose=False,
            optimize=False,
        )
    except torch.onnx.OnnxExporterError as error:
        if request.dynamic_shapes is not None and "static shape" in str(error.__cause__):
            raise RuntimeError(f"{request.what}: {_describe_constants(error.__cause__)}") from error
        raise RuntimeError(f"{request.what}: {_describe_failure(request.model, error)}") from error
    return present(program, "the program of torch.onnx.export")


def _describe_failure(model: nn.Module, error: Exception) -> str:
    if isinstance(model, QuantizedGraphModule):
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        return f"exporter='dynamo' cannot export the model ({first_line(reason)}); use exporter='torchscript'.{IF_THAT_FAILS}"
    return (
        f"torch.export cannot export {type(model).__name__} ({first_line(error.__cause__ or error)}). If its forward branches "
        "on values, use exporter='torchscript', which exports the branch that the example inputs take; export one file for "
        "each branch."
    )


def _describe_constants(error: object) -> str:
    found = [line.strip(" -.") for line in str(error).splitlines() if "static shape" in line]
    return (
        f"the model uses a constant in place of a dimension that should be dynamic ({found[0]}); use the size of a tensor "
        "there, as in x.view(x.size(0), -1), or make the dimension static."
    )


class _Wrapper(nn.Module):
    """Calls a model with the tensors of its inputs: the TorchScript exporter names only tensors.

    It also hides the `graph` attribute of a model, which that exporter would mistake for a TorchScript graph.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.add_module(WRAPPED, model)
        self.inputs = inputs

    def forward(self, *tensors: Tensor) -> object:
        args, kwargs = with_tensors((self.inputs.args, self.inputs.kwargs), iter(tensors))
        return self.get_submodule(WRAPPED)(*args, **kwargs)


def _export_torchscript(request: ExportRequest) -> onnx_ir.Model:
    axes = _names_of_axes(request)
    model = onnx_ir.from_proto(_torchscript_proto(request, axes))
    _add_unused_inputs(model, request.inputs, axes)
    first = _quantizers_of_scales(request.model)
    _name_by_quantizers(model, {f"{WRAPPED}.{scale}": name for scale, name in first.items()})
    keep_quantizers(model)
    return model


def _torchscript_proto(request: ExportRequest, axes: Mapping[str, dict[int, str]]) -> onnx.ModelProto:
    # A string in memory holds no weights above 2 GB.
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), ops_taken():
        warnings.simplefilter("ignore", DeprecationWarning)  # the caller chose the older exporter
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", "Constant folding", UserWarning)  # an optimization that does not apply
        file = os.path.join(folder, "model.onnx")
        try:
            torch.onnx.export(
                _Wrapper(request.model, request.inputs).eval(),
                tuple(request.inputs.tensors),
                file,
                dynamo=False,
                opset_version=request.opset,
                input_names=request.inputs.names,
                output_names=list(request.output_names) if request.output_names else None,
                dynamic_axes=axes,
            )
        except torch.onnx.OnnxExporterError as error:
            raise RuntimeError(
                f"{request.what}: exporter='torchscript' cannot export the model ({first_line(error)}); use "
                f"exporter='dynamo'.{IF_THAT_FAILS}"
            ) from error
        except RuntimeError as error:
            if "observable data dependence" not in str(error):
                raise
            raise RuntimeError(
                f"{request.what}: the TorchScript exporter cannot write an output that does not depend on the inputs "
                f"({str(error).partition(' (')[0]}); use exporter='dynamo', or export a module without this output."
            ) from error
        return onnx.load(file)


def _names_of_axes(request: ExportRequest) -> dict[str, dict[int, str]]:
    """Return the names of the dynamic dimensions of each input."""
    if request.dynamic_shapes is None:
        return {}
    sizes = zip(request.inputs.names, request.inputs.sizes(request.dynamic_shapes), strict=True)
    axes = {name: shape.items() if isinstance(shape, Mapping) else enumerate(shape or ()) for name, shape in sizes}
    return {
        name: {axis: str(getattr(dim, "__name__", dim)) for axis, dim in dims if dim is not None}
        for name, dims in axes.items()
    }


def _name_axes(model: onnx_ir.Model, axes: Mapping[str, Mapping[int, str]]) -> None:
    """Name the dynamic dimensions; torch.onnx.export omits the names if an input is not a tensor."""
    names = {}
    for value, named in zip(model.graph.inputs, axes.values(), strict=False):
        for axis, name in named.items():
            dim = None if value.shape is None else value.shape[axis]
            if isinstance(dim, onnx_ir.SymbolicDim):
                names[dim.value] = name
    values = (value for node in model.graph for value in node.outputs)
    for value in (*model.graph.inputs, *values):
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, onnx_ir.SymbolicDim) and dim.value in names and value.shape is not None:
                value.shape[axis] = names[dim.value]


def _add_unused_inputs(model: onnx_ir.Model, inputs: Inputs, axes: Mapping[str, Mapping[int, str]]) -> None:
    """Add the unused inputs, which the TorchScript exporter drops: the file has the same inputs as forward."""
    values = {value.name: value for value in model.graph.inputs}
    for name, tensor in zip(inputs.names, inputs.tensors, strict=True):
        if name not in values:
            shape = [axes.get(name, {}).get(axis, size) for axis, size in enumerate(tensor.shape)]
            kind = onnx_ir.TensorType(from_torch_dtype(tensor.dtype))
            values[name] = onnx_ir.Value(name=name, shape=onnx_ir.Shape(shape), type=kind)
    model.graph.inputs.clear()
    model.graph.inputs.extend(values[name] for name in inputs.names)


def _quantizers_of_scales(model: nn.Module) -> dict[str, str]:
    """Map every dotted name of each scale to the first name of its quantizer. Exporters may use any name of a shared module."""
    quantizers = (names for module, names in names_by_module(model).items() if isinstance(module, Grid))
    return {f"{name}.scale": names[0] for names in quantizers for name in names}


def _name_by_quantizers(model: onnx_ir.Model, quantizers: Mapping[str, str]) -> None:
    """Record in each placeholder the quantizer of its scale."""
    for node in placeholders_in(model):
        scale = node.inputs[1]
        quantizer = quantizers.get(scale.name or "") if scale is not None else None
        if quantizer is not None:
            node.metadata_props[QUANTIZER] = quantizer


EXPORTERS: Mapping[str, Callable[[ExportRequest], onnx_ir.Model]] = {
    "dynamo": _export_dynamo,
    "torchscript": _export_torchscript,
}
