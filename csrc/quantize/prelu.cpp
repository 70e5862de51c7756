// The bodies of PReLU with a quantizer after it: checks, results, kernel arguments.
#include "../prelu.h"

#include <ATen/ops/empty.h>

#include <tuple>

#include "../batch_norm/norm_checks.h"
#include "../layout.h"
#include "../registration.h"
#include "elementwise.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

// The checked arguments of an op: the slopes are the kernel's zero points, and each has the one scale beside it.
struct Prelu {
  Axis axis;
  KernelArgs args;
  Tensor zero_point;  // which args point to

  Prelu(const char* op, const Tensor& x, const Tensor& weight, const Tensor& scale, const optional<Tensor>& given,
        int64_t qmin, int64_t qmax) {
    check_float(op, "x", x);
    check_code_range(op, qmin, qmax);
    check_one_grid(op, "", scale, given, x);
    TORCH_CHECK_VALUE(weight.dim() == 1, op, ": weight must have one dimension, got shape ", weight.sym_sizes(), ".");
    const bool one = weight.sym_numel() == 1;
    TORCH_CHECK_VALUE(one || x.dim() >= 2, op, ": x must have at least 2 dimensions, (batch, channels, ...), for a ",
                      "weight of ", weight.sym_numel(), " elements, got shape ", x.sym_sizes(), ".");
    axis = check_axis(op, x, one ? std::nullopt : optional<int64_t>(1), 1);
    check_per_channel(op, "weight", weight, x, axis);
    args.bounds = representable(qmin, qmax, x);
    args.fractional = true;
    if (x.is_meta() || !given.has_value()) return;
    zero_point = in_arithmetic(*given, x.scalar_type() == at::kDouble);
    args.shared = zero_point.const_data_ptr();
  }
};

Tensor beside(const Tensor& weight, const Tensor& scale) { return scale.reshape({1}).expand({weight.numel()}); }

Tensor prelu_fake_quant(const Tensor& x, const Tensor& weight, const Tensor& scale, const optional<Tensor>& zero_point,
                        int64_t qmin, int64_t qmax, double /*grad_factor*/) {
  const Prelu given("prelu_fake_quant", x, weight, scale, zero_point, qmin, qmax);
  const Tensor y = empty_result(x, x.options(), 1);
  if (y.is_meta()) return y;
  run_elementwise(KernelId::prelu_fake_quant, given.args, y, empty_mask(x, false), x, beside(weight, scale), weight,
                  given.axis);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> prelu_fake_quant_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                             const Tensor& scale, const optional<Tensor>& zero_point,
                                                             int64_t qmin, int64_t qmax, double grad_factor) {
  constexpr const char* kOp = "prelu_fake_quant_backward";
  const Prelu given(kOp, x, weight, scale, zero_point, qmin, qmax);
  check_float(kOp, "grad", grad);
  check_same_shape(kOp, "grad", grad, x);
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  const Tensor dx = empty_result(x, x.options(), 1), dw = like(weight), ds = like(scale);
  if (dx.is_meta()) return {dx, dw, ds};
  const LearnedSums sums(KernelId::prelu_fake_quant_backward, given.args, dx, grad, x, beside(weight, scale), weight,
                         given.axis);
  sums.write_gradient(1, 1, nullptr, dw);
  sums.write_total(0, grad_factor, &scale, ds);
  return {dx, dw, ds};
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("prelu_fake_quant", prelu_fake_quant);
  m.impl("prelu_fake_quant_backward", prelu_fake_quant_backward);
}

}  // namespace qtoolkit
