"""describe(): the content of an ONNX file: its inputs, its Q/DQ nodes, and which of its layers are quantized."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qtoolkit.backends import backends
from qtoolkit.export.files.reading import open_graph
from qtoolkit.lint.ops import Op, find_quantizers

if TYPE_CHECKING:
    import onnx_ir

_MOVES = backends["tensorrt"]  # which ops only move values is the same on all targets


@dataclass(frozen=True)
class FileTensor:
    """An input or an output of a file: its name, its type and its sizes; dynamic sizes are given by name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}" + ("" if self.shape is None else f" [{', '.join(map(str, self.shape))}]")


@dataclass(frozen=True)
class FileLayer:
    """A layer or a matrix product of a file."""

    name: str  # the name of its node
    op: str  # its op
    quantized: bool  # whether all that it multiplies is quantized
    reason: str  # why it is float; "" if it is quantized
    weight: str  # the type of its weight's codes; "" of a float one


@dataclass(frozen=True)
class FileDescription:
    """The result of `describe`.

    Attributes:
        path: The file.
        bytes: Its size in bytes, including external weight files.
        producer: The tool that wrote it, and its version.
        opsets: The opset version of each domain; "ai.onnx" is ONNX's own domain.
        inputs: Its inputs.
        outputs: Its outputs.
        quantize_nodes: The number of QuantizeLinear nodes.
        dequantize_nodes: The number of DequantizeLinear nodes.
        activations: The number of activation quantizers for each integer type.
        weights: The number of layers for each integer type of weights.
        layers: Its layers and matrix products, in order.
    """

    path: str
    bytes: int
    producer: str
    opsets: Mapping[str, int]
    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]
    quantize_nodes: int
    dequantize_nodes: int
    activations: Mapping[str, int]
    weights: Mapping[str, int]
    layers: tuple[FileLayer, ...]


def describe(path: str | os.PathLike[str]) -> FileDescription:
    """Describe an ONNX file written by any tool, quantized or not.

    Args:
        path: The file.

    Returns:
        Its inputs and outputs, its quantizers by integer type, and its layers: quantized, or float with the reason.

    Raises:
        ValueError: As `UnreadableFileError`: the file is not ONNX, is truncated or invalid, has ops that ONNX does not know, or
            lacks the file of its weights.
        ImportError: onnx or onnxscript is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = qt.quantize(torch.nn.Linear(4, 2), [torch.rand(8, 4)], "onnxruntime", folder + "/model.onnx")
        ...     description = qt.export.describe(folder + "/model.onnx")
        >>> description.quantize_nodes, [layer.name for layer in description.layers]
        (1, ['node_linear'])
    """
    model = open_graph(path)
    from qtoolkit.export.files.ops import ops_of

    ops = ops_of(model)
    find_quantizers(ops, _MOVES)
    kinds = Counter(node.op_type for node in model.graph.all_nodes())
    return FileDescription(
        str(path),
        Path(path).stat().st_size + sum(file.stat().st_size for file in _weight_files(model, Path(path))),
        f"{model.producer_name or 'unknown'} {model.producer_version or ''}".strip(),
        {domain or "ai.onnx": version or 0 for domain, version in model.graph.opset_imports.items()},
        tuple(_tensor(value) for value in model.graph.inputs if not value.is_initializer()),
        tuple(_tensor(value) for value in model.graph.outputs),
        kinds["QuantizeLinear"],
        kinds["DequantizeLinear"],
        dict(Counter(op.node.codes.dtype for op in ops if op.node.codes is not None)),
        dict(Counter(op.node.weight.dtype for op in ops if op.node.weight is not None)),
        tuple(map(_described, (op for op in ops if op.kind.multiplies))),
    )


def _described(op: Op) -> FileLayer:
    reasons = [f"{source.name!r} is not quantized" for source in op.inputs if source.quantizer is None]
    if op.has_float_weight:
        reasons.append("its weight is not quantized")
    weight = "" if op.node.weight is None else op.node.weight.dtype
    return FileLayer(op.name, op.node.op_type, not reasons, "; ".join(reasons), weight)


def _tensor(value: "onnx_ir.Value") -> FileTensor:
    shape = None if value.shape is None else tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return FileTensor(value.name or "", "unknown" if value.dtype is None else value.dtype.name, shape)


def _weight_files(model: "onnx_ir.Model", path: Path) -> set[Path]:
    import onnx_ir

    tensors = (value.const_value for value in model.graph.initializers.values())
    return {path.parent / tensor.location for tensor in tensors if isinstance(tensor, onnx_ir.ExternalTensor)}
