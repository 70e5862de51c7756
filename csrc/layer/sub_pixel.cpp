#include "sub_pixel.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/repeat_interleave.h>

#include <algorithm>

namespace qtoolkit::sub_pixel {
namespace {

using at::Tensor;

constexpr int64_t kFewChannels = 4;

}  // namespace

Tensor kernel(const Tensor& weight, const std::vector<int64_t>& stride) {
  const int64_t high = stride[0], wide = stride[1];
  const int64_t rows = (weight.size(2) + high - 1) / high, columns = (weight.size(3) + wide - 1) / wide;
  const int64_t below = rows * high - weight.size(2), right = columns * wide - weight.size(3);
  const Tensor padded = at::constant_pad_nd(weight, {0, right, 0, below});
  const int64_t inputs = weight.size(0), outputs = weight.size(1);
  const Tensor phases = padded.reshape({inputs, outputs, rows, high, columns, wide}).flip({2, 4});
  return phases.permute({1, 3, 5, 0, 2, 4}).reshape({outputs * high * wide, inputs, rows, columns});
}

std::vector<int64_t> padding(const Tensor& kernel) { return {kernel.size(2) - 1, kernel.size(3) - 1}; }

Tensor per_phase(const Tensor& values, const std::vector<int64_t>& stride) {
  return at::repeat_interleave(values, stride[0] * stride[1]);
}

Tensor output(const Tensor& phases, at::IntArrayRef size, const Geometry& g) {
  const int64_t high = g.stride[0], wide = g.stride[1], images = phases.size(0);
  const int64_t channels = phases.size(1) / (high * wide), rows = phases.size(2), columns = phases.size(3);
  const Tensor split = phases.reshape({images, channels, high, wide, rows, columns}).permute({0, 1, 4, 2, 5, 3});
  const Tensor whole = split.reshape({images, channels, rows * high, columns * wide});
  const auto behind = [&](int64_t d) { return size[d] + g.padding[d - 2] - whole.size(d); };
  return at::constant_pad_nd(whole, {-g.padding[1], behind(3), -g.padding[0], behind(2)});
}

bool reaches_all(at::IntArrayRef input, at::IntArrayRef size, const Tensor& kernel, const Geometry& g) {
  const auto reaches = [&](int64_t d) {
    return size[d] + g.padding[d - 2] <= g.stride[d - 2] * (input[d] + kernel.size(d) - 1);
  };
  return reaches(2) && reaches(3);
}

bool has_few_channels(const Tensor& weight, const Geometry& g) {
  if (!weight.is_cpu() || weight.dim() != 4 || g.transposed || g.groups != 1) return false;
  const bool strided = std::max(g.stride[0], g.stride[1]) > 1, dense = std::max(g.dilation[0], g.dilation[1]) == 1;
  return weight.size(1) <= kFewChannels && strided && dense;
}

Tensor input_gradient(const Tensor& grad, at::IntArrayRef size, const Tensor& weight, const Geometry& g) {
  const Tensor of_phases = kernel(weight, g.stride).contiguous(grad.suggest_memory_format());
  const std::vector<int64_t> ones = {1, 1}, zeros = {0, 0};
  const Tensor phases = at::convolution(grad, of_phases, std::nullopt, ones, padding(of_phases), ones, false, zeros, 1);
  return output(phases, size, g);
}

}  // namespace qtoolkit::sub_pixel
