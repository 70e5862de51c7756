// The arguments of a kernel: raw pointers, sizes and strides, never a Tensor. Both devices read the same struct.
#pragma once

#include <cstdint>

#include "channels.h"

namespace qtoolkit {

namespace cpu {
struct ThreadHistogram;
}

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

// The lowest and highest code, rounded inwards to values that the arithmetic's type represents.
struct CodeBounds {
  double lo = 0, hi = 0;
};

// A running histogram in the memory of its device, or the first of one for each channel; see histogram.h.
struct RunningHistogram {
  int64_t* counts = nullptr;
  float* lo = nullptr;
  float* hi = nullptr;
  int64_t bins = 0;
};

QT_FN RunningHistogram channel_of(const RunningHistogram& first, int64_t channel) {
  return {first.counts + channel * first.bins, first.lo + channel, first.hi + channel, first.bins};
}

// A small float format: mantissa bits, smallest normal number and largest finite number.
struct FloatFormat {
  int mantissa = 0;
  double smallest_normal = 0, largest = 0;
};

constexpr int kMostLevels = 32;

// Magnitudes in units of a scale, ascending from 0.
struct Levels {
  int count = 0;
  float values[kMostLevels] = {};
};

// A sum of two tensors on grids, for add_codes; see requantize.h.
struct SumOfTwo {
  const void* scales = nullptr;  // of x, of the other tensor and of the result, in the type of the arithmetic
  double zero_points[3] = {};    // likewise
  bool fixed_point = false;      // in XNNPACK's fixed point; else as onnxruntime's kernel
  bool rounded_twice = false;    // as LiteRT's reference kernels, which alone subtract too
  bool subtract = false;
};

struct KernelArgs {
  int64_t numel = 0;  // of the result
  Channels channels;
  Operand x;          // the input; codes for dequantize; only its dtype for fake_quant_backward
  Operand grad;       // the incoming gradient of the backward kernels; the other tensor for add_codes
  void* y = nullptr;  // the dense result (dx for the backward kernels)
  Dtype y_dtype = Dtype::f32;
  bool stream = false;       // CPU: write y with streaming stores, past the caches
  bool packed = false;       // two codes a byte
  uint8_t* codes = nullptr;  // of y, for a functor that gives codes: int8 or uint8 in its memory order; null if unused
  uint8_t* mask = nullptr;   // bit i % 8 of byte i / 8; null if unused. Forward writes it, backward reads it
  const void* scale = nullptr;       // channels.count values in the type of the arithmetic
  const void* zero_point = nullptr;  // likewise; null if symmetric
  bool fractional = false;           // the zero points are no codes: they are not rounded
  // One value in the type of the arithmetic that all channels share, or null. Three functors take it, and then
  // `zero_point` is something else: of PReLU, slopes, and this is the zero point; of requantize, factors, and this is
  // the offset; of the legacy affine range, its lowest value, and this is its highest.
  const void* shared = nullptr;
  CodeBounds bounds;
  FloatFormat format;  // for fake_quant_float and block_scale
  // For block_scale, whose result has one scale for channels.inner elements of x, and whose `scale` is one number or
  // null: the format of the scales. Its largest number is 0 for e8m0 (powers of two).
  FloatFormat scale_format;
  Levels levels;  // for to_levels and its backward
  // For requantize: the zero point that is taken away after rounding, and whether what is added before it is added
  // without a rounding between.
  double zero_code = 0;
  bool fused = false;
  double count = 1;  // for requantize_fixed_point: by what the factor's bits are divided
  SumOfTwo sum;
  // Results of the reductions, channels.count float64 values each: the sums for scale and zero point (null if there
  // is none), or the lowest and highest values for minmax.
  double* sum_scale = nullptr;
  double* sum_zero_point = nullptr;
  RunningHistogram histogram;                        // updated in place by the histogram kernel
  cpu::ThreadHistogram* thread_histogram = nullptr;  // CPU: the counts of the thread that runs the kernel

  // Whether the arithmetic is float64: the input is, or the values that codes are dequantized to.
  bool is_f64() const { return x.dtype == Dtype::f64 || y_dtype == Dtype::f64; }
};

}  // namespace qtoolkit
