"""Replace float layers by QAT layers, where the rules quantize them."""

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.placement.rule_of_node import rule_of_node
from qtoolkit.layer_rules import LayerRules
from qtoolkit.nn.registry import from_float
from qtoolkit.op_kinds.rules import called_module


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Replace each float layer whose weight the rules quantize. A shared layer stays shared.

    Raises ValueError: a spec does not fit a layer's weight; TypeError: a `from_float` returns no module.
    """
    for node in gm.graph.nodes:
        module = called_module(node)
        if module is None or type(module) not in rules.table:
            continue
        qconfig = rules.decide(rule_of_node(node, rules), type(module)).qconfig
        if qconfig is not None and qconfig.weight is not None:
            name = str(node.target)
            new = from_float(module, rules.table[type(module)], qconfig.weight, qconfig.activation, name)
            gm.set_submodule(name, new)
    return gm
