"""onnxruntime on the CPU at its default optimization level, which turns Q/DQ nodes into integer kernels.

The optimized graph is saved, its quantized tensors are added to the outputs, and it is run without further optimizations. The
last optimization, to NHWC, only moves data and renames tensors, so the graph before it is used. Three facts about onnxruntime
1.30 matter:

- a fused kernel keeps the name of its op, and its output is the output of the QuantizeLinear;
- on x86, int8 values become uint8 values that are 128 higher (QDQS8ToU8Transformer). Their tensors get new names. The
  QuantizeLinear nodes keep their names, and show the new tensor names before kernels are fused;
- the saved graph has no types for moved tensors.
"""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from qtoolkit.errors import first_line
from qtoolkit.export.files.files import OpenedFile
from qtoolkit.export.files.kinds import CAST, ops_where
from qtoolkit.export.files.quantizer_nodes import QuantizerNode, bodies_in, layer_names, varying_tensors
from qtoolkit.export.verification.codes import largest_difference
from qtoolkit.export.verification.runtimes.saturating_sums import processor_saturates, saturating_nodes
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.runtimes.execution import Array, Executed, ExecutedLayer
from qtoolkit.runtimes.table import ONNXRUNTIME

if TYPE_CHECKING:
    import onnx
    import onnxruntime

TO_NHWC, FUSE = "NhwcTransformer", "QDQSelectorActionTransformer"
# Writes float biases as integers with the step input scale * weight scale, rounded to the type of the scales; float16 is too
# coarse for it. Measured with 1.30.
WRITE_BIASES = "WeightBiasQuantization"
CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
ALIKE = {
    "QuantizeLinear": 2,
    "DequantizeLinear": 1,
    "MatMulIntegerToFloat": 2,
}  # the input that has the type of the output
# Ops without computation: they rearrange values, or are computed once.
REARRANGES = ops_where(lambda kind: kind.rearranges) | {CAST, "Shape", "ReorderInput", "ReorderOutput", "Constant"}
SATURATES = (
    "onnxruntime's sums of uint8 times int8 products saturate at 16 bits on this processor, which has no VNNI instructions: "
    "export the file with weight_codes='uint8', whose sums are exact, or quantize weights to 7 bits."
)
# The default handling of a matrix product of floats with a quantized constant, and how to keep the floats.
OF_FLOATS, KEEP_FLOATS = "MatMulNBits", ("session.qdq_matmulnbits_accuracy_level", "1")
ROUNDS = (
    f"onnxruntime rounds the float inputs of {OF_FLOATS} to 8 bits, unlike the model, unless SessionOptions is set with "
    f"options.add_session_config_entry{KEEP_FLOATS}."
)


def execute(
    path: Path,
    inputs: Sequence[Tensor],
    nodes: Sequence[QuantizerNode],
    grids: Mapping[str, Grid],
    optimized: bool = True,
) -> Executed:
    """Run a file at the default optimization level, or without optimizations; return the quantized values at its quantizers.

    It is a default session without other options, except for a float16 file (`_of_float16`). Raises RuntimeError: onnxruntime
    cannot run the file.
    """
    import onnxruntime

    file = OpenedFile.of(path)
    with tempfile.TemporaryDirectory() as folder:
        off = (WRITE_BIASES,) if file.is_float16 else ()
        open_session = functools.partial(_session, path, Path(folder), optimized, off)
        session = open_session("default")
        open_session("fused", TO_NHWC)
        fused = OpenedFile.of(Path(folder) / "fused.onnx")
        _keep_constants_once(fused.proto.graph)
        types = _types(fused.proto.graph)
        saturating = saturating_nodes(fused, types) if processor_saturates() else ()
        tensors = _tensors_with_codes(open_session, Path(folder), fused.proto.graph, nodes)
        values = fused.run(inputs, list(tensors.values()))
        outputs = session.run(None, {value.name: values[value.name] for value in session.get_inputs()})
    change = largest_difference(outputs, [values[value.name] for value in session.get_outputs()])
    names = layer_names(file.proto.graph)
    layers = _layers(fused.proto.graph, types, names)
    read = [node for node in nodes if node.codes in tensors]
    codes = {node.codes: _as_in_file(values[tensors[node.codes]], grids[node.quantizer]) for node in read}
    exact = all(layer.integer for layer in layers)
    remarks = [SATURATES] if saturating else []
    remarks += [_of_float16(layers)] if file.is_float16 else []
    remarks += [ROUNDS] if any(layer.kernel == OF_FLOATS for layer in layers) else []
    return Executed(
        f"onnxruntime {onnxruntime.__version__}",
        outputs,
        codes,
        layers,
        sum(node.op_type in CONVERSIONS for node in fused.proto.graph.node),
        change,
        0.0 if exact else ONNXRUNTIME.tie_share,
        " ".join(remarks),
        saturating=tuple(_name_of(node, names) for node in saturating),
    )


