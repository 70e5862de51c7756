// Autograd of PReLU with a quantizer after it: saves the input; backward recomputes the rest.
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kPrelu = "prelu_fake_quant";

using PreluForward = Tensor(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, int64_t, int64_t,
                            double);
using PreluBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                         const optional<Tensor>&, int64_t, int64_t, double);

struct PreluFakeQuant : torch::autograd::Function<PreluFakeQuant> {
  template <class Below>
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& scale,
                        const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax, double grad_factor,
                        const Below& below) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, scale, zero_point.value_or(Tensor())});
    ctx->saved_data["qmin"] = qmin;
    ctx->saved_data["qmax"] = qmax;
    ctx->saved_data["grad_factor"] = grad_factor;
    return below();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<PreluBackward>("qtoolkit::prelu_fake_quant_backward");
    if (!grads[0].defined()) return variable_list(8);
    const variable_list saved = ctx->get_saved_variables();
    const optional<Tensor> zero_point = saved[3].defined() ? optional<Tensor>(saved[3]) : std::nullopt;
    auto& data = ctx->saved_data;
    auto [dx, dw, ds] = op.call(grads[0], saved[0], saved[1], saved[2], zero_point, data["qmin"].toInt(),
                                data["qmax"].toInt(), data["grad_factor"].toDouble());
    return {dx, dw, ds, {}, {}, {}, {}, {}};
  }
};

Tensor prelu_fake_quant(const Tensor& x, const Tensor& weight, const Tensor& scale, const optional<Tensor>& zero_point,
                        int64_t qmin, int64_t qmax, double grad_factor) {
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = find_op<PreluForward>("qtoolkit::prelu_fake_quant");
    return op.call(x, weight, scale, zero_point, qmin, qmax, grad_factor);
  };
  TORCH_CHECK_NOT_IMPLEMENTED(!is_differentiated(kPrelu, zero_point), kPrelu,
                              ": zero_point must not require grad, since the op has no gradient for it; pass "
                              "zero_point.detach(), or use torch.nn.functional.prelu and fake_quant.");
  bool differentiated = false;
  for (const Tensor* t : {&x, &weight, &scale}) differentiated = is_differentiated(kPrelu, *t) || differentiated;
  if (!differentiated) return below();
  return PreluFakeQuant::apply(x, weight, scale, zero_point, qmin, qmax, grad_factor, below);
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("prelu_fake_quant", prelu_fake_quant); }

}  // namespace qtoolkit
