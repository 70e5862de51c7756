// The bodies of max pooling and its backward.
#include <ATen/ops/empty.h>

#include <tuple>
#include <vector>

#include "../launch.h"
#include "../layout.h"
#include "../registration.h"
#include "pool_checks.h"

namespace qtoolkit {
namespace {

using at::Tensor;

using SymSizes = std::vector<c10::SymInt>;

// The shape of the result.
SymSizes shape_of_result(const char* op, c10::SymIntArrayRef size, const PoolSides& s, bool ceil_mode) {
  SymSizes shape = size.vec();
  const size_t rows = shape.size() - 2, columns = rows + 1;
  shape[rows] = results_of(shape[rows], s.kernel.rows, s.stride.rows, s.padding.rows, s.dilation.rows, ceil_mode);
  shape[columns] =
      results_of(shape[columns], s.kernel.columns, s.stride.columns, s.padding.columns, s.dilation.columns, ceil_mode);
  TORCH_CHECK_VALUE(shape[rows] >= 1 && shape[columns] >= 1, op, ": x must hold at least one window, got shape ", size,
                    ".");
  return shape;
}

// `x` is of the size that is pooled, `y` of the result's.
PoolArgs arguments(const Tensor& x, const Tensor& y, const PoolSides& s, at::MemoryFormat format) {
  PoolArgs args;
  args.images = x.dim() == 4 ? x.size(0) : 1;
  args.channels = x.size(-3);
  args.rows = {x.size(-2), y.size(-2), s.kernel.rows, s.stride.rows, s.padding.rows, s.dilation.rows};
  args.columns = {x.size(-1), y.size(-1), s.kernel.columns, s.stride.columns, s.padding.columns, s.dilation.columns};
  args.channels_last = format == at::MemoryFormat::ChannelsLast;
  args.dtype = dtype_of(x);
  return args;
}

at::MemoryFormat format_of(const Tensor& x) {
  return x.dim() == 4 ? x.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

std::tuple<Tensor, Tensor> max_pool_offsets(const Tensor& x, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                                            at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  constexpr const char* kOp = "max_pool_offsets";
  check_image(kOp, "x", x);
  const PoolSides sides = check_pool(kOp, kernel_size, stride, padding, dilation);
  const SymSizes shape = shape_of_result(kOp, x.sym_sizes(), sides, ceil_mode);
  const at::MemoryFormat format = format_of(x);
  const auto empty = [&](c10::ScalarType type) {
    return at::empty_symint(shape, x.options().dtype(type).memory_format(format));
  };
  const Tensor y = empty(x.scalar_type()), offsets = empty(at::kByte);
  if (y.is_meta() || y.numel() == 0) return {y, offsets};
  const Tensor in = x.contiguous(format);
  PoolArgs args = arguments(x, y, sides, format);
  args.x = in.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.offsets = offsets.mutable_data_ptr<uint8_t>();
  on(x.device()).max_pool_forward(args, x.device());
  return {y, offsets};
}

Tensor max_pool_offsets_backward(const Tensor& grad, const Tensor& offsets, c10::SymIntArrayRef size,
                                 at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                                 at::IntArrayRef dilation, bool ceil_mode) {
  constexpr const char* kOp = "max_pool_offsets_backward";
  check_image(kOp, "grad", grad);
  const PoolSides sides = check_pool(kOp, kernel_size, stride, padding, dilation);
  TORCH_CHECK_VALUE(static_cast<int64_t>(size.size()) == grad.dim(), kOp,
                    ": size must have as many numbers as grad has "
                    "dimensions, ",
                    grad.dim(), ", got ", size, ".");
  for (const auto& side : size) TORCH_CHECK_VALUE(side >= 0, kOp, ": size must not be negative, got ", size, ".");
  const SymSizes shape = shape_of_result(kOp, size, sides, ceil_mode);
  TORCH_CHECK_VALUE(grad.sym_sizes() == c10::SymIntArrayRef(shape), kOp, ": grad must have the shape of the result, ",
                    c10::SymIntArrayRef(shape), ", got ", grad.sym_sizes(), ".");
  TORCH_CHECK_TYPE(offsets.scalar_type() == at::kByte, kOp, ": offsets must be uint8, got ", offsets.scalar_type(),
                   "; pass the offsets that max_pool_offsets returned.");
  check_same_shape(kOp, "offsets", offsets, grad);
  const at::MemoryFormat format = format_of(offsets);
  const Tensor dx = at::empty_symint(size, grad.options().memory_format(format));
  if (dx.is_meta() || dx.numel() == 0) return dx;
  const Tensor in = grad.contiguous(format), places = offsets.contiguous(format);
  PoolArgs args = arguments(dx, grad, sides, format);
  args.x = in.const_data_ptr();
  args.y = dx.mutable_data_ptr();
  args.offsets = const_cast<uint8_t*>(places.const_data_ptr<uint8_t>());  // only read
  on(dx.device()).max_pool_backward(args, dx.device());
  return dx;
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("max_pool_offsets", max_pool_offsets);
  m.impl("max_pool_offsets_backward", max_pool_offsets_backward);
}

}  // namespace qtoolkit
