"""The interface of kernels: an op of the program, and the tensors and ops that are added to the file."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from qtoolkit.export import pt2e
from qtoolkit.export.tflite.flatbuffer import Scales, TensorInFile, in_order
from qtoolkit.op_kinds.kind import Bounds
from qtoolkit.op_kinds.table import CLIPS_OF_ATEN
from qtoolkit.runtimes.execution import Array

if TYPE_CHECKING:
    from qtoolkit.export.tflite.lowering import Lowering

IMAGE = (0, 2, 3, 1)  # the model's dimension of each axis of an image in the file
# The activations that kernels fuse, by the bounds of their ranges.
ACTIVATIONS: Mapping[tuple[float, float], str] = {(0, 6): "RELU6", (0, math.inf): "RELU", (-1, 1): "RELU_N1_TO_1"}
# Ops that return several tensors, and how one is taken: all positions along a dimension, or one position.
SPLITS = {"chunk": "slice", "split": "slice", "split_with_sizes": "slice", "tensor_split": "slice", "unbind": "select"}
EXTREMES = {"max": "amax", "min": "amin"}  # what takes the values of x.max(1) is a reduction


def name_of_op(node: fx.Node) -> str:
    """Return the name of a node's aten op, without its overload, or of its Python function.

    Taking one part of a split counts as a slice, or as a select of one position.
    """
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        parts = SPLITS if node.args[1] else SPLITS | EXTREMES
        return parts.get(name_of_op(node.args[0]), "getitem")
    return pt2e.name_of_op(node)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a node, including defaults, by the names of its schema."""
    if node.target is not operator.getitem:
        return pt2e.arguments(node)
    split, part = cast("tuple[fx.Node, int]", node.args)  # of which one part is a slice, or a selection
    found = arguments(split)
    source, dim = found["self"], found["dim"]
    if name_of_op(split) in EXTREMES:
        return {**found, "dim": [dim]}
    sizes = [tensor.shape[dim] for tensor in split.meta["val"]] if name_of_op(split) != "unbind" else [1] * (part + 1)
    start = sum(sizes[:part])
    return {"self": source, "dim": dim, "start": start, "end": start + sizes[part], "step": 1, "index": part}


def returns_several(node: fx.Node) -> bool:
    """Return whether an op returns several tensors that its users compute."""
    name = name_of_op(node)
    return name in SPLITS or (name in EXTREMES and not isinstance(node.meta["val"], Tensor))


def activation_of(node: fx.Node) -> str:
    """Return the LiteRT activation of a node; "" if kernels cannot fuse it."""
    bounds = bounds_of(node)
    return "" if bounds is None else ACTIVATIONS.get((bounds.low, bounds.high), "")


def bounds_of(node: fx.Node) -> Bounds | None:
    """Return the bounds of a ReLU or a clip; None for other ops, and for computed bounds."""
    of_arguments = CLIPS_OF_ATEN.get(name_of_op(node).removesuffix("_"))
    if of_arguments is None:
        return None
    bounds = of_arguments(lambda _, name, default: arguments(node).get(name, default))
    return bounds if bounds.known else None


