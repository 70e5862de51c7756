"""Kernels of elementwise ops, and of softmax and batch norm."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import fx

from qtoolkit.export.tflite.flatbuffer import Scales, TensorInFile
from qtoolkit.export.tflite.ops import TfliteOp, activation_of

OF_16_BITS = Scales((1 / 32768,), dtype="int16")  # the outputs of softmax, logistic and tanh


def _aligned(op: TfliteOp, values: Sequence[TensorInFile]) -> list[TensorInFile]:
    """Return values with the rank and the order of dimensions of the output."""
    rank = len(op.shape)
    full = [x if len(x.shape) == rank else op.reshaped(x, (1,) * (rank - len(x.shape)) + x.shape) for x in values]
    orders = [x.order for x in full if x.shape == op.shape and not x.is_plain] or [x.order for x in full]
    return [op.ordered(x, orders[0]) for x in full]


def binary(kernel: str, operands: Sequence[str] = ("self", "other")) -> Callable[[TfliteOp], TensorInFile]:
    """Return the kernel of an op on two tensors, or on a tensor and a number: these arguments, in this order."""

    def emit(op: TfliteOp) -> TensorInFile:
        if op.args.get("alpha", 1) != 1:
            raise ValueError(f"export_litert: {op.node.name!r} adds with alpha; multiply by alpha before the sum.")
        given = (op.args[name] for name in operands)
        a, b = _aligned(op, [op.value(each) if isinstance(each, fx.Node) else _number(op, each) for each in given])
        options = {} if kernel == "POW" else {"fusedActivationFunction": op.joined}
        return op.emit(kernel, [a, b], a, **options, **({"potScaleInt16": False} if kernel in ("ADD", "SUB") else {}))

    return emit


def _number(op: TfliteOp, value: float) -> TensorInFile:
    return TensorInFile(op.constant(np.array([value], np.float32), "number"), (1,), (0,))


def check_binary(op: TfliteOp) -> str:
    """Return why an op on two tensors has no integer kernel."""
    return "" if isinstance(op.args["other"], fx.Node) else "one input is a constant that is not quantized"


def reciprocal(op: TfliteOp) -> TensorInFile:
    """Add one divided by x."""
    x = op.value("self")
    return op.emit("DIV", [_number(op, 1.0), x], x)


def unary(kernel: str, **options: Callable[[TfliteOp], object]) -> Callable[[TfliteOp], TensorInFile]:
    """Return the kernel of an op on one tensor, with options from the op."""

    def emit(op: TfliteOp) -> TensorInFile:
        x = op.value(op.first)
        return op.emit(kernel, [x], x, **{name: of(op) for name, of in options.items()})

    return emit


def fixed(scales: Scales) -> Callable[[TfliteOp], str]:
    """Return the check of a kernel with a fixed output grid."""

    def check(op: TfliteOp) -> str:
        wanted = scales if op.scales is None or op.scales.dtype == "int8" else OF_16_BITS
        words = f"LiteRT's kernel requires output scale {wanted.scale[0]} and zero point {wanted.zero_point}"
        return "" if op.scales == wanted else words

    return check


def softmax(op: TfliteOp) -> TensorInFile:
    """Compute the op over the last axis of the file."""
    x, dim = op.value("self"), op.args["dim"] % len(op.shape)
    order = x.order if x.axis(dim) == len(x.shape) - 1 else (*(d for d in range(len(x.shape)) if d != dim), dim)
    x = op.ordered(x, order)
    return op.emit("SOFTMAX", [x], x, beta=1.0)


def relu(op: TfliteOp) -> TensorInFile:
    """Add a ReLU, a ReLU6 or a clip to other bounds."""
    x, kind = op.value("self"), activation_of(op.node)
    if kind:
        return op.emit(kind, [x], x)
    low, high = (op.args.get(name, op.args.get(f"{name}_val")) for name in ("min", "max"))
    for kernel, bound in (("MAXIMUM", low), ("MINIMUM", high)):
        if bound is not None:
            x = op.step(kernel, [x, _number(op, bound)], x)
    return x


def check_relu(op: TfliteOp) -> str:
    """Return why a clip has no integer kernel."""
    return "" if activation_of(op.node) else "LiteRT has no integer kernel for these bounds"


def silu(op: TfliteOp) -> TensorInFile:
    """Add a SiLU: the product of x and its sigmoid."""
    x = op.value("self")
    return op.emit("MUL", [x, op.step("LOGISTIC", [x], x)], x)


def elu(op: TfliteOp) -> TensorInFile:
    """Add an ELU as relu(x) + alpha (exp(min(x, 0)) - 1), because the reference kernels have no ELU."""
    x, alpha = op.value("self"), float(op.args["alpha"])
    if op.args["input_scale"] != 1 or op.args["scale"] != 1:
        raise ValueError(f"export_litert: {op.node.name!r} is an ELU with scales, such as SELU; replace it by an ELU.")
    below = op.step("EXP", [op.step("MINIMUM", [x, _number(op, 0.0)], x)], x)
    shifted = op.step("SUB", [below, _number(op, 1.0)], x)
    scaled = op.step("MUL", [shifted, _number(op, alpha)], x)
    return op.emit("ADD", [op.step("RELU", [x], x), scaled], x)


def hardsigmoid(op: TfliteOp) -> TensorInFile:
    """Add a hard sigmoid: relu6(x + 3) / 6."""
    x = op.value("self")
    six = op.option("ActivationFunctionType", "RELU6")
    shifted = op.step("ADD", [x, _number(op, 3.0)], x, fusedActivationFunction=six)
    return op.emit("MUL", [shifted, _number(op, 1 / 6)], x)


def prelu(op: TfliteOp) -> TensorInFile:
    """Add a PReLU."""
    x, slopes = op.value("self"), op.stored(op.args["weight"]).float()
    shape = [1] * (len(x.shape) - 1)
    if slopes.numel() > 1:
        shape[x.axis(1) - 1] = slopes.numel()
    return op.emit("PRELU", [x, op.constant(slopes.reshape(shape).numpy(), f"{op.name}.slopes")], x)


def layer_norm(op: TfliteOp) -> TensorInFile:
    """Add a layer norm: (x - mean) / sqrt(variance + eps) over the last dimensions, with a factor and a sum."""
    x, rank = op.plain(op.value("input")), len(op.shape)
    dims = range(rank - len(op.args["normalized_shape"]), rank)
    axes, kept = op.integers(dims), x.moved([1 if d in dims else n for d, n in enumerate(x.shape)], x.order)
    centred = op.step("SUB", [x, op.step("MEAN", [x, axes], kept, keepDims=True)], x)
    squares = op.step("MUL", [centred, centred], x)
    variance = op.step("MEAN", [squares, axes], kept, keepDims=True)
    root = op.step("RSQRT", [op.step("ADD", [variance, _number(op, op.args["eps"])], kept)], kept)
    scaled = [centred, root]
    if op.args["weight"] is not None:
        scaled = [op.step("MUL", scaled, x), op.value("weight")]
    if op.args["bias"] is None:
        return op.emit("MUL", scaled, x)
    return op.emit("ADD", [op.step("MUL", scaled, x), op.value("bias")], x)


def attention(op: TfliteOp) -> TensorInFile:
    """Add an attention without a mask: softmax(q k / sqrt(features)) v."""
    if op.args["attn_mask"] is not None or op.args["is_causal"] or op.args["enable_gqa"]:
        raise ValueError(
            f"export_litert: {op.node.name!r} is an attention with a mask or grouped heads, which LiteRT does not support; "
            "write it with matrix products."
        )
    query, key, value = (op.plain(op.value(name)) for name in ("query", "key", "value"))
    factor = query.shape[-1] ** -0.5 if op.args["scale"] is None else op.args["scale"]
    scores = query.moved((*query.shape[:-1], key.shape[-2]), query.order)
    scaled = op.step("MUL", [query, _number(op, factor)], query)
    products = op.step("BATCH_MATMUL", [scaled, key], scores, adjY=True)
    weights = op.step("SOFTMAX", [products], scores, beta=1.0)
    return op.emit("BATCH_MATMUL", [weights, value], query)


def batch_norm(op: TfliteOp) -> TensorInFile:
    """Add a batch norm: a factor and a sum."""
    mean, var = (op.stored(op.args[name]).double() for name in ("running_mean", "running_var"))
    given = (op.args[name] for name in ("weight", "bias"))
    weight, bias = (None if node is None else op.stored(node).double() for node in given)
    factor = (var + op.args["eps"]).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * factor
    x = op.value("input")
    shape = [1] * len(x.shape)
    shape[x.axis(1)] = factor.numel()
    factors, shifts = (op.constant(part.float().reshape(shape).numpy(), op.name) for part in (factor, shift))
    return op.emit("ADD", [op.step("MUL", [x, factors], x), shifts], x)
