"""The native ops: typed functions over `torch.ops.qtoolkit`.

All ops share these arguments:

- `scale` is a floating point tensor on the input's device, with one element or one per channel of `axis`. Its magnitude
  is used; zero counts as the smallest normal float32.
- `zero_point` has as many elements as `scale`, or is None (symmetric). It is an integer stored as a float; the ops round it.
- `axis` is the channel axis; None is per tensor.
- `group` above 1 divides dimension 0 into groups with separate channels: `scale` then has `group * x.size(axis)`
  elements, row-major. This serves the weight of a grouped transposed convolution, (in, out / groups, k...).
- `block_size` above 0 divides `axis` into blocks of that many elements, which share a scale: `scale` then has x's shape
  with dimension `axis` divided by `block_size`, or as many elements in one dimension. This is ONNX's blocked quantization
  (opset 21). It must divide the dimension and requires `group=1`. A linear weight (out, in) in blocks of 32 inputs has
  `axis=1` and `block_size=32`.

The arithmetic is float64 for float64 input and float32 for all other dtypes. Results have the memory format of the input
(channels_last stays channels_last). The grid is ONNX QuantizeLinear's:
`q = clamp(round_half_even(x / scale) + zero_point, qmin, qmax)`.

Under torch.vmap `fake_quant` is one call for all samples; the other ops run once per sample, with one warning from torch.
`observe_minmax_` and `observe_histogram_` update tensors that all samples share, so they raise under vmap.

Gradients are of reverse mode (`torch.autograd.grad`, `backward`); forward-mode AD and the gradient transforms of
torch.func (grad, vjp, jacrev) raise NotImplementedError. Double backward differentiates the straight-through gradient, as
torch's fake quantization does; for a scale or zero point that requires grad it raises NotImplementedError.
"""

from qtoolkit.ops.batch_norm import (
    batch_norm_fake_quant,
    batch_norm_rescale_,
    batch_norm_totals,
    batch_norm_track_,
)
from qtoolkit.ops.between_layers import max_pool, prelu_fake_quant, snapshot
from qtoolkit.ops.float_formats import fake_quant_block, fake_quant_float
from qtoolkit.ops.integer import dequantize, dequantize_int4, fake_quant, fake_quant_, quantize, quantize_int4
from qtoolkit.ops.learned import fake_quant_clipped, fake_quant_levels, float16_scale, interval, positive_scale
from qtoolkit.ops.legacy import fake_tensor_quant, tensor_quant
from qtoolkit.ops.observe import (
    grid_of_range,
    minmax,
    observe_fake_quant,
    observe_histogram_,
    observe_minmax_,
    search_range,
    take_range_,
)

__all__ = [
    "batch_norm_fake_quant",
    "batch_norm_rescale_",
    "batch_norm_totals",
    "batch_norm_track_",
    "dequantize",
    "dequantize_int4",
    "fake_quant",
    "fake_quant_",
    "fake_quant_block",
    "fake_quant_clipped",
    "fake_quant_float",
    "fake_quant_levels",
    "fake_tensor_quant",
    "float16_scale",
    "grid_of_range",
    "interval",
    "max_pool",
    "minmax",
    "observe_fake_quant",
    "observe_histogram_",
    "observe_minmax_",
    "positive_scale",
    "prelu_fake_quant",
    "quantize",
    "quantize_int4",
    "search_range",
    "snapshot",
    "take_range_",
    "tensor_quant",
]
