// Running histograms for CPU and CUDA, and the search for the range that a quantizer takes from one.
#include "histogram.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>

#include "launch.h"
#include "layout.h"
#include "observer_checks.h"
#include "search.h"

namespace qtoolkit {
namespace {

using at::Tensor;

void observe_histogram_(const Tensor& x, Tensor& counts, Tensor& lo, Tensor& hi) {
  check_storage("observe_histogram_", "x", x);
  check_histogram("observe_histogram_", x, counts, lo, hi);
  Tensor in = x;
  const Tensor order = layout_of_result(x, 1);
  Job job;
  job.numel = x.numel();
  job.channels = channels_of(order, {}, 1);
  job.x = operand_of(in, order);
  job.histogram = {counts.mutable_data_ptr<int64_t>(), lo.mutable_data_ptr<float>(), hi.mutable_data_ptr<float>(),
                   counts.numel()};
  launch(Op::histogram, job, {}, x.device());
}

Method method_of(std::string_view name) {
  if (name == "percentile") return Method::percentile;
  if (name == "mse") return Method::mse;
  return name == "l2" ? Method::l2 : Method::entropy;
}

// On the CPU wherever the histogram is: it is small, and this is the end of a calibration.
std::tuple<Tensor, Tensor> search_range(const Tensor& counts, const Tensor& lo, const Tensor& hi, int64_t qmin,
                                        int64_t qmax, std::string_view method, double percentile, bool symmetric) {
  check_search("search_range", counts, lo, hi, qmin, qmax, method, percentile);
  const Search how = {qmin, qmax, method_of(method), percentile, symmetric};
  const Tensor here = counts.to(at::kCPU).contiguous();
  const Tensor low = lo.to(at::kCPU).contiguous(), high = hi.to(at::kCPU).contiguous();
  Tensor new_lo = at::empty(lo.sizes(), low.options()), new_hi = at::empty(hi.sizes(), high.options());
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

TORCH_LIBRARY_IMPL(qtoolkit, CPU, m) {
  m.impl("observe_histogram_", observe_histogram_);
  m.impl("search_range", search_range);
}

#ifdef QTOOLKIT_CUDA
TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) {
  m.impl("observe_histogram_", observe_histogram_);
  m.impl("search_range", search_range);
}
#endif

}  // namespace qtoolkit
