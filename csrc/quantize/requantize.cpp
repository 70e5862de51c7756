// The bodies of the ops on codes that compute as runtimes do: checks, results, kernel arguments.
#include "../requantize.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "../batch_norm/norm_checks.h"
#include "../checks.h"
#include "../layout.h"
#include "../registration.h"
#include "elementwise.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

at::TensorOptions float32_like(const Tensor& x) { return x.options().dtype(at::kFloat); }

// A zero point that float32 represents, with room for codes around it.
void check_zero(const char* op, const char* name, int64_t value) {
  constexpr int64_t kMost = 1 << 23;
  TORCH_CHECK_VALUE(value >= -kMost && value <= kMost, op, ": ", name, " must lie in [", -kMost, ", ", kMost, "], got ",
                    value, ".");
}

Tensor requantize(const Tensor& x, const optional<Tensor>& factor, const Tensor& scale, int64_t qmin, int64_t qmax,
                  const optional<Tensor>& offset, int64_t zero_code, bool fused) {
  constexpr const char* kOp = "requantize";
  check_float(kOp, "x", x);
  check_code_range(kOp, qmin, qmax);
  check_zero(kOp, "zero_code", zero_code);
  check_one_element(kOp, "scale", scale, x);
  if (offset.has_value()) check_one_element(kOp, "offset", *offset, x);
  const Broadcast along = check_broadcast(kOp, factor.has_value() ? "factor" : "scale", x, factor.value_or(scale));
  const Tensor y = empty_result(x, float32_like(x), 1);
  if (y.is_meta()) return y;
  const Tensor in = as_type(x, at::kFloat), none = empty_mask(x, false);
  const Tensor beside = offset.has_value() ? in_arithmetic(*offset, false) : Tensor();
  KernelArgs args;
  args.bounds = representable(qmin, qmax, y);
  args.zero_code = static_cast<double>(zero_code);
  args.fused = fused;
  args.fractional = true;
  if (beside.defined()) args.shared = beside.const_data_ptr();
  if (factor.has_value()) {
    const Tensor scales = scale.reshape({1}).expand({along.values.numel()});
    run_elementwise(KernelId::requantize, args, y, none, in, scales, along.values, along.axis);
  } else {
    run_elementwise(KernelId::requantize_quotient, args, y, none, in, scale, std::nullopt, {});
  }
  return y;
}

Tensor requantize_fixed_point(const Tensor& x, const Tensor& factor, const Tensor& scale, int64_t qmin, int64_t qmax,
                              int64_t count, bool rounded_once) {
  constexpr const char* kOp = "requantize_fixed_point";
  check_float(kOp, "x", x);
  check_float(kOp, "factor", factor);
  check_code_range(kOp, qmin, qmax);
  check_one_element(kOp, "scale", scale, x);
  TORCH_CHECK_VALUE(count >= 1 && count < 1 << 20, kOp, ": count must lie in [1, 2^20), got ", count, ".");
  const Broadcast along = check_broadcast(kOp, "factor", x, factor);
  const Tensor y = empty_result(x, x.options().dtype(at::kDouble), 1);
  if (y.is_meta()) return y.to(at::kFloat);
  KernelArgs args;
  args.bounds = representable(qmin, qmax, y);
  args.fused = rounded_once;
  args.count = static_cast<double>(count);
  args.fractional = true;
  const Tensor scales = scale.to(at::kDouble).reshape({1}).expand({along.values.numel()});
  run_elementwise(KernelId::requantize_fixed_point, args, y, empty_mask(x, false), as_type(x, at::kDouble), scales,
                  along.values.to(at::kDouble), along.axis);
  return y.to(at::kFloat);
}

void check_broadcast_together(const char* op, const Tensor& x, const Tensor& other) {
  for (int64_t d = 1; d <= std::min(x.dim(), other.dim()); ++d) {
    const auto size = x.sym_size(-d), of_other = other.sym_size(-d);
    TORCH_CHECK_VALUE(size == of_other || size == 1 || of_other == 1, op, ": other must broadcast with x, of shape ",
                      x.sym_sizes(), ", got shape ", other.sym_sizes(), ".");
  }
}

