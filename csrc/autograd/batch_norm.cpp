// Autograd of batch norm in training: backward computes everything again from x and the statistics.
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kBatchNorm = "batch_norm_fake_quant";

using Optional = const optional<Tensor>&;
using ProcessGroup = optional<std::string_view>;
using BatchNormForward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, Optional, Optional, Optional,
                                                                    Optional, Optional, Optional, Optional, double,
                                                                    double, double, double, Optional, Optional, int64_t,
                                                                    int64_t, double, Optional, ProcessGroup, bool);
using BatchNormBackward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, Optional, Optional, Optional, Optional, Optional, Optional, Optional, const Tensor&,
    const Tensor&, double, double, double, double, Optional, Optional, int64_t, int64_t, double, bool, bool, Optional,
    ProcessGroup);

// The arguments that are no tensors with gradients.
struct Constants {
  Optional residual_codes, residual_scale, residual_zero_point, totals;
  double eps, low, high, slope;
  int64_t qmin, qmax;
  double grad_factor;
  ProcessGroup process_group;
};

optional<Tensor> optional_of(const Tensor& t) { return t.defined() ? optional<Tensor>(t) : std::nullopt; }

struct BatchNormFakeQuant : torch::autograd::Function<BatchNormFakeQuant> {
  // `below` returns y, mean and variance. The residual is kept as its codes, if they are given.
  template <class Below>
  static Tensor forward(AutogradContext* ctx, const Tensor& x, Optional weight, Optional bias, Optional divisor,
                        Optional residual, Optional scale, Optional zero_point, const Constants& constants,
                        bool residual_grad, bool scale_grad, const Below& below) {
    const auto [y, mean, variance] = below();
    const bool by_codes = constants.residual_codes.has_value();
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight.value_or(Tensor()), bias.value_or(Tensor()), divisor.value_or(Tensor()),
                            by_codes ? Tensor() : residual.value_or(Tensor()),
                            constants.residual_codes.value_or(Tensor()), constants.residual_scale.value_or(Tensor()),
                            constants.residual_zero_point.value_or(Tensor()), mean, variance, scale.value_or(Tensor()),
                            zero_point.value_or(Tensor()), constants.totals.value_or(Tensor())});
    auto& data = ctx->saved_data;
    data["numbers"] =
        std::vector<double>{constants.eps, constants.low, constants.high, constants.slope, constants.grad_factor};
    data["codes"] = std::vector<int64_t>{constants.qmin, constants.qmax};
    data["residual_grad"] = residual_grad;
    data["scale_grad"] = scale_grad;
    if (constants.process_group.has_value()) data["process_group"] = std::string(*constants.process_group);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<BatchNormBackward>("qtoolkit::batch_norm_fake_quant_backward");
    if (!grads[0].defined()) return variable_list(11);
    const variable_list saved = ctx->get_saved_variables();
    const auto of = [&](int i) { return optional_of(saved[i]); };
    auto& data = ctx->saved_data;
    const std::vector<double> numbers = data["numbers"].toDoubleVector();
    const std::vector<int64_t> codes = data["codes"].toIntVector();
    const bool residual_grad = data["residual_grad"].toBool(), scale_grad = data["scale_grad"].toBool();
    const auto named = data.find("process_group");
    const ProcessGroup process_group = named == data.end() ? std::nullopt : ProcessGroup(named->second.toStringView());
    const auto [dx, dweight, dbias, ddivisor, dresidual, ds, dz] =
        op.call(grads[0], saved[0], of(1), of(2), of(3), of(4), of(5), of(6), of(7), saved[8], saved[9], numbers[0],
                numbers[1], numbers[2], numbers[3], of(10), of(11), codes[0], codes[1], numbers[4], residual_grad,
                scale_grad, of(12), process_group);
    const auto if_given = [&](int i, const Tensor& gradient) { return saved[i].defined() ? gradient : Tensor(); };
    return {dx,
            if_given(1, dweight),
            if_given(2, dbias),
            if_given(3, ddivisor),
            residual_grad ? dresidual : Tensor(),
            ds.numel() > 0 ? ds : Tensor(),
            dz.numel() > 0 ? dz : Tensor(),
            {},
            {},
            {},
            {}};
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_fake_quant(
    const Tensor& x, Optional weight, Optional bias, Optional divisor, Optional residual, Optional residual_codes,
    Optional residual_scale, Optional residual_zero_point, double eps, double low, double high, double slope,
    Optional scale, Optional zero_point, int64_t qmin, int64_t qmax, double grad_factor, Optional totals,
    ProcessGroup process_group, bool packed) {
  static const auto op = find_op<BatchNormForward>("qtoolkit::batch_norm_fake_quant");
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(x, weight, bias, divisor, residual, residual_codes, residual_scale, residual_zero_point, eps, low,
                   high, slope, scale, zero_point, qmin, qmax, grad_factor, totals, process_group, packed);
  };
  bool differentiated = is_differentiated(kBatchNorm, x);
  for (const auto* t : {&weight, &bias, &divisor}) differentiated |= is_differentiated(kBatchNorm, *t);
  const bool residual_grad = is_differentiated(kBatchNorm, residual), in_scale = is_differentiated(kBatchNorm, scale);
  const bool scale_grad = is_differentiated(kBatchNorm, zero_point) || in_scale;
  if (!differentiated && !residual_grad && !scale_grad) return below();
  Tensor y, codes, mean, variance;
  const Constants constants = {residual_codes, residual_scale, residual_zero_point, totals,       eps, low, high, slope,
                               qmin,           qmax,           grad_factor,         process_group};
  y = BatchNormFakeQuant::apply(x, weight, bias, divisor, residual, scale, zero_point, constants, residual_grad,
                                scale_grad, [&] {
                                  std::tie(y, codes, mean, variance) = below();
                                  return std::make_tuple(y, mean, variance);
                                });
  return {y, codes, mean, variance};
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("batch_norm_fake_quant", batch_norm_fake_quant); }

}  // namespace qtoolkit
