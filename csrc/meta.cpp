// Shapes, dtypes and strides of every result, without data: what torch.compile and torch.export ask for. The checks are
// those of the real kernels; sizes may be symbolic.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

#include "checks.h"
#include "layout.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using c10::SymInt;
using std::optional;

std::tuple<Tensor, Tensor> fake_quant(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                      int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                      double /*grad_factor*/, bool with_mask) {
  check_storage("fake_quant", "x", x);
  check_range("fake_quant", qmin, qmax);
  check_grid("fake_quant", x, scale, zero_point, axis, group);
  const SymInt bytes = with_mask ? (x.sym_numel() + 7) / 8 : SymInt(0);
  return {empty_result(x, x.options(), group), at::empty_symint({bytes}, x.options().dtype(at::kByte))};
}

Tensor fake_quant_backward(const Tensor& grad, const Tensor& mask, at::IntArrayRef order) {
  check_storage("fake_quant_backward", "grad", grad);
  check_mask("fake_quant_backward", mask, grad, order);
  return empty_in_order(grad, order);
}

std::tuple<Tensor, Tensor, Tensor> fake_quant_learned_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                               const optional<Tensor>& zero_point, int64_t qmin,
                                                               int64_t qmax, optional<int64_t> axis, int64_t group,
                                                               double /*grad_factor*/) {
  constexpr const char* kOp = "fake_quant_learned_backward";
  check_storage(kOp, "x", x);
  check_storage(kOp, "grad", grad);
  check_range(kOp, qmin, qmax);
  check_same_shape(kOp, "grad", grad, x);
  check_grid(kOp, x, scale, zero_point, axis, group);
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {empty_result(x, x.options(), group), like(scale),
          zero_point.has_value() ? like(*zero_point) : at::empty({0}, scale.options())};
}

Tensor quantize(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                optional<int64_t> axis, int64_t group, c10::ScalarType dtype) {
  check_storage("quantize", "x", x);
  check_range("quantize", qmin, qmax);
  check_codes("quantize", dtype, qmin, qmax);
  check_grid("quantize", x, scale, zero_point, axis, group);
  return empty_result(x, x.options().dtype(dtype), group);
}

Tensor dequantize(const Tensor& codes, const Tensor& scale, const optional<Tensor>& zero_point, optional<int64_t> axis,
                  int64_t group, c10::ScalarType dtype) {
  check_code_input("dequantize", codes);
  check_storage_dtype("dequantize", dtype);
  check_grid("dequantize", codes, scale, zero_point, axis, group);
  return empty_result(codes, codes.options().dtype(dtype), group);
}

std::tuple<Tensor, Tensor> minmax(const Tensor& x, optional<int64_t> axis, int64_t group) {
  check_storage("minmax", "x", x);
  const int64_t a = check_axis("minmax", x, axis, group);
  check_not_empty("minmax", x);
  const auto shape = a < 0 ? std::vector<SymInt>{} : std::vector<SymInt>{x.sym_size(a) * group};
  return {at::empty_symint(shape, x.options()), at::empty_symint(shape, x.options())};
}

void observe_minmax_(const Tensor& x, Tensor& lo, Tensor& hi, optional<double> momentum, optional<int64_t> axis,
                     int64_t group) {
  check_storage("observe_minmax_", "x", x);
  const int64_t a = check_axis("observe_minmax_", x, axis, group);
  check_ranges("observe_minmax_", lo, hi, x, a, group);
  check_momentum("observe_minmax_", momentum);
}

void observe_histogram_(const Tensor& x, Tensor& counts, Tensor& lo, Tensor& hi) {
  check_storage("observe_histogram_", "x", x);
  check_histogram("observe_histogram_", x, counts, lo, hi);
}

std::tuple<Tensor, Tensor> search_range(const Tensor& counts, const Tensor& lo, const Tensor& hi, int64_t qmin,
                                        int64_t qmax, std::string_view method, double percentile, bool /*symmetric*/) {
  check_search("search_range", counts, lo, hi, qmin, qmax, method, percentile);
  return {at::empty_symint(lo.sym_sizes(), lo.options()), at::empty_symint(hi.sym_sizes(), hi.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Meta, m) {
  m.impl("fake_quant", fake_quant);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("fake_quant_learned_backward", fake_quant_learned_backward);
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
  m.impl("minmax", minmax);
  m.impl("observe_minmax_", observe_minmax_);
  m.impl("observe_histogram_", observe_histogram_);
  m.impl("search_range", search_range);
}

}  // namespace qtoolkit
