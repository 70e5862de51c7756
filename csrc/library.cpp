// All ops of the library: the table of contents of the native side.
//
// Common arguments. x: float32, float64, bfloat16 or float16; the arithmetic is float64 for float64, else float32.
// scale: one element, or one per channel of axis. group > 1 divides dimension 0 into groups with separate channels, as
// in the weight of a grouped transposed convolution; scale then has group * x.size(axis) elements. block_size > 0
// divides axis into blocks that share a scale (ONNX's blocked quantization); scale then has x's shape with dimension
// axis divided by block_size, or as many elements in one dimension. zero_point: as many elements as scale, or absent
// (symmetric). Results have the memory format of the input.
#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/version.h>

#include "cpu/launch.h"
#include "exact_sums.h"
#include "layer/int8_product.h"
#include "layer/onednn.h"
#include "unit/calls.h"

// The arguments of quant_weight and quant_layer for a weight, and of quant_layer for a layer. Fields that are numbers
// are lists, which qtoolkit/ops/layer.py makes and layer/layer.h reads: x_range: qmin and qmax of x; grid: qmin and
// qmax of the weight, group, block_size and axis; geometry: of a convolution. updated: the output channels, int64, in
// which the weight, its scale and the factor have a gradient; absent, in all of them.
#define QT_WEIGHT \
  " weight, Tensor? factor, Tensor scale, Tensor? zero_point, int[] grid, float grad_factor, Tensor? updated"
#define QT_INPUT "Tensor codes, Tensor x_scale, Tensor? x_zero_point, int[] x_range, Tensor"
#define QT_LAYER QT_INPUT QT_WEIGHT ", int[] geometry, bool integer"
// The arguments of batch_norm_fake_quant besides x. activation: low, high, slope; range: qmin, qmax.
#define QT_BATCH_NORM                                                                                                 \
  "Tensor? weight, Tensor? bias, Tensor? divisor, Tensor? residual, Tensor? residual_codes, Tensor? residual_scale, " \
  "Tensor? residual_zero_point, float eps, float[] activation, Tensor? scale, Tensor? zero_point, int[] range, "      \
  "float grad_factor=1.0, Tensor? totals=None, str? process_group=None"
// The arguments of function_fake_quant for its quantizer.
#define QT_QUANTIZED \
  " y_start, Tensor? y_ratio, Tensor? y_rate, Tensor? y_zero_point, int y_qmin, int y_qmax, float y_grad_factor"
// The same of add_norm_fake_quant. y_range: qmin, qmax.
#define QT_QUANTIZED_IN_RANGE \
  " y_start, Tensor? y_ratio, Tensor? y_rate, Tensor? y_zero_point, int[] y_range, float y_grad_factor"
// The arguments of product and fused_attention for an operand.
#define QT_CODES(name) ", Tensor? " name "_codes, Tensor? " name "_scale, Tensor? " name "_zero_point"
#define QT_CODES_OF(name)                                                                                        \
  " " name QT_CODES(name) ", SymInt[] " name "_size, bool " name "_signed, bool " name "_transposed, bool " name \
                          "_kept, "