def _of_float16(layers: Sequence[ExecutedLayer]) -> str:
    floats = sum(not layer.integer for layer in layers)
    return (
        "onnxruntime's CPU backend has no integer kernels for float16 Q/DQ pairs, except for products of two tensors: it "
        f"computes {floats} of {len(layers)} layers and ops in float. Use the file on GPUs. The optimizer {WRITE_BIASES} is "
        f"disabled here, because float16 is too coarse for the steps of biases: pass disabled_optimizers=[{WRITE_BIASES!r}] to "
        "your sessions."
    )


def _session(
    path: Path, folder: Path, optimized: bool, off: Sequence[str], name: str, *disabled: str
) -> "onnxruntime.InferenceSession":
    """Return a session, and save its graph under a name in a folder, with large weights in a separate file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # without the warning that the saved graph depends on the machine
    options.optimized_model_filepath = str(folder / f"{name}.onnx")
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    key = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{key}_file_name", f"{name}.data")
    options.add_session_config_entry(f"{key}_min_size_in_bytes", "1024")
    try:
        return onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=[*off, *disabled]
        )
    except Exception as error:  # onnxruntime's errors have no base class of their own
        raise RuntimeError(
            f"verify: onnxruntime cannot load {str(path)!r}{' at its default optimization level' * optimized}: "
            f"{first_line(error)}."
        ) from error


def _keep_constants_once(graph: "onnx.GraphProto") -> None:
    """Remove duplicate constants in bodies, which onnxruntime 1.30 writes with external weights but does not load."""
    for body in bodies_in(graph):
        once = {tensor.name: tensor for tensor in body.initializer}
        constants = [type(tensor).FromString(tensor.SerializeToString()) for tensor in once.values()]
        body.ClearField("initializer")
        body.initializer.extend(constants)


def _tensors_with_codes(
    open_session: Callable[..., object], folder: Path, graph: "onnx.GraphProto", nodes: Sequence[QuantizerNode]
) -> dict[str, str]:
    """Return the tensor of the optimized graph for each quantized tensor of the file."""
    written = {output for node in graph.node for output in node.output}
    tensors = {node.codes: node.codes for node in nodes if node.codes in written}
    if len(tensors) < len({node.codes for node in nodes}):
        open_session("pairs", TO_NHWC, FUSE)
        pairs = OpenedFile.of(folder / "pairs.onnx").proto.graph
        renamed = {node.name: node.output[0] for node in pairs.node if node.op_type == "QuantizeLinear"}
        found = {node.codes: renamed.get(node.quantize, "") for node in nodes if node.codes not in tensors}
        tensors |= {codes: tensor for codes, tensor in found.items() if tensor in written}
    return tensors


def _as_in_file(codes: Array, grid: Grid) -> Array:
    return codes.astype(np.int16) - 128 if grid.spec.qmin < 0 and codes.dtype == np.uint8 else codes


def _layers(graph: "onnx.GraphProto", types: Mapping[str, int], names: Mapping[str, str]) -> tuple[ExecutedLayer, ...]:
    """Return the compute nodes of an optimized graph with the names of their layers; `types` are the types of tensors."""
    import onnx

    codes = (onnx.TensorProto.UINT8, onnx.TensorProto.INT8)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    varying = varying_tensors(graph)  # the others are computed once, such as codes that onnxruntime makes of a bias
    layers = []
    for node in graph.node:
        if varying.isdisjoint(node.output):
            continue
        integer = any(types.get(tensor) in codes for tensor in node.input)
        computes = integer or any(types.get(tensor) in floats for tensor in node.output)
        if computes and node.op_type not in CONVERSIONS and node.op_type not in REARRANGES:
            layers.append(ExecutedLayer(_name_of(node, names), node.op_type, integer))
    return tuple(layers)


def _name_of(node: "onnx.NodeProto", names: Mapping[str, str]) -> str:
    """Return the display name of a node, from the `names` of the file's nodes."""
    return names.get(node.name, node.name) or str(node.output[0])


def _types(graph: "onnx.GraphProto") -> dict[str, int]:
    """Return the types of tensors. A tensor without a saved type was moved, and has the type of the node's first input."""
    values = (*graph.value_info, *graph.input, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        alike = ALIKE.get(node.op_type, 0)
        for output in node.output:
            types.setdefault(output, types.get(node.input[alike], 0) if len(node.input) > alike else 0)
    return types
