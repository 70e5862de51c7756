// Autograd of PReLU with a quantizer behind it: saves the input; backward recomputes the rest.
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "prelu_fake_quant";

using ForwardSchema = Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, double);
using BackwardSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                          int64_t, int64_t, double);

struct PreluFakeQuant : torch::autograd::Function<PreluFakeQuant> {
  template <class Below>
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& scale, int64_t qmin,
                        int64_t qmax, double grad_factor, const Below& below) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, scale});
    ctx->saved_data["qmin"] = qmin;
    ctx->saved_data["qmax"] = qmax;
    ctx->saved_data["grad_factor"] = grad_factor;
    return below();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<BackwardSchema>("qtoolkit::prelu_fake_quant_backward");
    if (!grads[0].defined()) return variable_list(7);
    const variable_list saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    auto [dx, dw, ds] = op.call(grads[0], saved[0], saved[1], saved[2], data["qmin"].toInt(), data["qmax"].toInt(),
                                data["grad_factor"].toDouble());
    return {dx, dw, ds, {}, {}, {}, {}};
  }
};

Tensor prelu_fake_quant(const Tensor& x, const Tensor& weight, const Tensor& scale, int64_t qmin, int64_t qmax,
                        double grad_factor) {
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = find_op<ForwardSchema>("qtoolkit::prelu_fake_quant");
    return op.call(x, weight, scale, qmin, qmax, grad_factor);
  };
  bool differentiated = false;
  for (const Tensor* t : {&x, &weight, &scale}) differentiated = is_differentiated(kOp, *t) || differentiated;
  if (!differentiated) return below();
  return PreluFakeQuant::apply(x, weight, scale, qmin, qmax, grad_factor, below);
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("prelu_fake_quant", prelu_fake_quant); }

}  // namespace qtoolkit
