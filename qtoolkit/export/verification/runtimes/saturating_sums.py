"""Whether int8 kernels of this processor saturate.

x86 processors without VNNI (AMD before Zen 4, Intel before Cascade Lake) multiply uint8 by int8 codes with VPMADDUBSW, which
adds the products of two neighbours in 16 bits: 255 * 127 * 2 does not fit. Codes of weights up to 64 do not overflow.
onnxruntime: docs/performance/model-optimizations/quantization.md, "When and why do I need to try U8U8?".
"""

import functools

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from qtoolkit.export.files.files import OpenedFile

SAFE_WEIGHT = 64  # the largest magnitude of a weight's code: 255 * 64 * 2 < 2**15


@functools.cache
def processor_saturates() -> bool:
    """Return whether onnxruntime's product of uint8 and int8 matrices saturates on this processor: by a trial."""
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
    """Return whether a file has int8 codes of weights, stored or computed from constants, whose products may saturate."""
    graph = file.proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    clipped = {node.input[0] for node in graph.node if node.op_type == "Clip"}  # to fewer than eight bits
    for node in graph.node:
        tensor = constants.get(node.input[0]) if node.input else None
        if tensor is None:
            continue
        if node.op_type == "QuantizeLinear" and node.output[0] not in clipped:
            return True
        stored = tensor.data_type == TensorProto.INT8  # DequantizeLinear takes them, or an op that rearranges them
        if stored and np.abs(file.constant(tensor).astype(np.int16)).max(initial=0) > SAFE_WEIGHT:
            return True
    return False
