// positive_scale: the scale of a learned quantizer, from the parameter that is trained.
//
// The parameter is the ratio of the scale to the scale at the start. So a step of an optimizer with steps of a fixed
// size, such as Adam, changes a small and a large scale by the same factor. The gradient of the ratio is divided by
// start^2: then a step of SGD changes the scale as if the scale itself were the parameter,
//   start * lr * (dL/dscale * start / start^2) = lr * dL/dscale.
// The scale takes the ratio's magnitude, since a step of SGD may be larger than a scale. A scale that vanished instead
// (as with softplus or exp) would have no gradient to come back.
#include <ATen/ops/abs.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/copysign.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>

#include "autograd.h"
#include "checks.h"
#include "registration.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "positive_scale";
constexpr double kLeast = 1.0 / (1 << 24);  // of the start

Tensor positive_scale(const Tensor& start, const Tensor& ratio) {
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"start", start}, {"ratio", ratio}}) {
    TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble, kOp, ": ", name,
                     " must be float32 or float64, got ", t.scalar_type(), ".");
  }
  TORCH_CHECK_TYPE(ratio.scalar_type() == start.scalar_type(), kOp, ": ratio must have the dtype of start, ",
                   start.scalar_type(), ", got ", ratio.scalar_type(), ".");
  TORCH_CHECK_VALUE(ratio.device() == start.device(), kOp, ": ratio must be on the device of start, ", start.device(),
                    ", got ", ratio.device(), ".");
  TORCH_CHECK_VALUE(ratio.sym_numel() == start.sym_numel(), kOp, ": ratio must have as many elements as start, ",
                    start.sym_numel(), ", got ", ratio.sym_numel(), ".");
  return at::mul(start, at::clamp_min(at::abs(ratio), kLeast).view_symint(start.sym_sizes()));
}

Tensor below_autograd(const Tensor& start, const Tensor& ratio) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&)>("qtoolkit::positive_scale");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(start, ratio);
}

struct PositiveScale : torch::autograd::Function<PositiveScale> {
  static Tensor forward(AutogradContext* ctx, const Tensor& start, const Tensor& ratio) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({start, ratio});
    return below_autograd(start, ratio);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor()};
    const variable_list saved = ctx->get_saved_variables();
    // start with the sign of the ratio
    const Tensor signed_start = at::copysign(saved[0].view_symint(saved[1].sym_sizes()), saved[1]);
    return {Tensor(), at::div(grads[0].view_symint(saved[1].sym_sizes()), signed_start)};
  }
};

Tensor positive_scale_autograd(const Tensor& start, const Tensor& ratio) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_differentiated(kOp, start), kOp,
                              ": start must not require grad, since the op has no gradient for it; pass "
                              "start.detach().");
  return is_differentiated(kOp, ratio) ? PositiveScale::apply(start, ratio) : below_autograd(start, ratio);
}

}  // namespace

QT_REGISTER_BODIES(m) { m.impl("positive_scale", positive_scale); }

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("positive_scale", positive_scale_autograd); }

}  // namespace qtoolkit
