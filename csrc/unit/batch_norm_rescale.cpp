// The scales of a weight before a batch norm, as the factor changes by which folding it multiplies the weight.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <optional>
#include <utility>

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

// What holds the variance of a step: all of it, or nothing.
static void check_held(const Tensor& variance, const optional<Tensor>& held, const optional<Tensor>& taken,
                       const optional<Tensor>& clock) {
  const char* op = "batch_norm_rescale_";
  TORCH_CHECK_VALUE(held.has_value() == taken.has_value() && held.has_value() == clock.has_value(), op,
                    ": held, taken and clock are given together, or none of them is.");
  if (!held.has_value()) return;
  TORCH_CHECK_VALUE(held->sym_numel() == variance.sym_numel() && held->is_contiguous() &&
                        held->scalar_type() == variance.scalar_type() && held->device() == variance.device(),
                    op, ": held is changed in place, so it must be contiguous, of as many elements as variance, ",
                    variance.sym_numel(), ", of its dtype and on its device, ", variance.scalar_type(), " on ",
                    variance.device(), ", got ", held->sym_numel(), ", ", held->scalar_type(), " on ", held->device(),
                    ".");
  for (const auto& [name, t] : {std::pair("taken", &*taken), std::pair("clock", &*clock)}) {
    TORCH_CHECK_VALUE(t->sym_numel() == 1 && t->scalar_type() == at::kLong && t->device() == variance.device(), op,
                      ": ", name, " must have one element of dtype int64 on the device of variance, ",
                      variance.device(), ", got ", t->sym_numel(), ", ", t->scalar_type(), " on ", t->device(), ".");
  }
}

static Tensor batch_norm_rescale_(const optional<Tensor>& start, const optional<Tensor>& rate,
                                  const optional<Tensor>& known, const Tensor& variance, const optional<Tensor>& gamma,
                                  double eps, const optional<Tensor>& held, const optional<Tensor>& taken,
                                  const optional<Tensor>& clock) {
  TORCH_CHECK_VALUE(start.has_value() == known.has_value() && (start.has_value() || !rate.has_value()),
                    "batch_norm_rescale_: start needs known, and known and rate need start.");
  TORCH_CHECK_TYPE(variance.is_floating_point(), "batch_norm_rescale_: variance must have a floating-point dtype, got ",
                   variance.scalar_type(), ".");
  check_held(variance, held, taken, clock);
  if (start.has_value()) check_rescale(*start, rate, *known, variance, gamma, eps);
  const Tensor copy = held.has_value() ? at::empty_like(variance, at::MemoryFormat::Contiguous)
                                       : variance.clone(at::MemoryFormat::Contiguous);
  if (variance.is_meta()) return copy;
  const auto rescale = on(variance.device()).rescale;
  const Tensor present = variance.contiguous();
  HeldVariance h;
  if (held.has_value()) {
    h.channels = variance.numel();
    h.size = variance.element_size();
    h.variance = present.const_data_ptr();
    h.held = held->mutable_data_ptr();
    h.copy = copy.mutable_data_ptr();
    h.taken = taken->mutable_data_ptr<int64_t>();
    h.clock = clock->const_data_ptr<int64_t>();
  }
  if (!start.has_value() || variance.numel() == 0) {
    if (held.has_value()) rescale(h, {}, variance.device());
    return copy;
  }
  const at::ScalarType type = start->scalar_type();
  if (held.has_value() && type != variance.scalar_type()) {  // the factor is computed from a cast of the copy
    rescale(h, {}, variance.device());
    h = {};
  }
  const Tensor of_start = as_type(copy, type), present_of_start = as_type(present, type);
  const Tensor factor = gamma.has_value() ? as_type(*gamma, type).contiguous() : Tensor();
  FactorChange u;
  u.f64 = type == at::kDouble;
  u.scales = start->numel();
  u.channels = variance.numel();
  u.eps = eps;
  u.variance = of_start.const_data_ptr();
  u.present = present_of_start.const_data_ptr();
  u.gamma = factor.defined() ? factor.const_data_ptr() : nullptr;
  u.start = start->mutable_data_ptr();
  u.rate = rate.has_value() ? rate->mutable_data_ptr() : nullptr;
  u.known = known->mutable_data_ptr();
  rescale(h, u, variance.device());
  return copy;
}

QT_REGISTER_BODIES(m) { m.impl("batch_norm_rescale_", batch_norm_rescale_); }

}  // namespace qtoolkit
