// torch's int8 convolutions and matrix products on the CPU, which its compiler uses for quantized models on x86. They
// are private to torch: nothing else in the package names them.
#pragma once

#include <ATen/core/Tensor.h>

#include "geometry.h"

namespace qtoolkit::onednn {

// Whether torch has these ops and they compute the largest sums of pairs of products exactly, as a trial shows. Without
// VNNI a processor's int8 products saturate.
bool is_exact();

// A convolution or a linear layer with its weight laid out for inputs of a size.
class Int8Layer {
 public:
  // weight: int8. steps: float32, what each output channel's sums are multiplied by. bias: float32.
  Int8Layer(const at::Tensor& weight, const at::Tensor& steps, const std::optional<at::Tensor>& bias,
            const Geometry& geometry, at::IntArrayRef size);

  // Returns sums of products of weights with codes minus the zero point, times the steps, plus the bias: float32, in
  // channels_last. codes: uint8, dense. The sums, and those with codes alone, must fit in int32.
  at::Tensor operator()(const at::Tensor& codes, int64_t zero_point) const;

 private:
  at::Tensor packed_, steps_, zeros_;
  std::optional<at::Tensor> bias_;
  Geometry geometry_;
};

}  // namespace qtoolkit::onednn