Tensor add_codes(const Tensor& x, const Tensor& x_scale, int64_t x_zero_point, const Tensor& other,
                 const Tensor& other_scale, int64_t other_zero_point, const Tensor& scale, int64_t zero_point,
                 int64_t qmin, int64_t qmax, bool fixed_point, bool rounded_twice, bool subtract) {
  constexpr const char* kOp = "add_codes";
  TORCH_CHECK_VALUE(!(fixed_point && rounded_twice), kOp,
                    ": fixed_point and rounded_twice name two kernels, pass one of them.");
  TORCH_CHECK_VALUE(rounded_twice || !subtract, kOp, ": subtract needs rounded_twice=True, whose kernel subtracts.");
  check_float(kOp, "x", x);
  check_float(kOp, "other", other);
  check_same_device(kOp, "other", other, x);
  check_code_range(kOp, qmin, qmax);
  check_one_element(kOp, "x_scale", x_scale, x);
  check_one_element(kOp, "other_scale", other_scale, x);
  check_one_element(kOp, "scale", scale, x);
  check_zero(kOp, "x_zero_point", x_zero_point);
  check_zero(kOp, "other_zero_point", other_zero_point);
  check_zero(kOp, "zero_point", zero_point);
  check_broadcast_together(kOp, x, other);
  const auto sizes = at::infer_size_symdimvector(x.sym_sizes(), other.sym_sizes());
  const Tensor a = x.expand_symint(sizes), b = other.expand_symint(sizes);
  const Tensor& like = x.sym_sizes() == a.sym_sizes() ? x : b;
  const Tensor y = empty_result(like, float32_like(x), 1);
  if (y.is_meta()) return y;
  const auto one = [](const Tensor& t) { return in_arithmetic(t, false).reshape({1}); };
  const Tensor scales = at::cat({one(x_scale), one(other_scale), one(scale)});
  Tensor in = as_type(a, at::kFloat), other_in = as_type(b, at::kFloat);
  KernelArgs args;
  args.numel = y.numel();
  args.x = operand_of(in, y);
  args.grad = operand_of(other_in, y);
  args.y = y.mutable_data_ptr();
  args.bounds = representable(qmin, qmax, y);
  args.sum = {
      scales.const_data_ptr(),
      {static_cast<double>(x_zero_point), static_cast<double>(other_zero_point), static_cast<double>(zero_point)},
      fixed_point,
      rounded_twice,
      subtract};
  on(x.device()).launch(KernelId::add_codes, args, {}, x.device());
  return y;
}

Tensor fake_quant_by_factor(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin,
                            int64_t qmax) {
  constexpr const char* kOp = "fake_quant_by_factor";
  check_float(kOp, "x", x);
  check_code_range(kOp, qmin, qmax);
  check_one_grid(kOp, "", scale, zero_point, x);
  const Tensor y = empty_result(x, x.options(), 1);
  KernelArgs args;
  args.bounds = representable(qmin, qmax, x);
  run_elementwise(KernelId::fake_quant_by_factor, args, y, empty_mask(x, false), x, scale, zero_point, {});
  return y;
}

Tensor centred_codes(const Tensor& x, const Tensor& scale) {
  constexpr const char* kOp = "centred_codes";
  check_float(kOp, "x", x);
  check_one_element(kOp, "scale", scale, x);
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor y = empty_result(x, x.options().dtype(type), 1);
  if (y.is_meta()) return y;
  run_elementwise(KernelId::centred_codes, {}, y, empty_mask(x, false), as_type(x, type), scale, std::nullopt, {});
  return y;
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("requantize", requantize);
  m.impl("requantize_fixed_point", requantize_fixed_point);
  m.impl("add_codes", add_codes);
  m.impl("fake_quant_by_factor", fake_quant_by_factor);
  m.impl("centred_codes", centred_codes);
}

}  // namespace qtoolkit
