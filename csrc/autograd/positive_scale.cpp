// positive_scale: the scale of a learned quantizer, from the parameter that is trained.
//
// The parameter is the ratio of the scale to the scale at the start. So a step of an optimizer with steps of a fixed
// size, such as Adam, changes a small and a large scale by the same factor. The gradient of the ratio is divided by
// start^2: then a step of SGD changes the scale as if the scale itself were the parameter,
//   start * lr * (dL/dscale * start / start^2) = lr * dL/dscale.
// A rate multiplies it: with rate = u^2 the scale changes as if scale / u were the parameter.
// The scale takes the ratio's magnitude, since a step of SGD may be larger than a scale. A scale that vanished instead
// (as with softplus or exp) would have no gradient to come back.
#include "positive_scale.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/copysign.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>

#include "../checks.h"
#include "../registration.h"
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OptionalTensor = std::optional<Tensor>;

constexpr const char* kPositiveScale = "positive_scale";
constexpr double kLeast = 1.0 / (1 << 24);  // of the start

void check_like_start(const char* name, const Tensor& t, const Tensor& start) {
  TORCH_CHECK_TYPE(t.scalar_type() == start.scalar_type(), kPositiveScale, ": ", name,
                   " must have the dtype of start, ", start.scalar_type(), ", got ", t.scalar_type(), ".");
  TORCH_CHECK_VALUE(t.device() == start.device(), kPositiveScale, ": ", name, " must be on the device of start, ",
                    start.device(), ", got ", t.device(), ".");
  TORCH_CHECK_VALUE(t.sym_numel() == start.sym_numel(), kPositiveScale, ": ", name,
                    " must have as many elements as start, ", start.sym_numel(), ", got ", t.sym_numel(), ".");
}

}  // namespace

Tensor positive_scale(const Tensor& start, const Tensor& ratio, const OptionalTensor& rate) {
  TORCH_CHECK_TYPE(start.scalar_type() == at::kFloat || start.scalar_type() == at::kDouble, kPositiveScale,
                   ": start must be float32 or float64, got ", start.scalar_type(), ".");
  check_like_start("ratio", ratio, start);
  if (rate) check_like_start("rate", *rate, start);
  return at::mul(start, at::clamp_min(at::abs(ratio), kLeast).view_symint(start.sym_sizes()));
}

Tensor positive_scale_backward(const Tensor& grad, const Tensor& start, const Tensor& ratio,
                               const OptionalTensor& rate) {
  const c10::SymIntArrayRef shape = ratio.sym_sizes();
  const Tensor signed_start = at::copysign(start.view_symint(shape), ratio);
  const Tensor of_ratio = at::div(grad.view_symint(shape), signed_start);
  return rate ? at::mul(of_ratio, rate->view_symint(shape)) : of_ratio;
}

namespace {

Tensor below_autograd(const Tensor& start, const Tensor& ratio, const OptionalTensor& rate) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&)>("qtoolkit::positive_scale");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(start, ratio, rate);
}

struct PositiveScale : torch::autograd::Function<PositiveScale> {
  static Tensor forward(AutogradContext* ctx, const Tensor& start, const Tensor& ratio, const OptionalTensor& rate) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({start, ratio, rate.value_or(Tensor())});
    return below_autograd(start, ratio, rate);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor(), Tensor()};
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor rate = saved[2].defined() ? OptionalTensor(saved[2]) : std::nullopt;
    return {Tensor(), positive_scale_backward(grads[0], saved[0], saved[1], rate), Tensor()};
  }
};

void check_is_constant(const char* name, const Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_differentiated(kPositiveScale, t), kPositiveScale, ": ", name,
                              " must not require grad, since the op has no gradient for it; pass ", name, ".detach().");
}

Tensor positive_scale_autograd(const Tensor& start, const Tensor& ratio, const OptionalTensor& rate) {
  check_is_constant("start", start);
  if (rate) check_is_constant("rate", *rate);
  return is_differentiated(kPositiveScale, ratio) ? PositiveScale::apply(start, ratio, rate)
                                                  : below_autograd(start, ratio, rate);
}

}  // namespace

QT_REGISTER_BODIES(m) { m.impl("positive_scale", positive_scale); }

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("positive_scale", positive_scale_autograd); }

}  // namespace qtoolkit
