"""Parts of a float16 file that stay in float32, between Casts: ops that lose accuracy or overflow, inputs and outputs."""

from collections.abc import Sequence

import onnx_ir
from onnx_ir import DataType

from qtoolkit.errors import present
from qtoolkit.export.files.graph import Constants, constant_input, constant_of, maker_of
from qtoolkit.op_kinds.float32 import FLOAT32_OPS

TYPE_NAMES = {DataType.FLOAT: "float32", DataType.FLOAT16: "float16"}
# Ops that return one of their inputs' values, so float16 is exact. Torch's exporters write Casts around some of them.
EXACT_OPS = ("Abs", "Neg", "Max", "Min", "ReduceMax", "ReduceMin")
Wide = dict[tuple[int, onnx_ir.Value], onnx_ir.Value]  # the values that are there in float32 too, in each graph


def keep_float32_ops(model: onnx_ir.Model) -> None:
    """Put Casts around each op of FLOAT32_OPS that takes float16, but not between two such ops."""
    onnx_ir.passes.common.ShapeInferencePass()(model)  # for the types
    constants, wide = Constants(model.graph), Wide()
    for node in list(onnx_ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type in EXACT_OPS:
            _narrow(node)
        elif node.op_type == "Cast":
            _drop_cast(node, wide)
        count = 0 if node.domain else FLOAT32_OPS.get(node.op_type, 0)
        places = [
            i for i, value in enumerate(node.inputs[:count]) if value is not None and value.dtype == DataType.FLOAT16
        ]
        if places and node.graph is not None:
            _keep_float32(node, node.graph, places, constants, wide)
        elif node.op_type == "QuantizeLinear":
            _take_float32(node, constants)


def _take_float32(quantize: onnx_ir.Node, constants: Constants) -> None:
    """Let a QuantizeLinear take the float32 output of an op directly: after a Cast it would round twice."""
    cast = maker_of(quantize.inputs[0], "Cast")
    source = None if cast is None else cast.inputs[0]
    scale = constant_input(quantize, 1)
    if source is None or scale is None or source.dtype != DataType.FLOAT or source.producer() is None:
        return
    quantize.replace_input_with(0, source)
    quantize.replace_input_with(1, constants.shared(scale, DataType.FLOAT, f"{source.name}.scale"))


def _narrow(node: onnx_ir.Node) -> None:
    """Let an op compute in float16 if its inputs are Casts from float16."""
    casts = [maker_of(value, "Cast") for value in node.inputs if value is not None and value.dtype == DataType.FLOAT]
    sources = [None if cast is None else cast.inputs[0] for cast in casts]
    graph = node.graph
    if graph is None or not sources or any(value is None or value.dtype != DataType.FLOAT16 for value in sources):
        return
    for index, value in enumerate(node.inputs):
        cast = maker_of(value, "Cast") if value is not None and value.dtype == DataType.FLOAT else None
        if cast is not None:
            node.replace_input_with(index, cast.inputs[0])
    _put_behind(node, graph, DataType.FLOAT16, DataType.FLOAT)


def _drop_cast(cast: onnx_ir.Node, wide: Wide) -> None:
    """Skip a Cast if a tensor with its output type already exists: before another Cast, or as an op's own output."""
    (value,), (result,) = cast.inputs, cast.outputs
    before = maker_of(value, "Cast")
    source = None if before is None else before.inputs[0]
    known = None if value is None else wide.get((id(cast.graph), value))
    of = None if source is None or value is None else (source.dtype, value.dtype, result.dtype)
    if of == (DataType.FLOAT16, DataType.FLOAT, DataType.FLOAT16):
        known = source
    if known is not None and known.dtype == result.dtype and not result.is_graph_output():
        onnx_ir.convenience.replace_all_uses_with(result, known)


def _put_behind(
    node: onnx_ir.Node, graph: onnx_ir.Graph | onnx_ir.Function, computed: DataType, returned: DataType
) -> onnx_ir.Value:
    """Let a node compute in one type, followed by a Cast to another; return the Cast's output, which keeps the name."""
    (output,) = node.outputs
    name = output.name
    output.name, output.dtype = f"{name}.{TYPE_NAMES[computed]}", computed
    cast = _cast(output, returned, name)
    graph.insert_after(node, cast)
    onnx_ir.convenience.replace_all_uses_with(output, cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, output)
    return cast.outputs[0]


def keep_float32_ends(model: onnx_ir.Model) -> None:
    """Add Casts so that a float16 file takes and returns float32."""
    graph, seen = model.graph, dict[onnx_ir.Value, onnx_ir.Value]()
    for value in graph.inputs:
        if value.dtype == DataType.FLOAT16:
            cast = _cast(value, DataType.FLOAT16, f"{value.name}.float16")
            onnx_ir.convenience.replace_all_uses_with(value, cast.outputs[0], replace_graph_outputs=True)
            cast.replace_input_with(0, value)
            graph.insert_before(graph[0], cast) if len(graph) else graph.append(cast)
            value.type = onnx_ir.TensorType(DataType.FLOAT)  # others may share the type that it had
    for index, value in enumerate(graph.outputs):
        if value.dtype == DataType.FLOAT16 and value not in seen:
            name, value.name = value.name, f"{value.name}.float16"
            cast = _cast(value, DataType.FLOAT, name)
            graph.append(cast)
            seen[value] = cast.outputs[0]
        graph.outputs[index] = seen.get(value, value)


def _keep_float32(
    node: onnx_ir.Node, graph: onnx_ir.Graph | onnx_ir.Function, places: Sequence[int], constants: Constants, wide: Wide
) -> None:
    for index in places:
        value = present(node.inputs[index], f"an input of {node.name!r}")
        array, key = constant_of(value), (id(graph), value)
        if key not in wide and array is not None:
            wide[key] = constants.add(array, DataType.FLOAT, f"{value.name}.float32")
        elif key not in wide:
            cast = _cast(value, DataType.FLOAT, f"{value.name}.float32")
            graph.insert_before(node, cast)
            wide[key] = cast.outputs[0]
        node.replace_input_with(index, wide[key])
    wide[id(graph), _put_behind(node, graph, DataType.FLOAT, DataType.FLOAT16)] = node.outputs[0]


def _cast(value: onnx_ir.Value, dtype: DataType, name: str | None) -> onnx_ir.Node:
    result = onnx_ir.Value(name=name, type=onnx_ir.TensorType(dtype), shape=value.shape)
    return onnx_ir.node("Cast", [value], {"to": int(dtype)}, name=f"{name}/cast", outputs=[result])
