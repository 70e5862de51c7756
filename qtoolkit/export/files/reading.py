"""Open and check files of unknown origin; invalid files raise errors with a clear message."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from qtoolkit.errors import first_line
from qtoolkit.extras import needed
from qtoolkit.runtimes.execution import Array

if TYPE_CHECKING:
    import onnx
    import onnx_ir


class UnreadableFileError(ValueError):
    """A file cannot be used; the message says why, and what to do.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        ...     try:
        ...         qt.export.describe(file.name)
        ...     except qt.export.UnreadableFileError:
        ...         print("not an ONNX file")
        not an ONNX file
    """


def open_model(path: str | os.PathLike[str]) -> "onnx.ModelProto":
    """Return the model of an ONNX file, without external weights.

    Raises UnreadableFileError: the file does not exist, is not ONNX, is truncated or invalid, has ops that ONNX does not know,
    or its external weights are missing. ImportError: onnx is not installed.
    """
    load = needed("onnx", "reading ONNX files", "onnx").load
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UnreadableFileError(f"{str(path)!r} {what}; pass the path of an ONNX file.")
    try:
        model: onnx.ModelProto = load(str(file), load_external_data=False, format="protobuf")
    except OSError as error:
        raise UnreadableFileError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # protobuf's errors have no base class of their own
        raise UnreadableFileError(
            f"{str(path)!r} is not an ONNX file, or is truncated: {first_line(error)}. Write it again, or copy it again."
        ) from error
    if not model.ir_version or not model.graph.node:
        raise UnreadableFileError(
            f"{str(path)!r} is not an ONNX file, or is truncated: it has no graph. Write it again, or copy it again."
        )
    _check_weights(model, file)
    _check(model, file)
    return model


def open_graph(path: str | os.PathLike[str]) -> "onnx_ir.Model":
    """Return a file's model as a graph with its functions inlined; errors as in `open_model`."""
    open_model(path)
    import onnx_ir
    from onnx_ir.passes.common import InlinePass

    try:
        model = onnx_ir.load(path)
        if model.functions:
            InlinePass()(model)
    except Exception as error:  # any, for a file that contradicts itself
        raise UnreadableFileError(f"{str(path)!r} is not a valid ONNX model: {first_line(error)}.") from error
    return model


def _check_weights(model: "onnx.ModelProto", file: Path) -> None:
    """Check that the external weight files exist and have the sizes that the model states."""
    from onnx import TensorProto

    folder = file.resolve().parent
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        weights = (folder / entries.get("location", "")).resolve()
        where = f"the weight {tensor.name!r} of {str(file)!r}"
        if not weights.is_relative_to(folder):
            raise UnreadableFileError(
                f"{where} is in {entries['location']!r}, outside the folder of the model; ONNX requires weight files in the "
                "same folder."
            )
        if not weights.is_file():
            raise UnreadableFileError(
                f"{where} is in {entries.get('location', '')!r}, which is missing; copy that file into the folder of the "
                "model."
            )
        try:
            end = int(entries.get("offset", 0)) + int(entries.get("length", 0))
        except ValueError:
            end = -1
        if not 0 <= end <= weights.stat().st_size:
            raise UnreadableFileError(
                f"{where} is truncated: {entries['location']!r} has {weights.stat().st_size} bytes; copy that file again."
            )


def _check(model: "onnx.ModelProto", file: Path) -> None:
    import onnx

    names = [
        text for node in model.graph.node for text in (node.name, node.op_type, node.domain, *node.input, *node.output)
    ]
    names += [each.name for each in (*model.graph.initializer, *model.graph.input, *model.graph.output)]
    if not all(isinstance(name, str) for name in names):  # protobuf returns other names as bytes
        raise UnreadableFileError(f"{str(file)!r} is not a valid ONNX model: a name in it is not UTF-8 text.")
    known = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    functions = {(function.domain, function.name) for function in model.functions}
    for node in model.graph.node:
        domain = node.domain or "ai.onnx"
        is_known = (node.domain, node.op_type) in functions or (
            domain in known and not _is_unknown(node, known[domain])
        )
        if not is_known:
            raise UnreadableFileError(
                f"{str(file)!r} has an op that ONNX does not know: {node.op_type!r} of domain {domain!r} (node {node.name!r}). "
                "Declare the opset of its domain, or write the file without this op."
            )
    try:
        onnx.checker.check_model(_with_types(model) or str(file))
    except Exception as error:  # the checker raises errors of several types
        raise UnreadableFileError(f"{str(file)!r} is not a valid ONNX model: {first_line(error)}.") from error


def _with_types(model: "onnx.ModelProto") -> "onnx.ModelProto | None":
    """Return a copy in which each input and output has a type and a shape: the checker requires them, runtimes do not.

    None if they have both. External weights become inputs, because the checker would look for their files.
    """
    import onnx

    values = (*model.graph.input, *model.graph.output)
    if all(value.type.tensor_type.HasField("shape") and value.type.tensor_type.elem_type for value in values):
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    outside = [t for t in copy.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in outside:
        copy.graph.initializer.remove(tensor)
    known = {value.name for value in copy.graph.input}
    new = [onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in outside if t.name not in known]
    copy.graph.input.extend(new)
    for value in (*copy.graph.input, *copy.graph.output):
        if value.type.WhichOneof("value") in (None, "tensor_type"):  # not a sequence or a map
            kind = value.type.tensor_type
            kind.elem_type = kind.elem_type or onnx.TensorProto.FLOAT
            kind.shape.SetInParent()
    return copy


def array_of(tensor: "onnx.TensorProto", file: Path) -> Array:
    """Return the values of a constant in a file.

    Raises UnreadableFileError: its type is not known, or it has more or fewer values than its shape says.
    """
    from onnx import numpy_helper

    try:
        return numpy_helper.to_array(tensor, str(file.resolve().parent))
    except Exception as error:  # of several types
        reason = f"its type {tensor.data_type} is not known" if isinstance(error, KeyError) else first_line(error)
        raise UnreadableFileError(
            f"{str(file)!r} is not a valid ONNX model: the constant {tensor.name!r} cannot be read: {reason}."
        ) from error


def _is_unknown(node: "onnx.NodeProto", version: int) -> bool:
    """Return whether an op is in ONNX's own domain but does not exist in this version."""
    from onnx import defs

    return node.domain in ("", "ai.onnx") and not (version > 0 and defs.has(node.op_type, version, ""))
