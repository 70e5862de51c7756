#include "layout.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace qtoolkit {

Dtype dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return Dtype::f32;
    case at::kDouble: return Dtype::f64;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::f16;
    case at::kChar: return Dtype::i8;
    case at::kByte: return Dtype::u8;
    case at::kShort: return Dtype::i16;
    case at::kUInt16: return Dtype::u16;
    case at::kInt: return Dtype::i32;
    default: TORCH_INTERNAL_ASSERT(false, "checks.h accepted ", t.scalar_type());
  }
}

at::Tensor as_type(const at::Tensor& t, at::ScalarType type) { return t.scalar_type() == type ? t : t.to(type); }

at::Tensor in_arithmetic(const at::Tensor& values, bool f64) {
  return as_type(values, f64 ? at::kDouble : at::kFloat).contiguous();
}

CodeBounds representable(int64_t qmin, int64_t qmax, const at::Tensor& x) {
  const CodeBounds exact = {static_cast<double>(qmin), static_cast<double>(qmax)};
  if (x.scalar_type() == at::kDouble) return exact;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float lo = static_cast<float>(exact.lo), hi = static_cast<float>(exact.hi);
  return {lo < exact.lo ? std::nextafter(lo, kInfinity) : lo, hi > exact.hi ? std::nextafter(hi, -kInfinity) : hi};
}

std::vector<int64_t> memory_order(const at::Tensor& dense) {
  if (dense.is_contiguous()) return {};
  std::vector<int64_t> order(dense.dim());
  std::iota(order.begin(), order.end(), 0);
  const auto strides = dense.sym_strides();
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return order;
}

at::Tensor empty_as(const at::Tensor& dense, const at::TensorOptions& options) {
  return at::empty_strided_symint(dense.sym_sizes(), dense.sym_strides(), options);
}

at::Tensor empty_in_order(const at::Tensor& like, at::IntArrayRef order) {
  if (order.empty()) return at::empty_symint(like.sym_sizes(), like.options());
  std::vector<c10::SymInt> strides(like.dim());
  c10::SymInt step = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = step;
    step = step * like.sym_size(*d);
  }
  return at::empty_strided_symint(like.sym_sizes(), strides, like.options());
}

Operand operand_of(at::Tensor& t, const at::Tensor& dense) {
  Operand operand;
  operand.data = t.const_data_ptr();
  operand.dtype = dtype_of(t);
  if (t.strides() == dense.strides() || (t.is_contiguous() && dense.is_contiguous())) return operand;

  std::vector<int64_t> order = memory_order(dense);
  if (order.empty()) {
    order.resize(dense.dim());
    std::iota(order.begin(), order.end(), 0);
  }
  int dims = 0;
  for (const int64_t d : order) {
    if (t.size(d) == 1) continue;
    const bool joins = dims > 0 && operand.stride[dims - 1] == t.size(d) * t.stride(d);
    if (joins) {
      operand.size[dims - 1] *= t.size(d);
      operand.stride[dims - 1] = t.stride(d);
    } else if (dims == kMaxDims) {
      at::Tensor copy = empty_in_order(t, memory_order(dense));
      copy.copy_(t);
      t = copy;
      return operand_of(t, dense);
    } else {
      operand.size[dims] = t.size(d);
      operand.stride[dims] = t.stride(d);
      ++dims;
    }
  }
  operand.dims = dims;
  operand.dense = dims == 0 || (dims == 1 && operand.stride[0] == 1);
  return operand;
}

at::Tensor in_order_of(const at::Tensor& t, const at::Tensor& dense) {
  at::Tensor read = t;
  if (operand_of(read, dense).dense) return read;
  at::Tensor copy = empty_in_order(t, memory_order(dense));
  return copy.copy_(t);
}

