"""A stand-in of the package tensorrt: the few calls of benchmarks/pages/tensorrt_engine.py, computed by onnxruntime.

It is no TensorRT: it fuses nothing, and it shows whether the program runs, not what an engine computes, how fast, or in which
types. Names and arguments are those of tensorrt 11.4, which tests/test_tensorrt_page.py compares where that is installed.
"""

import ctypes
import json
from collections.abc import Iterable
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

__version__ = "11.4 (a stand-in)"

DataType = Enum("DataType", ["FLOAT", "HALF", "INT8", "INT32", "INT64", "BOOL"])
ProfilingVerbosity = Enum("ProfilingVerbosity", ["LAYER_NAMES_ONLY", "DETAILED", "NONE"])
LayerInformationFormat = Enum("LayerInformationFormat", ["ONELINE", "JSON"])
TYPES = {
    TensorProto.FLOAT: DataType.FLOAT, TensorProto.FLOAT16: DataType.HALF, TensorProto.INT8: DataType.INT8,
    TensorProto.INT32: DataType.INT32, TensorProto.INT64: DataType.INT64, TensorProto.BOOL: DataType.BOOL,
}  # fmt: skip
SAID = {DataType.FLOAT: "Float", DataType.HALF: "Half", DataType.INT8: "Int8"}
KERNELS = {"QuantizeLinear": "Quantize", "DequantizeLinear": "Dequantize", "Cast": "Reformat"}


class Logger:
    WARNING = 2

    def __init__(self, min_severity: int = WARNING) -> None:
        self.min_severity = min_severity


class INetworkDefinition:
    model: onnx.ModelProto


class IBuilderConfig:
    profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY


class IHostMemory:
    def __init__(self, plan: bytes) -> None:
        self.plan, self.nbytes = plan, len(plan)


class Builder:
    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        assert flags == 0  # of TensorRT 11, which has no other networks
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> IHostMemory | None:
        assert config.profiling_verbosity is ProfilingVerbosity.DETAILED
        ops = {node.op_type for node in network.model.graph.node}
        return None if "Det" in ops else IHostMemory(network.model.SerializeToString())


class ParserError:
    def __init__(self, text: str) -> None:
        self.text = text

    def desc(self) -> str:
        return self.text


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: Logger) -> None:
        self.network, self.errors = network, list[ParserError]()

    def parse_from_file(self, model: str) -> bool:
        try:
            self.network.model = onnx.shape_inference.infer_shapes(onnx.load(model), check_type=True, strict_mode=True)
        except onnx.shape_inference.InferenceError as error:
            self.errors.append(ParserError(str(error)))
        return not self.errors

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int) -> ParserError:
        return self.errors[index]


class IExecutionContext:
    nvtx_verbosity = ProfilingVerbosity.DETAILED

    def __init__(self, engine: "ICudaEngine") -> None:
        self.engine, self.addresses = engine, dict[str, int]()

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return name in self.engine.values

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == 0
        session = self.engine.session
        found = session.run(None, {value.name: self._array(value.name) for value in session.get_inputs()})
        for value, array in zip(session.get_outputs(), found, strict=True):
            self._array(value.name)[...] = array
        return True

    def _array(self, name: str) -> np.ndarray:
        shape, elem_type = self.engine.get_tensor_shape(name), self.engine.values[name].elem_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
        memory = (ctypes.c_byte * (int(np.prod(shape)) * dtype.itemsize)).from_address(self.addresses[name])
        return np.frombuffer(memory, dtype).reshape(shape)


class EngineInspector:
    def __init__(self, engine: "ICudaEngine") -> None:
        self.engine = engine

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        assert format is LayerInformationFormat.JSON
        nodes = (node for node in self.engine.model.graph.node if node.op_type != "Constant")
        return json.dumps({"Layers": list(map(self._layer, nodes))})

    def _layer(self, node: onnx.NodeProto) -> dict[str, object]:
        """Return a node as a layer; one that takes dequantized codes takes these codes, as in an engine that fuses pairs."""
        made_by = {output: maker for maker in self.engine.model.graph.node for output in maker.output}
        makers = {name: made_by[name] for name in node.input if name in made_by}
        codes = {name: maker.input[0] for name, maker in makers.items() if maker.op_type == "DequantizeLinear"}
        inputs = self._tensors(codes.get(name, name) for name in node.input)
        kernel = KERNELS.get(node.op_type, "kgen")
        return {"Name": node.name, "LayerType": kernel, "Inputs": inputs, "Outputs": self._tensors(node.output)}

    def _tensors(self, names: Iterable[str]) -> list[dict[str, str]]:
        types = {name: self.engine.get_tensor_dtype(name) for name in names if name in self.engine.values}
        return [
            {"Name": name, "Datatype": SAID.get(dtype, ""), "Format": "Row major linear"}
            for name, dtype in types.items()
        ]


class ICudaEngine:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, graph = model, model.graph
        self.values = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input, *graph.output)}
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def get_tensor_dtype(self, name: str) -> DataType:
        return TYPES[self.values[name].elem_type]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(dim.dim_value for dim in self.values[name].shape.dim)

    def create_execution_context(self) -> IExecutionContext:
        return IExecutionContext(self)

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self)


class Runtime:
    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: IHostMemory) -> ICudaEngine:
        return ICudaEngine(onnx.ModelProto.FromString(serialized_engine.plan))


CLASSES = [
    Logger,
    Builder,
    IBuilderConfig,
    OnnxParser,
    ParserError,
    Runtime,
    ICudaEngine,
    IExecutionContext,
    EngineInspector,
]


def module() -> ModuleType:
    """Return the stand-in as a module of the name tensorrt."""
    found = ModuleType("tensorrt")
    found.__dict__.update(globals())
    found.__name__, found.__spec__ = "tensorrt", ModuleSpec("tensorrt", None)
    return found
