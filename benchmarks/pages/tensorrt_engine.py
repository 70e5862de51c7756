"""An engine of TensorRT 11: built from an ONNX file, run, timed, and read layer by layer.

Networks of TensorRT 11 are strongly typed: each tensor has the type that it has in the file, so nothing is set but how much the
engine tells of its layers. Tensors of torch are its memory, and torch's streams its order.
"""

import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from qtoolkit.export.files.quantizer_nodes import QuantizerNode
from qtoolkit.export.verification.codes import largest_difference
from qtoolkit.runtimes.execution import Executed, ExecutedLayer
from qtoolkit.runtimes.table import TENSORRT

OLDEST = 11  # the first version without flags for types
# The names of tensorrt.DataType, and the words for types in what the engine inspector says.
DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
}
WORDS = {name.lower(): str(dtype).removeprefix("torch.") for name, dtype in DTYPES.items()}
WORDS |= {"fp32": "float32", "fp16": "float16", "bfloat16": "bfloat16", "fp8": "fp8", "int4": "int4", "fp4": "fp4"}
# From the type that decides how long a layer takes to the others: a layer that takes codes computes on them, and one that takes
# a float32 tensor moves it.
PRECISIONS = ("int8", "fp8", "int4", "fp4", "float32", "bfloat16", "float16")
# Layers that convert or move values. The inspector's names of kernels are not documented.
CONVERSIONS = ("cast", "constant", "dequantize", "noop", "quantize", "reformat", "shuffle")


