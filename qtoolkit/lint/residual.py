"""Residual adds: which branch stays unquantized, so that the target computes its convolution and the add as one."""

import heapq
from collections.abc import Iterator

from qtoolkit.backends import Backend
from qtoolkit.lint.findings import MODEL_OPTIMIZER, Broken, LintRule
from qtoolkit.lint.ops import Op, origin
from qtoolkit.runtimes.table import TENSORRT


def free_branch(op: Op, backend: Backend) -> Op | None:
    """Return the input of a residual add that stays unquantized; None for other ops and other targets."""
    if not (backend.frees_a_branch() and op.kind.adds):
        return None
    branches = [source for source in op.inputs if layer_before(source) is not None]
    if len(branches) < 2:
        return branches[0] if branches else None
    # Both branches end in a layer: the longer one is the main branch, the other the shortcut.
    first, second = lengths_from_fork(branches[0], branches[1])
    return branches[0] if first >= second else branches[1]


def fuses(op: Op, backend: Backend) -> bool:
    """Return whether the target computes a residual add as part of a convolution."""
    free = free_branch(op, backend)
    return free is not None and fusing_layer(free) is not None


def layer_before(op: Op) -> Op | None:
    """Return the quantized layer that computes a tensor, alone or with its batch norm, and that has no other user."""
    layer = origin(op, sole_user=True)
    return layer if layer is not None and layer.kind.layer and not layer.has_float_weight else None


def fusing_layer(op: Op) -> Op | None:
    """Return the quantized layer that computes a tensor, and an add after it with it."""
    layer = layer_before(op)
    return layer if layer is not None and layer.kind.fuses_add else None


def lengths_from_fork(first: Op, second: Op) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how many layers, and how many ops, each of two branches has that the other does not share, up to their fork."""
    reached: dict[Op, set[int]] = {first: {0}, second: {1}}
    waiting = [(-op.place, place, op) for place, op in enumerate((first, second))]
    heapq.heapify(waiting)
    counts = [[0, 0], [0, 0]]
    while any(len(reached[op]) == 1 for *_, op in waiting):
        *_, op = heapq.heappop(waiting)
        if len(reached[op]) == 1:
            branch = counts[next(iter(reached[op]))]
            branch[0] += op.kind.layer
            branch[1] += not op.is_quantizer
        for source in op.inputs:
            if source not in reached:
                heapq.heappush(waiting, (-source.place, len(reached), source))
            reached[source] = reached.get(source, set()) | reached[op]
    (layers, ops), (other_layers, other_ops) = counts
    return (layers, ops), (other_layers, other_ops)


def _one_free_branch(op: Op, backend: Backend) -> Iterator[Broken]:
    if not op.kind.adds:
        return
    layers = [layer for source in op.inputs if (layer := fusing_layer(source)) is not None]
    on_grid = [source.quantizer is not None for source in op.inputs]
    if layers and all(on_grid):
        yield (
            "both inputs of a residual add are quantized, so that no convolution fuses with it.",
            f"Leave the branch of {layers[0].name!r} without a quantizer.",
        )
    if layers and not any(on_grid):
        yield (
            "no input of a residual add is quantized, so that the convolution before it returns floats.",
            "Quantize the identity branch.",
        )


def _the_longer_branch(op: Op, backend: Backend) -> Iterator[Broken]:
    quantized = [source for source in op.inputs if source.quantizer is not None]
    if not op.kind.adds or len(op.inputs) != 2 or len(quantized) != 1:
        return
    main, other = quantized[0], next(source for source in op.inputs if source is not quantized[0])
    layer = fusing_layer(main)
    if layer is None or fusing_layer(other) is None:
        return
    (layers, _), (other_layers, _) = lengths_from_fork(main, other)
    if layers > other_layers:
        yield (
            f"the longer branch of a residual add, which ends in {layer.name!r}, is quantized; the target fuses the add with "
            f"the convolution of the longer branch, whose output must be float.",
            "Quantize the other branch.",
        )


RULES = (
    LintRule("residual-add", _one_free_branch, f"{TENSORRT.rules}; {MODEL_OPTIMIZER}", Backend.frees_a_branch),
    LintRule("residual-branch", _the_longer_branch, MODEL_OPTIMIZER, Backend.frees_a_branch),
)
