"""The picture of a graph for the page: shapes placed by graphviz, without its markup; or a module tree without a graph."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree

from torch import fx

from qtoolkit.debug.draw import picture_of
from qtoolkit.graph.nodes import is_quantizer, name_of

LARGE = 40  # nodes: a larger graph has its blocks folded
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class PictureNode:
    """A node of the picture."""

    key: str  # the key of what the page says of it
    kind: str  # "quantized", "fused", "transparent", "float", "quantizer", "plain" or "block"
    place: int  # the number of the node in the graph
    path: str  # the outline of an op; "" for a quantizer
    ellipse: tuple[str, ...] | None  # the center and the radii of a quantizer, or None
    texts: tuple[tuple[str, str, str], ...]  # the lines of text, each with its place

    @property
    def label(self) -> str:
        """The text in one line."""
        return ", ".join(text for _, _, text in self.texts)


@dataclass(frozen=True)
class Line:
    """An edge of the picture, between two nodes."""

    source: int
    target: int
    path: str
    head: str


@dataclass(frozen=True)
class Picture:
    """A graph as shapes, in graphviz' coordinates: y is negative above the origin; `block` is the unfolded block."""

    block: str
    width: float
    height: float
    shapes: tuple[PictureNode, ...]
    lines: tuple[Line, ...]


def key_of(node: fx.Node) -> str:
    """Return the tooltip key of a node: the name of its line in a report."""
    return f"quantizer {node.target}" if is_quantizer(node) else f"op {name_of(node)}"


def draw_shapes(gm: fx.GraphModule) -> tuple[Picture, ...]:
    """Return the pictures of a graph. A large graph has one with all blocks folded, and one for each unfolded block.

    Raises ImportError: the extra [report] is not installed.
    """
    blocks = blocks_of(gm)
    return tuple(_draw(gm, blocks, block) for block in ("", *dict.fromkeys(blocks.values())))


def blocks_of(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Return the block (a module) of each node in a block, for the depth with the fewest boxes; {} for a small graph."""
    if len(gm.graph.nodes) <= LARGE:
        return {}
    paths = dict[fx.Node, list[str]]()
    for node in gm.graph.nodes:
        paths[node] = _path_of(node, paths)
    depths = range(1, max(map(len, paths.values())) + 1)
    divisions = [{node: ".".join(path[:depth]) for node, path in paths.items() if path} for depth in depths]
    return min(divisions, key=lambda blocks: _most_shown(gm, blocks), default={})


def _most_shown(gm: fx.GraphModule, blocks: Mapping[fx.Node, str]) -> int:
    """Return the number of boxes of a picture with the largest block unfolded."""
    sizes = Counter(blocks.values()).values()
    return len(gm.graph.nodes) - len(blocks) + len(sizes) + max(sizes)


def _path_of(node: fx.Node, paths: Mapping[fx.Node, list[str]]) -> list[str]:
    """Return the path of the module that calls a node; a quantizer belongs to the module of its input."""
    if is_quantizer(node):
        return paths[node.all_input_nodes[0]]
    if node.op == "call_module":
        return name_of(node).split(".")[:-1]
    stack = [str(name) for name in node.meta.get("nn_module_stack", ())] if node.op.startswith("call") else []
    return stack[-1].partition("@")[0].split(".") if stack and stack[-1] else []


def _draw(gm: fx.GraphModule, blocks: Mapping[fx.Node, str], unfolded: str) -> Picture:
    folded = {node: block for node, block in blocks.items() if block != unfolded}
    root = ElementTree.fromstring(picture_of(gm, folded))
    nodes = {node.name: (place, node) for place, node in enumerate(gm.graph.nodes)}
    width, height = (float(value) for value in root.attrib["viewBox"].split()[2:])
    groups = list(root.iter(f"{SVG}g"))
    shapes = [_shape(group, *nodes[_title(group)], folded) for group in groups if _is(group, "node")]
    lines = [_line(group, nodes) for group in groups if _is(group, "edge")]
    return Picture(unfolded, width, height, tuple(shapes), tuple(lines))


def _is(group: ElementTree.Element, what: str) -> bool:
    return what in group.get("class", "").split()


def _title(group: ElementTree.Element) -> str:
    title = group.find(f"{SVG}title")
    return "" if title is None or title.text is None else title.text


def _shape(group: ElementTree.Element, place: int, node: fx.Node, folded: Mapping[fx.Node, str]) -> PictureNode:
    outline, ellipse = group.find(f".//{SVG}path"), group.find(f".//{SVG}ellipse")
    texts = [(text.get("x", ""), text.get("y", ""), (text.text or "").strip()) for text in group.iter(f"{SVG}text")]
    is_op = node in folded or node.op.startswith("call")
    kind = next(word for word in group.get("class", "").split() if word != "node") if is_op else "plain"
    round_ = None if ellipse is None else tuple(ellipse.get(name, "") for name in ("cx", "cy", "rx", "ry"))
    path = "" if outline is None else _short(outline.get("d", ""))
    key = f"block {folded[node]}" if node in folded else key_of(node)
    return PictureNode(key, kind, place, path, round_, tuple(texts))


def _line(group: ElementTree.Element, nodes: Mapping[str, tuple[int, fx.Node]]) -> Line:
    source, target = _title(group).split("->")
    path, head = group.find(f".//{SVG}path"), group.find(f".//{SVG}polygon")
    points = "" if head is None else _short(head.get("points", ""))
    return Line(nodes[source][0], nodes[target][0], "" if path is None else _short(path.get("d", "")), points)


def _short(numbers: str) -> str:
    """Return a path with one decimal."""
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), numbers)


@dataclass
class Branch:
    """A module in the tree of a model."""

    name: str  # the last part of its dotted name
    key: str = ""  # the key of what the page says of it, if it has a line
    kind: str = ""  # its status, if it has a line
    says: str = ""  # its kind of op and how it is quantized
    parts: dict[str, "Branch"] = field(default_factory=dict)  # the modules in it

    def at(self, name: str) -> "Branch":
        """Return the branch of a dotted name; a new one is added to the tree."""
        branch = self
        for part in name.split(".") if name else ():
            branch = branch.parts.setdefault(part, Branch(part))
        return branch