def what_is_missing(device: str) -> list[str]:
    """Return what engines need and this machine does not have, each a sentence that says what to do."""
    missing = []
    if device != "cpu" and not torch.cuda.is_available():
        missing.append("There is no GPU that this torch can use.")
    if find_spec("tensorrt") is None:
        missing.append("The package tensorrt is not installed: pip install tensorrt.")
    elif int(_version().split(".")[0]) < OLDEST:
        missing.append(f"tensorrt is {_version()}, and {OLDEST} or newer is needed: pip install --upgrade tensorrt.")
    if any(find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")):
        missing.append("Packages for ONNX files are not installed: pip install -r requirements-onnx.txt.")
    return missing


def _version() -> str:
    try:
        return version("tensorrt")
    except PackageNotFoundError:  # in NVIDIA's containers the package of Debian has no metadata for pip
        import tensorrt

        return str(tensorrt.__version__)


@dataclass(frozen=True)
class Layer:
    """A layer of an engine, by the engine inspector."""

    name: str
    kernel: str  # the inspector's LayerType
    takes: tuple[str, ...]  # the types of its inputs
    returns: tuple[str, ...]  # the types of its outputs

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Layer":
        """Return a layer of the inspector's JSON."""
        takes, returns = (tuple(_type_of(t) for t in facts.get(end, ())) for end in ("Inputs", "Outputs"))
        return cls(str(facts["Name"]), str(facts.get("LayerType", "unknown")), takes, returns)

    @property
    def converts(self) -> bool:
        """Whether it computes nothing."""
        return self.kernel.lower() in CONVERSIONS

    @property
    def precision(self) -> str:
        """The type in which it computes, by its inputs; "other" for shapes and for types that the inspector does not say."""
        types = self.takes or self.returns
        return next((name for name in PRECISIONS if name in types), "other")

    def __str__(self) -> str:
        return f"{self.precision} {self.kernel} {self.name}"


def _type_of(tensor: Mapping[str, Any]) -> str:
    """Return the type of a tensor: in TensorRT 11 it has a field of its own, before that it was a word in the format."""
    said = " ".join(str(tensor.get(key, "")) for key in ("DataType", "Datatype", "Format/Datatype", "Format"))
    found = re.search(rf"\b({'|'.join(WORDS)})\b", said, re.IGNORECASE)
    return WORDS[found[1].lower()] if found else "unknown"


class Engine:
    """An engine of a file with fixed sizes, and memory for what it takes and returns.

    Raises:
        RuntimeError: TensorRT does not read the file, or builds no engine of it.
    """

    def __init__(self, path: Path, device: str) -> None:
        import onnx
        import tensorrt

        logger = tensorrt.Logger(tensorrt.Logger.WARNING)
        builder = tensorrt.Builder(logger)
        network = builder.create_network()
        parser = tensorrt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(path)):
            why = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
            raise RuntimeError(f"TensorRT does not read the file: {why}")
        config = builder.create_builder_config()
        config.profiling_verbosity = tensorrt.ProfilingVerbosity.DETAILED  # else the inspector gives names alone
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise RuntimeError("TensorRT builds no engine of the file; its messages on the console say why")
        self.bytes = int(plan.nbytes)
        self.engine = tensorrt.Runtime(logger).deserialize_cuda_engine(plan)
        self.context = self.engine.create_execution_context()
        self.context.nvtx_verbosity = tensorrt.ProfilingVerbosity.NONE  # what it tells a profiler takes time
        self.stream = torch.cuda.Stream() if device != "cpu" else None
        graph = onnx.load(str(path), load_external_data=False).graph  # an engine may have them in another order
        self.inputs, self.outputs = ([value.name for value in ends] for ends in (graph.input, graph.output))
        self.tensors = {name: self._memory(name, device) for name in (*self.inputs, *self.outputs)}
        for name, tensor in self.tensors.items():
            self.context.set_tensor_address(name, tensor.data_ptr())

    def _memory(self, name: str, device: str) -> Tensor:
        dtype = DTYPES[self.engine.get_tensor_dtype(name).name]
        return torch.empty(tuple(self.engine.get_tensor_shape(name)), dtype=dtype, device=device)

    def _enqueue(self) -> None:
        if not self.context.execute_async_v3(0 if self.stream is None else self.stream.cuda_stream):
            raise RuntimeError("TensorRT does not execute the engine; its messages on the console say why")

    def run(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return what the engine returns for inputs in the order of the file, by name, on the processor."""
        for name, x in zip(self.inputs, inputs, strict=True):
            self.tensors[name].copy_(x)
        if self.stream is not None:
            torch.cuda.synchronize()
        self._enqueue()
        if self.stream is not None:
            self.stream.synchronize()
        return {name: self.tensors[name].cpu() for name in self.outputs}

    def milliseconds(self, repeats: int) -> float:
        """Return the median time of a run for the last inputs, without copies from and to the processor."""
        for _ in range(min(repeats, 20)):
            self._enqueue()
        return median(self._timed() for _ in range(repeats))

    def _timed(self) -> float:
        if self.stream is None:
            start = time.perf_counter()
            self._enqueue()
            return 1e3 * (time.perf_counter() - start)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(self.stream)
        self._enqueue()
        after.record(self.stream)
        after.synchronize()
        return before.elapsed_time(after)

    def layers(self) -> list[Layer]:
        """Return the layers, as TensorRT fused them."""
        import tensorrt

        inspector = self.engine.create_engine_inspector()
        said = json.loads(inspector.get_engine_information(tensorrt.LayerInformationFormat.JSON))
        return [Layer.of(facts) for facts in said["Layers"]]


def executed(
    plain: Engine, path: Path, inputs: Sequence[Tensor], nodes: Sequence[QuantizerNode], device: str
) -> Executed:
    """Return an engine's outputs, and its quantized values, which a second engine of the same file returns.

    A tensor that is returned is written, which may keep layers from being fused: `changed_by_reading` says what that changes in
    the outputs.
    """
    import tensorrt

    outputs = [y.numpy() for y in plain.run(inputs).values()]
    with tempfile.TemporaryDirectory() as folder:
        reading = Engine(_returning(path, [node.codes for node in nodes], Path(folder)), device)
    found, every = reading.run(inputs), plain.layers()
    layers = [layer for layer in every if not layer.converts]
    return Executed(
        f"tensorrt {tensorrt.__version__}",
        outputs,
        {node.codes: found[node.codes].numpy() for node in nodes},
        tuple(ExecutedLayer(layer.name, layer.kernel, layer.precision == "int8") for layer in layers),
        len(every) - len(layers),
        largest_difference(outputs, [found[name].numpy() for name in plain.outputs]),
        TENSORRT.tie_share,
    )


def _returning(path: Path, tensors: Iterable[str], folder: Path) -> Path:
    """Write a file that also returns these int8 tensors, in a folder."""
    import onnx

    model = onnx.load(str(path))
    returned = {value.name for value in model.graph.output}
    names = [name for name in dict.fromkeys(tensors) if name not in returned]
    int8 = onnx.TypeProto(tensor_type=onnx.TypeProto.Tensor(elem_type=onnx.TensorProto.INT8))
    model.graph.output.extend(onnx.ValueInfoProto(name=name, type=int8) for name in names)
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"
