"""The quantizers that layers hold: of their weights, of their inputs where the graph has none, and between their ops."""

from dataclasses import dataclass

from torch import fx, nn

from qtoolkit.errors import with_article
from qtoolkit.graph.nodes import is_quantizer, may_be_packed, tensor_inputs
from qtoolkit.graph.plan import Edge
from qtoolkit.nn import QuantModule, QuantRecurrent
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.shared_modules import first_names

INPUT = "input_quantizer"
ITSELF = ""  # a quantizer that the model's own forward calls


@dataclass(frozen=True)
class LayerQuantizer:
    """A quantizer that a layer holds."""

    node: fx.Node  # the node that calls the layer, or the leaf module around it
    layer: str  # the layer's dotted name, as the node has it
    module: nn.Module
    attribute: str  # the quantizer's name in the layer; "" where the layer is a quantizer of the model's own
    quantizer: Quantizer
    name: str  # its first dotted name in the model

    @property
    def is_inside(self) -> bool:
        """Whether the layer is inside a leaf module."""
        return self.layer != self.node.target

    @property
    def is_weights(self) -> bool:
        """Whether it quantizes a weight."""
        return self.quantizer.of_weight

    @property
    def sources(self) -> list[str]:
        """The tensors that it quantizes: the nodes that compute them; tensors of no node get a name of their own."""
        if self.attribute in (INPUT, ITSELF) and not self.is_inside:
            return [source.name for source in tensor_inputs(self.node)]
        return [f"{self.layer}.{self.attribute.removesuffix('_quantizer')}"]

    @property
    def consumers(self) -> tuple[str, ...]:
        """The ops that take its values: the layer's dotted name inside a leaf module, else names of nodes."""
        if self.attribute == ITSELF:
            return tuple(user.name for user in self.node.users)
        return (self.layer if self.is_inside else self.node.name,)

    @property
    def why(self) -> str:
        """The reason in words."""
        if self.is_weights and isinstance(self.module, QuantModule):
            return f"weight of {with_article(self.module.KIND)}"
        if self.attribute == ITSELF:
            return "a quantizer of the model's own"
        if self.attribute != INPUT:
            return f"{type(self.module).__name__} quantizes it between its ops"
        if (
            not self.is_inside
            and isinstance(self.module, QuantRecurrent)
            and any(map(may_be_packed, tensor_inputs(self.node)))
        ):
            return "the layer quantizes its input itself: it may be a packed sequence"
        where = "inside a leaf module" if self.is_inside else "called inside a leaf module, too"
        return f"the layer quantizes its input itself: it is {where}"

    def edges(self) -> list[Edge]:
        """Return the edges of the plan that it quantizes."""
        ends = [(source, consumer) for source in self.sources for consumer in self.consumers]
        return [Edge(source, consumer, self.name, self.quantizer.spec, self.why) for source, consumer in ends]


def layer_quantizers(gm: fx.GraphModule) -> list[LayerQuantizer]:
    """Return the quantizers of the layers that a graph calls, and of layers inside leaf modules."""
    names = first_names(gm)
    nodes = [node for node in gm.graph.nodes if node.op == "call_module" and not is_quantizer(node)]
    return [
        _held(node, path, module, names[module])
        for node in nodes
        for path, module in named_quantizers(module_of(node)).items()
    ]


def layer_edges(gm: fx.GraphModule) -> list[Edge]:
    """Return the edges that layers quantize themselves, each once, even if its module is called several times."""
    edges = [edge for held in layer_quantizers(gm) for edge in held.edges()]
    return list({(edge.source, edge.consumer, edge.quantizer): edge for edge in edges}.values())


def _held(node: fx.Node, path: str, quantizer: Quantizer, name: str) -> LayerQuantizer:
    if not path:
        return LayerQuantizer(node, str(node.target), quantizer, ITSELF, quantizer, name)
    inner, _, attribute = path.rpartition(".")
    layer = f"{node.target}.{inner}" if inner else str(node.target)
    return LayerQuantizer(node, layer, module_of(node).get_submodule(inner), attribute, quantizer, name)
