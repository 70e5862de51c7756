// Shapes, dtypes and strides of every result, without data: what torch.compile and torch.export ask for. The checks are
// those of the real kernels; sizes may be symbolic.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

#include "layout.h"
#include "observer_checks.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using c10::SymInt;
using std::optional;

Tensor empty_mask(const Tensor& x, bool wanted) {
  const SymInt bytes = wanted ? (x.sym_numel() + 7) / 8 : SymInt(0);
  return at::empty_symint({bytes}, x.options().dtype(at::kByte));
}

std::tuple<Tensor, Tensor> fake_quant(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                      int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                      int64_t block_size, double /*grad_factor*/, bool with_mask) {
  check_storage("fake_quant", "x", x);
  check_range("fake_quant", qmin, qmax);
  check_grid("fake_quant", x, scale, zero_point, axis, group, block_size);
  return {empty_result(x, x.options(), group), empty_mask(x, with_mask)};
}

Tensor fake_quant_(Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                   optional<int64_t> axis, int64_t group, int64_t block_size, bool with_mask) {
  check_fake_quant_(x, scale, zero_point, qmin, qmax, axis, group, block_size);
  return empty_mask(x, with_mask);
}

std::tuple<Tensor, Tensor> observe_fake_quant(const Tensor& x, Tensor& lo, Tensor& hi, Tensor& scale,
                                              const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                              optional<double> momentum, bool /*pow2_scale*/, optional<int64_t> axis,
                                              int64_t group, int64_t block_size, bool with_mask) {
  check_observe_fake_quant(x, lo, hi, scale, zero_point, qmin, qmax, momentum, axis, group, block_size);
  return {empty_result(x, x.options(), group), empty_mask(x, with_mask)};
}

std::tuple<Tensor, Tensor> fake_quant_float(const Tensor& x, const Tensor& scale, std::string_view format,
                                            optional<int64_t> axis, int64_t group, int64_t block_size, bool with_mask) {
  check_storage("fake_quant_float", "x", x);
  check_format("fake_quant_float", format);
  check_grid("fake_quant_float", x, scale, std::nullopt, axis, group, block_size);
  return {empty_result(x, x.options(), group), empty_mask(x, with_mask)};
}

std::tuple<Tensor, Tensor, Tensor> fake_quant_block(const Tensor& x, std::string_view format, int64_t block_size,
                                                    std::string_view scale_format, const optional<Tensor>& tensor_scale,
                                                    bool with_mask) {
  check_storage("fake_quant_block", "x", x);
  check_small_float("fake_quant_block", format);
  check_blocks("fake_quant_block", x, block_size, scale_format, tensor_scale);
  auto sizes = x.sym_sizes().vec();
  sizes.back() = sizes.back() / block_size;
  const auto kind = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(sizes, x.options().dtype(kind)),
          empty_mask(x, with_mask)};
}

void check_legacy(const char* op, const Tensor& x, const Tensor& amax, int64_t num_bits) {
  check_storage(op, "x", x);
  check_bits(op, num_bits);
  check_amax(op, x, amax);
}

std::tuple<Tensor, Tensor, Tensor> tensor_quant(const Tensor& x, const Tensor& amax, int64_t num_bits,
                                                bool /*unsigned*/, bool /*narrow_range*/, bool with_mask) {
  check_legacy("tensor_quant", x, amax, num_bits);
  return {empty_result(x, x.options(), 1), at::empty_like(amax, x.options()), empty_mask(x, with_mask)};
}

std::tuple<Tensor, Tensor> fake_tensor_quant(const Tensor& x, const Tensor& amax, int64_t num_bits, bool /*unsigned*/,
                                             bool /*narrow_range*/, bool with_mask) {
  check_legacy("fake_tensor_quant", x, amax, num_bits);
  return {empty_result(x, x.options(), 1), empty_mask(x, with_mask)};
}

Tensor fake_quant_backward(const Tensor& grad, const Tensor& mask, at::IntArrayRef order) {
  check_storage("fake_quant_backward", "grad", grad);
  check_mask("fake_quant_backward", mask, grad, order);
  return empty_in_order(grad, order);
}

