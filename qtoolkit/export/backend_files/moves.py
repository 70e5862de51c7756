"""Grids of tensors behind and before ops that move values: a compiler that looks up each tensor finds one there too."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.export.files.kinds import ops_where
from qtoolkit.export.passes.repeated_pairs import moved_inputs
from qtoolkit.export.passes.saturation import CLIPS

# Ops whose output has all values of their input.
_REARRANGING = ops_where(lambda kind: kind.rearranges)


def spread(model: Any, encodings: Iterable[Encoding], joins_relu: bool) -> list[Encoding]:
    """Return the encodings, and those of tensors that have the same values.

    Args:
        model: The graph without placeholders.
        encodings: The encodings of quantized tensors.
        joins_relu: Whether the output of an op before a ReLU has the ReLU's grid, because the target computes both as one op.
    """
    found = {encoding.tensor: encoding for encoding in encodings}
    nodes = [node for node in model.graph if not node.domain]
    for node in nodes:
        sources = node.inputs[:1] if node.op_type == "Gather" else moved_inputs(node)
        known = [None if source is None else found.get(str(source.name)) for source in sources]
        first = known[0] if known else None
        if first is not None and all(one is not None and one.has_grid_of(first) for one in known):
            _add(found, first, (output.name for output in node.outputs))
    for node in reversed(nodes):
        goes_back = node.op_type in _REARRANGING or (joins_relu and node.op_type in CLIPS)
        source = node.inputs[0] if goes_back else None
        behind = found.get(node.outputs[0].name)
        if source is not None and behind is not None and source.producer() is not None and len(source.uses()) == 1:
            _add(found, behind, () if source.is_graph_output() else (source.name,))
    return list(found.values())


def _add(found: dict[str, Encoding], encoding: Encoding, tensors: Iterable[str]) -> None:
    if encoding.axis is None and not encoding.is_weight:
        for tensor in tensors:
            found.setdefault(tensor, replace(encoding, tensor=tensor))
