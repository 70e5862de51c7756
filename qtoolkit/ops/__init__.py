"""The native ops: typed fronts over `torch.ops.qtoolkit`.

Common arguments, of every op here:

- `scale` is a floating point tensor on the input's device, with one element, or with one per channel of `axis`. It counts
  by its magnitude; zero counts as the smallest normal float32.
- `zero_point` has as many elements, or is None (symmetric). It is a code stored as a float, and is rounded where used.
- `axis` is the channel axis; None is per tensor.
- `group` above 1 splits dimension 0 into groups, each with channels of its own: `scale` then has `group * x.size(axis)`
  elements, row-major. This is the weight of a grouped transposed convolution, (in, out / groups, k...).
- `block_size` above 0 cuts `axis` into blocks of so many elements, which share a scale: `scale` then has x's shape with
  dimension `axis` divided by `block_size`, or as many elements in a row. This is ONNX's blocked quantization (opset 21). It
  must divide the dimension, and goes with `group=1`. A linear weight (out, in) in blocks of 32 inputs has `axis=1` and
  `block_size=32`.

Arithmetic is float32, and float64 for float64 input, whatever the storage type. Results lie in memory as the input does
(channels_last stays channels_last). The grid is ONNX QuantizeLinear's:
`q = clamp(round_half_even(x / scale) + zero_point, qmin, qmax)`.

Under torch.vmap `fake_quant` is one call for all samples; the other ops take them one after the other, of which torch warns
once. `observe_minmax_` and `observe_histogram_` update what all samples share: there they raise.
"""

from qtoolkit.ops.compiling import snapshot
from qtoolkit.ops.float_formats import fake_quant_block, fake_quant_float
from qtoolkit.ops.int4 import dequantize_int4, quantize_int4
from qtoolkit.ops.integer import dequantize, fake_quant, fake_quant_, quantize
from qtoolkit.ops.legacy import fake_tensor_quant, tensor_quant
from qtoolkit.ops.observe import (
    grid_of_range,
    minmax,
    observe_fake_quant,
    observe_histogram_,
    observe_minmax_,
    search_range,
)

__all__ = [
    "dequantize",
    "dequantize_int4",
    "fake_quant",
    "fake_quant_",
    "fake_quant_block",
    "fake_quant_float",
    "fake_tensor_quant",
    "grid_of_range",
    "minmax",
    "observe_fake_quant",
    "observe_histogram_",
    "observe_minmax_",
    "quantize",
    "quantize_int4",
    "search_range",
    "snapshot",
    "tensor_quant",
]
