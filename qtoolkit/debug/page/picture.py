"""The picture of a graph for a page: the shapes that graphviz places, without its markup; and a tree where there is none."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from torch import fx

from qtoolkit.debug.draw import picture_of
from qtoolkit.graph.nodes import is_quantizer, name_of

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Shape:
    """A node of the picture.

    Attributes:
        key: The key of what the page says of it.
        kind: "quantized", "fused", "transparent", "float", "quantizer" or "plain".
        place: The number of the node in the graph.
        path: The outline of an op; "" for a quantizer.
        ellipse: The center and the radii of a quantizer, or None.
        texts: The lines of text, each with its place.
    """

    key: str
    kind: str
    place: int
    path: str
    ellipse: tuple[str, str, str, str] | None
    texts: tuple[tuple[str, str, str], ...]

    @property
    def label(self) -> str:
        """The text in one line."""
        return ", ".join(text for _, _, text in self.texts)


@dataclass(frozen=True)
class Line:
    """An edge of the picture, between the places of two nodes."""

    source: int
    target: int
    path: str
    head: str


@dataclass(frozen=True)
class Picture:
    """A graph as shapes, in graphviz' coordinates: y is negative above the origin."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    lines: tuple[Line, ...]


def key_of(node: fx.Node) -> str:
    """Return the key of what the page says of a node: the names that the lines of a report have."""
    return f"quantizer {node.target}" if is_quantizer(node) else f"op {name_of(node)}"


def draw_shapes(gm: fx.GraphModule) -> Picture:
    """Return the picture of a graph.

    Raises:
        ImportError: The extra [report] is not installed.
    """
    root = ElementTree.fromstring(picture_of(gm))
    nodes = {node.name: (place, node) for place, node in enumerate(gm.graph.nodes)}
    width, height = (float(value) for value in root.attrib["viewBox"].split()[2:])
    groups = list(root.iter(f"{SVG}g"))
    shapes = [_shape(group, *nodes[_title(group)]) for group in groups if _is(group, "node")]
    lines = [_line(group, nodes) for group in groups if _is(group, "edge")]
    return Picture(width, height, tuple(shapes), tuple(lines))


def _is(group: ElementTree.Element, what: str) -> bool:
    return what in group.get("class", "").split()


def _title(group: ElementTree.Element) -> str:
    title = group.find(f"{SVG}title")
    return "" if title is None or title.text is None else title.text


def _shape(group: ElementTree.Element, place: int, node: fx.Node) -> Shape:
    outline, ellipse = group.find(f".//{SVG}path"), group.find(f".//{SVG}ellipse")
    texts = [(text.get("x", ""), text.get("y", ""), (text.text or "").strip()) for text in group.iter(f"{SVG}text")]
    is_op = node.op.startswith("call")
    kind = next(word for word in group.get("class", "").split() if word != "node") if is_op else "plain"
    round_ = None if ellipse is None else tuple(ellipse.get(name, "") for name in ("cx", "cy", "rx", "ry"))
    path = "" if outline is None else _short(outline.get("d", ""))
    return Shape(key_of(node), kind, place, path, round_, tuple(texts))  # type: ignore[arg-type]  # of four


def _line(group: ElementTree.Element, nodes: Mapping[str, tuple[int, Any]]) -> Line:
    source, target = _title(group).split("->")
    path, head = group.find(f".//{SVG}path"), group.find(f".//{SVG}polygon")
    points = "" if head is None else _short(head.get("points", ""))
    return Line(nodes[source][0], nodes[target][0], "" if path is None else _short(path.get("d", "")), points)


def _short(numbers: str) -> str:
    """Return a path with one digit after the point."""
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), numbers)


@dataclass
class Branch:
    """A module in the tree of a model.

    Attributes:
        name: The last part of its dotted name.
        key: The key of what the page says of it, if it has a line.
        kind: Its status, if it has a line.
        says: Its kind of op and how it is quantized.
        parts: The modules in it.
    """

    name: str
    key: str = ""
    kind: str = ""
    says: str = ""
    parts: dict[str, "Branch"] = field(default_factory=dict)

    def at(self, name: str) -> "Branch":
        """Return the branch of a dotted name, which is put into the tree if it is new."""
        branch = self
        for part in name.split(".") if name else ():
            branch = branch.parts.setdefault(part, Branch(part))
        return branch
