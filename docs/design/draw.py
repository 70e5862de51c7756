"""Draws the .dot files of this folder as .svg files beside them: python docs/design/draw.py."""

from pathlib import Path

import pygraphviz


def svg_of(source: Path) -> str:
    """Return a drawing as SVG."""
    return str(pygraphviz.AGraph(source.read_text()).draw(format="svg", prog="dot").decode())


if __name__ == "__main__":
    for dot in Path(__file__).parent.glob("*.dot"):
        dot.with_suffix(".svg").write_text(svg_of(dot))
