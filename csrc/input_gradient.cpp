#include "input_gradient.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/flip.h>

#include <algorithm>

namespace qtoolkit {
namespace {

using at::Tensor;

constexpr int64_t kFewChannels = 4;

int64_t larger(const std::vector<int64_t>& values) { return std::max(values[0], values[1]); }

// (out, in, rows, columns) -> (in * phases, out, rows of a phase, columns of a phase), reversed.
Tensor kernel_of_phases(const Tensor& weight, const std::vector<int64_t>& stride) {
  const int64_t high = stride[0], wide = stride[1];
  const int64_t rows = (weight.size(2) + high - 1) / high, columns = (weight.size(3) + wide - 1) / wide;
  const int64_t below = rows * high - weight.size(2), right = columns * wide - weight.size(3);
  const Tensor padded = at::constant_pad_nd(weight, {0, right, 0, below});
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const Tensor phases = padded.reshape({outputs, inputs, rows, high, columns, wide}).flip({2, 4});
  return phases.permute({1, 3, 5, 0, 2, 4}).reshape({inputs * high * wide, outputs, rows, columns});
}

// (N, channels * phases, rows, columns) -> (N, channels, rows * stride, columns * stride).
Tensor interleaved(const Tensor& phases, const std::vector<int64_t>& stride) {
  const int64_t high = stride[0], wide = stride[1], images = phases.size(0);
  const int64_t channels = phases.size(1) / (high * wide), rows = phases.size(2), columns = phases.size(3);
  const Tensor split = phases.reshape({images, channels, high, wide, rows, columns}).permute({0, 1, 4, 2, 5, 3});
  return split.reshape({images, channels, rows * high, columns * wide});
}

}  // namespace

bool has_few_channels(const Tensor& weight, const Geometry& g) {
  if (!weight.is_cpu() || weight.dim() != 4 || g.transposed || g.groups != 1) return false;
  return weight.size(1) <= kFewChannels && larger(g.stride) > 1 && larger(g.dilation) == 1;
}

Tensor input_gradient(const Tensor& grad, at::IntArrayRef size, const Tensor& weight, const Geometry& g) {
  const Tensor kernel = kernel_of_phases(weight, g.stride).contiguous(grad.suggest_memory_format());
  const std::vector<int64_t> ones = {1, 1}, zeros = {0, 0}, reach = {kernel.size(2) - 1, kernel.size(3) - 1};
  const Tensor phases = at::convolution(grad, kernel, std::nullopt, ones, reach, ones, false, zeros, 1);
  const Tensor padded = interleaved(phases, g.stride);
  const auto behind = [&](int64_t d) { return size[d] + g.padding[d - 2] - padded.size(d); };
  // Rows and columns that are padding are cut off; those behind the last window have no gradient.
  return at::constant_pad_nd(padded, {-g.padding[1], behind(3), -g.padding[0], behind(2)});
}

}  // namespace qtoolkit
