"""ONNX files: save them, with separate weight files for large models; check them; run them in onnxruntime."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError
from onnx_ir import DataType
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from qtoolkit.errors import first_line
from qtoolkit.files import write_atomically
from qtoolkit.runtimes.execution import Array

if TYPE_CHECKING:
    import onnxruntime

KEPT_INSIDE = 1 << 16  # bytes of a tensor above which verification hands it to onnxruntime apart from the model
SMALL_FLOATS = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)
LARGEST_FILE = 2_000_000_000  # bytes of weights; a protocol buffer holds less than 2^31 bytes


def save(model: onnx_ir.Model, folder: Path, weights: str) -> tuple[Path, Path | None]:
    """Save a model in a folder; return its file, and a weight file with the given name if one file is too small for both."""
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    path = folder / "model.onnx"
    if size <= LARGEST_FILE:
        onnx_ir.save(model, path)
        return path, None
    onnx_ir.save(model, path, external_data=weights)
    return path, folder / weights


def weights_of(path: Path) -> set[str]:
    """Return the names of the external weight files of the model at a path, as `save` names them."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    names = {name for name in _weight_names(path) if path.with_name(name).is_file()}
    if not names or not path.is_file():
        return set()
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (OSError, DecodeError):
        return set()
    return names & {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}


def free_name(path: Path, used: Set[str]) -> str:
    """Return a name for the weight file of a new model; the old model at the path still uses its own while it is written."""
    return next(name for name in _weight_names(path) if name not in used)


def _weight_names(path: Path) -> tuple[str, str]:
    return f"{path.name}.data", f"{path.name}.1.data"


@contextmanager
def replacing_model(model: onnx_ir.Model, path: Path, opset: int, what: str) -> Iterator[tuple[Path, ...]]:
    """Save a model in a temporary folder, and move it to a path at the end of a `with` block.

    Yields its file, and its weight file if there is one. If the block raises, the existing file at the path is kept. Raises
    RuntimeError, which begins with `what`: the file is not valid ONNX.
    """
    with tempfile.TemporaryDirectory() as folder:
        old = weights_of(path)
        file, weights = save(model, Path(folder), free_name(path, old))
        check_file(file, opset, what)
        yield (file,) if weights is None else (file, weights)
        if weights is not None:
            write_atomically(weights, path.with_name(weights.name))
        write_atomically(file, path)
        for name in old:
            path.with_name(name).unlink(missing_ok=True)


