// Op bodies that others are made of, for CPU and CUDA. Arguments are checked already; axis -1 is per tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "launch.h"

namespace qtoolkit {

inline const at::Tensor* pointer(const std::optional<at::Tensor>& t) { return t.has_value() ? &*t : nullptr; }

// The lowest (row 0) and highest (row 1) values of each channel, in float64: exact for every storage type.
at::Tensor ranges_of(const at::Tensor& x, const Axis& axis);

// x on an integer grid, written to y, and the packed mask. y is dense, as empty_result gives it, or x itself.
std::tuple<at::Tensor, at::Tensor> fake_quant_onto(const at::Tensor& y, const at::Tensor& x, const at::Tensor& scale,
                                                   const std::optional<at::Tensor>& zero_point, int64_t qmin,
                                                   int64_t qmax, const Axis& axis, bool with_mask);

}  // namespace qtoolkit
