"""Sums of int8 products that saturate on processors without VNNI.

x86 processors without VNNI (AMD before Zen 4, Intel before Cascade Lake) multiply uint8 by int8 with VPMADDUBSW, which adds two
neighbouring products in 16 bits: 255 * 127 * 2 does not fit. Weights up to 64 do not overflow. Products of uint8 with uint8 do
not overflow either, because they use other instructions. Source: onnxruntime's
docs/performance/model-optimizations/quantization.md, "When and why do I need to try U8U8?".
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from qtoolkit.export.files.files import OpenedFile
from qtoolkit.quantizers.quantizer import LARGEST_SAFE_CODE

# onnxruntime's kernels that add integer products, with the input positions of both operands.
PRODUCTS = {
    **dict.fromkeys(("QLinearConv", "QGemm", "QLinearMatMul"), (0, 3)),
    **dict.fromkeys(
        ("ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QAttention"), (0, 1)
    ),
}


@functools.cache
def processor_saturates() -> bool:
    """Return whether onnxruntime's product of uint8 and int8 matrices saturates on this processor, by running one."""
    import onnxruntime

    largest, size = (255, 127), 64
    codes = numpy_helper.from_array(np.full((size, size), largest[1], np.int8), "codes")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "codes"], ["sums"])],
        "trial",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, size])],
        [helper.make_tensor_value_info("sums", TensorProto.INT32, [1, size])],
        [codes],
    )
    opset = helper.make_opsetid("", 13)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=7)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (sums,) = session.run(None, {"x": np.full((1, size), largest[0], np.uint8)})
    return bool((sums != largest[0] * largest[1] * size).any())


def has_wide_weights(file: OpenedFile) -> bool:
    """Return whether a file has int8 weights, stored or computed from constants, with products that may saturate."""
    graph = file.proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    clipped = {node.input[0] for node in graph.node if node.op_type == "Clip"}  # to fewer than eight bits
    for node in graph.node:
        tensor = constants.get(node.input[0]) if node.input else None
        if tensor is None:
            continue
        if node.op_type == "QuantizeLinear" and node.output[0] not in clipped:
            zero_point = constants.get(node.input[2]) if len(node.input) > 2 else None
            if zero_point is not None and zero_point.data_type == TensorProto.INT8:
                return True
        if _is_wide(file, tensor):  # DequantizeLinear takes it, or an op that rearranges it
            return True
    return False


def saturating_nodes(optimized: OpenedFile, types: Mapping[str, int]) -> Sequence[NodeProto]:
    """Return the nodes of an optimized graph with sums that may saturate: products of uint8 with large int8 values.

    `types` are the types of the tensors. Other combinations of the two types have exact sums (measured with onnxruntime 1.30).
    """
    constants = {tensor.name: tensor for tensor in optimized.proto.graph.initializer}

    def may_saturate(node: NodeProto) -> bool:
        first, second = (node.input[place] for place in PRODUCTS[node.op_type])
        if types.get(first) == TensorProto.INT8 or types.get(second) != TensorProto.INT8:
            return False  # floats become uint8 codes in the kernel
        return second not in constants or _is_wide(optimized, constants[second])

    return [node for node in optimized.proto.graph.node if node.op_type in PRODUCTS and may_saturate(node)]


def _is_wide(file: OpenedFile, tensor: TensorProto) -> bool:
    """Return whether a constant with more dimensions than a zero point has int8 values that are too large."""
    if tensor.data_type != TensorProto.INT8 or len(tensor.dims) < 2:
        return False
    return bool(np.abs(file.constant(tensor).astype(np.int16)).max(initial=0) > LARGEST_SAFE_CODE)
