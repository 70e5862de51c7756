// The observer and the quantizer of a moving range in one op, for CPU and CUDA: the second read of x finds what the
// caches have kept of the first, and nothing waits for the device in between.
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "bodies.h"
#include "launch.h"
#include "layout.h"
#include "observer_checks.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

std::tuple<Tensor, Tensor> observe_fake_quant(const Tensor& x, Tensor& lo, Tensor& hi, Tensor& scale,
                                              const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                              optional<double> momentum, bool pow2_scale, optional<int64_t> axis,
                                              int64_t group, int64_t block_size, bool with_mask) {
  const Axis a = check_observe_fake_quant(x, lo, hi, scale, zero_point, qmin, qmax, momentum, axis, group, block_size);
  const GridTensors grid = {&scale, pointer(zero_point)};
  const CodeRange codes = {static_cast<double>(qmin), static_cast<double>(qmax), !zero_point.has_value(), pow2_scale};
  blend_ranges(lo, hi, ranges_of(x, a), momentum);
  grid_of_ranges(lo, hi, grid, codes);
  return fake_quant_onto(empty_result(x, x.options(), group), x, scale, zero_point, qmin, qmax, a, with_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, CPU, m) { m.impl("observe_fake_quant", observe_fake_quant); }

#ifdef QTOOLKIT_CUDA
TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) { m.impl("observe_fake_quant", observe_fake_quant); }
#endif

}  // namespace qtoolkit
