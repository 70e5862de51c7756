"""Lower a program in the PT2E form to a LiteRT file: op by op, in integers if all tensors of an op are quantized.

- An op computes in integers if it has an integer kernel, its inputs are quantized, and a quantize op is the only user of its
  output, directly or after a ReLU or ReLU6 that the kernel fuses. All other ops compute in float; the result names them.
- Images are NHWC in the file (`TensorInFile.order`): inputs of four dimensions, and tensors computed from them.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor, fx

from qtoolkit.errors import present
from qtoolkit.export.program import Decomposed
from qtoolkit.export.pt2e import computed, decomposed_ops, layer_name
from qtoolkit.export.tflite.flatbuffer import FileBuilder, FileFacts, Scales, TensorInFile, in_order
from qtoolkit.export.tflite.kernels import KERNELS, TfliteKernel
from qtoolkit.export.tflite.ops import (
    IMAGE,
    TfliteOp,
    activation_of,
    arguments,
    bounds_of,
    name_of_op,
    returns_several,
)
from qtoolkit.runtimes.execution import ExecutedLayer

CONVERSIONS = ("QUANTIZE", "DEQUANTIZE")
# Ops with results that depend only on shapes and types.
FILLS = (
    "zeros", "ones", "full", "arange", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like",
)  # fmt: skip


class Lowering:
    """Makes the file of a program. Raises ValueError: LiteRT lacks an op of the program.

    `io_type` is the type of inputs and outputs: "float32", or an integer type for inputs and outputs with such a quantizer.
    """

    def __init__(self, found: Decomposed, io_type: str) -> None:
        self.captured = found.captured
        self.io_type = io_type
        self.file = FileBuilder()
        self.ops = decomposed_ops()
        self.values: dict[fx.Node, TensorInFile] = {}
        self.parts: dict[fx.Node, tuple[TensorInFile, ...]] = {}
        self.constants: dict[fx.Node, Tensor | None] = {}
        self.floats: dict[int, TensorInFile] = {}
        self.layers: list[ExecutedLayer] = []
        self.reasons: dict[str, str] = {}
        self.quantizers: list[tuple[str, int, tuple[int, ...]]] = []
        self.weights: list[tuple[str, int, tuple[int, ...], tuple[int, ...]]] = []
        self.stored = found.quantizers.stored
        nodes = (node for node in self.captured.graph.nodes if self._is_quantize(node))
        self.names = dict(zip(nodes, found.quantizers.activations, strict=True))
        self.inputs: dict[str, TensorInFile] = {}
        self.outputs: dict[str, TensorInFile] = {}
        self.conversions = 0

    def run(self, description: str) -> bytes:
        """Lower the graph; return the bytes of the file."""
        for node in self.captured.graph.find_nodes(op="get_attr"):
            self.constants[node] = attrgetter(str(node.target))(self.captured).detach()
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                self.inputs[str(node.target)] = self.values[node] = self._input(node)
            elif node.op == "call_function" and node not in self.values:
                self._lower(node)
        self.outputs = self._outputs()
        facts = FileFacts(
            quantizers=self.quantizers,
            weights=self.weights,
            constants=list(self.stored),
            inputs=[value.order for value in self.inputs.values()],
            outputs=[value.order for value in self.outputs.values()],
            conversions=self.conversions,
            layers=[(layer.name, layer.kernel, layer.integer) for layer in self.layers],
        )
        return self.file.pack(self.inputs, self.outputs, description, facts)

    # ---- nodes

    def _lower(self, node: fx.Node) -> None:
        if not node.users:
            return
        if self._is_constant(node):
            self._note_constant(node)
        elif node.target is operator.getitem and node.args[0] in self.parts:
            self.values[node] = self.parts[node.args[0]][node.args[1]]  # type: ignore[index]
        elif self._is_quantize(node):
            self._quantize(node)
        elif returns_several(node):
            return  # what takes them computes them from its input
        elif self._is_dequantize(node):
            self.values[node] = self.values[node.all_input_nodes[0]]
        else:
            self._compute(node)

    def _input(self, node: fx.Node) -> TensorInFile:
        shape = tuple(node.meta["val"].shape)
        order = IMAGE if len(shape) == len(IMAGE) else tuple(range(len(shape)))
        grids = {self._scales(user) if self._is_quantize(user) else None for user in node.users}
        scales = grids.pop() if len(grids) == 1 else None
        if scales is not None and scales.dtype != self.io_type:
            scales = None
        dtype = np.dtype("float32" if scales is None else scales.dtype)
        if node.meta["val"].dtype != torch.float32:
            raise ValueError(
                f"export_litert: input {node.target!r} has dtype {node.meta['val'].dtype}; the file supports float32 and "
                "quantized inputs. Move the ops that use it out of the model."
            )
        tensor = self.file.tensor(str(node.target), in_order(shape, order), dtype, scales)
        return TensorInFile(tensor, shape, order, scales)

    def _outputs(self) -> dict[str, TensorInFile]:
        (output,) = self.captured.graph.find_nodes(op="output")
        found = {}
        for i, node in enumerate(output.args[0]):
            value = self.values.get(node)
            if value is None:
                raise ValueError(
                    f"export_litert: output {node.name!r} does not depend on the inputs; remove it from the outputs."
                )
            in_codes = value.scales is not None and value.scales.dtype == self.io_type
            found[f"output_{i}" if i else "output"] = value if in_codes else self.as_float(value)
        return found

    def _quantize(self, node: fx.Node) -> None:
        """Quantize floats, or requantize integers of another grid."""
        source, scales = self.values[node.all_input_nodes[0]], self._scales(node)
        if source.scales != scales:
            source = self.emit("QUANTIZE", [source], self.name(node), replace(source, scales=scales))
        self.values[node] = source
        self._note(node)

    def _note(self, node: fx.Node) -> None:
        if self.names[node]:
            value = self.values[node]
            self.quantizers.append((self.names[node], value.tensor, value.order))

    def _note_constant(self, node: fx.Node) -> None:
        """Store the integers of a constant with an activation quantizer, so that the file has all quantized values."""
        if self._is_quantize(node) and self.names[node]:
            codes, scales = self.stored_tensor(node).numpy(), self._scales(node)
            tensor = self.file.tensor(self.name(node), codes.shape, codes.dtype, scales, codes)
            self.quantizers.append((self.names[node], tensor, tuple(range(codes.ndim))))

    def _compute(self, node: fx.Node) -> None:
        kernel = KERNELS.get(name_of_op(node))
        if kernel is None:
            raise ValueError(
                f"export_litert: LiteRT has no op for {node.target} at {node.name!r}; replace it, or export only the part of "
                "the model before it."
            )
        end, activation = self._joined(node, kernel)
        quantize = self._sole_user(end)
        reason = self._why_float(node, kernel, quantize)
        in_float = TfliteOp(self, node, None, activation, self.name(node))
        if quantize is None or reason:
            op, quantize = in_float, None
        else:
            op = TfliteOp(self, node, self._scales(quantize), activation, self.name(quantize))
            if reason := kernel.check(op):
                op, quantize = in_float, None
        first = len(self.file.operators)
        found = kernel.emit(op)
        if isinstance(found, tuple):
            self.parts[node] = found
        else:
            self.values[end] = self.values[node] = found
            if quantize is not None:
                self.values[quantize] = found
                self._note(quantize)
        if kernel.computes and len(self.file.operators) > first:
            name = layer_name(node)
            self.layers.append(ExecutedLayer(name, kernel.name, not reason, left=bool(reason)))
            if reason:
                self.reasons[name] = reason

    def _joined(self, node: fx.Node, kernel: TfliteKernel) -> tuple[fx.Node, str]:
        """Return the last node of an op including a fused activation, and the activation's name."""
        user = self._sole_user(node)
        if user is None or not kernel.joins:
            return node, "NONE"
        activation = activation_of(user) or ("NONE" if self._is_absorbed(user) else "")
        return (user, activation) if activation else (node, "NONE")

    def _is_absorbed(self, clip: fx.Node) -> bool:
        """Return whether the saturation of the quantizer after a clip has the same effect."""
        bounds, quantize = bounds_of(clip), self._sole_user(clip)
        if bounds is None or quantize is None or not self._is_quantize(quantize):
            return False
        scales, given = self._scales(quantize), arguments(quantize)
        low, high = (np.rint(end / scales.scale[0]) + scales.zero_point for end in (bounds.low, bounds.high))
        return bool(low <= given["quant_min"] and high >= given["quant_max"])

    def _why_float(self, node: fx.Node, kernel: TfliteKernel, quantize: fx.Node | None) -> str:
        if kernel.refusal:
            return kernel.refusal.format(name_of_op(node))
        if quantize is None or not self._is_quantize(quantize):
            return "its output is not quantized, or not for all users"
        dtype = quantize.args[-1]
        if dtype not in (torch.int8, torch.int16) or (dtype == torch.int16 and not kernel.wide):
            return f"LiteRT has no {dtype} kernel for it"
        for source in kernel.data(node):
            if not self._is_quantized(source):
                return f"its input {source.name} is not quantized"
            scales = self.values[source].scales if source in self.values else None
            if scales is not None and scales.dtype != str(dtype).removeprefix("torch."):
                return f"its input {source.name} is not {dtype}, as its output is"
        return ""

    def _is_quantized(self, source: fx.Node) -> bool:
        if self._is_constant(source):
            return self._is_dequantize(source)
        value = self.values.get(source)
        return value is not None and value.scales is not None

    def _sole_user(self, node: fx.Node) -> fx.Node | None:
        (user, *others) = node.users or (None,)
        return None if others else user

    def _is_quantize(self, node: fx.Node | None) -> bool:
        return node is not None and node.target in (self.ops.quantize_per_tensor, self.ops.quantize_per_channel)

    def _is_dequantize(self, node: fx.Node) -> bool:
        return node.target in (self.ops.dequantize_per_tensor, self.ops.dequantize_per_channel)

    def _scales(self, node: fx.Node) -> Scales:
        if node.target not in (self.ops.quantize_per_tensor, self.ops.dequantize_per_tensor):
            raise ValueError(
                f"export_litert: {self.names.get(node, node.name)!r} has per-channel scales; use a per-tensor scale."
            )
        given = arguments(node)
        dtype = given["dtype"]
        if dtype not in (torch.int8, torch.int16):
            raise ValueError(
                f"export_litert: {self.names.get(node, node.name)!r} is {dtype}, but LiteRT's kernels support int8 and int16; "
                "prepare the model with backend='litert'."
            )
        scale = float(np.float32(given["scale"]))
        return Scales((scale,), given["zero_point"], dtype=str(dtype).removeprefix("torch."))

    # ---- constants

    def _is_constant(self, node: fx.Node) -> bool:
        return self.constant(node) is not None

    def constant(self, node: fx.Node) -> Tensor | None:
        """Return the tensor of a node that does not depend on the inputs; None for other nodes."""
        if node not in self.constants:
            fills, sources = name_of_op(node) in FILLS, node.all_input_nodes
            known = {source: _like(source) if fills else self.constant(source) for source in sources}
            is_op = node.op == "call_function" and (fills or sources)
            is_known = is_op and all(isinstance(x, Tensor) for x in known.values())
            self.constants[node] = computed(node, known) if is_known else None
        return self.constants[node]

    def codes_of(self, node: fx.Node) -> tuple[Tensor, Tensor, int | None]:
        """Return the integers, the scales and the axis of a dequantized constant."""
        given = arguments(node)
        scale = self.stored_tensor(given["scales"]) if "scales" in given else torch.tensor(given["scale"])
        return self.stored_tensor(given["input"]), scale.float().reshape(-1), given.get("axis")

    def stored_tensor(self, node: fx.Node) -> Tensor:
        """Return a constant that must exist."""
        return present(self.constant(node), f"the constant {node.name!r}")

    def is_dequantized(self, node: fx.Node) -> bool:
        """Return whether a node is a dequantized constant."""
        return self._is_dequantize(node) and self._is_constant(node)

    def note_weight(self, codes: Tensor, tensor: int, axes: Sequence[int]) -> None:
        """Record that a tensor of the file holds quantized values of the model, with these axes in the file."""
        for name, stored in self.stored.items():
            if torch.equal(stored, codes):
                self.weights.append((name, tensor, tuple(axes), tuple(codes.shape)))

    # ---- what kernels emit

    def emit(
        self, op: str, inputs: Sequence[TensorInFile | int], name: str, like: TensorInFile, **values: object
    ) -> TensorInFile:
        """Add an op with one output, with the shape, order and grid of a value."""
        dtype = np.dtype("float32" if like.scales is None else like.scales.dtype)
        tensor = self.file.tensor(name, in_order(like.shape, like.order), dtype, like.scales)
        tensors = [each.tensor if isinstance(each, TensorInFile) else each for each in inputs]
        self.file.operator(op, tensors, [tensor], **values)
        self.conversions += op in CONVERSIONS
        return replace(like, tensor=tensor)

    def as_float(self, value: TensorInFile) -> TensorInFile:
        """Dequantize integers."""
        if value.scales is None:
            return value
        if value.tensor not in self.floats:
            name = f"{self.file.tensors[value.tensor].name.decode()}.float"
            self.floats[value.tensor] = self.emit("DEQUANTIZE", [value], name, replace(value, scales=None))
        return self.floats[value.tensor]

    def name(self, node: fx.Node) -> str:
        """Return the name of a node's tensor: the name of its quantizer, if it has one."""
        return self.names.get(node) or node.name


def _like(node: fx.Node) -> Tensor:
    """Return a tensor with the shape and type of a node's output."""
    value = node.meta["val"]
    return torch.zeros(tuple(value.shape), dtype=value.dtype)


def layouts(ends: Mapping[str, TensorInFile]) -> dict[str, str]:
    """Return the layout of each input or output, as text."""
    return {name: "NHWC" if value.order == IMAGE else "as in the model" for name, value in ends.items()}
