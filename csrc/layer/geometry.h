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
  // The dimension of an output's channels.
  int64_t channel_axis(int64_t dims) const { return is_linear() ? dims - 1 : 1; }
};

// The weight of a transposed convolution is (in, out / groups, k...): its output channels run along groups and axis 1.
inline c10::SymInt output_channels(const at::Tensor& weight, const Geometry& g) {
  return g.transposed ? weight.sym_size(1) * g.groups : weight.sym_size(0);
}

// The length of an output along a spatial dimension.
inline c10::SymInt output_length(const c10::SymInt& length, const c10::SymInt& kernel, size_t d, const Geometry& g) {
  const c10::SymInt reach = (kernel - 1) * g.dilation[d] + 1;
  if (g.transposed) return (length - 1) * g.stride[d] - 2 * g.padding[d] + reach + g.output_padding[d];
  return (length + 2 * g.padding[d] - reach + g.stride[d]) / g.stride[d];
}

inline std::vector<c10::SymInt> output_size(c10::SymIntArrayRef size, const at::Tensor& weight, const Geometry& g) {
  std::vector<c10::SymInt> result = size.vec();
  result[g.channel_axis(static_cast<int64_t>(size.size()))] = output_channels(weight, g);
  for (size_t d = 0; d < g.stride.size(); ++d) {
    result[d + 2] = output_length(size[d + 2], weight.sym_size(static_cast<int64_t>(d) + 2), d, g);
  }
  return result;
}

}  // namespace qtoolkit
