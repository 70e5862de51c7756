"""Replace float layers by QAT layers, where the rules quantize them."""

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import may_be_packed, tensor_inputs
from qtoolkit.graph.placement.rule_of_node import rule_of_node
from qtoolkit.layer_rules import LayerRules
from qtoolkit.nn import QuantRecurrent
from qtoolkit.nn.module import activation_quantizer
from qtoolkit.nn.registry import from_float
from qtoolkit.op_kinds.rules import called_module


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Replace each float layer whose weight the rules quantize. A shared layer stays shared.

    A recurrent layer whose input may be a packed sequence, which is no tensor, quantizes its input itself.

    Raises ValueError: a spec does not fit a layer's weight; TypeError: a `from_float` returns no module.
    """
    for node in gm.graph.nodes:
        module = called_module(node)
        if module is None or type(module) not in rules.table:
            continue
        qconfig = rules.decide(rule_of_node(node, rules), module).qconfig
        if qconfig is not None and qconfig.weight is not None:
            name = str(node.target)
            new = from_float(module, rules.table[type(module)], qconfig.weight, qconfig.activation, name)
            if isinstance(new, QuantRecurrent) and any(map(may_be_packed, tensor_inputs(node))):
                new.input_quantizer = activation_quantizer(qconfig.activation, f"{name}.input_quantizer", new)
                new.train(new.training)
            gm.set_submodule(name, new)
    return gm
