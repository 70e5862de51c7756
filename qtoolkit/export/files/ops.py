"""Read the ops of an ONNX file with Q/DQ nodes, in the form that the rules of `qtoolkit.lint` use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir

from qtoolkit.export.files.gates import gate_of, is_faster_by_tanh
from qtoolkit.export.files.graph import constant_of, input_at, is_of_one
from qtoolkit.export.files.kinds import BINARY, WEIGHTED, bounds_of, kind_by_op
from qtoolkit.export.files.reading import UnreadableFileError
from qtoolkit.export.files.sizes import macs_of, sum_of_values, type_of, values_of, weights_of
from qtoolkit.lint.ops import FileCodes, FileNode, LayerFacts, Op, WeightFacts
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.table import KINDS, NO_OPS, OTHER
from qtoolkit.runtimes.execution import Array

SIZES = ("Shape", "Size")  # they read no values


def ops_of(model: onnx_ir.Model) -> list[Op]:
    """Return the ops of a file in order; ops in a body of If, Loop or Scan come before the op that runs it.

    A QuantizeLinear is a quantizer; the DequantizeLinear nodes after it, and a Clip of its integers, belong to it. Nodes
    computed from constants alone belong to the node that uses them. A body is a separate graph, as in runtimes: tensors from
    outside are its inputs. Raises UnreadableFileError: a node lacks an input or an attribute.
    """
    try:
        return _Reader(model.graph, model.graph.opset_imports.get("", 0), []).ops
    except Exception as error:  # onnx_ir raises errors of all types, assertions too
        raise UnreadableFileError(
            f"a node of the file lacks an input or an attribute, or one of them has a wrong type ({type(error).__name__}: "
            f"{error})."
        ) from error


class _Reader:
    """Reads the nodes of a graph in order, and adds their ops to a list; `taken` are the outside tensors that a body uses."""

    def __init__(self, graph: onnx_ir.Graph, opset: int, ops: list[Op], taken: Iterable[onnx_ir.Value] = ()) -> None:
        self.opset, self.ops = opset, ops
        self.made: dict[onnx_ir.Value | None, Op] = {}  # the op that computes each tensor that depends on the inputs
        self.gates = {part for node in graph if (gate := gate_of(node)) is not None for part in gate.nodes}
        for value in (*graph.inputs, *taken):
            if not value.is_initializer():
                facts = FileNode("", "", self.opset, dtype=type_of(value), values=values_of(value))
                self._add(Op(value.name or "", NO_OPS["placeholder"], node=facts), [value])
        for node in graph:
            for body in _bodies(node):
                _Reader(body, opset, ops, self._taken_by(body))
            self._read(node)
        for value in graph.outputs:
            if value in self.made:
                self.made[value].returned = True

    def _taken_by(self, body: onnx_ir.Graph) -> list[onnx_ir.Value]:
        """Return the tensors of this graph that a body uses or returns."""
        nodes = onnx_ir.traversal.RecursiveGraphIterator(body)
        values = (*(value for node in nodes for value in node.inputs), *body.outputs)
        return [value for value in dict.fromkeys(values) if value is not None and value in self.made]

    def _add(self, op: Op, outputs: Iterable[onnx_ir.Value]) -> None:
        op.place = len(self.ops)
        self.ops.append(op)
        for source in op.inputs:
            source.users.append(op)
        self.made.update(dict.fromkeys(outputs, op))

    def _read(self, node: onnx_ir.Node) -> None:
        sources = list(dict.fromkeys(self.made[value] for value in node.inputs if value in self.made))
        if (not sources and not _bodies(node)) or node in self.gates or node.op_type in SIZES:
            return
        first = self.made.get(input_at(node, 0))
        if first is not None and (_stays_with_quantizer(node, first) or is_of_one(node)):
            self.made.update(dict.fromkeys(node.outputs, first))
            return
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            quantize = node.op_type == "QuantizeLinear"
            if quantize or (first is not None and first.is_input):
                codes, before = _codes(node), [] if first is None else [first]
                facts = self._facts(node, before, codes=codes)
                self._add(Op(_name(node), OTHER, before, grid=codes.grid, node=facts), node.outputs)
            elif first is not None:
                self.made.update(dict.fromkeys(node.outputs, first))
            return
        gate = gate_of(node)
        if gate is not None:
            sources = [self.made[gate.x]]
            facts = self._facts(node, sources, faster_by_tanh=is_faster_by_tanh(node, gate))
            self._add(Op(_name(node), KINDS[gate.kind], sources, node=facts), node.outputs)
            return
        self._add(self._op(node), node.outputs)

    def _op(self, node: onnx_ir.Node) -> Op:
        weighted = self._weight(node)
        kind = self._kind(node, weighted is not None)
        first = self.made.get(input_at(node, 0))
        if kind.moves and first is not None:  # sizes, indices and positions are no data
            sources = [first]
        else:
            taken = list(node.inputs if weighted is None else [v for v in node.inputs[:2] if v is not weighted])
            taken += [value for body in _bodies(node) for value in self._taken_by(body)]
            sources = list(dict.fromkeys(self.made[value] for value in taken if value in self.made))
        if weighted is None:
            facts = self._facts(node, sources, bounds=bounds_of(node), macs=macs_of(node, None), **_of_windows(node))
            return Op(_name(node), kind, sources, node=facts)
        weight, bias = ConstantWeight.of(weighted), input_at(node, 2)
        codes = weight.codes
        grid = None if codes is None else WeightFacts(codes.bits, weight.axis, codes.block_size > 0, codes.block_size)
        layer = layer_of(node, weight.shape, grid)
        facts = self._facts(
            node,
            sources,
            weight=codes,
            bias=None if bias is None else ConstantWeight.of(bias).codes,
            macs=macs_of(node, layer),
            weights=weights_of(layer),
        )
        return Op(_name(node), kind, sources, layer=layer, node=facts)

    def _facts(self, node: onnx_ir.Node, sources: Sequence[Op], **facts: Any) -> FileNode:
        given = [[value for value in node.inputs if self.made.get(value) is source] for source in sources]
        taken = (
            values_of(values[0]) if values else source.node.values
            for values, source in zip(given, sources, strict=True)
        )
        return FileNode(
            node.op_type,
            "" if node.domain == "ai.onnx" else node.domain,
            self.opset,
            dtype=type_of(next(iter(node.outputs), None)),
            values=sum_of_values(node.outputs),
            taken=tuple(taken),
            **facts,
        )

    def _weight(self, node: onnx_ir.Node) -> onnx_ir.Value | None:
        """Return the constant weight of a layer; None for other nodes."""
        if node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Gather" and node.inputs[0] not in self.made:
            return node.inputs[0]
        if node.op_type not in WEIGHTED or len(node.inputs) < 2:
            return None
        places = (1, 0) if node.op_type in ("Gemm", "MatMul") else (1,)
        return next((node.inputs[i] for i in places if node.inputs[i] not in self.made), None)

    def _kind(self, node: onnx_ir.Node, weighted: bool) -> OpKind:
        if node.domain not in ("", "ai.onnx"):
            return OTHER
        if node.op_type in BINARY:
            return BINARY[node.op_type][sum(value in self.made for value in node.inputs) < 2]
        if node.op_type == "MatMul":
            return KINDS["linear" if weighted else "matmul"]
        if node.op_type == "Gather":
            return KINDS["embedding"] if weighted else (OTHER if node.inputs[1] in self.made else KINDS["slice"])
        return kind_by_op(node)


def _stays_with_quantizer(node: onnx_ir.Node, source: Op) -> bool:
    """Return whether a node belongs to the quantizer before it: its DequantizeLinear, or a clip or cast of its integers."""
    if not source.is_quantizer:
        return False
    if node.op_type == "DequantizeLinear":
        return True
    maker = node.inputs[0].producer() if node.inputs[0] is not None else None
    on_codes = maker is not None and maker.op_type != "DequantizeLinear"
    return on_codes and source.node.op_type == "QuantizeLinear" and node.op_type in ("Clip", "Cast")


def _of_windows(node: onnx_ir.Node) -> dict[str, bool]:
    """Return the facts about the windows of an average pool; {} for other nodes."""
    if node.op_type != "AveragePool":
        return {}
    beyond, counts = (bool(node.attributes.get_int(name, 0)) for name in ("ceil_mode", "count_include_pad"))
    return {"reaches_beyond": beyond, "counts_padding": counts}


def _bodies(node: onnx_ir.Node) -> list[onnx_ir.Graph]:
    """Return the graphs that a node runs: the branches of an If, the body of a Loop or a Scan."""
    found: list[onnx_ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == onnx_ir.AttributeType.GRAPHS:
            found += attribute.as_graphs()
    return found


def _name(node: onnx_ir.Node) -> str:
    return node.name or (node.outputs[0].name if node.outputs else "") or node.op_type


def _codes(node: onnx_ir.Node) -> FileCodes:
    """Return the integer type of a QuantizeLinear or DequantizeLinear."""
    quantize = node.op_type == "QuantizeLinear"
    given = input_at(node, 2)
    scale, zero = _constant(node.inputs[1]), _constant(given)
    shared = scale is not None and scale.size == 1
    axis = None if shared else node.attributes.get_int("axis", 1)
    zero_point = np.zeros((), np.float32) if given is None else zero
    block_size, takers = node.attributes.get_int("block_size", 0) or 0, len(node.outputs[0].uses()) if quantize else 1
    return FileCodes(_dtype(node, zero), scale, zero_point, given is not None, axis, block_size, takers)


def _dtype(node: onnx_ir.Node, zero_point: Array | None) -> str:
    """Return ONNX's name of the integer type: the type of the zero point, else of the integers, else ONNX's default."""
    quantize = node.op_type == "QuantizeLinear"
    values = (input_at(node, 2), node.outputs[0] if quantize else node.inputs[0])
    known = [onnx_ir.DataType.from_numpy(zero_point.dtype)] if zero_point is not None else []
    known += [value.dtype for value in values if value is not None and value.dtype is not None]
    asked = node.attributes.get_int("output_dtype", 0) if quantize else 0
    return (known[0] if known else onnx_ir.DataType(asked or onnx_ir.DataType.UINT8)).name


def _constant(value: onnx_ir.Value | None) -> Array | None:
    """Return the array of a constant, also through Identity and Cast, as exporters write zero points; None for other values."""
    array = constant_of(value)
    node = None if value is None else value.producer()
    if array is not None or node is None or node.op_type not in ("Identity", "Cast"):
        return array
    array = _constant(node.inputs[0])
    if array is None or node.op_type == "Identity":
        return array
    return array.astype(onnx_ir.DataType(node.attributes.get_int("to", 1)).numpy())


@dataclass(frozen=True)
class ConstantWeight:
    """A constant, traced back to its stored integers."""

    codes: FileCodes | None  # its codes; None where it stays float
    shape: tuple[int, ...]  # its shape; () where it is not known
    axis: int | None  # the axis that its scales run along; None for one scale, or where it is not known

    @classmethod
    def of(cls, value: onnx_ir.Value) -> "ConstantWeight":
        """Return the weight that nodes compute from constants; unknown properties are None or ()."""
        node = value.producer()
        if node is None or not node.inputs or node.inputs[0] is None:
            return cls(None, _shape(value), None)
        source = cls.of(node.inputs[0])
        if node.op_type in ("DequantizeLinear", "QuantizeLinear"):
            codes = _codes(node)
            axis = None if codes.axis is None else codes.axis % max(len(source.shape), 1)
            return cls(codes, source.shape, axis)
        if node.op_type == "Transpose" and source.shape:
            order = node.attributes.get_ints("perm") or list(reversed(range(len(source.shape))))
            if sorted(order) != list(range(len(source.shape))):
                return cls(source.codes, (), None)
            axis = None if source.axis is None else list(order).index(source.axis)
            return cls(source.codes, tuple(source.shape[i] for i in order), axis)
        if node.op_type in ("Identity", "Cast", "Clip") or is_of_one(node):
            return source
        return cls(source.codes, _shape(value), None)


def _shape(value: onnx_ir.Value) -> tuple[int, ...]:
    tensor = onnx_ir.convenience.get_const_tensor(value)
    shape = tuple((value.shape if tensor is None else tensor.shape) or ())
    sizes = tuple(size for size in shape if isinstance(size, int))
    return sizes if len(sizes) == len(shape) else ()


def layer_of(node: onnx_ir.Node, shape: tuple[int, ...], grid: WeightFacts | None = None) -> LayerFacts:
    """Return the layer that a node computes with a weight of this shape."""
    groups = max(node.attributes.get_int("group", 1) or 1, 1)
    if node.op_type == "Conv" and len(shape) > 2:
        return LayerFacts(grid, shape[1] * groups, shape[0], groups, shape[2:])
    if node.op_type == "ConvTranspose" and len(shape) > 2:
        return LayerFacts(grid, shape[0], shape[1] * groups, groups, shape[2:], output_axis=1)
    if len(shape) == 2 and node.op_type in ("Gemm", "MatMul"):
        rows_are_outputs = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
        output_axis = 0 if rows_are_outputs else 1
        return LayerFacts(grid, shape[1 - output_axis], shape[output_axis], output_axis=output_axis)
    return LayerFacts(grid, groups=groups, output_axis=max(len(shape) - 1, 0))
