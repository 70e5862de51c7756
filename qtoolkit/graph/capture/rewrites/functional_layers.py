"""Layers of a subclass that calls its function with its own weight: they become torch's layers, which the swap replaces.

For example, timm's Conv2dSame pads its input, then calls torch.nn.functional.conv2d with its own parameters. A batch norm after
it can then be folded, and reports name the module.
"""

from collections import defaultdict
from collections.abc import Sequence

from torch import fx, nn

from qtoolkit.graph.capture.rewrites.both_modes import Traced
from qtoolkit.graph.nodes import kind_of
from qtoolkit.graph.weighted_functions import LAYERS, float_layer, geometry_of
from qtoolkit.op_kinds.facts import replace_node
from qtoolkit.op_kinds.rules import argument, is_number
from qtoolkit.shared_modules import replace_everywhere


def run(traced: Traced) -> None:
    """Replace the calls of functions by calls of the layers whose weights they take, and these layers by torch's type.

    A layer stays if it has other parameters, buffers or submodules, or if its weight has other users.
    """
    model, read = traced.model, defaultdict[str, list[fx.Node]](list)
    for node in traced.graph.find_nodes(op="get_attr"):
        read[str(node.target)].append(node)
    for target, nodes in read.items():
        name, _, attribute = target.rpartition(".")
        if name and attribute == "weight":
            calls = [user for node in nodes for user in node.users if not is_number(user)]
            layer = _torch_layer(name, model.get_submodule(name), calls)
            if layer is not None:
                replace_everywhere(model, model.get_submodule(name), layer)
                for call in calls:
                    call_layer(call, name, argument(call, 0, "input"))


def _torch_layer(name: str, module: nn.Module, calls: Sequence[fx.Node]) -> nn.Module | None:
    """Return torch's layer that computes the same as calls of a function with a module's weight; None if there is none."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    has_more = set(module._parameters) - {"weight", "bias"} or module._buffers or module._modules
    own = all(_takes_parameters(call, name, bias is not None) for call in calls)
    if not calls or has_more or weight is None or not own:
        return None
    (kind, geometry), *others = [(kind_of(call), geometry_of(call)) for call in calls]
    differ = any(other != (kind, geometry) for other in others)
    cls = LAYERS.get((kind.name, weight.dim()))
    if differ or geometry is None or cls is None or not isinstance(module, cls.FLOAT):
        return None
    layer = float_layer(cls, weight, geometry)
    layer.register_parameter("weight", weight)
    layer.register_parameter("bias", bias)
    return layer.train(module.training)


def _takes_parameters(call: fx.Node, name: str, has_bias: bool) -> bool:
    """Return whether a function takes the weight and the bias of a module as they are, and nothing else of it."""
    source, weight, bias = (argument(call, place, of) for place, of in enumerate(("input", "weight", "bias")))
    if call.op != "call_function" or not isinstance(source, fx.Node):
        return False
    return _reads(weight, f"{name}.weight") and (_reads(bias, f"{name}.bias") if has_bias else bias is None)


def _reads(operand: object, target: str) -> bool:
    return isinstance(operand, fx.Node) and (operand.op, operand.target) == ("get_attr", target)


def call_layer(call: fx.Node, name: str, source: fx.Node) -> None:
    """Replace the call of a function by a call of the layer of this name, which has the function's tensors."""
    with call.graph.inserting_before(call):
        new = call.graph.call_module(name, (source,))
    others = [node for node in call.all_input_nodes if node is not source and node.op != "placeholder"]
    replace_node(call, new)
    for unused in (node for node in others if not node.users):
        call.graph.erase_node(unused)
