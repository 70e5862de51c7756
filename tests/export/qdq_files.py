"""ONNX files with Q/DQ nodes, written node by node, as other tools write them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOATS = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}
DTYPES = {TensorProto.INT8: np.int8, TensorProto.UINT8: np.uint8, TensorProto.INT16: np.int16}


class File:
    """Writes a file, whose floats are of a type. Every method returns the name of a tensor."""

    def __init__(
        self, opset: int = 21, domains: tuple[str, ...] = (), floats: type[np.floating[Any]] = np.float32
    ) -> None:
        self.floats = floats
        self.opset, self.domains, self.prefix = opset, domains, ""
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    def input(self, name: str, *shape: int | str) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, FLOATS[self.floats], shape))
        return name

    def output(self, tensor: str, dtype: int | None = None) -> None:
        self.outputs.append(helper.make_tensor_value_info(tensor, dtype or FLOATS[self.floats], None))

    def constant(self, array: Any, dtype: int | None = None) -> str:
        name = f"{self.prefix}c{len(self.constants)}"
        tensor = numpy_helper.from_array(np.asarray(array), name) if dtype is None else None
        self.constants.append(tensor or helper.make_tensor(name, dtype, np.shape(array), np.ravel(array)))
        return name

    def node(self, op: str, *inputs: str, name: str = "", outputs: int = 1, **attributes: Any) -> Any:
        names = [f"{self.prefix}t{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(op, inputs, names, name=name or f"{op.lower()}{len(self.nodes)}", **attributes)
        )
        return names[0] if outputs == 1 else names

    def pair(
        self, x: str, scale: Any = 0.05, zero: Any = 0, dtype: int = TensorProto.INT8, name: str = "", **attributes: Any
    ) -> str:
        """Quantize and dequantize; zero=None leaves the zero point out."""
        scale = np.asarray(scale, self.floats)
        rest = [] if zero is None else [self.constant(np.broadcast_to(zero, scale.shape).astype(np.float32), dtype)]
        given = [self.constant(scale), *rest]
        codes = self.node("QuantizeLinear", x, *given, name=name, **attributes)
        return self.node("DequantizeLinear", codes, *given, **attributes)

    def weight(
        self,
        *shape: int,
        axis: int | None = 0,
        dtype: int = TensorProto.INT8,
        zero: Any = 0,
        block: int = 0,
        scale: float = 0.01,
    ) -> str:
        codes = np.random.default_rng(0).integers(0 if dtype == TensorProto.UINT8 else -7, 8, shape)
        sizes = () if axis is None else (shape[axis],)
        if block:
            sizes = tuple(size // block if i == axis else size for i, size in enumerate(shape))
        scales = np.full(sizes, scale, self.floats)
        zeros = np.full(sizes, zero)
        attributes = {} if axis is None else {"axis": axis}
        attributes |= {"block_size": block} if block else {}
        given = (self.constant(codes, dtype), self.constant(scales), self.constant(zeros, dtype))
        return self.node("DequantizeLinear", *given, **attributes)

    def bias(self, size: int, scale: Any) -> str:
        zero = self.constant(np.zeros(np.shape(scale), np.int32))
        given = (self.constant(np.arange(size, dtype=np.int32)), self.constant(np.asarray(scale, np.float32)), zero)
        return self.node("DequantizeLinear", *given, axis=0)

    def conv(self, x: str, outputs: int = 16, inputs: int = 16, name: str = "conv", *rest: str, **options: Any) -> str:
        """A 3x3 convolution with a quantized weight, and padding that keeps the size."""
        return self.node("Conv", x, self.weight(outputs, inputs, 3, 3, **options), *rest, name=name, pads=[1] * 4)

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.constants)
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(domain, 1) for domain in self.domains)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        known = all(node.domain in ("", *self.domains) and node.op_type != "If" for node in self.nodes)
        return onnx.shape_inference.infer_shapes(model) if known else model

    def save(self, folder: Path, name: str = "model.onnx") -> str:
        path = str(folder / name)
        onnx.save(self.model(), path)
        return path

    def in_a_branch(self) -> "File":
        """Return a file with the nodes of this one in a branch of an If, which takes the inputs from outside."""
        whole = File(self.opset, self.domains)
        whole.prefix, named = "outside_", [output.name for output in self.outputs]
        outputs = [helper.make_tensor_value_info(f"else_{name}", TensorProto.FLOAT, None) for name in named]
        same = [helper.make_node("Identity", [self.inputs[0].name], [output.name]) for output in outputs]
        then_branch = helper.make_graph(self.nodes, "then", [], self.outputs, self.constants)
        branches = {"then_branch": then_branch, "else_branch": helper.make_graph(same, "else", [], outputs)}
        whole.inputs = [*self.inputs, helper.make_tensor_value_info("which", TensorProto.BOOL, [])]
        taken = whole.node("If", "which", outputs=len(named), **branches)
        for tensor in [taken] if len(named) == 1 else taken:
            whole.output(tensor)
        return whole


def clean() -> File:
    """A convolution and a ReLU between quantizers, in which TensorRT and OpenVINO find nothing."""
    file = File()
    x = file.pair(file.input("x", 1, 16, 8, 8), name="q_x")
    y = file.node("Relu", file.conv(x), name="relu")
    z = file.conv(file.pair(y, name="q_relu"), name="next")
    file.output(z)
    return file
