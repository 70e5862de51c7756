// What a kernel is told: raw pointers, sizes and strides; never a Tensor. Both back ends read the same struct.
#pragma once

#include <cstdint>

#include "channels.h"

namespace qtoolkit {

enum class Dtype : int8_t { f32, f64, bf16, f16, i8, u8, i16, u16, i32, i4, u4 };

// Two codes a byte, the first in the low half (ONNX's INT4 and UINT4): always dense and row-major.
QT_FN bool is_packed(Dtype dtype) { return dtype == Dtype::i4 || dtype == Dtype::u4; }

constexpr int kMaxDims = 8;

// An operand read in the memory order of the result, which is always dense: element i of the result is
// element offset(i) of the operand. Dimensions run from the slowest to the fastest of the result.
struct Operand {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  bool dense = true;  // then offset(i) == i
  int dims = 0;
  int64_t size[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};
};

// The lowest and highest code, as the arithmetic can hold them.
struct Ends {
  double lo = 0, hi = 0;
};

// A running histogram in the memory of its device; see histogram.h.
struct RunningHistogram {
  int64_t* counts = nullptr;
  float* lo = nullptr;
  float* hi = nullptr;
  int64_t bins = 0;
};

// A small float format: bits of its mantissa, 2^(its lowest exponent), and its largest finite number.
struct FloatFormat {
  int mantissa = 0;
  double smallest_normal = 0, largest = 0;
};

struct Job {
  int64_t numel = 0;
  Channels channels;
  Operand x;          // the input; codes for dequantize; unused by fake_quant_backward
  Operand grad;       // the incoming gradient, for the backward ops
  void* y = nullptr;  // the dense result (dx for the backward ops)
  Dtype y_dtype = Dtype::f32;
  bool stream = false;               // CPU: y is large, so it is written past the caches
  uint8_t* mask = nullptr;           // bit i % 8 of byte i / 8; null where not wanted. Forward writes, backward reads
  const void* scale = nullptr;       // channels.count values, float64 where x is float64, else float32
  const void* zero_point = nullptr;  // the same, or null: symmetric
  Ends ends;
  FloatFormat format;  // of fake_quant_float, but for the logarithmic one
  // Of block_scale: its result has one number for each channels.inner elements of x, and job.scale is one number or
  // null. The format of the scales; a largest number of 0 stands for e8m0, powers of two.
  FloatFormat scale_format;
  // Results of the reductions, channels.count values of float64 each: of the learned backward the sums for scale
  // and (null where not wanted) zero point; of minmax the lowest and the highest value.
  double* sum_scale = nullptr;
  double* sum_zero_point = nullptr;
  RunningHistogram histogram;  // of observe_histogram_, updated in place
};

}  // namespace qtoolkit