def check_file(path: Path, opset: int, what: str) -> None:
    """Raise RuntimeError, which begins with `what`, if a file is not valid ONNX."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except (ValidationError, InferenceError) as error:
        remedy = "; pass opset=22" if "bfloat16" in str(error) else ""
        raise RuntimeError(
            f"{what}: the model is not valid ONNX in opset {opset}: {first_line(error)}{remedy}."
        ) from error


@dataclass(frozen=True)
class OpenedFile:
    """A model to run in onnxruntime."""

    proto: onnx.ModelProto  # the model, whose large weights are elsewhere if it was read from a file
    folder: str = ""  # the folder of its weights, if they are in a file of their own
    weights: Mapping[str, Array] = field(default_factory=dict)  # large weights that were in the file itself, by name

    @classmethod
    def of(cls, model: onnx.ModelProto | str | os.PathLike[str]) -> "OpenedFile":
        """Open a model, or the file at a path; external weights are not read."""
        if isinstance(model, onnx.ModelProto):
            return cls(model)
        proto = onnx.load(str(model), load_external_data=False)
        return cls(proto, os.path.dirname(os.path.abspath(model)), _take_out_weights(proto))

    @property
    def is_float16(self) -> bool:
        """Whether its constants are float16 numbers: scales, biases or weights."""
        return any(tensor.data_type == TensorProto.FLOAT16 for tensor in self.proto.graph.initializer)

    def run(self, inputs: Sequence[Tensor], names: Sequence[str]) -> dict[str, Array]:
        """Run the model without graph optimizations; return its inputs and outputs, and the tensors with these names.

        Raises RuntimeError: onnxruntime cannot run it.
        """
        constants = {t.name: self.constant(t) for t in self.proto.graph.initializer if t.name in names}
        session = self._session([name for name in dict.fromkeys(names) if name not in constants])
        feeds = _feeds(session, inputs)
        outputs = [value.name for value in session.get_outputs()]
        try:
            found = session.run(outputs, feeds)
        except Exception as error:  # onnxruntime's errors have no base class of their own
            raise RuntimeError(
                f"verify_onnx: onnxruntime cannot run the file on these inputs: {first_line(error)}. If they have the dtypes "
                "and sizes of the example inputs, torch's exporter has written an op wrongly, or onnxruntime does not support "
                "this op; check whether it runs a file of the float model. Try the other exporter; or quantize the submodules "
                "before and after the op with qtoolkit.prepare_parts and export them; or quantize the model with "
                "qtoolkit.quant_modules.replace, which writes recurrent layers step by step."
            ) from error
        values = {**constants, **feeds, **dict(zip(outputs, found, strict=True))}
        kinds = _small_floats(self.proto.graph)
        return {name: _places(array.astype(kinds.get(name, array.dtype))) for name, array in values.items()}

    def taken(self, inputs: Sequence[Tensor], what: str) -> list[Tensor]:
        """Return inputs in the types of the file: float32 inputs are cast if it takes float16 (keep_io_types=False).

        Raises ValueError, which begins with `what`, if the number, dtypes or sizes of the inputs do not match.
        """
        stored = {tensor.name for tensor in self.proto.graph.initializer}
        taken = [value for value in self.proto.graph.input if value.name not in stored]
        if len(taken) != len(inputs):
            raise ValueError(
                f"{what}: the file takes {len(taken)} tensors ({', '.join(value.name for value in taken)}), got {len(inputs)}; "
                "pass inputs like the example inputs of the export."
            )
        result = []
        for value, given in zip(taken, inputs, strict=True):
            kind = value.type.tensor_type
            narrow = given.dtype == torch.float32 and kind.elem_type == TensorProto.FLOAT16
            x = given.half() if narrow else given
            sizes = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim]
            fits = len(sizes) == x.dim() and all(
                isinstance(size, str) or size == own for size, own in zip(sizes, x.shape, strict=True)
            )
            if from_torch_dtype(x.dtype) != kind.elem_type or (kind.HasField("shape") and not fits):
                raise ValueError(
                    f"{what}: input {value.name!r} of the file is {DataType(kind.elem_type).numpy()} of shape "
                    f"({', '.join(map(str, sizes))}), got {str(x.dtype).removeprefix('torch.')} of shape "
                    f"({', '.join(map(str, x.shape))}); pass inputs like the example inputs of the export, or export with "
                    "dynamic_batch=True or dynamic_shapes."
                )
            result.append(x)
        return result

    def constants(self, names: Sequence[str]) -> dict[str, Array]:
        """Return tensors that do not depend on the inputs of the model.

        Raises RuntimeError: onnxruntime cannot compute them.
        """
        stored = {tensor.name: tensor for tensor in self.proto.graph.initializer}
        found = {name: _places(self.constant(stored[name])) for name in names if name in stored}
        computed = [name for name in names if name not in stored]
        if not computed:
            return found
        needed, nodes = set(computed), []
        for node in reversed(self.proto.graph.node):
            if needed.intersection(node.output):
                needed.update(node.input)
                nodes.append(node)
        part = onnx.ModelProto(ir_version=self.proto.ir_version, opset_import=self.proto.opset_import)
        part.graph.name = self.proto.graph.name
        part.graph.node.extend(reversed(nodes))
        part.graph.initializer.extend(tensor for name, tensor in stored.items() if name in needed)
        weights = {name: array for name, array in self.weights.items() if name in needed}
        return found | OpenedFile(part, self.folder, weights).run([], computed)

    def constant(self, tensor: onnx.TensorProto) -> Array:
        """Return the array of an initializer."""
        return self.weights[tensor.name] if tensor.name in self.weights else numpy_helper.to_array(tensor, self.folder)

    def _session(self, names: Sequence[str]) -> "onnxruntime.InferenceSession":
        """Return a session of the model whose outputs include the tensors of these names."""
        import onnxruntime

        opened = onnx.ModelProto()
        opened.CopyFrom(self.proto)
        shown = {o.name for o in opened.graph.output} | {i.name for i in opened.graph.input}
        opened.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in shown)
        _widen(opened.graph, names)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", self.folder)
        weights = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in self.weights.values()]
        options.add_external_initializers(list(self.weights), weights)
        try:
            return onnxruntime.InferenceSession(opened.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors have no base class of their own
            fp8 = self.is_float16 and any(tensor.data_type in SMALL_FLOATS for tensor in self.proto.graph.initializer)
            why = "it has no kernels for fp8 in float16, which TensorRT has" if fp8 else first_line(error)
            raise RuntimeError(
                f"verify_onnx: onnxruntime cannot run the file on the CPU: {why}. If the target can run it, pass "
                "verify=False to write the file without verification; float32 models run everywhere."
            ) from error


def refusal_of_default_session(path: Path, inputs: Sequence[Tensor]) -> str:
    """Return why onnxruntime does not run a file on inputs in a default session; "" if it does."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # onnxruntime prints the error otherwise, which is returned here
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        session.run(None, _feeds(session, inputs))
    except Exception as error:  # onnxruntime's errors have no base class of their own
        return first_line(error)
    return ""


