// Range observers for CPU and CUDA: one read of the input, no wait for the device.
#include "observe.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <tuple>

#include "bodies.h"
#include "launch.h"
#include "layout.h"
#include "observer_checks.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

}  // namespace

Tensor ranges_of(const Tensor& x, const Axis& axis) {
  Tensor in = x;
  const Tensor order = layout_of_result(x, axis.group);
  const int64_t count = count_of_channels(x, axis).expect_int();
  Tensor ranges = at::empty({2, count}, x.options().dtype(at::kDouble));
  Job job;
  job.numel = x.numel();
  job.channels = channels_of(order, axis, count);
  job.x = operand_of(in, order);
  job.sum_scale = ranges.mutable_data_ptr<double>();
  job.sum_zero_point = job.sum_scale + count;
  launch(Op::minmax, job, {}, x.device());
  if (axis.block == 0 || order.is_contiguous()) return ranges;
  const auto sorted = [&](int64_t row) { return from_memory_order(ranges.select(0, row), order, axis).flatten(); };
  return at::stack({sorted(0), sorted(1)});
}

namespace {

std::tuple<Tensor, Tensor> minmax(const Tensor& x, optional<int64_t> axis, int64_t group, int64_t block_size) {
  check_storage("minmax", "x", x);
  const Axis a = check_axis("minmax", x, axis, group, block_size);
  check_not_empty("minmax", x);
  const Tensor ranges = ranges_of(x, a).to(x.scalar_type());
  const auto shape = shape_of_channels(x, a);
  return {ranges.select(0, 0).view_symint(shape).clone(), ranges.select(0, 1).view_symint(shape).clone()};
}

void observe_minmax_(const Tensor& x, Tensor& lo, Tensor& hi, optional<double> momentum, optional<int64_t> axis,
                     int64_t group, int64_t block_size) {
  check_storage("observe_minmax_", "x", x);
  const Axis a = check_axis("observe_minmax_", x, axis, group, block_size);
  check_ranges("observe_minmax_", lo, hi, x, a);
  check_momentum("observe_minmax_", momentum);
  blend_ranges(lo, hi, ranges_of(x, a), momentum);
}

std::tuple<Tensor, Tensor> grid_of_range(const Tensor& lo, const Tensor& hi, int64_t qmin, int64_t qmax, bool symmetric,
                                         bool pow2_scale) {
  check_grid_of_range(lo, hi, qmin, qmax, symmetric);
  const Tensor scale = at::empty(lo.sizes(), lo.options());
  const Tensor zero_point = symmetric ? at::empty({0}, lo.options()) : at::empty(lo.sizes(), lo.options());
  const CodeRange codes = {static_cast<double>(qmin), static_cast<double>(qmax), symmetric, pow2_scale};
  grid_of_ranges(lo.contiguous(), hi.contiguous(), {&scale, symmetric ? nullptr : &zero_point}, codes);
  return {scale, zero_point};
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, CompositeExplicitAutograd, m) {
  m.impl("snapshot", [](const Tensor& x) { return x.detach().clone(); });
}

TORCH_LIBRARY_IMPL(qtoolkit, CPU, m) {
  m.impl("minmax", minmax);
  m.impl("observe_minmax_", observe_minmax_);
  m.impl("grid_of_range", grid_of_range);
}

#ifdef QTOOLKIT_CUDA
TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) {
  m.impl("minmax", minmax);
  m.impl("observe_minmax_", observe_minmax_);
  m.impl("grid_of_range", grid_of_range);
}
#endif

}  // namespace qtoolkit
