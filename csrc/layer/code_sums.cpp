#include "code_sums.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/round.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>

#include "int8_product.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

constexpr int64_t kScratch = 1 << 28;  // bytes of rows, or of their sums, at a time

// ---- operands

// Unsigned codes minus 128, which int8 holds.
Tensor as_signed(const Tensor& codes) {
  return codes.scalar_type() == at::kByte ? at::bitwise_xor(codes, 128).view(at::kChar) : codes;
}

// What is subtracted from these codes, float64; nullopt for 0. A zero point is rounded to an integer.
optional<Tensor> offset_of(const Tensor& codes, const optional<Tensor>& zero_point) {
  const bool is_shifted = codes.scalar_type() == at::kByte;
  if (!zero_point.has_value()) {
    return is_shifted ? optional<Tensor>(at::scalar_tensor(-128.0, at::kDouble)) : std::nullopt;
  }
  const Tensor offset = at::round(zero_point->reshape({}).to(at::kDouble));
  return is_shifted ? at::sub(offset, 128) : offset;
}

bool pads(const Geometry& g) {
  return std::any_of(g.padding.begin(), g.padding.end(), [](int64_t edge) { return edge != 0; });
}

// The channels as the last dimension.
Tensor channels_behind(const Tensor& t) { return t.movedim(1, -1); }

// What each output of a convolution reads, without a copy: (N, out..., kernel..., in) of images (N, spatial..., in).
Tensor windows_of(const Tensor& images, at::IntArrayRef kernel, at::IntArrayRef out, const Geometry& g) {
  const size_t dims = kernel.size();
  Tensor padded = images.contiguous();
  if (pads(g)) {
    std::vector<int64_t> size = images.sizes().vec();
    for (size_t d = 0; d < dims; ++d) size[d + 1] += 2 * g.padding[d];
    padded = at::zeros(size, images.options());
    Tensor inside = padded;
    for (size_t d = 0; d < dims; ++d) {
      const auto dimension = static_cast<int64_t>(d) + 1;
      inside = inside.narrow(dimension, g.padding[d], images.size(dimension));
    }
    inside.copy_(images);
  }
  std::vector<int64_t> size = {images.size(0)}, strides = {padded.stride(0)};
  for (size_t d = 0; d < dims; ++d) {
    size.push_back(out[d]);
    strides.push_back(padded.strides()[d + 1] * g.stride[d]);
  }
  for (size_t d = 0; d < dims; ++d) {
    size.push_back(kernel[d]);
    strides.push_back(padded.strides()[d + 1] * g.dilation[d]);
  }
  size.push_back(images.size(-1));
  strides.push_back(1);
  return at::as_strided(padded, size, strides, padded.storage_offset());
}

}  // namespace

bool CodeSums::take(const Tensor& weight, bool transposed, int64_t groups) {
  return !transposed && groups == 1 && weight.numel() > 0;
}

CodeSums::CodeSums(const Tensor& weight, Geometry geometry)
    : kernel_(weight.sizes().slice(2).vec()),
      outputs_(weight.size(0)),
      depth_(weight.numel() / weight.size(0)),
      geometry_(std::move(geometry)) {
  const Tensor in_rows = geometry_.is_linear() ? weight.unsqueeze(1) : channels_behind(weight);
  rows_ = int8_product::right_rows(in_rows, depth_);
  sums_per_place_ = at::sum(in_rows, {-1}, false, at::kDouble).flatten(1);
}

// The sums of the weights that are not over the padding, float64: (positions or 1, outputs).
Tensor CodeSums::offsets_of(const Tensor& codes, at::IntArrayRef out) const {
  if (!pads(geometry_)) return at::sum(sums_per_place_, {1}).unsqueeze(0);
  std::vector<int64_t> image = codes.sizes().vec();
  image.erase(image.begin() + 1);
  image[0] = 1;
  image.push_back(1);
  const Tensor inside = windows_of(at::ones(image, codes.options()), kernel_, out, geometry_);
  return at::mm(inside.reshape({-1, sums_per_place_.size(1)}).to(at::kDouble), sums_per_place_.t());
}

Tensor CodeSums::operator()(const Tensor& codes, const optional<Tensor>& zero_point, at::ScalarType dtype) const {
  const bool is_linear = geometry_.is_linear();
  std::vector<int64_t> size = codes.sizes().vec();
  if (!is_linear) size.erase(size.begin() + 1);
  for (size_t d = 0; d < kernel_.size(); ++d) {
    size[d + 1] = output_length(size[d + 1], kernel_[d], d, geometry_).guard_int(__FILE__, __LINE__);
  }
  const std::vector<int64_t> out(size.begin() + 1, size.begin() + 1 + static_cast<int64_t>(kernel_.size()));
  if (is_linear) size.pop_back();
  size.push_back(outputs_);
  const Tensor result = at::empty(size, codes.options().dtype(dtype));
  const Tensor y = is_linear ? result : result.movedim(-1, 1);
  if (result.numel() == 0) return y;

  const Tensor bytes = as_signed(codes);
  const Tensor blocks =
      is_linear ? bytes.reshape({-1, depth_}) : windows_of(channels_behind(bytes), kernel_, out, geometry_);
  const optional<Tensor> offset = offset_of(codes, zero_point);
  const optional<Tensor> offsets =
      offset.has_value() ? optional<Tensor>(at::mul(offsets_of(codes, out), *offset)) : std::nullopt;
  const int64_t batch = blocks.size(0), positions = result.numel() / outputs_ / batch;
  const Tensor sums_of_batch = result.view({batch, positions, outputs_});
  const int64_t most = std::max<int64_t>(kScratch / (positions * std::max(depth_, 4 * outputs_)), 1);
  for (int64_t start = 0; start < batch; start += most) {
    const int64_t count = std::min(most, batch - start);
    const Tensor left = int8_product::left_rows(blocks.narrow(0, start, count), depth_);
    const Tensor products = int8_product::product(left, rows_);
    const Tensor sums =
        products.narrow(0, 0, count * positions).narrow(1, 0, outputs_).view({count, positions, outputs_});
    Tensor part = sums_of_batch.narrow(0, start, count);
    if (offsets.has_value()) {
      at::sub_out(part, sums, *offsets);
    } else {
      part.copy_(sums);
    }
  }
  return y;
}

// For Python, which keeps the rows of the weights of converted models.
namespace {

struct Holder : torch::CustomClassHolder {
  CodeSums layer;

  Holder(const Tensor& weight, std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation)
      : layer(weight, {stride, padding, dilation, {}, false, 1}) {}

  Tensor sums(const Tensor& codes, const optional<Tensor>& zero_point, at::ScalarType dtype) {
    return layer(codes, zero_point, dtype);
  }
};

TORCH_LIBRARY_FRAGMENT(qtoolkit, m) {
  m.class_<Holder>("CodeSums")
      .def(torch::init<Tensor, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>())
      .def("sums", &Holder::sums)
      .def_static("take", &CodeSums::take);
}

}  // namespace
}  // namespace qtoolkit