std::tuple<Tensor, Tensor, Tensor> fake_quant_learned_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                               const optional<Tensor>& zero_point, int64_t qmin,
                                                               int64_t qmax, optional<int64_t> axis, int64_t group,
                                                               int64_t block_size, double /*grad_factor*/) {
  constexpr const char* kOp = "fake_quant_learned_backward";
  check_storage(kOp, "x", x);
  check_storage(kOp, "grad", grad);
  check_range(kOp, qmin, qmax);
  check_same_shape(kOp, "grad", grad, x);
  check_grid(kOp, x, scale, zero_point, axis, group, block_size);
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {empty_result(x, x.options(), group), like(scale),
          zero_point.has_value() ? like(*zero_point) : at::empty({0}, scale.options())};
}

Tensor quantize(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                optional<int64_t> axis, int64_t group, int64_t block_size, c10::ScalarType dtype) {
  check_storage("quantize", "x", x);
  check_range("quantize", qmin, qmax);
  check_codes("quantize", dtype, qmin, qmax);
  check_grid("quantize", x, scale, zero_point, axis, group, block_size);
  return empty_result(x, x.options().dtype(dtype), group);
}

Tensor dequantize(const Tensor& codes, const Tensor& scale, const optional<Tensor>& zero_point, optional<int64_t> axis,
                  int64_t group, int64_t block_size, c10::ScalarType dtype) {
  check_code_input("dequantize", codes);
  check_storage_dtype("dequantize", dtype);
  check_grid("dequantize", codes, scale, zero_point, axis, group, block_size);
  return empty_result(codes, codes.options().dtype(dtype), group);
}

Tensor quantize_int4(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin,
                     int64_t qmax, optional<int64_t> axis, int64_t group, int64_t block_size) {
  check_storage("quantize_int4", "x", x);
  check_range("quantize_int4", qmin, qmax);
  check_int4("quantize_int4", qmin, qmax);
  check_grid("quantize_int4", x, scale, zero_point, axis, group, block_size);
  return at::empty_symint({(x.sym_numel() + 1) / 2}, x.options().dtype(at::kByte));
}

Tensor dequantize_int4(const Tensor& packed, c10::SymIntArrayRef size, const Tensor& scale,
                       const optional<Tensor>& zero_point, bool /*is_signed*/, optional<int64_t> axis, int64_t group,
                       int64_t block_size, c10::ScalarType dtype) {
  check_packed("dequantize_int4", packed, size);
  check_storage_dtype("dequantize_int4", dtype);
  const Tensor y = at::empty_symint(size, packed.options().dtype(dtype));
  check_grid("dequantize_int4", y, scale, zero_point, axis, group, block_size);
  return y;
}

std::tuple<Tensor, Tensor> minmax(const Tensor& x, optional<int64_t> axis, int64_t group, int64_t block_size) {
  check_storage("minmax", "x", x);
  const Axis a = check_axis("minmax", x, axis, group, block_size);
  check_not_empty("minmax", x);
  const auto shape = shape_of_channels(x, a);
  return {at::empty_symint(shape, x.options()), at::empty_symint(shape, x.options())};
}

void observe_minmax_(const Tensor& x, Tensor& lo, Tensor& hi, optional<double> momentum, optional<int64_t> axis,
                     int64_t group, int64_t block_size) {
  check_storage("observe_minmax_", "x", x);
  const Axis a = check_axis("observe_minmax_", x, axis, group, block_size);
  check_ranges("observe_minmax_", lo, hi, x, a);
  check_momentum("observe_minmax_", momentum);
}

std::tuple<Tensor, Tensor> grid_of_range(const Tensor& lo, const Tensor& hi, int64_t qmin, int64_t qmax, bool symmetric,
                                         bool /*pow2_scale*/) {
  check_grid_of_range(lo, hi, qmin, qmax, symmetric);
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {like(lo), symmetric ? at::empty({0}, lo.options()) : like(lo)};
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
  m.impl("fake_quant_", fake_quant_);
  m.impl("observe_fake_quant", observe_fake_quant);
  m.impl("fake_quant_float", fake_quant_float);
  m.impl("fake_quant_block", fake_quant_block);
  m.impl("tensor_quant", tensor_quant);
  m.impl("fake_tensor_quant", fake_tensor_quant);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("fake_quant_learned_backward", fake_quant_learned_backward);
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
  m.impl("quantize_int4", quantize_int4);
  m.impl("dequantize_int4", dequantize_int4);
  m.impl("minmax", minmax);
  m.impl("observe_minmax_", observe_minmax_);
  m.impl("grid_of_range", grid_of_range);
  m.impl("observe_histogram_", observe_histogram_);
  m.impl("search_range", search_range);
}

}  // namespace qtoolkit
