// The bodies of the running histogram and of the search for a range to quantize.
#include "../histogram.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "../launch.h"
#include "../layout.h"
#include "../registration.h"
#include "../search.h"
#include "observer_checks.h"

namespace qtoolkit {
namespace {

using at::Tensor;

void add_to(const RunningHistogram& first, const Tensor& x, const Axis& axis, int64_t channels) {
  Tensor in = x;
  const Tensor order = layout_of_result(x, axis.group);
  KernelArgs args;
  args.numel = x.numel();
  args.channels = channels_of(order, axis, channels);
  args.x = operand_of(in, order);
  args.histogram = first;
  on(x.device()).launch(KernelId::histogram, args, {}, x.device());
}

// A CPU divides each channel between its threads; a GPU counts all channels at once.
void observe_histogram_(const Tensor& x, Tensor& counts, Tensor& lo, Tensor& hi, std::optional<int64_t> axis,
                        int64_t group) {
  check_float("observe_histogram_", "x", x);
  const Axis a = check_axis("observe_histogram_", x, axis, group);
  check_histogram("observe_histogram_", x, counts, lo, hi, a);
  if (x.is_meta()) return;
  const RunningHistogram first = {counts.mutable_data_ptr<int64_t>(), lo.mutable_data_ptr<float>(),
                                  hi.mutable_data_ptr<float>(), counts.size(-1)};
  const int64_t channels = lo.numel();
  if (a.index < 0 || !x.is_cpu()) return add_to(first, x, a, channels);
  const int64_t size = x.size(a.index), rows = x.size(0) / group;
  for (int64_t i = 0; i < channels; ++i) {
    const Tensor part = x.narrow(0, i / size * rows, rows).select(a.index, i % size);
    add_to(channel_of(first, i), part, {}, 1);
  }
}

Method method_of(std::string_view name) {
  if (name == "percentile") return Method::percentile;
  if (name == "mse") return Method::mse;
  return name == "l2" ? Method::l2 : Method::entropy;
}

// Runs on the CPU on every device: a histogram is small, and calibration ends here.
std::tuple<Tensor, Tensor> search_range(const Tensor& counts, const Tensor& lo, const Tensor& hi, int64_t qmin,
                                        int64_t qmax, std::string_view method, double percentile, bool symmetric,
                                        at::IntArrayRef candidates) {
  check_search("search_range", counts, lo, hi, qmin, qmax, method, percentile);
  check_candidates("search_range", candidates, counts.sym_size(-1), method, symmetric);
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  if (counts.is_meta()) return {like(lo), like(hi)};
  const Search how = {qmin, qmax, method_of(method), percentile, symmetric, candidates.vec()};
  const Tensor here = counts.to(at::kCPU).contiguous();
  const Tensor low = lo.to(at::kCPU).contiguous(), high = hi.to(at::kCPU).contiguous();
  const Tensor new_lo = like(low), new_hi = like(high);
  const int64_t n = counts.size(-1);
  const int64_t* from = here.const_data_ptr<int64_t>();
  const float *lows = low.const_data_ptr<float>(), *highs = high.const_data_ptr<float>();
  float *new_lows = new_lo.mutable_data_ptr<float>(), *new_highs = new_hi.mutable_data_ptr<float>();
  at::parallel_for(0, lo.numel(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Clip clip = search(from + c * n, lows[c], highs[c], n, how);
      new_lows[c] = clip.lo;
      new_highs[c] = clip.hi;
    }
  });
  return {new_lo.to(lo.device()), new_hi.to(hi.device())};
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("observe_histogram_", observe_histogram_);
  m.impl("search_range", search_range);
}

}  // namespace qtoolkit
