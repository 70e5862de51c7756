"""Sliding windows and their padding; kernels of pools, means and resizes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtoolkit.export.tflite.flatbuffer import TensorInFile
from qtoolkit.export.tflite.ops import TfliteOp


@dataclass(frozen=True)
class Window:
    """The sizes of a sliding window, for height and width."""

    size: tuple[int, ...]  # of the window
    stride: tuple[int, ...]  # of its steps
    dilation: tuple[int, ...]  # of its elements
    padding: tuple[tuple[int, int], ...]  # before and behind the image

    @classmethod
    def of(cls, args: Mapping[str, Any], size: Sequence[int], image: Sequence[int], out: Sequence[int]) -> "Window":
        """Return the window of an op with these arguments, input sizes and output sizes."""
        size, stride, dilation = two(size), two(args.get("stride") or size), two(args.get("dilation", 1))
        given = args.get("padding", 0)
        padding = []
        for d in range(2):
            reach = (out[d] - 1) * stride[d] + dilation[d] * (size[d] - 1) + 1
            before = max(reach - image[d], 0) // 2 if isinstance(given, str) else two(given)[d]
            padding.append((0 if given == "valid" else before, max(reach - image[d] - before, 0)))
        return cls(size, stride, dilation, tuple(padding))

    def is_same(self, image: Sequence[int], out: Sequence[int]) -> bool:
        """Return whether LiteRT's padding "SAME" equals this padding."""
        return all(self._is_same(d, image[d], out[d]) for d in range(2))

    def _is_same(self, d: int, image: int, out: int) -> bool:
        total = max((out - 1) * self.stride[d] + self.dilation[d] * (self.size[d] - 1) + 1 - image, 0)
        before, behind = self.padding[d]
        return out == -(-image // self.stride[d]) and (before, behind) == (total // 2, total - total // 2)


def two(value: int | Iterable[int]) -> tuple[int, ...]:
    """Return a size of both dimensions."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * 2 if len(values) == 1 else values


def padded(op: TfliteOp, x: TensorInFile, window: Window, lowest: bool = False) -> tuple[TensorInFile, str]:
    """Return an image, padded by a separate op if necessary, and the padding option of the kernel."""
    image, out = x.shape[2:], op.shape[2:]
    if not any(any(ends) for ends in window.padding):
        return x, "VALID"
    if window.is_same(image, out):
        return x, "SAME"
    return pad(op, x, [(0, 0), (0, 0), *window.padding], lowest), "VALID"


def pad(op: TfliteOp, x: TensorInFile, ends: Sequence[tuple[int, int]], lowest: bool = False) -> TensorInFile:
    """Return a value padded with zeros, or with the lowest value, before and after its dimensions."""
    shape = [size + before + behind for size, (before, behind) in zip(x.shape, ends, strict=True)]
    sizes = op.constant(np.array([ends[dim] for dim in x.order], np.int32), "padding")
    like = x.moved(shape, x.order)
    if not lowest:
        return op.step("PAD", [x, sizes], like)
    lowest_value = np.finfo(np.float32).min if x.scales is None else np.iinfo(x.scales.dtype).min
    dtype = "float32" if x.scales is None else x.scales.dtype
    fill = op.constant(np.array([lowest_value], dtype), "lowest", x.scales)
    return op.step("PADV2", [x, sizes, fill], like)


def strides(op: TfliteOp, window: Window, padding: str) -> dict[str, int]:
    """Return the options of padding and strides."""
    height, width = window.stride
    return {"padding": op.option("Padding", padding), "strideH": height, "strideW": width}


def dilations(window: Window) -> dict[str, int]:
    """Return the options of dilation."""
    return {"dilationHFactor": window.dilation[0], "dilationWFactor": window.dilation[1]}


# ---- kernels


def max_pool(op: TfliteOp) -> TensorInFile:
    """Add a max pool; pad with the lowest value if the kernel does not."""
    x = op.image("self")
    window = Window.of(op.args, op.args["kernel_size"], x.shape[2:], op.shape[2:])
    if set(window.dilation) != {1}:
        raise ValueError(
            f"export_litert: LiteRT's max pool supports no dilation, got {window.dilation} in {op.node.name!r}."
        )
    x, padding = padded(op, x, window, lowest=True)
    return _pool(op, "MAX_POOL_2D", x, window, padding)


def avg_pool(op: TfliteOp) -> TensorInFile:
    """Pad with zeros if padding counts, or let the kernel exclude the padding."""
    x = op.image("self")
    window = Window.of(op.args, op.args["kernel_size"], x.shape[2:], op.shape[2:])
    pads = any(any(ends) for ends in window.padding)
    if op.args["divisor_override"] or (pads and op.args["ceil_mode"]):
        raise ValueError(f"export_litert: LiteRT's average pool has no ceil_mode and no divisor: {op.node.name!r}.")
    if not pads:
        return _pool(op, "AVERAGE_POOL_2D", x, window, "VALID")
    if op.args["count_include_pad"]:
        return _pool(op, "AVERAGE_POOL_2D", pad(op, x, [(0, 0), (0, 0), *window.padding]), window, "VALID")
    if not window.is_same(x.shape[2:], op.shape[2:]):
        raise ValueError(
            f"export_litert: LiteRT's average pool excludes padding only for TensorFlow's SAME, but {op.node.name!r} has the "
            f"padding {window.padding}; set count_include_pad=True."
        )
    return _pool(op, "AVERAGE_POOL_2D", x, window, "SAME")


def _pool(op: TfliteOp, kernel: str, x: TensorInFile, window: Window, padding: str) -> TensorInFile:
    height, width = window.size
    options = {**strides(op, window, padding), "filterHeight": height, "filterWidth": width}
    return op.emit(kernel, [x], x, **options, fusedActivationFunction=op.joined)


def adaptive_pool(op: TfliteOp) -> TensorInFile:
    """Add an average pool with windows of equal size."""
    x = op.image("self")
    image, out = x.shape[2:], op.shape[2:]
    if any(image[d] % out[d] for d in range(2)):
        raise ValueError(
            f"export_litert: the adaptive pool {op.node.name!r} has windows of different sizes from {image} to {out}; use an "
            "output size that divides the input size."
        )
    size = tuple(image[d] // out[d] for d in range(2))
    return _pool(op, "AVERAGE_POOL_2D", x, Window(size, size, (1, 1), ((0, 0), (0, 0))), "VALID")


def reduction(kind: str) -> Callable[[TfliteOp], TensorInFile]:
    """Return the kernel of a mean, or of a reduction to the largest or smallest values."""

    def emit(op: TfliteOp) -> TensorInFile:
        x, rank = op.value("self"), len(op.args["self"].meta["val"].shape)
        dims = [dim % rank for dim in (op.args.get("dim") or range(rank))]
        kept = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
        axes = op.integers(sorted(x.axis(dim) for dim in dims))
        if op.args.get("keepdim"):
            return op.emit(kind, [x, axes], x, keepDims=True)
        like = TensorInFile(-1, kept, x.order, op.scales)
        return op.reshaped(op.step(kind, [x, axes], like, keepDims=True), op.shape, op.name)

    return emit


def nearest(op: TfliteOp) -> TensorInFile:
    """Add a resize to the nearest value."""
    x = op.image(op.first)
    size = op.integers(op.shape[2:])
    return op.emit("RESIZE_NEAREST_NEIGHBOR", [x, size], x)


def bilinear(op: TfliteOp) -> TensorInFile:
    """Add a linear resize."""
    x, aligned = op.image(op.first), bool(op.args["align_corners"])
    options = {"alignCorners": aligned, "halfPixelCenters": not aligned}
    return op.emit("RESIZE_BILINEAR", [x, op.integers(op.shape[2:])], x, **options)
