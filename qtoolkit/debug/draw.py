"""draw(): the graph of a model as an SVG file, with quantizers and their ranges."""

import os
from collections import Counter
from collections.abc import Mapping

from torch import fx, nn

from qtoolkit.extras import needed
from qtoolkit.files import checked_path, write_atomically
from qtoolkit.graph.graph_module import plan_in
from qtoolkit.graph.nodes import is_quantizer, kind_of, name_of
from qtoolkit.graph.verdict_now import verdict_now
from qtoolkit.nn import QuantModule
from qtoolkit.quantizers.clip_range import clip_range
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.verdicts import Status
from qtoolkit.wrapped import unwrapped

# Fill color of a node by its status in the plan; None is for graphs without a plan.
COLORS = {
    Status.QUANTIZED: "#cfe8cf",
    Status.FUSED: "#cfe8cf",
    Status.TRANSPARENT: "#eeeeee",
    Status.FLOAT: "#f6d5c3",
    None: "#ffffff",
}
QUANTIZER_COLOR = "#d3e3f8"
LARGE = 500  # nodes: the best places and curves for 1,300 take half a minute, straight lines 2 seconds


def draw(graph_module: fx.GraphModule, path: str | os.PathLike[str]) -> None:
    """Write the graph of a model as an SVG file.

    Ops are boxes: green if quantized or fused with a quantized op, gray for data movement, orange if float, with the reason as
    a tooltip. A layer shows the spec and the range of its weight quantizer. Quantizers are blue ellipses with their spec and
    range.

    Args:
        graph_module: The result of `qtoolkit.prepare` or `qtoolkit.convert`, or another GraphModule.
        path: The file to write; its folder is created. If a step fails, nothing is written.

    Raises:
        TypeError: `graph_module` is not a GraphModule.
        ImportError: The extra [report] is not installed.

    Example:
        >>> import tempfile
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()), backend="tensorrt")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     qt.debug.draw(prepared, folder + "/model.svg")
        ...     "int8" in open(folder + "/model.svg").read()
        True
    """
    graph_module = unwrapped(graph_module)
    if not isinstance(graph_module, fx.GraphModule):
        raise TypeError(
            f"draw: graph_module must be a torch.fx.GraphModule, got {type(graph_module).__name__}; call qtoolkit.prepare "
            f"first."
        )
    path = checked_path(path, "draw", "model.svg")
    write_atomically(picture_of(graph_module), path)


def picture_of(gm: fx.GraphModule, folded: Mapping[fx.Node, str] | None = None) -> bytes:
    """Return the graph of a model as SVG. The title of a node's group is its name; its class comes from `_attributes`.

    All nodes that `folded` maps to the same block form one box; its title is the name of the first node. Raises ImportError:
    the extra [report] is not installed.
    """
    pygraphviz = needed("pygraphviz", "draw", "report")
    faster = {"splines": "polyline", "nslimit": "1"} if len(gm.graph.nodes) > LARGE else {}
    closer = {"ranksep": "0.25"} if folded else {}
    picture = pygraphviz.AGraph(directed=True, rankdir="TB", fontname="Helvetica", **faster, **closer)
    picture.node_attr.update(shape="box", style="filled,rounded", fontname="Helvetica", fontsize="10")
    folded, firsts = folded or {}, dict[str, fx.Node]()
    sizes = Counter(folded.values())
    shown = {node: firsts.setdefault(block, node) for node, block in folded.items()}  # the first node of its block
    for node in gm.graph.nodes:
        if node not in shown:
            picture.add_node(node.name, **_attributes(gm, node))
        elif shown[node] is node:
            label = f"{folded[node]}\n{sizes[folded[node]]} ops, folded"
            picture.add_node(node.name, label=_literal(label), **{"class": "block"})
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            begin, end = shown.get(source, source), shown.get(node, node)
            if begin is not end:
                picture.add_edge(begin.name, end.name)
    drawn: bytes = picture.draw(format="svg", prog="dot")
    return drawn


def _attributes(gm: fx.GraphModule, node: fx.Node) -> dict[str, str]:
    module = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
    if isinstance(module, TensorQuantizer | Grid) and is_quantizer(node):
        return {
            "label": _describe(module),
            "tooltip": _literal(str(node.target)),
            "fillcolor": QUANTIZER_COLOR,
            "shape": "ellipse",
            "class": "quantizer",
        }
    plan = plan_in(gm)
    verdict = None if plan is None or node.name not in plan.status else verdict_now(node, plan)
    status, text = (None, "") if verdict is None else (verdict.status, verdict.text)
    lines = [name_of(node), str(kind_of(node))]
    if isinstance(module, QuantModule):
        lines += [f"weight {_describe(quantizer)}" for quantizer in module.weight_quantizers().values()]
    return {
        "label": _literal("\n".join(lines)),
        "tooltip": _literal(text or str(status or node.op)),
        "fillcolor": COLORS[status],
        "class": str(status or "plain"),
    }


def _literal(text: str) -> str:
    """Return a text that graphviz writes unchanged: without escapes, and not as markup."""
    text = text.replace("\\", "\\\\")
    return f" {text}" if text.startswith("<") else text


def _describe(quantizer: nn.Module) -> str:
    """Return the spec and the representable range."""
    if not isinstance(quantizer, TensorQuantizer | Grid):
        return type(quantizer).__name__
    lo, hi = clip_range(quantizer)
    if not bool(lo.isfinite().all()):
        return f"{quantizer.spec.describe()}\nno range yet"
    return f"{quantizer.spec.describe()}\n[{float(lo.min()):.3g}, {float(hi.max()):.3g}]"
