// What a layer computes from its input and weight: a convolution, a transposed convolution or a matrix product.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace qtoolkit {

struct Geometry {
  std::vector<int64_t> stride, padding, dilation, output_padding;  // all empty for a linear layer
  bool transposed;
  int64_t groups;

  bool is_linear() const { return stride.empty(); }
};

}  // namespace qtoolkit