def _feeds(session: "onnxruntime.InferenceSession", inputs: Sequence[Tensor]) -> dict[str, Array]:
    """Return the inputs of a session by name."""
    names = [value.name for value in session.get_inputs()]
    return {name: x.detach().cpu().numpy() for name, x in zip(names, inputs, strict=True)}


def _take_out_weights(model: onnx.ModelProto) -> dict[str, Array]:
    """Replace the data of large weights in a model by a reference, and return their arrays: this avoids a second copy."""
    weights = {}
    for tensor in model.graph.initializer:
        shared = helper.tensor_dtype_to_np_dtype(tensor.data_type).isbuiltin  # others have no type in numpy itself
        if tensor.data_location != TensorProto.EXTERNAL and len(tensor.raw_data) > KEPT_INSIDE and shared == 1:
            weights[tensor.name] = numpy_helper.to_array(tensor)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="memory")
    return weights


def _widen(graph: onnx.GraphProto, names: Sequence[str]) -> None:
    """Cast quantized values of types that numpy lacks to a type that it has, under the same names."""
    wide = {TensorProto.INT4: TensorProto.INT8, TensorProto.UINT4: TensorProto.UINT8}
    wide |= dict.fromkeys(SMALL_FLOATS, TensorProto.FLOAT)
    dtypes = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in list(graph.node):
        dtype = wide.get(dtypes.get(_zero_point(node), 0)) if node.op_type == "QuantizeLinear" else None
        if dtype is not None and node.output[0] in names:
            name = node.output[0]
            node.output[0] = f"{name}.narrow"
            for user in graph.node:
                user.input[:] = [f"{name}.narrow" if taken == name else taken for taken in user.input]
            graph.node.append(helper.make_node("Cast", [f"{name}.narrow"], [name], to=dtype))


def _small_floats(graph: onnx.GraphProto) -> dict[str, np.dtype[Any]]:
    """Return the output type of each QuantizeLinear in a small float format, by the name of its output."""
    small = (tensor for tensor in graph.initializer if tensor.data_type in SMALL_FLOATS)
    dtypes = {tensor.name: helper.tensor_dtype_to_np_dtype(tensor.data_type) for tensor in small}
    quantizers = (node for node in graph.node if node.op_type == "QuantizeLinear")
    return {node.output[0]: dtypes[_zero_point(node)] for node in quantizers if _zero_point(node) in dtypes}


def _zero_point(node: onnx.NodeProto) -> str:
    """Return the name of the zero point of a QuantizeLinear; "" if it has none (the default is a uint8 0)."""
    return node.input[2] if len(node.input) > 2 else ""


def _places(codes: Array) -> Array:
    """Return small floats as indices into the numbers of their format, as `Grid.codes` does; other arrays as they are."""
    bits = {"float8_e4m3fn": 8, "float8_e5m2": 8, "float4_e2m1fn": 4}.get(codes.dtype.name)
    if bits is None:
        return codes
    sign, places = 1 << bits - 1, codes.view(np.uint8).astype(np.int16)
    return np.where(places & sign, -(places & sign - 1), places & sign - 1)