#define QT_FACTOR(name) "Tensor" QT_CODES_OF(name)
#define QT_KEPT_FACTOR(name) "Tensor?" QT_CODES_OF(name)
// The input of a layer before it was fake-quantized, and the scale that is trained by it.
#define QT_RAW "Tensor? raw=None, Tensor? raw_scale=None, float raw_factor=1.0"
#define QT_FUNCTION "str function, SymInt[] shape, Tensor? weight, Tensor? bias, float eps"
TORCH_LIBRARY(qtoolkit, m) {
  // LayerUnit, BatchNormUnit, FunctionUnit and AttentionUnit(Dict(str, Any) fields, str[] varying): all that an op of
  // the same fields is told, and its calls; see unit/unit.h and unit/calls.cpp.
  qtoolkit::register_units(m);

  // Returns values on the grid and the packed in-range mask (empty unless mask is set or x requires grad).
  // Differentiable in x, and in scale and zero_point if they require grad; their gradients are multiplied by
  // grad_factor.
  m.def(
      "fake_quant(Tensor x, Tensor scale, Tensor? zero_point, int qmin, int qmax, int? axis=None, int group=1, "
      "int block_size=0, float grad_factor=1.0, bool mask=False) -> (Tensor, Tensor)");

  // The same in place; returns the mask. Differentiable in x only; saves only the mask for backward.
  m.def(
      "fake_quant_(Tensor(a!) x, Tensor scale, Tensor? zero_point, int qmin, int qmax, int? axis=None, int group=1, "
      "int block_size=0, bool mask=False) -> Tensor");

  // Returns start * max(|ratio|, 2^-24), of start's shape. Differentiable in ratio, with the gradient times rate
  // divided by start^2; see positive_scale.cpp.
  m.def("positive_scale(Tensor start, Tensor ratio, Tensor? rate=None) -> Tensor");

  // Returns scales as numbers of float16: the nearest ones, at least 2^-14; above 65,504 with 11 bits all the same.
  // Differentiable, straight through.
  m.def("float16_scale(Tensor scale) -> Tensor");

  // Returns a copy of value. Differentiable in through, of the same shape and dtype, with the gradient of the result.
  m.def("straight_through(Tensor value, Tensor through) -> Tensor");

  // observe_minmax_, then grid_of_range of the new ranges, written to scale and zero_point (symmetric without a zero
  // point), then fake_quant on this grid, with float16_scale of the scale if wanted. Differentiable in x.
  m.def(
      "observe_fake_quant(Tensor x, Tensor(a!) lo, Tensor(b!) hi, Tensor(c!) scale, Tensor(d!)? zero_point, int qmin, "
      "int qmax, float? momentum=None, bool pow2_scale=False, bool float16_scale=False, int? axis=None, int group=1, "
      "int block_size=0, Tensor(e!)? skipped=None, bool mask=False) -> (Tensor, Tensor)");

  // Returns values on the grid of a small float format ("e4m3", "e5m2" or "e2m1"): x / scale rounded half to even,
  // saturated at the format's largest number, times scale; or on the logarithmic grid "nnie", whose largest number is
  // scale. And the packed mask of the elements that were not saturated. Differentiable in x.
  m.def(
      "fake_quant_float(Tensor x, Tensor scale, str format, int? axis=None, int group=1, int block_size=0, "
      "bool mask=False) -> (Tensor, Tensor)");

  // fake_quant_float with a scale for each block of block_size consecutive elements of the last dimension, from their
  // largest magnitude. Returns values, scales and mask, row-major. scale_format "e8m0" is OCP MX v1.0; "e4m3" is
  // NVFP4's, relative to a scale of the tensor.
  m.def(
      "fake_quant_block(Tensor x, str format, int block_size, str scale_format, Tensor? tensor_scale=None, "
      "bool mask=False) -> (Tensor, Tensor, Tensor)");

  // The numerics of pytorch-quantization: returns integers stored as floats, the multiplier maxb / amax (1 if amax <=
  // 2^-24), and the packed mask of |x| <= amax. amax: broadcast to x. Differentiable in x.
  m.def(
      "tensor_quant(Tensor x, Tensor amax, int num_bits=8, bool unsigned=False, bool narrow_range=True, "
      "bool mask=False) -> (Tensor, Tensor, Tensor)");

  // The same, divided by the multiplier: returns values and mask.
  m.def(
      "fake_tensor_quant(Tensor x, Tensor amax, int num_bits=8, bool unsigned=False, bool narrow_range=True, "
      "bool mask=False) -> (Tensor, Tensor)");

  // Its affine grid of signed integers over [min_range, max_range], one element each: returns values, and the packed
  // mask of the range. Differentiable in x.
  m.def(
      "fake_affine_tensor_quant(Tensor x, Tensor min_range, Tensor max_range, int num_bits=8, bool mask=False) -> "
      "(Tensor, Tensor)");

  // Its E4M3, scaled so that amax becomes the largest number: returns values, and the packed mask of |x| <= amax.
  // Differentiable in x.
  m.def("scaled_e4m3(Tensor x, Tensor amax, bool mask=False) -> (Tensor, Tensor)");

  // Returns dx: grad where the mask's bit is set, else 0. order: x's dimensions from the slowest to the fastest in
  // memory; empty for row-major.
  m.def("fake_quant_backward(Tensor grad, Tensor mask, int[] order) -> Tensor");

  // Returns dx, dscale and dzero_point (empty if there is no zero point) of a learned grid, from x.
  m.def(
      "fake_quant_learned_backward(Tensor grad, Tensor x, Tensor scale, Tensor? zero_point, int qmin, int qmax, "
      "int? axis=None, int group=1, int block_size=0, float grad_factor=1.0) -> (Tensor, Tensor, Tensor)");

  // The learned quantizers other than LSQ; see shaped.h. shape "clip": values as fake_quant, with the gradients of
  // trained ranges; with steepness, the gradient of x is a soft staircase's. "levels": the nearest of levels * scale,
  // with the sign of x if qmin is negative. "interval": not rounded; scale and zero_point are the distance and the
  // center of an interval of magnitudes, which is mapped to [0, 1], with the sign of x if qmin is negative. steepness:
  // as many elements as scale. Differentiable in x, scale, zero_point and steepness.
  m.def(
      "fake_quant_shaped(Tensor x, Tensor scale, Tensor? zero_point, Tensor? steepness, int qmin, int qmax, str shape, "
      "int[] levels=[], int? axis=None, int group=1, int block_size=0) -> Tensor");

  // Returns its gradients in x, scale, zero_point and steepness; empty where there is none.
  m.def(
      "fake_quant_shaped_backward(Tensor grad, Tensor x, Tensor scale, Tensor? zero_point, Tensor? steepness, int "
      "qmin, "
      "int qmax, str shape, int[] levels=[], int? axis=None, int group=1, int block_size=0) -> (Tensor, Tensor, "
      "Tensor, Tensor)");

  // fake_quant(prelu(x, weight), scale, zero_point, qmin, qmax). weight: one element, or one for each channel of
  // dimension 1; scale, zero_point: one element. Differentiable in x, weight and scale.
  m.def(
      "prelu_fake_quant(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, int qmin, int qmax, float "
      "grad_factor=1.0) -> Tensor");

  // Returns its gradients in x, weight and scale, from x.
  m.def(
      "prelu_fake_quant_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, int qmin, int "
      "qmax, "
      "float grad_factor=1.0) -> (Tensor, Tensor, Tensor)");

  // Batch norm in training over dimension 1 of x, + residual, an activation, and fake quantization: returns y, its
  // integers (int8 if qmin is negative, else uint8; empty if they do not fit or there is no scale), and the mean and
  // the biased variance of each channel of x. packs_codes: integers of 4 bits are packed, as in layer_fake_quant, and
  // empty for rows of planes of an odd size too. divisor f: the batch norm of x / f is meant. residual is added;
  // residual_codes are its integers, from which backward rebuilds it. The activation is low + slope (v - low) up to
  // low, and high from high on. scale and zero_point have one element; without them nothing is rounded. Differentiable
  // in x, weight, bias, divisor, residual, scale and zero_point. totals: the result of batch_norm_totals for x, divisor
  // and process_group, whose ranks share their statistics and the sums of their gradients; backward then waits for
  // them.
  m.def("batch_norm_fake_quant(Tensor x, " QT_BATCH_NORM
        ", bool packs_codes=False) -> (Tensor y, Tensor codes, Tensor mean, Tensor variance)");

  // Returns, of each channel of x / divisor, the sums of all values and of all squares, and last the number of values
  // of a channel: 2 C + 1 float64 in row 0 of all ranks of a process group, if one is named, and in row 1 of this one.
  // offset: ranks exchange the sums of x / divisor + offset, so that one of them may have that as its x.
  m.def("batch_norm_totals(Tensor x, Tensor? divisor, Tensor? offset, str? process_group=None) -> Tensor");

  // Returns its gradients in x, weight, bias, divisor, residual, scale and zero_point; empty where one is not wanted or
  // there is none.
  m.def(
      "batch_norm_fake_quant_backward(Tensor grad, Tensor x, Tensor mean, Tensor variance, bool[7] "
      "wanted, " QT_BATCH_NORM ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Moves running statistics towards a batch of x / divisor + offset: mean and biased variance are x's,
  // count is its number of values in a channel; or the last of totals, which batch_norm_totals returned, if they are
  // given.
  m.def(
      "batch_norm_track_(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor mean, Tensor variance, "
      "Tensor? divisor, Tensor? offset, float momentum, SymInt count, Tensor? totals=None) -> ()");

  // Returns the variance with which a step of the training quantizes a weight, as a new tensor: `held`, which first
  // takes the running variance if the clock of steps has moved since it was `taken`. The start of scales in units of a
  // weight, and their rate, take the factor by which folding the batch norm multiplies the weight, if it is not the
  // known one.
  m.def(
      "batch_norm_rescale_(Tensor(a!)? start, Tensor(b!)? rate, Tensor(c!)? known, Tensor variance, Tensor? gamma, "
      "float eps, Tensor(d!)? held=None, Tensor(e!)? taken=None, Tensor? clock=None) -> Tensor");

  // Returns fake_quant(weight * factor, scale, zero_point, ...) for the weight of a layer; factor: one element per
  // output channel. transposed, groups: of a transposed convolution. Differentiable in weight, factor, scale and
  // zero_point.
  m.def("quant_weight(Tensor" QT_WEIGHT ", bool transposed=False, int groups=1) -> Tensor");

  // Returns its gradients in weight, factor, scale and zero_point; empty where one is not wanted or there is none.
  m.def("quant_weight_backward(Tensor grad, Tensor" QT_WEIGHT
        ", bool transposed, int groups, bool[4] wanted) -> (Tensor, Tensor, Tensor, Tensor)");

  // Returns a convolution, a transposed convolution or (stride empty) a linear layer of x with quant_weight(weight,
  // factor, scale, ...), where x lies on the grid of x_scale, x_zero_point and integers in [x_qmin, x_qmax]. factor,
  // bias: one element per output channel. codes: x as integers, or two per byte: in one dimension in row-major order
  // (quantize_int4), or channels 2i and 2i + 1 of an image as channel i. integer: computes in integers, and backward in
  // channels_last. dtype: the type of the computation, by default x's. memory_format: of the output image, by default
  // the one that torch's layer returns. raw, raw_scale: the tensor that x was before it was fake-quantized, and the
  // scale, for the gradient in raw_scale, which is multiplied by raw_factor. Differentiable in x, weight, factor,
  // scale, zero_point, bias and raw_scale; backward keeps x as integers, and computes the quantized weight again.
  m.def("quant_layer(Tensor x, Tensor? bias, " QT_LAYER
        ", ScalarType? dtype=None, MemoryFormat? memory_format=None, " QT_RAW ") -> Tensor");

  // Returns its gradients in x, weight, factor, scale, zero_point, bias and raw_scale; empty where one is not wanted or
  // there is none. size, x_dtype: of x. grad has the type of the computation.
  m.def("quant_layer_backward(Tensor grad, SymInt[] size, " QT_LAYER ", ScalarType x_dtype, bool[7] wanted, " QT_RAW
        ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Returns batch_norm_fake_quant of quant_layer, and of the ops that make their arguments. Its arguments are the
  // fields of the unit; x is the one of that name, for the dispatcher. The scale of the weight is positive_scale(start,
  // ratio, rate), or start without a ratio, and with float16 float16_scale of that; y's scale is made likewise. The
  // weight's factor is gamma / sqrt(variance + eps), or 1 where that is 0. bias: of the layer; the batch norm subtracts
  // it, so that only the running mean has it. frozen_mean: variance and this are constants that the batch norm
  // normalizes by; it is folded into the layer, whose factor may be 0 and whose bias is (bias - frozen_mean) factor +
  // beta, with rounds_bias on the grid of the integer sums. lo, hi: the range that a symmetric grid covers, of each
  // output channel; start, lo and hi are set to the weight's. The running statistics, if tracks is set, take in the
  // batch, and batches counts it; the batch is the one of all ranks of a process group, if one is named, and backward
  // waits for them too. Returns y and its integers, then what backward keeps: the scales, the factor, the layer's
  // output and its statistics, or copies of the constants. Of a layer with a frozen batch norm and a quantizer alone it
  // keeps the packed mask instead, unless the grid of y is learned, and without a quantizer nothing. Differentiable in
  // x, weight, start, ratio, zero_point, bias, gamma, beta, residual, y_start, y_ratio, y_zero_point and raw_scale.
  // raw, raw_scale: as in quant_layer. The grids of x and of the residual must not change before backward.
  m.def(
      "unit(__torch__.torch.classes.qtoolkit.BatchNormUnit unit, Tensor x) -> (Tensor y, Tensor y_codes, Tensor?[] "
      "kept)");

  // Returns the gradients that are wanted, in the order of GradientOf in unit/fields.h. start and y_start are needed
  // with their ratios alone; without variance, mean and batch_variance are constants. order: the memory order of y.
  m.def("unit_backward(__torch__.torch.classes.qtoolkit.BatchNormUnit unit, Tensor grad, bool[] wanted) -> Tensor[]");

  // Returns fake_quant of quant_layer, with their scales made as unit does, and without y_start quant_layer alone.
  // rounds_bias: puts the bias on the grid of the integer sums, as quantizers/bias.py says. learned: the
  // grid of y is trained, so that backward keeps the layer's output; else it keeps the packed mask. with_codes: returns
  // the integers of y too: int8 if y_qmin is negative, else uint8; if they fit in 4 bits, packed as quant_layer takes
  // them, and empty where that is not the order of y in memory. Returns y and its integers, then what backward keeps.
  // Differentiable in x, weight, start, ratio, zero_point, bias, y_start, y_ratio, y_zero_point and raw_scale.
  m.def(
      "layer_fake_quant(__torch__.torch.classes.qtoolkit.LayerUnit unit, Tensor x) -> (Tensor y, Tensor y_codes, "
      "Tensor?[] kept)");

  // Returns the gradients that are wanted, in the same order.
  m.def(
      "layer_fake_quant_backward(__torch__.torch.classes.qtoolkit.LayerUnit unit, Tensor grad, bool[] wanted) -> "
      "Tensor[]");

  // Returns fake_quant of a function of x: "none", "heads", "relu", "gelu", "gelu_tanh", "silu", "layer_norm" or
  // "rms_norm"; shape, weight, bias and eps are a norm's. "heads": x * eps, contiguous, of a view of shape (batch,
  // heads, places, features). keeps_x: backward computes the function again from x; False only for "none" and "heads"
  // with a grid that is not learned. learned, with_codes: as above. dtype: of y, whose values are
  // rounded to it; None is x's. Returns y and its integers, then what backward keeps. Differentiable in x, weight,
  // bias, y_start, y_ratio and y_zero_point.
  m.def("function_fake_quant(Tensor x, " QT_FUNCTION ", bool keeps_x, Tensor" QT_QUANTIZED
        ", bool y_float16, bool learned, bool with_codes, ScalarType? dtype=None) -> (Tensor y, Tensor y_codes, Tensor "
        "y_scale, "
        "Tensor mask, Tensor mean, Tensor rstd)");

  // Returns its gradients, in this order; empty where one is not wanted or there is none. mask: empty where the grid is
  // learned.
  m.def("function_fake_quant_backward(Tensor grad, int[] order, Tensor? x, " QT_FUNCTION ", Tensor?" QT_QUANTIZED
        ", Tensor y_scale, Tensor mask, Tensor mean, Tensor rstd, bool[6] wanted) -> (Tensor, Tensor, Tensor, Tensor, "
        "Tensor, Tensor)");

  // The same of a norm of x + residual, two tensors of one shape; returns the sum too, last, which is contiguous.
  // Differentiable in x, residual and as above.
  m.def("add_norm_fake_quant(Tensor x, Tensor residual, " QT_FUNCTION ", Tensor" QT_QUANTIZED_IN_RANGE
        ", bool y_float16, bool learned, bool with_codes, ScalarType? dtype=None) -> (Tensor y, Tensor y_codes, Tensor "
        "y_scale, Tensor mask, Tensor mean, Tensor rstd, Tensor sum)");

  // Returns the gradient of the sum, the same in the type `narrow` (empty without one), and the gradients of weight,
  // bias, y_start, y_ratio and y_zero_point, as above. grad_sum: the gradient of the sum from its other users.
  m.def("add_norm_fake_quant_backward(Tensor grad, Tensor? grad_sum, Tensor sum, ScalarType? narrow, " QT_FUNCTION
        ", Tensor?" QT_QUANTIZED_IN_RANGE
        ", Tensor y_scale, Tensor mask, Tensor mean, Tensor rstd, bool[7] wanted) -> (Tensor, Tensor, Tensor, Tensor, "
        "Tensor, Tensor, Tensor)");

  // Its arguments are the fields of the unit; q is the one of that name, for the dispatcher.
  // Returns fake_quant(softmax(q k^T + mask)) v, computed in a dtype, with the softmax in float32 (float64 for a dtype
  // of that), and what backward keeps: the scale of the weights, and the softmax if keeps_softmax is set, else that is
  // computed again. q: (..., target, features), k: (..., source, features), v: (..., source, features of v), with the
  // same other sizes, of which there is one at least. q_codes, q_scale, q_zero_point: q as integers, from which
  // backward makes its values again; without them it keeps q. mask: added to the scores, to which it broadcasts.
  // weights_start: makes the scale as y_start does; without it the weights are not rounded. learned: their grid is
  // trained. Differentiable in q, k, v, weights_start, weights_ratio and weights_zero_point; backward computes the
  // weights again.
  m.def(
      "attention_fake_quant(__torch__.torch.classes.qtoolkit.AttentionUnit unit, Tensor q) -> (Tensor y, Tensor?[] "
      "kept)");

  // Returns the gradients that are wanted, in the order of GradientOf in unit/fields.h.
  m.def(
      "attention_fake_quant_backward(__torch__.torch.classes.qtoolkit.AttentionUnit unit, Tensor grad, bool[] wanted) "
      "-> Tensor[]");

  // Returns x @ other as torch.bmm, x: (batch, rows, features), other: (batch, features, columns), or a copy of
  // `computed`, which is that. Backward keeps an operand as integers; without codes it keeps the operand, if `kept` is
  // set, which the gradient of the other one takes. size: of the codes, if they have four bits, which are packed
  // in the order of memory, and signed or not; transposed: they are of the transposed matrices. Differentiable in
  // x and other.
  m.def("product(" QT_FACTOR("x") QT_FACTOR("other") "Tensor? computed=None) -> Tensor");

  // Returns its gradients, in this order; empty where one is not wanted.
  m.def("product_backward(Tensor grad, " QT_KEPT_FACTOR("x")
            QT_KEPT_FACTOR("other") "bool[2] wanted) -> (Tensor, Tensor)");

  // Returns torch's scaled_dot_product_attention of (batch, heads, length, features) as its fused op of the CPU
  // computes it, and the logarithms of its sums. Backward keeps an operand as integers, if it has some. is_signed: of
  // the integers of q, k and v. Differentiable in q, k and v.
  m.def("fused_attention(Tensor q" QT_CODES("q") ", Tensor k" QT_CODES("k") ", Tensor v" QT_CODES(
      "v") ", SymInt[] k_size, bool[3] is_signed, bool is_causal, float? scale) -> (Tensor y, Tensor logsumexp)");

  // Returns its gradients, in this order; empty where one is not wanted.
  m.def("fused_attention_backward(Tensor grad, Tensor? q" QT_CODES("q") ", Tensor? k" QT_CODES("k") ", Tensor? v" QT_CODES(
      "v") ", SymInt[] k_size, bool[3] is_signed, bool is_causal, float? scale, Tensor y, Tensor logsumexp, bool[3] "
           "wanted) -> (Tensor, Tensor, Tensor)");

  // torch.ops.aten.convolution with a batch and gradients that write inside of their memory; see strided_pointwise.h.
  m.def(
      "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, bool "
      "transposed, "
      "int[] output_padding, int groups) -> Tensor");

  // 2-d max pooling with at most 256 elements in a window: returns the values and, for each, the place of the largest
  // element in its window (uint8, counted row by row). Sides have one number or two. Differentiable in x.
  m.def(
      "max_pool_offsets(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool "
      "ceil_mode=False) "
      "-> (Tensor, Tensor)");

  // Returns dx, of the size of the input. An offset outside of x has no gradient.
  m.def(
      "max_pool_offsets_backward(Tensor grad, Tensor offsets, SymInt[] size, int[] kernel_size, int[] stride, "
      "int[] padding, int[] dilation, bool ceil_mode=False) -> Tensor");

  // Returns a copy of x. Compilers save the result for backward and never recompute it: they would recompute it from a
  // buffer that was updated in place since, such as batch norm's statistics. Gradient checkpointing recomputes it all
  // the same: in a forward that changes x, as `changes` says, that is an error.
  m.def("snapshot(Tensor x, bool changes=False) -> Tensor");

  // Returns x as integers: int8, uint8, int16, uint16 or int32. NaN becomes qmin.
  m.def(
      "quantize(Tensor x, Tensor scale, Tensor? zero_point, int qmin, int qmax, int? axis=None, int group=1, "
      "int block_size=0, *, ScalarType dtype) -> Tensor");

  // Returns the values of integers.
  m.def(
      "dequantize(Tensor codes, Tensor scale, Tensor? zero_point, int? axis=None, int group=1, int block_size=0, *, "
      "ScalarType dtype) -> Tensor");

  // Returns 4-bit integers, two per byte: one-dimensional uint8, x's elements in row-major order, the first in the low
  // half of a byte, an odd number padded with 0 (ONNX's INT4 and UINT4). Signed if qmin is negative. NaN becomes qmin.
  // in_memory_order: an image in channels_last, with an even number of channels, is packed as quant_layer
  // takes it: channels 2i and 2i + 1 as channel i.
  m.def(
      "quantize_int4(Tensor x, Tensor scale, Tensor? zero_point, int qmin=-8, int qmax=7, int? axis=None, "
      "int group=1, int block_size=0, bool in_memory_order=False) -> Tensor");

  // Returns the values of such integers, row-major of the given size.
  m.def(
      "dequantize_int4(Tensor packed, SymInt[] size, Tensor scale, Tensor? zero_point, bool signed=True, "
      "int? axis=None, int group=1, int block_size=0, *, ScalarType dtype) -> Tensor");

  // The integer arithmetic of runtimes; see requantize.h. Results are float32 values on the grid of scale, one
  // element, with integers minus the zero point in [qmin, qmax].
  //
  // Returns the values of the integers round(x * factor + offset) - zero_code; of round(x / scale + offset) - zero_code
  // without a factor. factor: broadcast to x. offset: one element; by default zero_code. fused: multiplies and adds
  // with one rounding. x is rounded to float32 first.
  m.def(
      "requantize(Tensor x, Tensor? factor, Tensor scale, int qmin, int qmax, Tensor? offset=None, int zero_code=0, "
      "bool fused=False) -> Tensor");

  // Returns the values of the integers x * factor as LiteRT's reference kernels round them: by a factor of 31 bits,
  // then by a power of two. factor: float64, positive, broadcast to x. count: the divisor of the bits, as for a mean.
  // rounded_once: by both at once. x: integers of less than 2^31.
  m.def(
      "requantize_fixed_point(Tensor x, Tensor factor, Tensor scale, int qmin, int qmax, int count=1, bool "
      "rounded_once=False) -> Tensor");

  // Returns the sum of x and other, values on grids with one scale each, which broadcast. fixed_point: as XNNPACK's
  // kernel computes it; rounded_twice: as LiteRT's reference kernel, which also subtracts; else as onnxruntime's.
  m.def(
      "add_codes(Tensor x, Tensor x_scale, int x_zero_point, Tensor other, Tensor other_scale, int other_zero_point, "
      "Tensor scale, int zero_point, int qmin, int qmax, bool fixed_point=False, bool rounded_twice=False, "
      "bool subtract=False) -> Tensor");

  // Returns fake_quant(x, scale, zero_point, qmin, qmax) as LiteRT computes it: halves are rounded away from zero.
  m.def("fake_quant_away(Tensor x, Tensor scale, Tensor? zero_point, int qmin, int qmax) -> Tensor");

  // Ops of LiteRT's reference kernels on integers stored as floats; see reference_codes.cpp. Returns the integers of
  // softmax on the grid of 256 steps of 1/256, from integers of which a zero point may be subtracted.
  m.def("softmax_codes(Tensor x, float scale, int dim) -> Tensor");

  // Returns the integers of x relu6(x + 3) / 6 minus the zero point, from integers minus theirs.
  m.def("hard_swish_codes(Tensor x, float x_scale, float scale, int qmin, int qmax) -> Tensor");

  // Returns sums / counts, rounded with halves away from zero: the integers of means.
  m.def("average_codes(Tensor sums, Tensor counts) -> Tensor");

  // Returns the integers of images (N, C, H, W) at another size, from integers with their zero point.
  m.def("resize_linear_codes(Tensor x, int[] size, bool align_corners) -> Tensor");

  // Returns fake_quant(x, scale, zero_point, qmin, qmax) as OpenVINO computes it: x is multiplied by a factor.
  m.def("fake_quant_by_factor(Tensor x, Tensor scale, Tensor? zero_point, int qmin, int qmax) -> Tensor");

  // Returns the integers minus the zero point of values on a grid with one scale, as floats of the arithmetic's type.
  m.def("centred_codes(Tensor x, Tensor scale) -> Tensor");

  // Returns the lowest and highest values, per tensor, per channel or (in the shape of a scale) per block. NaN
  // propagates.
  m.def("minmax(Tensor x, int? axis=None, int group=1, int block_size=0) -> (Tensor, Tensor)");

  // Widens the running ranges lo and hi to hold the range of x; with a momentum, moves them towards it. The initial
  // range is [inf, -inf]. With skipped (int64, as many elements as lo), a range with NaN or infinities is counted there
  // and not taken in.
  m.def(
      "observe_minmax_(Tensor x, Tensor(a!) lo, Tensor(b!) hi, float? momentum=None, int? axis=None, int group=1, "
      "int block_size=0, Tensor(c!)? skipped=None) -> ()");

  // Returns the scale and zero point (empty if symmetric) whose grid covers the ranges [lo, hi]; see range_grid.h.
  m.def(
      "grid_of_range(Tensor lo, Tensor hi, int qmin, int qmax, bool symmetric=True, bool pow2_scale=False) "
      "-> (Tensor, Tensor)");

  // Counts a step where the clock has moved: `count` has the clock's last value and the number of steps. In the first
  // `steps` of them, writes grid_of_range to scale and zero_point (symmetric without a zero point), except for channels
  // without a range.
  m.def(
      "take_range_(Tensor lo, Tensor hi, Tensor(a!) scale, Tensor(b!)? zero_point, Tensor(c!) count, Tensor clock, "
      "int qmin, int qmax, int steps, bool pow2_scale=False) -> ()");

  // Adds x to the running histogram counts (int64, an even number of equal bins) of the range [lo, hi], which is
  // widened as needed; see histogram.h. Per channel: counts has a row for each. hi <= lo: no values yet. NaN, an
  // infinity or a magnitude of 2^126 or more makes lo and hi NaN, and later values are not counted.
  m.def(
      "observe_histogram_(Tensor x, Tensor(a!) counts, Tensor(b!) lo, Tensor(c!) hi, int? axis=None, int group=1) "
      "-> ()");

  // Returns the best range to quantize to [qmin, qmax], by a method ("percentile", "mse", "l2" or "entropy");
  // see search.h. counts: (bins) or (channels, bins). candidates: for "entropy", the symmetric ranges to compare, in
  // bins from zero (empty: every edge). An empty histogram gives [inf, -inf], one with lo and hi NaN gives NaN.
  m.def(
      "search_range(Tensor counts, Tensor lo, Tensor hi, int qmin, int qmax, str method, float percentile=99.99, "
      "bool symmetric=True, int[] candidates=[]) -> (Tensor, Tensor)");

  // Returns how to compute exact sums of products in float: see exact_sums.h.
  m.def("digit_bits(float sums, float weights) -> int", qtoolkit::digit_bits);

  // Returns whether torch's int8 kernels compute exact sums on this processor: see onednn.h.
  m.def("int8_is_exact() -> bool", qtoolkit::onednn::is_exact);

  // Returns whether a device has torch's int8 matrix product: see int8_product.h.
  m.def("int8_product_is_on(Device device) -> bool", qtoolkit::int8_product::is_on);

  // Returns the instruction set of the CPU's kernels.
  m.def("instruction_set() -> str", [] { return std::string(qtoolkit::cpu::instruction_set()); });
}

// qtoolkit/_native.py reads this string from the file, since a library built for another torch does not load.
extern "C" __attribute__((used, visibility("default"))) const char qtoolkit_built_for[] =
    "qtoolkit was built for torch " TORCH_VERSION;
