// Autograd: what each op saves for backward, and which backward op it calls. Each kernel calls its own op again below
// autograd, so that the op stays one node in compiled and exported graphs.
#include "autograd.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ForwardSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const optional<Tensor>&, int64_t,
                                                 int64_t, optional<int64_t>, int64_t, int64_t, double, bool);
using LearnedBackwardSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                                 const optional<Tensor>&, int64_t, int64_t,
                                                                 optional<int64_t>, int64_t, int64_t, double);

std::tuple<Tensor, Tensor> forward_below(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                         int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                         int64_t block_size, double grad_factor, bool mask) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op<ForwardSchema>("qtoolkit::fake_quant")
      .call(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, mask);
}

// Fixed scale: saves only the packed mask, one bit per element.
struct FakeQuant : torch::autograd::Function<FakeQuant> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& scale,
                               const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax, optional<int64_t> axis,
                               int64_t group, int64_t block_size, double grad_factor) {
    auto [y, mask] = forward_below(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, true);
    ctx->save_for_backward({mask});
    ctx->saved_data["order"] = memory_order(y);
    ctx->mark_non_differentiable({mask});
    return {y, mask};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor dx = backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["order"].toIntVector());
    return {dx, {}, {}, {}, {}, {}, {}, {}, {}};
  }
};

// Learned scale (and zero point): saves the input; backward recomputes the rest.
struct FakeQuantLearned : torch::autograd::Function<FakeQuantLearned> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& scale,
                               const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax, optional<int64_t> axis,
                               int64_t group, int64_t block_size, double grad_factor, bool with_mask) {
    auto [y, mask] = forward_below(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, with_mask);
    ctx->save_for_backward({x, scale, zero_point.value_or(Tensor())});
    ctx->saved_data["qmin"] = qmin;
    ctx->saved_data["qmax"] = qmax;
    ctx->saved_data["axis"] = axis;
    ctx->saved_data["group"] = group;
    ctx->saved_data["block_size"] = block_size;
    ctx->saved_data["grad_factor"] = grad_factor;
    ctx->mark_non_differentiable({mask});
    return {y, mask};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const optional<Tensor> zero_point = saved[2].defined() ? optional<Tensor>(saved[2]) : std::nullopt;
    auto& data = ctx->saved_data;
    auto [dx, ds, dz] = op<LearnedBackwardSchema>("qtoolkit::fake_quant_learned_backward")
                            .call(grads[0], saved[0], saved[1], zero_point, data["qmin"].toInt(), data["qmax"].toInt(),
                                  data["axis"].toOptional<int64_t>(), data["group"].toInt(), data["block_size"].toInt(),
                                  data["grad_factor"].toDouble());
    return {dx, ds, zero_point ? dz : Tensor(), {}, {}, {}, {}, {}, {}, {}};
  }
};

// Linear in grad, so its derivative is the same op: double backward works.
struct FakeQuantBackward : torch::autograd::Function<FakeQuantBackward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& mask, std::vector<int64_t> order) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({mask});
    ctx->saved_data["order"] = order;
    return backward_op(grad, mask, order);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["order"].toIntVector()), {}, {}};
  }
};

std::tuple<Tensor, Tensor> fake_quant(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                      int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                      int64_t block_size, double grad_factor, bool mask) {
  const bool grad_mode = at::GradMode::is_enabled();
  const bool learned = grad_mode && (scale.requires_grad() || (zero_point.has_value() && zero_point->requires_grad()));
  if (learned) {
    const auto out =
        FakeQuantLearned::apply(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, mask);
    return {out[0], out[1]};
  }
  if (grad_mode && x.requires_grad()) {
    const auto out = FakeQuant::apply(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor);
    return {out[0], out[1]};
  }
  return forward_below(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, mask);
}

// Boxed kernels serve ops of any signature.
using torch::jit::Stack;

// Ops whose first argument is x, whose last is `bool mask` and whose last result is the mask: the gradient in x is
// straight-through, other tensors have none.
void straight_through(const c10::OperatorHandle& op, Stack* stack) {
  const size_t inputs = op.schema().arguments().size(), outputs = op.schema().returns().size();
  const Tensor x = torch::jit::peek(*stack, 0, inputs).toTensor();
  const auto below = [&] {
    const at::AutoDispatchBelowAutograd guard;
    op.callBoxed(stack);
  };
  if (!is_differentiated(x)) return below();
  stack->back() = true;
  const variable_list results = StraightThrough::apply(x, [&] {
    below();
    variable_list results;
    for (const c10::IValue& result : torch::jit::last(*stack, outputs)) results.push_back(result.toTensor());
    return results;
  });
  torch::jit::drop(*stack, outputs);
  for (const Tensor& result : results) stack->push_back(result);
}

// The same, and an error where the gradient of another tensor would be lost.
void straight_through_in_x_only(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 1; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    TORCH_CHECK_NOT_IMPLEMENTED(!value.isTensor() || !is_differentiated(value.toTensor()),
                                op.schema().operator_name().name.substr(sizeof("qtoolkit::") - 1), ": ",
                                arguments[i].name(), " must not require grad, since the op has no gradient for it; ",
                                "pass ", arguments[i].name(), ".detach().");
  }
  straight_through(op, stack);
}

// Between autograd and the devices' kernels: the tensors that an op writes to count as changed.
void bump_versions(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  variable_list written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite() && value.isTensor()) written.push_back(value.toTensor());
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  for (const Tensor& t : written) torch::autograd::impl::bump_version(t);
}

Tensor fake_quant_backward(const Tensor& grad, const Tensor& mask, at::IntArrayRef order) {
  return FakeQuantBackward::apply(grad, mask, order.vec());
}

Tensor snapshot(const Tensor& x) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op<Tensor(const Tensor&)>("qtoolkit::snapshot").call(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) {
  using torch::CppFunction;
  m.impl("fake_quant", fake_quant);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("snapshot", snapshot);
  for (const char* name : {"fake_quant_float", "fake_quant_block", "observe_fake_quant"}) {
    m.impl(name, CppFunction::makeFromBoxedFunction<&straight_through_in_x_only>());
  }
  for (const char* name : {"tensor_quant", "fake_tensor_quant"}) {  // amax has no gradient, as in pytorch-quantization
    m.impl(name, CppFunction::makeFromBoxedFunction<&straight_through>());
  }
  // To differentiate these is an error.
  for (const char* name :
       {"fake_quant_learned_backward", "dequantize", "dequantize_int4", "minmax", "grid_of_range", "search_range"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(qtoolkit, ADInplaceOrView, m) {
  for (const char* name : {"fake_quant_", "observe_fake_quant", "observe_minmax_", "observe_histogram_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
  }
}

}  // namespace qtoolkit
