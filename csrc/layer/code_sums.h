// Sums of products of codes as products of int8 matrices: exact, since they are int32 throughout.
#pragma once

#include "geometry.h"

namespace qtoolkit {

// A linear layer, or a convolution without groups, on codes. The body serves all devices; layers compute by it on a
// GPU.
class CodeSums {
 public:
  // Whether a layer's sums are a product of two matrices; of a linear layer groups is 1.
  static bool take(const at::Tensor& weight, bool transposed, int64_t groups);

  // weight: int8, (out, in) or (out, in, kernel...). 128 times the sum of an output's magnitudes must fit in int32.
  CodeSums(const at::Tensor& weight, Geometry geometry);

  // Returns the sums of products of weights with codes minus the zero point, rounded once to `dtype` (float32 or
  // float64), in channels_last for convolutions. What a convolution pads adds nothing to them.
  //   codes        int8 or uint8: (..., in) for a linear layer, else (N, in, spatial...)
  //   zero_point   one element; absent for 0. It need not be one of the codes, and is not read on the host.
  at::Tensor operator()(const at::Tensor& codes, const std::optional<at::Tensor>& zero_point,
                        at::ScalarType dtype) const;

 private:
  at::Tensor offsets_of(const at::Tensor& codes, at::IntArrayRef out) const;

  std::vector<int64_t> kernel_;
  int64_t outputs_, depth_;
  at::Tensor rows_;            // the weights of an output each, as int8_product takes them
  at::Tensor sums_per_place_;  // (outputs, places of the kernel) of the weights, float64
  Geometry geometry_;
};

}  // namespace qtoolkit
