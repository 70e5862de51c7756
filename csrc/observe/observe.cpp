// The bodies of the range observers: one read of the input, without waiting for the device.
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <tuple>

#include "../launch.h"
#include "../layout.h"
#include "../registration.h"
#include "observer_checks.h"

namespace qtoolkit {

using at::Tensor;
using std::optional;

Tensor ranges_of(const Tensor& x, const Axis& axis) {
  Tensor in = x;
  const Tensor order = layout_of_result(x, axis.group);
  const int64_t count = count_of_channels(x, axis).expect_int();
  Tensor ranges = at::empty({2, count}, x.options().dtype(at::kDouble));
  KernelArgs args;
  args.numel = x.numel();
  args.channels = channels_of(order, axis, count);
  args.x = operand_of(in, order);
  args.sum_scale = ranges.mutable_data_ptr<double>();
  args.sum_zero_point = args.sum_scale + count;
  on(x.device()).launch(KernelId::minmax, args, {}, x.device());
  if (axis.block == 0 || order.is_contiguous()) return ranges;
  const auto sorted = [&](int64_t row) { return from_memory_order(ranges.select(0, row), order, axis).flatten(); };
  return at::stack({sorted(0), sorted(1)});
}

namespace {

std::tuple<Tensor, Tensor> minmax(const Tensor& x, optional<int64_t> axis, int64_t group, int64_t block_size) {
  check_float("minmax", "x", x);
  const Axis a = check_axis("minmax", x, axis, group, block_size);
  check_not_empty("minmax", x);
  const auto shape = shape_of_channels(x, a);
  const Tensor lo = at::empty_symint(shape, x.options()), hi = at::empty_symint(shape, x.options());
  if (lo.is_meta()) return {lo, hi};
  const Tensor ranges = ranges_of(x, a);
  lo.copy_(ranges.select(0, 0).view(lo.sizes()));
  hi.copy_(ranges.select(0, 1).view(hi.sizes()));
  return {lo, hi};
}

void observe_minmax_(const Tensor& x, Tensor& lo, Tensor& hi, optional<double> momentum, optional<int64_t> axis,
                     int64_t group, int64_t block_size, const optional<Tensor>& skipped) {
  check_float("observe_minmax_", "x", x);
  const Axis a = check_axis("observe_minmax_", x, axis, group, block_size);
  check_running_ranges("observe_minmax_", lo, hi, skipped, x, a);
  check_momentum("observe_minmax_", momentum);
  if (!x.is_meta()) on(x.device()).blend_ranges(lo, hi, ranges_of(x, a), momentum, pointer(skipped));
}

std::tuple<Tensor, Tensor> grid_of_range(const Tensor& lo, const Tensor& hi, int64_t qmin, int64_t qmax, bool symmetric,
                                         bool pow2_scale) {
  check_grid_of_range("grid_of_range", lo, hi, qmin, qmax, symmetric);
  const auto empty = [&] { return at::empty_symint(lo.sym_sizes(), lo.options()); };
  const Tensor scale = empty(), zero_point = symmetric ? at::empty({0}, lo.options()) : empty();
  if (scale.is_meta()) return {scale, zero_point};
  const CodeRange codes = {static_cast<double>(qmin), static_cast<double>(qmax), symmetric, pow2_scale};
  on(lo.device()).grid_of_ranges(lo.contiguous(), hi.contiguous(), {&scale, symmetric ? nullptr : &zero_point}, codes);
  return {scale, zero_point};
}

void take_range_(const Tensor& lo, const Tensor& hi, Tensor& scale, const optional<Tensor>& zero_point, Tensor& count,
                 const Tensor& clock, int64_t qmin, int64_t qmax, int64_t steps, bool pow2_scale) {
  constexpr const char* kOp = "take_range_";
  const bool symmetric = !zero_point.has_value();
  check_grid_of_range(kOp, lo, hi, qmin, qmax, symmetric);
  check_written(kOp, "scale", scale, lo);
  if (!symmetric) check_written(kOp, "zero_point", *zero_point, lo);
  check_steps_seen(kOp, count, clock, lo);
  if (lo.is_meta()) return;
  const CodeRange codes = {static_cast<double>(qmin), static_cast<double>(qmax), symmetric, pow2_scale};
  int64_t* of_count = count.mutable_data_ptr<int64_t>();
  const StepsSeen seen = {of_count, of_count + 1, clock.const_data_ptr<int64_t>(), steps};
  on(lo.device()).take_ranges(lo.contiguous(), hi.contiguous(), {&scale, pointer(zero_point)}, codes, seen);
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("minmax", minmax);
  m.impl("observe_minmax_", observe_minmax_);
  m.impl("grid_of_range", grid_of_range);
  m.impl("take_range_", take_range_);
}

}  // namespace qtoolkit
