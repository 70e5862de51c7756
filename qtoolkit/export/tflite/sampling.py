"""Kernels of pools, means and resizes."""

from qtoolkit.export.tflite.flatbuffer import Value
from qtoolkit.export.tflite.ops import Op
from qtoolkit.export.tflite.windows import Window, pad, padded, strides


def max_pool(op: Op) -> Value:
    """Pad with the lowest value, where the kernel does not, and add a max pool."""
    x = op.image("self")
    window = Window.of(op.args, op.args["kernel_size"], x.shape[2:], op.shape[2:])
    if set(window.dilation) != {1}:
        raise ValueError(
            f"export_litert: LiteRT's max pool has no dilation, got {window.dilation} in {op.node.name!r}."
        )
    x, padding = padded(op, x, window, lowest=True)
    return _pool(op, "MAX_POOL_2D", x, window, padding)


def avg_pool(op: Op) -> Value:
    """Pad with zeros, where these count, or let the kernel leave the padding out."""
    x = op.image("self")
    window = Window.of(op.args, op.args["kernel_size"], x.shape[2:], op.shape[2:])
    pads = any(any(ends) for ends in window.padding)
    if op.args["divisor_override"] or (pads and op.args["ceil_mode"]):
        raise ValueError(f"export_litert: LiteRT's average pool has no ceil_mode and divisor: {op.node.name!r}.")
    if not pads:
        return _pool(op, "AVERAGE_POOL_2D", x, window, "VALID")
    if op.args["count_include_pad"]:
        return _pool(op, "AVERAGE_POOL_2D", pad(op, x, [(0, 0), (0, 0), *window.padding]), window, "VALID")
    if not window.is_same(x.shape[2:], op.shape[2:]):
        raise ValueError(
            f"export_litert: LiteRT's average pool excludes the padding only if it is TensorFlow's SAME, not "
            f"{window.padding} as in {op.node.name!r}; set count_include_pad=True."
        )
    return _pool(op, "AVERAGE_POOL_2D", x, window, "SAME")


def _pool(op: Op, kernel: str, x: Value, window: Window, padding: str) -> Value:
    height, width = window.size
    options = {**strides(op, window, padding), "filterHeight": height, "filterWidth": width}
    return op.emit(kernel, [x], x, **options, fusedActivationFunction=op.joined)


def adaptive_pool(op: Op) -> Value:
    """Add an average pool whose windows have one size."""
    x = op.image("self")
    image, out = x.shape[2:], op.shape[2:]
    if any(image[d] % out[d] for d in range(2)):
        raise ValueError(
            f"export_litert: the adaptive pool {op.node.name!r} has windows of different sizes from {image} to {out}; take "
            f"a size that divides the image's."
        )
    size = tuple(image[d] // out[d] for d in range(2))
    return _pool(op, "AVERAGE_POOL_2D", x, Window(size, size, (1, 1), ((0, 0), (0, 0))), "VALID")


def mean(op: Op) -> Value:
    """Add a mean."""
    x, rank = op.value("self"), len(op.args["self"].meta["val"].shape)
    dims = [dim % rank for dim in (op.args.get("dim") or range(rank))]
    kept = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
    axes = op.integers(sorted(x.axis(dim) for dim in dims))
    if op.args.get("keepdim"):
        return op.emit("MEAN", [x, axes], x, keepDims=True)
    like = Value(-1, kept, x.order, op.scales)
    return op.reshaped(op.step("MEAN", [x, axes], like, keepDims=True), op.shape, op.name)


def nearest(op: Op) -> Value:
    """Add a resize to the nearest value."""
    x = op.image(op.first)
    size = op.integers(op.shape[2:])
    return op.emit("RESIZE_NEAREST_NEIGHBOR", [x, size], x)


def bilinear(op: Op) -> Value:
    """Add a linear resize."""
    x, aligned = op.image(op.first), bool(op.args["align_corners"])
    options = {"alignCorners": aligned, "halfPixelCenters": not aligned}
    return op.emit("RESIZE_BILINEAR", [x, op.integers(op.shape[2:])], x, **options)
