// straight_through: a value with the gradient of another tensor.
#include <ATen/ops/clone.h>

#include "../checks.h"
#include "../registration.h"
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kStraightThrough = "straight_through";

Tensor detached_value(const Tensor& value, const Tensor& through) {
  check_float(kStraightThrough, "value", value);
  TORCH_CHECK_VALUE(through.sym_sizes() == value.sym_sizes(), kStraightThrough,
                    ": through must have the shape of value, ", value.sym_sizes(), ", got ", through.sym_sizes(), ".");
  TORCH_CHECK_TYPE(through.scalar_type() == value.scalar_type(), kStraightThrough,
                   ": through must have the dtype of value, ", value.scalar_type(), ", got ", through.scalar_type(),
                   ".");
  check_same_device(kStraightThrough, "through", through, value);
  return value.clone();
}

Tensor below_autograd(const Tensor& value, const Tensor& through) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&)>("qtoolkit::straight_through");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(value, through);
}

struct Straight : torch::autograd::Function<Straight> {
  static Tensor forward(AutogradContext* ctx, const Tensor& value, const Tensor& through) {
    ctx->set_materialize_grads(false);
    return below_autograd(value, through);
  }

  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& grads) { return {Tensor(), grads[0]}; }
};

Tensor straight_through_autograd(const Tensor& value, const Tensor& through) {
  return is_differentiated(kStraightThrough, through) ? Straight::apply(value.detach(), through)
                                                      : below_autograd(value, through);
}

}  // namespace

QT_REGISTER_BODIES(m) { m.impl("straight_through", detached_value); }

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("straight_through", straight_through_autograd); }

}  // namespace qtoolkit
