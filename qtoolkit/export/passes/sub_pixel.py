"""Write quantized transposed convolutions as a convolution and a DepthToSpace, for which runtimes have integer kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir
from onnx_ir import Value

from qtoolkit.errors import present
from qtoolkit.export.files.graph import Constants, constant_input, constant_of, maker_of, replace_node
from qtoolkit.export.passes.onnxruntime import quantizer_behind
from qtoolkit.export.passes.repeated_pairs import is_on_codes
from qtoolkit.integer.sub_pixel import SubPixel, sub_pixels_of_image

LAST = np.iinfo(np.int64).min  # of a Slice that runs backwards to the first element


def write_sub_pixel_convolutions(model: onnx_ir.Model) -> None:
    """Write each quantized transposed convolution as a convolution with a channel for each pixel of a block.

    The file keeps the weight's integers; ops on constants rearrange them, which runtimes compute once. The pair of the output
    is also inserted after the convolution. No quantized value changes: the sums of products are the same. If the output is not
    a whole number of blocks long, a Slice cuts the last blocks.

    Transposed convolutions with dilation, in one or three dimensions, or with two different strides are not changed.
    """
    for node in list(model.graph):
        if node.op_type == "ConvTranspose":
            _Rewriting(model, node).run()


class _Rewriting:
    """Rewrites one node, if its attributes allow it."""

    def __init__(self, model: onnx_ir.Model, node: onnx_ir.Node) -> None:
        self.model, self.node, self.constants = model, node, Constants(model.graph)
        self.nodes: list[onnx_ir.Node] = []
        self.joined: list[Value] = []  # outputs of activations in front of the QuantizeLinear
        self.groups = node.attributes.get_int("group", 1) or 1
        self.stride = self._ints("strides", [1, 1])[0]  # of both dimensions

    def run(self) -> None:
        node, quantize = self.node, self._quantize()
        x, weight, *biases = (value for value in node.inputs if value is not None)
        of_biases = [maker for value in biases if (maker := maker_of(value, "DequantizeLinear")) is not None]
        stored = _Stored.of(weight, self.groups)
        if quantize is None or not is_on_codes(x) or stored is None or len(of_biases) < len(biases):
            return
        forms = self._forms(stored.sizes)
        if forms is None:
            return
        inputs = [x, self._dequantized(stored.dequantize, self._arranged(stored, forms))]
        for of_bias in of_biases:
            inputs.append(self._dequantized(of_bias, self._repeated(of_bias, 0)))
        pads = [*(form.before for form in forms), *(form.after for form in forms)]
        y = self._add("Conv", inputs, node.name, pads=pads, group=self.groups)
        replace_node(node, self.nodes, y)
        for value in self.joined:
            value.shape = None  # it has more channels now
        y.shape = None
        self._shuffle(quantize, forms)

    def _quantize(self) -> onnx_ir.Node | None:
        """Return the 8-bit QuantizeLinear that is the only user of the output, after activations that it saturates; or None."""
        quantize, self.joined = quantizer_behind(self.node.outputs[0])
        zero_point = None if quantize is None else constant_input(quantize, 2)
        return quantize if zero_point is not None and zero_point.size == 1 and zero_point.dtype.itemsize == 1 else None

    def _forms(self, sizes: list[int]) -> Sequence[SubPixel] | None:
        """Return the block form of both dimensions for a weight of these sizes; None without sizes."""
        attributes = self.node.attributes
        if attributes.get_string("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in attributes:
            return None
        ones, zeros = [1] * len(sizes), [0] * len(sizes)
        pads = self._ints("pads", [*zeros, *zeros])
        cuts = list(zip(pads[: len(sizes)], pads[len(sizes) :], strict=True))
        strides, dilations = self._ints("strides", ones), self._ints("dilations", ones)
        return sub_pixels_of_image(sizes, strides, cuts, self._ints("output_padding", zeros), dilations)

    def _ints(self, name: str, default: list[int]) -> list[int]:
        return list(self.node.attributes.get_ints(name, default) or default)

    # ---- what is written

    def _arranged(self, stored: "_Stored", forms: Sequence[SubPixel]) -> Value:
        """Return the integers of the convolution's weight: (out * stride * stride, in / groups, taps, taps)."""
        sides, stride, taps = stored.sides, self.stride, [form.taps for form in forms]
        y = stored.codes
        if stored.in_rows:
            y = self._add("Reshape", [y, self._constant([self.groups * sides[0], sides[1], *stored.sizes])])
        zeros = [0, 0, *(form.front for form in forms), 0, 0, *(form.back for form in forms)]
        y = self._add("Pad", [y, self._constant(zeros), *stored.zeros(self.constants)]) if any(zeros) else y
        y = self._add("Reshape", [y, self._constant([self.groups, *sides, taps[0], stride, taps[1], stride])])
        ends = (self._constant(part) for part in ([-1, -1], [LAST, LAST], [3, 5], [-1, -1]))
        y = self._add("Slice", [y, *ends]) if max(taps) > 1 else y
        outputs, inputs = (1, 2) if stored.in_rows else (2, 1)
        y = self._add("Transpose", [y], perm=[0, outputs, 4, 6, inputs, 3, 5])
        sizes = [self.groups * sides[outputs - 1] * stride * stride, sides[inputs - 1], *taps]
        y = self._add("Reshape", [y, self._constant(sizes)])
        y.shape, y.type = onnx_ir.Shape(sizes), stored.codes.type
        return y

    def _dequantized(self, like: onnx_ir.Node, codes: Value) -> Value:
        """Return dequantized values with the scales of a DequantizeLinear, each channel's scale for all pixels of a block."""
        grid = [self._repeated(like, index) for index in range(1, len(like.inputs))]
        y = self._add("DequantizeLinear", [codes, *grid], like.name, axis=0)
        y.type = like.outputs[0].type
        y.shape = codes.shape if y.type is not None else None  # a shape alone cannot be written
        return y

    def _repeated(self, node: onnx_ir.Node, index: int) -> Value:
        """Return a constant input with each channel's number repeated for all pixels of a block."""
        value = present(node.inputs[index], f"input {index} of {node.name!r}")
        array = present(constant_of(value), f"the constant {value.name!r}")
        if array.ndim == 0:
            return value
        dtype = onnx_ir.DataType.from_numpy(array.dtype)
        return self.constants.add(np.repeat(array, self.stride**2), dtype, f"{value.name}.blocks")

    def _shuffle(self, quantize: onnx_ir.Node, forms: Sequence[SubPixel]) -> None:
        """Put a pair and a DepthToSpace before a QuantizeLinear, and a Slice if blocks exceed the output."""
        self.nodes, name = [], self.node.name
        last, *pair = (present(value, f"an input of {quantize.name!r}") for value in quantize.inputs)
        codes = self._add("QuantizeLinear", [last, *pair], f"{name}/quantize")
        values = self._add("DequantizeLinear", [codes, *pair], f"{name}/dequantize")
        pixels = self._add("DepthToSpace", [values], f"{name}/pixels", blocksize=self.stride, mode="CRD")
        for new, like in ((codes, pair[1]), (values, last), (pixels, last)):
            new.type = like.type
        over = [(axis, -form.over) for axis, form in enumerate(forms, start=2) if form.over]
        if over:
            axes, ends = ([place[i] for place in over] for i in (0, 1))
            bounds = (self._constant(part) for part in ([0] * len(over), ends, axes))
            pixels = self._add("Slice", [pixels, *bounds], f"{name}/cut")
            pixels.type = last.type
        self.model.graph.insert_before(quantize, self.nodes)
        quantize.replace_input_with(0, pixels)

    def _constant(self, values: list[int]) -> Value:
        return self.constants.integers(values, f"{self.node.name}/sizes")

    def _add(
        self, op: str, inputs: Sequence[Value], name: str | None = None, **attributes: int | str | Sequence[int]
    ) -> Value:
        self.nodes.append(onnx_ir.node(op, inputs, attributes, name=name))
        return self.nodes[-1].outputs[0]