class TfliteOp:
    """An op of the program: its inputs in the file, and the tensors and ops that its kernel adds.

    `scales` and `name` describe its output; there are no scales if it computes in float. `activation` is a fused activation.
    """

    def __init__(self, lowering: "Lowering", node: fx.Node, scales: Scales | None, activation: str, name: str) -> None:
        self.lowering, self.node, self.scales, self.name = lowering, node, scales, name
        self.args = arguments(node)
        self.joined = self.option("ActivationFunctionType", activation)
        self.first = "self" if "self" in self.args else "input"  # the first tensor, as the schemas of aten call it
        value = node.meta["val"]
        self.shape: tuple[int, ...] = tuple(value.shape) if isinstance(value, Tensor) else ()

    def option(self, kind: str, name: str) -> int:
        """Return the number of an option by the schema's names."""
        return self.lowering.file.option(kind, name)

    # ---- inputs

    def value(self, argument: "str | fx.Node") -> TensorInFile:
        """Return an input: integers if the op computes in integers, otherwise floats."""
        node: fx.Node = self.args[argument] if isinstance(argument, str) else argument
        constant = self.lowering.constant(node)
        if constant is not None:
            return self._constant_input(node, constant)
        value = self.lowering.values[node]
        return value if self.scales is not None else self.lowering.as_float(value)

    def _constant_input(self, node: fx.Node, constant: Tensor) -> TensorInFile:
        order = tuple(range(constant.dim()))
        if self.scales is None or not self.lowering.is_dequantized(node):
            return TensorInFile(self.constant(constant.float().numpy(), node.name), tuple(constant.shape), order)
        codes, scale, _ = self.lowering.codes_of(node)
        dtype = str(codes.dtype).removeprefix("torch.")
        scales = Scales(tuple(scale.tolist()), arguments(node)["zero_point"], dtype=dtype)
        tensor = self.constant(codes.numpy(), node.name, scales)
        self.lowering.note_weight(codes, tensor, order)
        return TensorInFile(tensor, tuple(codes.shape), order, scales)

    def image(self, argument: str) -> TensorInFile:
        """Return an input of four dimensions in NHWC."""
        return self.ordered(self.value(argument), IMAGE)

    def plain(self, value: TensorInFile) -> TensorInFile:
        """Return a value in the model's order of dimensions."""
        return self.ordered(value, tuple(range(len(value.shape))))

    def ordered(self, value: TensorInFile, order: Sequence[int]) -> TensorInFile:
        """Return a value in another order of dimensions: by a TRANSPOSE, or by a RESHAPE if no data moves."""
        if value.order == tuple(order):
            return value
        if _moves_nothing(value, order):
            return self.arranged_as(value, value.shape, order)
        axes = self.integers([value.order.index(dim) for dim in order])
        return self.lowering.emit(
            "TRANSPOSE", [value, axes], f"{self.name}.transposed", value.moved(value.shape, order)
        )

    def reshaped(self, value: TensorInFile, shape: Sequence[int], name: str = "") -> TensorInFile:
        """Return a value in another shape, in the model's order of dimensions."""
        plain = value if _moves_nothing(value, range(len(value.shape))) else self.plain(value)
        return self.arranged_as(plain, shape, tuple(range(len(shape))), name)

    def arranged_as(
        self, value: TensorInFile, shape: Sequence[int], order: Sequence[int], name: str = ""
    ) -> TensorInFile:
        """Add a reshape without data movement, with the file's axes in this order of the shape's dimensions."""
        sizes, like = in_order(shape, order), value.moved(shape, order)
        name = name or f"{self.name}.reshaped"
        return self.lowering.emit(
            "RESHAPE", [value, self.integers(sizes)], name, like, newShape=np.array(sizes, np.int32)
        )

    def integers(self, values: Sequence[int]) -> int:
        """Return a constant of int32."""
        return self.constant(np.array(values, np.int32), "shape")

    def constant(self, array: Array, name: str, scales: Scales | None = None) -> int:
        """Return a constant tensor."""
        return self.lowering.file.tensor(name, array.shape, array.dtype, scales, array)

    # ---- the output

    def emit(self, op: str, inputs: Sequence[TensorInFile | int], like: TensorInFile, **values: object) -> TensorInFile:
        """Add the op that computes the output, in the order of dimensions of a value."""
        output = TensorInFile(-1, self.shape, like.order, self.scales)
        return self.lowering.emit(op, inputs, self.name, output, **values)

    def step(self, op: str, inputs: Sequence[TensorInFile | int], like: TensorInFile, **values: object) -> TensorInFile:
        """Add an intermediate op with the shape, order and grid of a value for its output."""
        return self.lowering.emit(op, inputs, f"{self.name}.{op.lower()}", like, **values)

    # ---- weights

    def stored(self, node: fx.Node) -> Tensor:
        """Return a weight, or another stored tensor. Raises ValueError: it is computed from the inputs."""
        values = self.lowering.constant(node)
        if values is None:
            raise ValueError(
                f"export_litert: the weight of {self.node.name!r} is computed from the inputs, but LiteRT files need constant "
                "weights; export another part of the model."
            )
        return values

    def weight(
        self, argument: str, axes: Sequence[int], channel: int, reshape: Sequence[int] | None = None
    ) -> tuple[int, Array | None]:
        """Return a weight as a constant with these axes, and its scales.

        `channel` is the axis of the output channels in the file; `reshape` is the shape in the file, if the dimensions differ.
        """
        node = self.args[argument]
        values = self.stored(node)
        name = node.all_input_nodes[0].name if node.all_input_nodes else node.name
        if self.scales is None:
            return self.constant(_arranged(values.float(), axes, reshape), name), None
        codes, scale, _ = self.lowering.codes_of(node)
        tensor = self.constant(_arranged(codes, axes, reshape), name, Scales(tuple(scale.tolist()), 0, channel))
        self.lowering.note_weight(codes, tensor, axes)
        return tensor, scale.numpy()

    def bias(self, source: TensorInFile, weight_scales: Array | None, channels: int) -> int:
        """Return the bias as a constant: int32 at input scale times weight scale if the op computes in integers."""
        node = self.args.get("bias")
        given = torch.zeros(channels) if node is None else self.stored(node).float()
        if self.scales is None or source.scales is None or weight_scales is None:
            return self.constant(given.numpy(), f"{self.name}.bias")
        steps = np.float32(source.scales.scale[0]) * weight_scales.astype(np.float32)
        codes = np.rint(given.double().numpy() / steps.astype(np.float64))
        dtype = "int32" if source.scales.dtype == "int8" else "int64"
        limits = np.iinfo(np.int32)  # of the model's codes too
        codes = np.clip(codes, limits.min, limits.max).astype(dtype)
        return self.constant(codes, f"{self.name}.bias", Scales(tuple(steps.tolist()), dtype=dtype))


def _moves_nothing(value: TensorInFile, order: Sequence[int]) -> bool:
    """Return whether the dimensions of more than one element are in the same order."""
    before, behind = ([dim for dim in dims if value.shape[dim] > 1] for dims in (value.order, order))
    return before == behind


def _arranged(weight: Tensor, axes: Sequence[int], reshape: Sequence[int] | None) -> Array:
    array = weight.numpy().transpose(axes)
    return array if reshape is None else array.reshape(reshape)
