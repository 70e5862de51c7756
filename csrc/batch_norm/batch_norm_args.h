// The arguments of the batch norm kernels: raw pointers and sizes. Both devices read the same struct.
#pragma once

#include "../kernel_args.h"

namespace qtoolkit {

// What a launch computes: all at once, or one half. Between the halves, the ranks of a process group add up `totals`.
enum class NormStage : int { all, totals, rest };

// Running statistics of dtype `dtype`, and what they take in, in float64 if `f64` and else float32.
struct TrackedStatistics {
  int64_t channels = 0;
  Dtype dtype = Dtype::f32;
  bool f64 = false;
  void* running_mean = nullptr;
  void* running_variance = nullptr;
  const void* mean = nullptr;
  const void* variance = nullptr;
  const void* divisor = nullptr;  // or null
  const void* offset = nullptr;   // or null
  double momentum = 0, count = 0;
  const double* counted = nullptr;  // or null: where the count is, in memory of the device
  int64_t* batches = nullptr;       // or null: the number of batches, which grows by one
};

// Tensors of x's shape are dense and of one memory order, outer x channels x inner. Those of a channel are in the type
// of the arithmetic. Absent ones are null.
struct BatchNormArgs {
  int64_t outer = 0, channels = 0, inner = 0;
  Dtype dtype = Dtype::f32;  // of x, residual, grad, y and residual_grad
  const void* x = nullptr;
  const void* grad = nullptr;               // backward
  const void* residual = nullptr;           // its values, or
  const uint8_t* residual_codes = nullptr;  // its codes, int8 or uint8
  bool residual_signed = false;
  const void* residual_scale = nullptr;
  const void* residual_zero_point = nullptr;
  void* y = nullptr;              // dx in backward
  void* residual_grad = nullptr;  // backward
  uint8_t* codes = nullptr;       // forward: int8 or uint8; see `packed`
  const void* weight = nullptr;
  const void* bias = nullptr;
  const void* divisor = nullptr;
  void* mean = nullptr;  // written by forward, read by backward
  void* variance = nullptr;
  double eps = 0, low = 0, high = 0, slope = 0;
  const void* scale = nullptr;  // null: not quantized
  const void* zero_point = nullptr;
  CodeBounds bounds;
  // Backward: a row of channels each, the sums of the gradients of weight, bias and divisor; then, if `learned` is set,
  // two sums of the whole tensor, of the gradients of scale and zero point.
  double* gradients = nullptr;
  bool learned = false;
  bool stream = false;  // CPU: write results with streaming stores, past the caches
  bool packed = false;  // two codes a byte; not where `inner` is odd, since planes would share bytes
  // CPU: the open interval of values that the quantizer passes the gradient for; with a slope of 0, of those that the
  // activation does not stop either.
  double pass_low = 0, pass_high = 0;
  NormStage stage = NormStage::all;
  // Two sums for each channel, in a row of channels each, and the number of values of a channel. Forward: the sums of
  // x / divisor and of its square. Backward: of the gradients of weight and bias.
  double* totals = nullptr;
  const double* own = nullptr;  // backward, `rest`: forward's totals of this rank alone
  // On a GPU forward tracks the statistics too, if there are running ones, and takes a counter for each channel: zeros.
  TrackedStatistics tracked;
  unsigned* arrived = nullptr;

  QT_METHOD int64_t count() const { return outer * inner; }  // elements of a channel
  bool is_f64() const { return dtype == Dtype::f64; }
  QT_METHOD void set_totals(int64_t c, double first, double second) const {
    totals[c] = first;
    totals[channels + c] = second;
    if (c == 0) totals[2 * channels] = static_cast<double>(count());
  }
  QT_METHOD double total_count() const { return totals[2 * channels]; }
};

}  // namespace qtoolkit
