// Range observers for CPU and CUDA: one read of the input, no wait for the device.
#include "observe.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "bodies.h"
#include "checks.h"
#include "launch.h"
#include "layout.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

int64_t range_count(const Tensor& x, int64_t axis, int64_t group) { return axis < 0 ? 1 : x.size(axis) * group; }

}  // namespace

Tensor ranges_of(const Tensor& x, int64_t axis, int64_t group) {
  Tensor in = x;
  const Tensor order = layout_of_result(x, group);
  const int64_t count = range_count(x, axis, group);
  Tensor ranges = at::empty({2, count}, x.options().dtype(at::kDouble));
  Job job;
  job.numel = x.numel();
  job.channels = channels_of(order, axis, group, count);
  job.x = operand_of(in, order);
  job.sum_scale = ranges.mutable_data_ptr<double>();
  job.sum_zero_point = job.sum_scale + count;
  launch(Op::minmax, job, {}, x.device());
  return ranges;
}

namespace {

std::tuple<Tensor, Tensor> minmax(const Tensor& x, optional<int64_t> axis, int64_t group) {
  check_storage("minmax", "x", x);
  const int64_t a = check_axis("minmax", x, axis, group);
  check_not_empty("minmax", x);
  const Tensor ranges = ranges_of(x, a, group).to(x.scalar_type());
  const auto shape = a < 0 ? std::vector<int64_t>{} : std::vector<int64_t>{range_count(x, a, group)};
  return {ranges.select(0, 0).view(shape).clone(), ranges.select(0, 1).view(shape).clone()};
}

void observe_minmax_(const Tensor& x, Tensor& lo, Tensor& hi, optional<double> momentum, optional<int64_t> axis,
                     int64_t group) {
  check_storage("observe_minmax_", "x", x);
  const int64_t a = check_axis("observe_minmax_", x, axis, group);
  check_ranges("observe_minmax_", lo, hi, x, a, group);
  check_momentum("observe_minmax_", momentum);
  blend_ranges(lo, hi, ranges_of(x, a, group), momentum);
}

std::tuple<Tensor, Tensor> grid_of_range(const Tensor& lo, const Tensor& hi, int64_t qmin, int64_t qmax, bool symmetric,
                                         bool pow2_scale) {
  check_grid_of_range(lo, hi, qmin, qmax);
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
