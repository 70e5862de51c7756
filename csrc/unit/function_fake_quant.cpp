// A function of one tensor with a quantizer behind it. Backward keeps the function's input alone and computes the
// function again, where its result and its input would be two copies; without a function it keeps one bit an element.
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>

#include "../checks.h"
#include "../layer/layer_ops.h"
#include "../registration.h"
#include "unit.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

Reader& operator>>(Reader& reader, Function& f) { return reader >> f.name >> f.shape >> f.weight >> f.bias >> f.eps; }

void check_function(const char* op, const Function& f) {
  for (const char* known : {"none", "relu", "gelu", "gelu_tanh", "silu", "layer_norm"}) {
    if (f.name == known) return;
  }
  TORCH_CHECK_VALUE(false, op, ": function must be 'none', 'relu', 'gelu', 'gelu_tanh', 'silu' or 'layer_norm', got '",
                    f.name, "'.");
}

// The function's value; of a layer norm with the mean and the inverse deviation of each row.
struct Value {
  Tensor result, mean, rstd;
};

Value value_of(const Function& f, const Tensor& x) {
  if (f.is_layer_norm()) {
    const auto [y, mean, rstd] = at::native_layer_norm_symint(x, f.shape, f.weight, f.bias, f.eps);
    return {y, mean, rstd};
  }
  if (f.name == "relu") return {at::relu(x), {}, {}};
  if (f.name == "silu") return {at::silu(x), {}, {}};
  return {f.is_none() ? x : at::gelu(x, f.approximate()), {}, {}};
}

void function_fake_quant(const c10::OperatorHandle& op, Stack* stack) {
  Tensor x;
  Function function;
  bool keeps_x;
  Quantized output;
  const size_t count = op.schema().arguments().size();
  Reader(torch::jit::last(*stack, count)) >> x >> function >> keeps_x >> output;
  torch::jit::drop(*stack, count);

  constexpr const char* kOp = "function_fake_quant";
  check_float(kOp, "x", x);
  check_function(kOp, function);
  TORCH_CHECK_VALUE(output.trained.start.has_value(), kOp, ": y_start must be given, got None.");
  TORCH_CHECK_VALUE(keeps_x || (function.is_none() && !output.learned), kOp,
                    ": keeps_x must be True where backward computes the function again or the grid is learned.");
  const WithoutAutocast guard;
  const Scales scales = make_scales({kOp, nullptr, nullptr, nullptr, &output.trained}, {});
  const Value value = value_of(function, x);
  const QuantizedTensor q = quantize_output(value.result, output, scales.y_scale);
  for (const Tensor& t : {q.y, q.codes, *scales.y_scale, q.mask, value.mean, value.rstd}) {
    stack->emplace_back(or_empty(t, x.options()));
  }
}

// The places of gradients in the results of function_fake_quant_backward.
enum { kX, kWeight, kBias, kYStart, kYRatio, kYZeroPoint, kCount };
using WantedOfFunction = std::array<bool, kCount>;
using GradientsOfFunction = std::array<Tensor, kCount>;

// From the gradient of the function's value, and the value itself, which is undefined where it was not computed again.
void through(const Function& f, const Tensor& grad, const Tensor& x, const Value& saved, const WantedOfFunction& wanted,
             GradientsOfFunction& gradients) {
  if (f.is_layer_norm()) {
    std::tie(gradients[kX], gradients[kWeight], gradients[kBias]) = at::native_layer_norm_backward_symint(
        grad, x, f.shape, saved.mean, saved.rstd, f.weight, f.bias,
        {wanted[kX], wanted[kWeight] && f.weight.has_value(), wanted[kBias] && f.bias.has_value()});
  } else if (f.name == "relu") {
    gradients[kX] = at::threshold_backward(grad, x, 0);
  } else if (f.name == "silu") {
    gradients[kX] = at::silu_backward(grad, x);
  } else {
    gradients[kX] = f.is_none() ? grad : at::gelu_backward(grad, x, f.approximate());
  }
}

void function_fake_quant_backward(const c10::OperatorHandle& op, Stack* stack) {
  Tensor grad, y_scale, mask;
  std::vector<int64_t> order;
  optional<Tensor> x;
  Function function;
  Quantized output;
  Value saved;
  WantedOfFunction wanted;
  const size_t count = op.schema().arguments().size();
  Reader(torch::jit::last(*stack, count)) >> grad >> order >> x >> function >> static_cast<Output&>(output) >>
      y_scale >> mask >> saved.mean >> saved.rstd >> wanted;
  torch::jit::drop(*stack, count);

  const UnitParts parts = {"function_fake_quant_backward", nullptr, nullptr, nullptr, &output.trained};
  check_parts(parts, 0);
  check_function(parts.op, function);
  TORCH_CHECK_VALUE(x.has_value() || function.is_none(), parts.op, ": x must be given for a function, got None.");
  output.learned = x.has_value() && mask.sym_numel() == 0;
  const WithoutAutocast guard;
  const optional<Tensor> z = output.learned ? optional<Tensor>(value_of(function, *x).result) : std::nullopt;
  const QuantizedGradients behind = quantize_output_backward(grad, z, mask, order, output, y_scale);
  GradientsOfFunction gradients;
  through(function, behind.z, x.value_or(grad), saved, wanted, gradients);
  const PartGradients of_parts =
      gradients_of_parts(parts, {{}, behind.scale, {}, {}, {}}, {false, false, wanted[kYStart], wanted[kYRatio]});
  gradients[kYStart] = of_parts.y_start;
  gradients[kYRatio] = of_parts.y_ratio;
  gradients[kYZeroPoint] = behind.zero_point;
  push_wanted(stack, gradients, wanted, grad.options());
}

}  // namespace

UnitOutput call_op(const c10::intrusive_ptr<FunctionUnit>& unit) {
  static const auto op = find_op<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, std::string_view, c10::SymIntArrayRef, const optional<Tensor>&, const optional<Tensor>&, double,
      bool, const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&, int64_t,
      int64_t, double, bool, bool, bool)>("qtoolkit::function_fake_quant");
  const Function& f = unit->function;
  const Quantized& q = unit->output;
  auto [y, codes, y_scale, mask, mean, rstd] =
      op.call(unit->x, f.name, f.shape, f.weight, f.bias, f.eps, /*keeps_x=*/q.learned || !f.is_none(), q.trained.start,
              q.trained.ratio, q.trained.rate, q.zero_point, q.qmin, q.qmax, q.grad_factor, q.trained.float16,
              q.learned, q.with_codes);
  return {y, codes, y_scale};
}

QT_REGISTER_BODIES(m) {
  m.impl("function_fake_quant", torch::CppFunction::makeFromBoxedFunction<&function_fake_quant>());
  m.impl("function_fake_quant_backward", torch::CppFunction::makeFromBoxedFunction<&function_fake_quant_backward>());
}

}  // namespace qtoolkit
