"""Functions with a quantized weight, F.conv2d(x, weight), as the layers that compute the same, whose rules hold for both."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import is_weight_quantizer, kind_of, parameters_in, tensor_inputs
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.function_bias import FunctionBias
from qtoolkit.nn.layers import conv, conv_transpose, linear
from qtoolkit.op_kinds.rules import argument, module_of

# By kind of op and dimensions of the weight.
LAYERS: Mapping[tuple[str, int], type[QuantWeighted]] = {
    ("conv", 3): conv.QuantConv1d,
    ("conv", 4): conv.QuantConv2d,
    ("conv", 5): conv.QuantConv3d,
    ("conv_transpose", 3): conv_transpose.QuantConvTranspose1d,
    ("conv_transpose", 4): conv_transpose.QuantConvTranspose2d,
    ("conv_transpose", 5): conv_transpose.QuantConvTranspose3d,
    ("linear", 2): linear.QuantLinear,
}
# The arguments after input, weight and bias, by position, with their defaults.
GEOMETRY: Mapping[str, Mapping[str, int]] = {
    "conv": {"stride": 1, "padding": 0, "dilation": 1, "groups": 1},
    "conv_transpose": {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1},
    "linear": {},
}
BIAS = 2  # its position


def weight_node(node: fx.Node) -> fx.Node | None:
    """Return the node of the quantizer of a function's weight; None for layers, and for functions without one."""
    found = [source for source in tensor_inputs(node) if is_weight_quantizer(source)]
    return found[0] if node.op == "call_function" and len(found) == 1 else None


def bias_node(node: fx.Node) -> fx.Node | None:
    """Return the node of a function's bias, rounded or not."""
    bias = argument(node, BIAS, "bias")
    return bias if isinstance(bias, fx.Node) else None


def rounding_of(bias: fx.Node | None) -> FunctionBias | None:
    """Return the module that rounds a bias; None if there is none."""
    module = module_of(bias) if bias is not None and bias.op == "call_module" else None
    return module if isinstance(module, FunctionBias) else None


def layer_of(gm: QuantizedGraphModule, node: fx.Node) -> QuantWeighted | None:
    """Return a layer with the weight, its quantizer, the bias and the geometry of a function.

    None for other ops, and where the bias or the geometry is computed from activations.

    The layer is no part of the model. It shares the model's quantizer and, where nothing computes them, its parameters.
    """
    quantizer, bias, geometry = weight_node(node), bias_node(node), geometry_of(node)
    if bias is not None and rounding_of(bias) is not None:
        bias = bias.all_input_nodes[0]
    computed = bias is not None and bias not in parameters_in(gm.graph)
    if quantizer is None or geometry is None or computed:
        return None
    nodes = [source for source in (quantizer.all_input_nodes[0], bias) if source is not None]
    weight, *biases = gm.values_of(nodes).values()
    cls = LAYERS.get((kind_of(node).name, weight.dim()))
    if cls is None or tensor_inputs(node)[-1] is not quantizer:
        return None
    layer = cls.from_float(float_layer(cls, weight, geometry), None)
    layer.weight = nn.Parameter(weight.detach(), False)
    layer.bias = nn.Parameter(biases[0].detach(), False) if biases else None
    layer.weight_quantizer = module_of(quantizer)  # type: ignore[assignment]  # a Quantizer, as the node says
    return layer


def geometry_of(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments after the bias; None where one is computed."""
    names = GEOMETRY.get(kind_of(node).name, {})
    places = enumerate(names.items(), start=BIAS + 1)
    given = {name: argument(node, place, name, default) for place, (name, default) in places}
    plain = {name: tuple(value) if isinstance(value, list | tuple) else value for name, value in given.items()}
    parts = [part for value in plain.values() for part in (value if isinstance(value, tuple) else (value,))]
    return plain if all(isinstance(part, int | str) for part in parts) else None


def float_layer(cls: type[QuantWeighted], weight: Tensor, geometry: Mapping[str, Any]) -> nn.Module:
    """Return the layer of torch of a function's weight and geometry, on the meta device."""
    rows, columns, groups = weight.size(0), weight.size(1), int(geometry.get("groups", 1))
    if not cls.OP_KIND.convolves:
        return cls.FLOAT(columns, rows, device="meta")
    sizes = (rows, columns * groups) if cls.OP_KIND.transposed else (columns * groups, rows)
    return cls.FLOAT(*sizes, tuple(weight.shape[2:]), device="meta", **geometry)
