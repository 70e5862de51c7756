// The scales of a weight behind a batch norm, as the factor changes by which folding it multiplies the weight.
#include <ATen/core/Tensor.h>

#include <optional>

#include "../checks.h"
#include "../launch.h"
#include "../registration.h"

namespace qtoolkit {

using at::Tensor;
using std::optional;

namespace {

void check_rescale(const Tensor& start, const optional<Tensor>& rate, const Tensor& known, const Tensor& variance,
                   const optional<Tensor>& gamma, double eps) {
  const char* op = "batch_norm_rescale_";
  TORCH_CHECK_VALUE(eps >= 0, op, ": eps must not be negative, got ", eps, ".");
  TORCH_CHECK_TYPE(start.scalar_type() == at::kFloat || start.scalar_type() == at::kDouble, op,
                   ": start must have dtype float32 or float64, got ", start.scalar_type(), ".");
  const auto check = [&](const char* name, const Tensor& t) {
    TORCH_CHECK_VALUE(t.sym_numel() == start.sym_numel() && t.device() == start.device() && t.is_contiguous() &&
                          t.scalar_type() == start.scalar_type(),
                      op, ": ", name, " is changed in place, so it must be contiguous, of as many elements as start, ",
                      start.sym_numel(), ", of its dtype and on its device, ", start.scalar_type(), " on ",
                      start.device(), ", got ", t.sym_numel(), ", ", t.scalar_type(), " on ", t.device(), ".");
  };
  check("start", start);
  if (rate.has_value()) check("rate", *rate);
  check("known", known);
  const auto check_channels = [&](const char* name, const Tensor& t) {
    TORCH_CHECK_TYPE(t.is_floating_point(), op, ": ", name, " must have a floating-point dtype, got ", t.scalar_type(),
                     ".");
    TORCH_CHECK_VALUE(t.sym_numel() == variance.sym_numel() && t.device() == start.device(), op, ": ", name,
                      " must have as many elements as variance, ", variance.sym_numel(), ", on the device of start, ",
                      start.device(), ", got ", t.sym_numel(), " on ", t.device(), ".");
  };
  check_channels("variance", variance);
  if (gamma.has_value()) check_channels("gamma", *gamma);
  TORCH_CHECK_VALUE(start.sym_numel() == 1 || start.sym_numel() == variance.sym_numel(), op,
                    ": start must have one element, or one for each element of variance, ", variance.sym_numel(),
                    ", got ", start.sym_numel(), ".");
}

}  // namespace

static Tensor batch_norm_rescale_(Tensor& start, const optional<Tensor>& rate, Tensor& known, const Tensor& variance,
                                  const optional<Tensor>& gamma, double eps) {
  check_rescale(start, rate, known, variance, gamma, eps);
  const Tensor copy = variance.clone(at::MemoryFormat::Contiguous);
  if (start.is_meta() || variance.numel() == 0) return copy;
  const Tensor of_start = as_type(copy, start.scalar_type());
  const Tensor factor = gamma.has_value() ? as_type(*gamma, start.scalar_type()).contiguous() : Tensor();
  FactorChange u;
  u.f64 = start.scalar_type() == at::kDouble;
  u.scales = start.numel();
  u.channels = variance.numel();
  u.eps = eps;
  u.variance = of_start.const_data_ptr();
  u.gamma = factor.defined() ? factor.const_data_ptr() : nullptr;
  u.start = start.mutable_data_ptr();
  u.rate = rate.has_value() ? rate->mutable_data_ptr() : nullptr;
  u.known = known.mutable_data_ptr();
  on(start.device()).take_factor(u, start.device());
  return copy;
}

QT_REGISTER_BODIES(m) { m.impl("batch_norm_rescale_", batch_norm_rescale_); }

}  // namespace qtoolkit