namespace {

// The sizes of a tensor with one value per block.
std::vector<int64_t> sizes_of_blocks(const at::Tensor& dense, const Axis& axis) {
  std::vector<int64_t> sizes = dense.sizes().vec();
  sizes[axis.index] /= axis.block;
  return sizes;
}

// The number of elements in the dimensions that are faster in memory than the axis.
int64_t elements_within(const at::Tensor& dense, int64_t axis) {
  const std::vector<int64_t> order = memory_order(dense);
  int64_t elements = 1;
  for (int64_t place = dense.dim() - 1;; --place) {
    const int64_t d = order.empty() ? place : order[place];
    if (d == axis) return elements;
    elements *= dense.size(d);
  }
}

Channels channels_of_blocks(const at::Tensor& dense, const Axis& axis) {
  const int64_t inner = elements_within(dense, axis.index), count = dense.numel() / axis.block;
  if (inner == 1) return {count, axis.block, std::max<int64_t>(dense.numel(), 1), count};
  return {inner, 1, axis.block * inner, count};
}

}  // namespace

Channels channels_of(const at::Tensor& dense, const Axis& axis, int64_t scales) {
  Channels channels;
  channels.group_span = std::max<int64_t>(dense.numel() / axis.group, 1);
  if (axis.index < 0 || scales == 1) return channels;
  if (axis.block > 0) return channels_of_blocks(dense, axis);
  channels.size = dense.size(axis.index);
  channels.count = channels.size * axis.group;
  channels.inner = channels.size == 1 ? channels.group_span : dense.stride(axis.index);
  return channels;
}

at::Tensor to_memory_order(const at::Tensor& values, const at::Tensor& dense, const Axis& axis) {
  if (axis.block == 0 || values.numel() == 1 || dense.is_contiguous()) return values;
  return values.reshape(sizes_of_blocks(dense, axis)).permute(memory_order(dense));
}

at::Tensor from_memory_order(const at::Tensor& values, const at::Tensor& dense, const Axis& axis) {
  if (axis.block == 0 || values.numel() == 1 || dense.is_contiguous()) return values;
  const std::vector<int64_t> order = memory_order(dense), sizes = sizes_of_blocks(dense, axis);
  std::vector<int64_t> sorted, place(order.size());
  for (const int64_t d : order) {
    place[d] = static_cast<int64_t>(sorted.size());
    sorted.push_back(sizes[d]);
  }
  return values.view(sorted).permute(place).contiguous();
}

// Whether channels_of can describe the groups of a dense tensor.
static bool has_separate_groups(const at::Tensor& dense, int64_t group) {
  return group == 1 || dense.is_contiguous() || dense.sym_stride(0) * dense.sym_size(0) == dense.sym_numel();
}

at::Tensor empty_result(const at::Tensor& x, const at::TensorOptions& options, int64_t group) {
  const at::Tensor y = x.is_non_overlapping_and_dense() ? empty_as(x, options) : at::empty_like(x, options);
  return has_separate_groups(y, group) ? y : at::empty_symint(x.sym_sizes(), options);
}

at::Tensor empty_codes(const at::Tensor& y, bool is_signed, bool packed) {
  const at::TensorOptions bytes = y.options().dtype(is_signed && !packed ? at::kChar : at::kByte);
  if (!packed) return empty_as(y, bytes);
  if (y.is_contiguous()) return at::empty_symint({(y.sym_numel() + 1) / 2}, bytes);
  const bool is_image = y.dim() == 4 && y.is_contiguous(at::MemoryFormat::ChannelsLast);
  if (!is_image || y.sym_size(1) % 2 != 0) return at::empty({0}, bytes);
  return at::empty_symint({y.sym_size(0), y.sym_size(1) / 2, y.sym_size(2), y.sym_size(3)},
                          bytes.memory_format(at::MemoryFormat::ChannelsLast));
}

at::Tensor layout_of_result(const at::Tensor& x, int64_t group) {
  if (x.is_non_overlapping_and_dense() && has_separate_groups(x, group)) return x;
  return empty_result(x, x.options().device(at::kMeta), group);
}

}  // namespace qtoolkit
