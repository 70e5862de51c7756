"""Kernels of data movement ops."""

from collections.abc import Sequence

import numpy as np

from qtoolkit.export.tflite.flatbuffer import TensorInFile
from qtoolkit.export.tflite.ops import IMAGE, TfliteOp


def cut(op: TfliteOp, x: TensorInFile, begin: Sequence[int]) -> TensorInFile:
    """Slice the output of an op out of a value, from these positions."""
    starts, sizes = ([part[dim] for dim in x.order] for part in (begin, op.shape))
    return op.emit("SLICE", [x, op.integers(starts), op.integers(sizes)], x)


def check_same_grid(op: TfliteOp) -> str:
    """Return why an op has no integer kernel: its input and its output have different grids."""
    same = op.value(op.first).scales == op.scales
    return "" if same else "LiteRT's kernel requires the same scale for input and output"


def cat(op: TfliteOp) -> TensorInFile:
    """Add a concat."""
    values = [op.value(node) for node in op.args["tensors"] if node.meta["val"].numel()]
    values = [op.ordered(x, values[0].order) for x in values]
    return op.emit("CONCATENATION", values, values[0], axis=values[0].axis(op.args["dim"]))


def check_cat(op: TfliteOp) -> str:
    """Return why a concat has no integer kernel."""
    same = all(op.value(node).scales == op.scales for node in op.args["tensors"])
    return "" if same else "LiteRT's kernel requires the same scale for all inputs and the output"


def same(op: TfliteOp) -> TensorInFile:
    """Return the input."""
    return op.value(op.first)


def reshape(op: TfliteOp) -> TensorInFile:
    """Add a reshape."""
    return op.reshaped(op.value(op.first), op.shape, op.name)


def permute(op: TfliteOp) -> TensorInFile:
    """Record the order of dimensions; data moves only when an op needs another order."""
    x, rank = op.value(op.first), len(op.shape)
    dims = [dim % rank for dim in _permutation(op, rank)]
    return op.plain(TensorInFile(x.tensor, op.shape, tuple(dims.index(dim) for dim in x.order), x.scales))


def _permutation(op: TfliteOp, rank: int) -> list[int]:
    if "dims" in op.args:
        return list(op.args["dims"])
    dims = list(range(rank))
    if rank > 1:
        a, b = (op.args.get(name, i) % rank for i, name in enumerate(("dim0", "dim1")))
        dims[a], dims[b] = b, a
    return dims


def slice_of(op: TfliteOp) -> TensorInFile:
    """Add a slice, with steps or without."""
    x = op.value("self")
    dim = op.args["dim"] % len(x.shape)
    size = x.shape[dim]
    if "length" in op.args:  # of narrow, whose start may be counted from the end
        start, step = op.args["start"] % size, 1
        end = start + op.args["length"]
    else:
        start, end, _ = slice(op.args["start"], op.args["end"]).indices(size)
        step = op.args["step"]
    if step == 1:
        return cut(op, x, [start if d == dim else 0 for d in range(len(x.shape))])
    begins, ends, steps = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    begins[dim], ends[dim], steps[dim] = start, max(end, start), step
    parts = [op.integers([part[d] for d in x.order]) for part in (begins, ends, steps)]
    return op.emit("STRIDED_SLICE", [x, *parts], x)


def part(op: TfliteOp, x: TensorInFile, dim: int, start: int, size: int) -> TensorInFile:
    """Slice positions out of a dimension of a value, as an intermediate op."""
    like = x.moved([size if d == dim else count for d, count in enumerate(x.shape)], x.order)
    starts, sizes = ([start if d == dim else 0 for d in x.order], [like.shape[d] for d in x.order])
    return op.step("SLICE", [x, op.integers(starts), op.integers(sizes)], like)


def place(op: TfliteOp, x: TensorInFile, dim: int, index: int, name: str = "") -> TensorInFile:
    """Select one position of a dimension of a value, and drop the dimension."""
    shape = [count for d, count in enumerate(x.shape) if d != dim]
    return op.reshaped(part(op, x, dim, index, 1), shape, name)


def select(op: TfliteOp) -> TensorInFile:
    """Select one position of a dimension, and drop the dimension."""
    x = op.value("self")
    dim = op.args["dim"] % len(x.shape)
    return place(op, x, dim, op.args["index"] % x.shape[dim], op.name)


def joined(op: TfliteOp, values: Sequence[TensorInFile], dim: int) -> TensorInFile:
    """Concatenate values in one order along a dimension, as an intermediate op."""
    first = values[0]
    sizes = [sum(x.shape[d] for x in values) if d == dim else size for d, size in enumerate(first.shape)]
    like = first.moved(sizes, first.order)
    return op.step("CONCATENATION", values, like, axis=first.axis(dim))


def stacked(op: TfliteOp, values: Sequence[TensorInFile], dim: int = 0) -> TensorInFile:
    """Stack values of one shape along a new dimension."""
    shape = values[0].shape
    return joined(op, [op.reshaped(x, (*shape[:dim], 1, *shape[dim:])) for x in values], dim)


def stack(op: TfliteOp) -> TensorInFile:
    """Add a stack."""
    return stacked(op, [op.value(node) for node in op.args["tensors"]], op.args["dim"] % len(op.shape))


def zero_pad(op: TfliteOp) -> TensorInFile:
    """Add padding with zeros."""
    x, ends = op.value("self"), [(0, 0)] * len(op.shape)
    given = op.args["pad"]
    for i in range(len(given) // 2):
        ends[len(ends) - 1 - i] = given[2 * i], given[2 * i + 1]
    if any(min(pair) < 0 for pair in ends) or op.args.get("mode", "constant") != "constant" or op.args["value"]:
        raise ValueError(
            f"export_litert: {op.node.name!r} pads with other values than zero, or crops; LiteRT supports only zero padding."
        )
    sizes = op.constant(np.array([ends[dim] for dim in x.order], np.int32), "padding")
    return op.emit("PAD", [x, sizes], x)


def pixel_shuffle(op: TfliteOp) -> TensorInFile:
    """Rearrange dimensions: LiteRT's DEPTH_TO_SPACE has another order of channels."""
    x, r = op.image("self"), op.args["upscale_factor"]
    n, _, h, w = x.shape
    _, channels, height, width = op.shape
    parts = TensorInFile(x.tensor, (n, channels * r * r, h, w), IMAGE, x.scales)
    five = op.arranged_as(parts, (n, h * w, channels, r, r), (0, 1, 2, 3, 4))
    six = op.arranged_as(five, (n, h, w, channels, r, r), tuple(range(6)))
    axes = op.integers((0, 1, 4, 2, 5, 3))
    moved = op.step("TRANSPOSE", [six, axes], six.moved((n, h, r, w, r, channels), range(6)))
    return op.arranged_as(moved, (n, channels, height, width), IMAGE, op.name)
