// float16_scale: the scale of a quantizer as the target has it whose scales are float16 numbers. What is stored and
// trained stays in float32, so that steps below the distance of two float16 numbers add up.
#include "float16_scale.h"

#include <ATen/ops/empty_like.h>

#include "../checks.h"
#include "../launch.h"
#include "../registration.h"
#include "autograd.h"

namespace qtoolkit {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor float16_scales(const Tensor& scale) {
  constexpr const char* kOp = "float16_scale";
  TORCH_CHECK_TYPE(scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kDouble, kOp,
                   ": scale must be float32 or float64, got ", scale.scalar_type(), ".");
  const Tensor result = at::empty_like(scale, at::MemoryFormat::Contiguous);
  if (result.is_meta() || result.numel() == 0) return result;
  const Tensor from = scale.contiguous();
  UnitScales u;
  u.f64 = scale.scalar_type() == at::kDouble;
  u.weight = {from.numel(), from.const_data_ptr(), nullptr, result.mutable_data_ptr(), /*float16=*/true};
  on(scale.device()).unit_scales(u, scale.device());
  return result;
}

namespace {

Tensor below_autograd(const Tensor& scale) {
  static const auto op = find_op<Tensor(const Tensor&)>("qtoolkit::float16_scale");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(scale);
}

struct Float16Scale : torch::autograd::Function<Float16Scale> {
  static Tensor forward(AutogradContext* ctx, const Tensor& scale) {
    ctx->set_materialize_grads(false);
    return below_autograd(scale);
  }

  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& grads) { return {grads[0]}; }
};

Tensor float16_scale_autograd(const Tensor& scale) {
  return is_differentiated("float16_scale", scale) ? Float16Scale::apply(scale) : below_autograd(scale);
}

}  // namespace

QT_REGISTER_BODIES(m) { m.impl("float16_scale", float16_scales); }

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("float16_scale", float16_scale_autograd); }

}  // namespace qtoolkit
