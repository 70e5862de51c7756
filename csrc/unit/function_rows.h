// A function of a tensor with a quantizer after it, and its gradients, as one CUDA kernel each way.
#pragma once

#include "unit_scales.h"

namespace qtoolkit {

enum class RowFunction : int8_t { norm, none, heads, gelu, gelu_tanh, silu };

// Where a tensor of shape (batch, heads, places, features) has its elements. Features are a multiple of 8, and
// consecutive; the strides are multiples of 8.
struct HeadStrides {
  int64_t batch = 0, head = 0, place = 0;
};

// All tensors are dense and in one order of memory. Those of a direction that a call does not compute are null.
struct FunctionRows {
  RowFunction function = RowFunction::norm;
  int64_t rows = 1, length = 0;  // of a norm, a multiple of 8; other functions have one row
  double eps = 0;                // of a norm; of heads the factor
  int64_t heads = 1, places = 1, features = 8;
  HeadStrides x_strides, dx_strides;
  const void* x = nullptr;         // of a sum in backward, the sum
  Dtype dtype = Dtype::f32;        // of x and dx; that of a norm is float32
  const void* residual = nullptr;  // what a norm adds to x first, or null
  Dtype residual_dtype = Dtype::f32;
  const float *weight = nullptr, *bias = nullptr;  // of a norm, or null
  float *mean = nullptr, *rstd = nullptr;  // of each row of a norm: forward writes them; an RMS norm has no mean
  const void *scale = nullptr, *zero_point = nullptr;  // one float each; the second is null if symmetric
  TrainedScale made;  // what the scale is made of, which forward writes; without a start it is made before
  CodeBounds bounds;

  float* sum = nullptr;  // of x and residual
  void* y = nullptr;
  Dtype y_dtype = Dtype::f32;
  uint8_t* codes = nullptr;  // may be null
  bool packed = false;       // two codes a byte
  uint8_t* mask = nullptr;   // as in KernelArgs; backward computes the grid's points again where it has none

  const void* grad = nullptr;  // of y
  Dtype grad_dtype = Dtype::f32;
  const float* grad_sum = nullptr;  // of the sum, from its other users; may be null
  void* dx = nullptr;               // of a sum, its gradient
  void* narrow = nullptr;           // the same in another type, or null
  Dtype narrow_dtype = Dtype::f32;
  float *dweight = nullptr, *dbias = nullptr;  // may be null
  double* sums = nullptr;                      // of the gradients of scale and zero point, or null

  bool is_backward() const { return grad != nullptr; }
};

// Longer rows do not fit into the registers of a block.
constexpr int64_t kLongestNormRow = 8192;

}  // namespace qtoolkit
