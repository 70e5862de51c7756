"""Transposed convolutions of codes, written as a convolution and a DepthToSpace, which runtimes compute on codes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qtoolkit.export.passes.repeated_pairs import is_on_codes
from qtoolkit.export.passes.saturation import constant_input, quantizer_behind
from qtoolkit.sub_pixel import SubPixel, sub_pixels_of_image

if TYPE_CHECKING:
    import onnx_ir

LAST = np.iinfo(np.int64).min  # of a Slice that runs backwards to the first element


def write_sub_pixel_convolutions(model: "onnx_ir.Model") -> None:
    """Write each transposed convolution between codes as a convolution with a channel for each pixel of a block.

    The weight's codes stay in the file as they are, and are rearranged by ops on constants, which runtimes compute once. The
    pair of the output stands behind the convolution too. No code changes: the sums of products are the same.

    Those with dilation, with groups, in one or three dimensions, with two strides, or whose output is no multiple of the stride
    longer than the input stay as they are.
    """
    for node in list(model.graph):
        if node.op_type == "ConvTranspose":
            _Rewriting(model, node).run()


class _Rewriting:
    """Rewrites one node, if it has the form."""

    def __init__(self, model: "onnx_ir.Model", node: "onnx_ir.Node") -> None:
        from qtoolkit.export.lowering import Constants

        self.model, self.node, self.constants = model, node, Constants(model.graph)
        self.nodes: list[onnx_ir.Node] = []
        self.joined: list[onnx_ir.Value] = []  # outputs of activations in front of the QuantizeLinear

    def run(self) -> None:
        """Rewrite the node."""
        import onnx_ir

        node, quantize = self.node, self._quantize()
        x, *constants = (value for value in node.inputs if value is not None)
        pairs: list[Any] = [_dequantize(value) for value in constants]
        if quantize is None or not is_on_codes(x) or None in pairs:
            return
        codes, scale = pairs[0].inputs[0], constant_input(pairs[0], 1)
        forms = self._forms(codes)
        along_outputs = scale is not None and (scale.size == 1 or pairs[0].attributes.get_int("axis", 1) == 1)
        if forms is None or not along_outputs:
            return
        stride, channels = self._ints("strides", [1, 1])[0], codes.shape[1]
        arranged = self._arranged(codes, forms, stride)
        inputs = [x, self._dequantized(pairs[0], arranged, channels)]
        for of_bias in pairs[1:]:
            inputs.append(self._dequantized(of_bias, self._repeated(of_bias.inputs[0], channels), channels))
        pads = [*(form.before for form in forms), *(form.after for form in forms)]
        y = self._add("Conv", inputs, {"pads": pads}, name=node.name)
        onnx_ir.convenience.replace_nodes_and_values(self.model.graph, node, [node], self.nodes, node.outputs, [y])
        for value in self.joined:
            value.shape = None  # it has more channels now
        y.shape = None
        self._shuffle(quantize, stride)

    def _quantize(self) -> Any:
        """Return the QuantizeLinear of 8 bits that alone takes the output, behind activations that it saturates; or None."""
        quantize, self.joined = quantizer_behind(self.node.outputs[0])
        zero_point = None if quantize is None else constant_input(quantize, 2)
        return quantize if zero_point is not None and zero_point.size == 1 and zero_point.dtype.itemsize == 1 else None

    def _forms(self, codes: Any) -> Sequence[SubPixel] | None:
        """Return the form of both dimensions of a weight with these codes; None without them."""
        attributes = self.node.attributes
        given = attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and "output_shape" not in attributes
        if codes.const_value is None or not given:
            return None
        sizes = list(codes.shape[2:])
        ones, zeros = [1] * len(sizes), [0] * len(sizes)
        pads = self._ints("pads", [*zeros, *zeros])
        cuts = list(zip(pads[: len(sizes)], pads[len(sizes) :], strict=True))
        strides, dilations = self._ints("strides", ones), self._ints("dilations", ones)
        extra = self._ints("output_padding", zeros)
        return sub_pixels_of_image(sizes, strides, cuts, extra, dilations, attributes.get_int("group", 1))

    def _ints(self, name: str, default: list[int]) -> list[int]:
        return list(self.node.attributes.get_ints(name, default) or default)

    # ---- what is written

    def _arranged(self, codes: Any, forms: Sequence[SubPixel], stride: int) -> Any:
        """Return the codes (in, out, k, k) as (out * stride * stride, in, taps, taps)."""
        columns, channels = codes.shape[:2]
        taps = [form.taps for form in forms]
        zeros = [0, 0, *(form.front for form in forms), 0, 0, *(form.back for form in forms)]
        y = self._add("Pad", [codes, self._constant(zeros)]) if any(zeros) else codes
        y = self._add("Reshape", [y, self._constant([columns, channels, taps[0], stride, taps[1], stride])])
        ends = (self._constant(part) for part in ([-1, -1], [LAST, LAST], [2, 4], [-1, -1]))
        y = self._add("Slice", [y, *ends]) if max(taps) > 1 else y
        y = self._add("Transpose", [y], {"perm": [1, 3, 5, 0, 2, 4]})
        y = self._add("Reshape", [y, self._constant([channels * stride * stride, columns, *taps])])
        y.shape, y.dtype = _shape([channels * stride * stride, columns, *taps]), codes.dtype
        return y

    def _dequantized(self, like: Any, codes: Any, channels: int) -> Any:
        """Return the values of codes in the steps of a DequantizeLinear, each channel's for all pixels of a block."""
        grid = [self._repeated(value, channels) for value in like.inputs[1:]]
        y = self._add("DequantizeLinear", [codes, *grid], {"axis": 0}, name=like.name)
        y.shape, y.type = codes.shape, like.outputs[0].type
        return y

    def _repeated(self, value: Any, channels: int) -> Any:
        array = value.const_value.numpy()
        if array.ndim == 0:
            return value
        block = self._ints("strides", [1, 1])[0] ** 2
        return self.constants.add(np.repeat(array, block), value.dtype, f"{value.name}.blocks")

    def _shuffle(self, quantize: Any, stride: int) -> None:
        """Put a pair and a DepthToSpace in front of a QuantizeLinear."""
        self.nodes = []
        last, *pair = quantize.inputs
        codes = self._add("QuantizeLinear", [last, *pair], name=f"{self.node.name}/quantize")
        values = self._add("DequantizeLinear", [codes, *pair], name=f"{self.node.name}/dequantize")
        pixels = self._add(
            "DepthToSpace", [values], {"blocksize": stride, "mode": "CRD"}, name=f"{self.node.name}/pixels"
        )
        for new, like in ((codes, pair[1]), (values, last), (pixels, last)):
            new.type = like.type
        self.model.graph.insert_before(quantize, self.nodes)
        quantize.replace_input_with(0, pixels)

    def _constant(self, values: list[int]) -> Any:
        from onnx_ir import DataType

        return self.constants.add(np.array(values, np.int64), DataType.INT64, f"{self.node.name}/sizes")

    def _add(
        self, op_type: str, inputs: list[Any], attributes: dict[str, Any] | None = None, name: str | None = None
    ) -> Any:
        import onnx_ir

        self.nodes.append(onnx_ir.node(op_type, inputs, attributes or {}, name=name))
        return self.nodes[-1].outputs[0]


def _shape(sizes: list[int]) -> Any:
    import onnx_ir

    return onnx_ir.Shape(sizes)


def _dequantize(value: Any) -> Any:
    """Return the DequantizeLinear that computes a tensor; None for other tensors."""
    maker = value.producer()
    return maker if maker is not None and maker.op_type == "DequantizeLinear" else None
