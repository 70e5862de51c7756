// Fake quantization of a weight whose output channels are rows in memory, scaled by a factor for each: the forward in
// one read, and all gradients in one read of the weight and of the incoming gradient. For the CPU.
#pragma once

#include "../kernel_args.h"

namespace qtoolkit {

// A row of the weight has major x minor elements. A tensor of the other memory format has them as minor x major.
struct WeightRows {
  int64_t rows = 0, major = 1, minor = 1;
  bool f64 = false;              // the type of all values, else float32
  const void* weight = nullptr;  // rows
  const void* factor = nullptr;  // one value per row; null for 1
  const void* scale = nullptr;   // one value per row, or one for all
  int64_t scale_step = 1;        // between the scales of two rows: 1 or 0
  CodeBounds bounds;
  bool other_format = false;  // of y, or of grad

  // Forward: the values, or on the CPU the codes and for each row 0 or, where a value is not finite, NaN.
  void* y = nullptr;
  Dtype y_dtype = Dtype::f32;  // CUDA: any float type; on the CPU that of all values
  uint8_t* codes = nullptr;
  void* poison = nullptr;

  // Backward. The sums have one value per row.
  const void* grad = nullptr;
  Dtype grad_dtype = Dtype::f32;  // as y_dtype
  void* dweight = nullptr;
  double *sum_scale = nullptr, *sum_factor = nullptr;

  QT_METHOD int64_t length() const { return major * minor; }
};

namespace cpu {
void weight_forward(const WeightRows& args);
void weight_backward(const WeightRows& args);
}  // namespace cpu
}  // namespace qtoolkit
