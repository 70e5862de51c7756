"""The quantizers of an exported file: their nodes, and the layers that their weights belong to."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qtoolkit.graph.passes.insert import WEIGHT_HOLDER

if TYPE_CHECKING:
    import onnx
    import onnx_ir

# Suffixes of a quantizer's node names (`node_name`).
QUANTIZE, DEQUANTIZE = "quantize", "dequantize"
# Ops on the stored codes of a weight (`qtoolkit.export.passes.sub_pixel`).
REARRANGED = ("Pad", "Reshape", "Slice", "Transpose")


def node_name(quantizer: str, role: str) -> str:
    """Return the name of a quantizer's node in the file.

    Example:
        >>> node_name("conv.weight_quantizer", DEQUANTIZE)
        'conv.weight_quantizer.dequantize'
    """
    return f"{quantizer}.{role}"


def quantizer_of(node: "onnx.NodeProto | onnx_ir.Node") -> str:
    """Return the quantizer of a DequantizeLinear node by the node's name; "" for another node."""
    return (node.name or "").rpartition(node_name("", DEQUANTIZE))[0]


@dataclass(frozen=True)
class QuantizerNode:
    """A quantizer's nodes in the file, by tensor names."""

    quantizer: str  # its dotted name in the model
    source: str  # the values that are quantized, or the codes where the file stores them
    codes: str  # the codes
    values: str  # the values of the codes
    is_constant: bool  # whether the codes do not depend on the inputs of the model
    quantize: str  # the name of the QuantizeLinear node; "" where the file stores the codes
    zero_points: str  # the zero points of the DequantizeLinear node; "" where it has none

    @property
    def is_stored(self) -> bool:
        """Whether the file stores the integers themselves, without a QuantizeLinear node."""
        return self.source == self.codes


def quantizer_nodes(graph: "onnx.GraphProto") -> list[QuantizerNode]:
    """Return the quantizers of a file in the order of its nodes: one per DequantizeLinear with a quantizer's name."""
    named = ((node, quantizer_of(node)) for node in graph.node)
    found = {node.output[0]: name for node, name in named if node.op_type == "DequantizeLinear" and name}
    return [replace(pair, quantizer=found[pair.values]) for pair in pairs(graph) if pair.values in found]


def pairs(graph: "onnx.GraphProto") -> list[QuantizerNode]:
    """Return all DequantizeLinear nodes of a file by the name of their QuantizeLinear node, or their own name."""
    made_by = {output: node for node in graph.node for output in node.output}
    varying = varying_tensors(graph)
    found = []
    for node in graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        codes = node.input[0]
        while codes not in varying and codes in made_by and made_by[codes].op_type in REARRANGED:
            codes = made_by[codes].input[0]
        origin = made_by.get(codes)
        while origin is not None and origin.op_type in ("Clip", "Cast"):
            origin = made_by.get(origin.input[0])
        quantizes = origin is not None and origin.op_type == "QuantizeLinear"
        source, quantize = (origin.input[0], origin.name) if origin is not None and quantizes else (codes, "")
        name = quantize or node.name or codes
        zero_points = node.input[2] if len(node.input) > 2 else ""
        found.append(QuantizerNode(name, source, codes, node.output[0], codes not in varying, quantize, zero_points))
    return found


def bodies_in(graph: "onnx.GraphProto") -> list["onnx.GraphProto"]:
    """Return the bodies of If, Loop and Scan in a graph, including nested ones."""
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    bodies = [body for each in attributes for body in (*([each.g] if each.HasField("g") else []), *each.graphs)]
    return [each for body in bodies for each in (body, *bodies_in(body))]


def quantizers_in_bodies(graph: "onnx.GraphProto") -> list[str]:
    """Return the names of the QuantizeLinear nodes in bodies of If, Loop and Scan, whose outputs runtimes cannot return."""
    nodes = (node for body in bodies_in(graph) for node in body.node)
    return [node.name or node.output[0] for node in nodes if node.op_type == "QuantizeLinear"]


def varying_tensors(graph: "onnx.GraphProto") -> set[str]:
    """Return the names of the tensors that depend on the inputs of a graph."""
    varying = {value.name for value in graph.input}
    for node in graph.node:
        has_body = any(attribute.HasField("g") for attribute in node.attribute)  # a body may read any outer tensor
        if has_body or varying.intersection(node.input):
            varying.update(node.output)
    return varying


def _owner(quantizer: str) -> str:
    """Return the name of the layer, or of the function, whose weight a quantizer quantizes."""
    layer, _, name = quantizer.rpartition(".")
    return name if layer.startswith(WEIGHT_HOLDER) else layer


def layer_names(graph: "onnx.GraphProto") -> dict[str, str]:
    """Return a display name for each node of a file: the layer of its quantized weight, or the node's own name."""
    made_by = {output: node for node in graph.node for output in node.output}
    varying = varying_tensors(graph)

    def weight_behind(tensor: str) -> str:
        """Return the quantizer of a constant tensor, through the nodes between; "" if there is none."""
        while tensor not in varying and (node := made_by.get(tensor)) is not None and node.input:
            if quantizer := quantizer_of(node):
                return quantizer
            tensor = node.input[0]
        return ""

    names = {}
    for node in graph.node:
        weights = [quantizer for tensor in node.input if (quantizer := weight_behind(tensor))]
        names[node.name] = _owner(weights[0]) if weights and varying.intersection(node.output) else node.name
    return names