@dataclass(frozen=True)
class _Stored:
    """The integers of a transposed convolution's weight, as stored in the file."""

    codes: Value
    dequantize: onnx_ir.Node  # their DequantizeLinear, with one scale, or one for each output channel
    # whether each row is one output channel, (out, in / groups * k * k), as for grouped weights with per-channel
    # scales; else (in, out / groups, k, k)
    in_rows: bool
    sides: list[int]  # the channels of a group, in the order of the codes
    sizes: list[int]  # the spatial sizes

    @classmethod
    def of(cls, weight: Value, groups: int) -> "_Stored | None":
        """Return the integers of a weight; None if it has none, or if its scales run along other channels.

        Also None if onnxruntime has no integer kernels for it: 4-bit integers, different zero points, values in bfloat16.
        """
        value: Value | None = weight
        while (
            value is not None and (maker := value.producer()) is not None and maker.op_type in ("Reshape", "Transpose")
        ):
            value = maker.inputs[0]
        dequantize, shape, in_rows = maker_of(value, "DequantizeLinear"), _sizes_of(weight), value is not weight
        if dequantize is None or shape is None or "output_dtype" in dequantize.attributes:
            return None
        codes, scale = dequantize.inputs[0], constant_input(dequantize, 1)
        if codes is None or codes.const_value is None or codes.const_value.dtype.itemsize < 1 or scale is None:
            return None
        zero_point = constant_input(dequantize, 2)
        if zero_point is not None and np.unique(zero_point).size > 1:
            return None
        along_outputs = dequantize.attributes.get_int("axis", 1) == (0 if in_rows else 1) and (in_rows or groups == 1)
        if scale.size > 1 and not along_outputs:
            return None
        sides = [shape[0] // groups, shape[1]]
        return cls(codes, dequantize, in_rows, sides[::-1] if in_rows else sides, shape[2:])

    def zeros(self, constants: Constants) -> list[Value]:
        """Return the zero point as an input of Pad; nothing for 0, its default."""
        zero_point = constant_input(self.dequantize, 2)
        if zero_point is None or not zero_point.any():
            return []
        dtype = onnx_ir.DataType.from_numpy(zero_point.dtype)
        return [constants.shared(zero_point.reshape(-1)[0], dtype, f"{self.codes.name}.of_zero")]


def _sizes_of(weight: Value) -> list[int] | None:
    """Return the shape of a weight, also after a Reshape; None if unknown."""
    maker = weight.producer()
    if maker is not None and maker.op_type == "Reshape":
        shape = constant_input(maker, 1)
        return None if shape is None else [int(size) for size in shape]
    codes = None if maker is None else constant_input(maker, 0)
    return None if codes is None else list(codes.shape)
