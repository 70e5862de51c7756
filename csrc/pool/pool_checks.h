// Argument checks of max pooling; see checks.h.
#pragma once

#include "../checks.h"

namespace qtoolkit {

// Height and width, from one number or two.
struct Sides {
  int64_t rows, columns;
};

inline Sides check_sides(const char* op, const char* name, at::IntArrayRef sides, int64_t least) {
  TORCH_CHECK_VALUE(sides.size() == 1 || sides.size() == 2, op, ": ", name, " must have one or two numbers, got ",
                    sides, ".");
  for (const int64_t side : sides) {
    TORCH_CHECK_VALUE(side >= least && side <= 2147483647, op, ": ", name, " must lie in [", least,
                      ", 2147483647], got ", sides, ".");
  }
  return {sides[0], sides.back()};
}

struct PoolSides {
  Sides kernel, stride, padding, dilation;
};

inline PoolSides check_pool(const char* op, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                            at::IntArrayRef padding, at::IntArrayRef dilation) {
  const PoolSides s = {check_sides(op, "kernel_size", kernel_size, 1), check_sides(op, "stride", stride, 1),
                       check_sides(op, "padding", padding, 0), check_sides(op, "dilation", dilation, 1)};
  TORCH_CHECK_VALUE(s.kernel.rows <= 256 && s.kernel.columns <= 256 && s.kernel.rows * s.kernel.columns <= 256, op,
                    ": kernel_size must have at most 256 elements, since an offset is one byte, got ", kernel_size,
                    "; use torch.nn.functional.max_pool2d.");
  TORCH_CHECK_VALUE(s.padding.rows <= s.kernel.rows / 2 && s.padding.columns <= s.kernel.columns / 2, op,
                    ": padding must be at most half of the kernel size, got padding=", padding,
                    " and kernel_size=", kernel_size, ".");
  return s;
}

// The number of windows along a dimension. With ceil_mode the last one may reach past the end, but starts before it.
inline c10::SymInt results_of(const c10::SymInt& size, int64_t kernel, int64_t stride, int64_t padding,
                              int64_t dilation, bool ceil_mode) {
  const c10::SymInt room = size + (2 * padding - dilation * (kernel - 1) - 1);
  if (room < 0 && !ceil_mode) return 0;
  if (room + (ceil_mode ? stride - 1 : 0) < 0) return 0;
  const c10::SymInt results = (room + (ceil_mode ? stride - 1 : 0)) / stride + 1;
  return ceil_mode && (results - 1) * stride >= size + padding ? results - 1 : results;
}

inline void check_image(const char* op, const char* name, const at::Tensor& x) {
  check_float(op, name, x);
  TORCH_CHECK_VALUE(x.dim() == 3 || x.dim() == 4, op, ": ", name,
                    " must have 3 or 4 dimensions, (channels, height, width) or with a batch in front, got shape ",
                    x.sym_sizes(), ".");
}

}  // namespace qtoolkit
