// Autograd: what each op saves for backward, and which backward op it calls. Each kernel calls its own op again below
// autograd, so that the op stays one node in compiled and exported graphs.
#include "autograd.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kFakeQuant = "fake_quant";

using FakeQuantForward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const optional<Tensor>&, int64_t,
                                                    int64_t, optional<int64_t>, int64_t, int64_t, double, bool);
using LearnedBackwardSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                                 const optional<Tensor>&, int64_t, int64_t,
                                                                 optional<int64_t>, int64_t, int64_t, double);

std::tuple<Tensor, Tensor> forward_below(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                         int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                         int64_t block_size, double grad_factor, bool mask) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<FakeQuantForward>("qtoolkit::fake_quant");
  return op.call(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, mask);
}

// Learned scale (and zero point): saves the input; backward recomputes the rest.
struct FakeQuantLearned : torch::autograd::Function<FakeQuantLearned> {
  template <class Below>
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                        int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group, int64_t block_size,
                        double grad_factor, const Below& below) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, scale, zero_point.value_or(Tensor())});
    ctx->saved_data["qmin"] = qmin;
    ctx->saved_data["qmax"] = qmax;
    ctx->saved_data["axis"] = axis;
    ctx->saved_data["group"] = group;
    ctx->saved_data["block_size"] = block_size;
    ctx->saved_data["grad_factor"] = grad_factor;
    return below();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<LearnedBackwardSchema>("qtoolkit::fake_quant_learned_backward");
    if (!grads[0].defined()) return variable_list(10);
    const variable_list saved = ctx->get_saved_variables();
    const optional<Tensor> zero_point = saved[2].defined() ? optional<Tensor>(saved[2]) : std::nullopt;
    auto& data = ctx->saved_data;
    auto [dx, ds, dz] = op.call(grads[0], saved[0], saved[1], zero_point, data["qmin"].toInt(), data["qmax"].toInt(),
                                data["axis"].toOptional<int64_t>(), data["group"].toInt(), data["block_size"].toInt(),
                                data["grad_factor"].toDouble());
    return {dx, ds, zero_point ? dz : Tensor(), {}, {}, {}, {}, {}, {}, {}};
  }
};

std::tuple<Tensor, Tensor> fake_quant(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                      int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                      int64_t block_size, double grad_factor, bool mask) {
  const auto below = [&](bool with_mask) {
    return forward_below(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, with_mask);
  };
  const bool in_x = is_differentiated(kFakeQuant, x), in_scale = is_differentiated(kFakeQuant, scale);
  const bool learned = is_differentiated(kFakeQuant, zero_point) || in_scale;
  if (!in_x && !learned) return below(mask);
  Tensor y, bits;
  if (learned) {
    y = FakeQuantLearned::apply(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, [&] {
      std::tie(y, bits) = below(mask);
      return y;
    });
  } else {
    y = StraightThrough::apply(x, [&] {
      std::tie(y, bits) = below(true);
      return Masked{y, bits, memory_order(y)};
    });
  }
  return {y, bits};
}

// Boxed kernels serve ops of any signature.
using torch::jit::Stack;

std::string_view name_of(const c10::OperatorHandle& op) {
  return std::string_view(op.operator_name().name).substr(sizeof("qtoolkit::") - 1);
}

// Ops whose first argument is x, whose last is `bool mask` and whose last result is the mask: the gradient in x is
// straight-through, other tensors have none.
void straight_through(const c10::OperatorHandle& op, Stack* stack) {
  const size_t inputs = op.schema().arguments().size(), outputs = op.schema().returns().size();
  const Tensor x = torch::jit::peek(*stack, 0, inputs).toTensor();
  const auto below = [&] {
    const at::AutoDispatchBelowAutograd guard;
    op.callBoxed(stack);
  };
  if (!is_differentiated(name_of(op), x)) return below();
  stack->back() = true;
  const Tensor y = StraightThrough::apply(x, [&] {
    below();
    const Tensor& y = torch::jit::peek(*stack, 0, outputs).toTensor();
    return Masked{y, stack->back().toTensor(), memory_order(y)};
  });
  torch::jit::peek(*stack, 0, outputs) = y;
}

// The same, and an error where the gradient of another tensor would be lost.
void straight_through_in_x_only(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 1; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    TORCH_CHECK_NOT_IMPLEMENTED(
        !value.isTensor() || !is_differentiated(name_of(op), value.toTensor()), name_of(op), ": ", arguments[i].name(),
        " must not require grad, since the op has no gradient for it; ", "pass ", arguments[i].name(), ".detach().");
  }
  straight_through(op, stack);
}

// The remedy for each op without a gradient.
struct WithoutGradient {
  std::string_view op, sentence;
};
constexpr std::array<WithoutGradient, 27> kWithoutGradient = {{
    {"function_fake_quant_backward",
     "function_fake_quant: double backward is not supported; compute the first gradient without create_graph=True, or "
     "use torch's function and fake_quant."},
    {"add_norm_fake_quant_backward",
     "add_norm_fake_quant: double backward is not supported; compute the first gradient without create_graph=True, or "
     "use torch's norm and fake_quant."},
    {"product_backward",
     "product: double backward is not supported; compute the first gradient without create_graph=True, or prepare with "
     "training_arithmetic='float' and save='float'."},
    {"fused_attention_backward",
     "fused_attention: double backward is not supported; compute the first gradient without create_graph=True, or "
     "prepare with training_arithmetic='float' and save='float'."},
    {"fake_quant_learned_backward",
     "fake_quant: double backward through a scale or zero_point that requires grad is not supported; pass "
     "scale.detach() "
     "and zero_point.detach(), or compute the first gradient without create_graph=True."},
    {"fake_quant_shaped_backward",
     "fake_quant_shaped: double backward is not supported; compute the first gradient without create_graph=True, or "
     "use fake_quant with a fixed scale."},
    {"prelu_fake_quant_backward",
     "prelu_fake_quant: double backward is not supported; compute the first gradient without create_graph=True, or use "
     "torch.nn.functional.prelu and fake_quant."},
    {"batch_norm_fake_quant_backward",
     "batch_norm_fake_quant: double backward is not supported; compute the first gradient without create_graph=True, "
     "or "
     "use torch.nn.functional.batch_norm and fake_quant."},
    {"quant_weight_backward",
     "quant_weight: double backward through a scale or zero_point that requires grad is not supported; pass "
     "scale.detach() and zero_point.detach(), or compute the first gradient without create_graph=True."},
    {"quant_layer_backward",
     "quant_layer: double backward is not supported; keep floats for backward: qtoolkit.prepare(..., save='float')."},
    {"max_pool_offsets_backward",
     "max_pool_offsets: double backward is not supported; compute the first gradient without create_graph=True, or use "
     "torch.nn.functional.max_pool2d."},
    {"dequantize", "dequantize: has no gradient; use fake_quant, which has gradients in x, scale and zero_point."},
    {"dequantize_int4",
     "dequantize_int4: has no gradient; use fake_quant, which has gradients in x, scale and zero_point."},
    {"requantize", "requantize: has no gradient; differentiate the prepared model, or pass x.detach()."},
    {"requantize_fixed_point",
     "requantize_fixed_point: has no gradient; differentiate the prepared model, or pass x.detach()."},
    {"softmax_codes", "softmax_codes: has no gradient; differentiate the prepared model, or pass x.detach()."},
    {"hard_swish_codes", "hard_swish_codes: has no gradient; differentiate the prepared model, or pass x.detach()."},
    {"average_codes", "average_codes: has no gradient; differentiate the prepared model, or pass x.detach()."},
    {"resize_linear_codes",
     "resize_linear_codes: has no gradient; differentiate the prepared model, or pass x.detach()."},
    {"add_codes", "add_codes: has no gradient; differentiate the prepared model, or pass x.detach()."},
    {"fake_quant_by_factor", "fake_quant_by_factor: has no gradient; use fake_quant, or pass x.detach()."},
    {"fake_quant_away", "fake_quant_away: has no gradient; use fake_quant, or pass x.detach()."},
    {"centred_codes", "centred_codes: has no gradient; use fake_quant, or pass x.detach()."},
    {"batch_norm_totals",
     "batch_norm_totals: has no gradient; batch_norm_fake_quant has the gradient of x. Pass x.detach()."},
    {"minmax", "minmax: has no gradient; use torch.amin and torch.amax, or pass x.detach()."},
    {"grid_of_range", "grid_of_range: has no gradient; pass lo.detach() and hi.detach()."},
    {"search_range", "search_range: has no gradient; pass lo.detach() and hi.detach()."},
}};

// The results require grad, and backward through them raises an error: the gradient is not lost in silence.
struct NoGradient : torch::autograd::Function<NoGradient> {
  static variable_list forward(AutogradContext* ctx, at::TensorList /*inputs*/, std::string_view sentence,
                               const variable_list& results) {
    ctx->saved_data["sentence"] = std::string(sentence);
    ctx->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& /*grads*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, ctx->saved_data["sentence"].toStringRef());
  }
};

void call_without_gradient(const c10::OperatorHandle& op, Stack* stack) {
  const size_t inputs = op.schema().arguments().size(), outputs = op.schema().returns().size();
  variable_list differentiated;
  for (const c10::IValue& value : torch::jit::last(*stack, inputs)) {
    if (value.isTensor() && is_differentiated(name_of(op), value.toTensor()))
      differentiated.push_back(value.toTensor());
  }
  {
    const at::AutoDispatchBelowAutograd guard;
    op.callBoxed(stack);
  }
  if (differentiated.empty()) return;
  const std::string_view name = name_of(op);
  const auto* refused = std::find_if(kWithoutGradient.begin(), kWithoutGradient.end(),
                                     [&](const WithoutGradient& each) { return each.op == name; });
  variable_list results;
  for (const c10::IValue& result : torch::jit::last(*stack, outputs)) results.push_back(result.toTensor());
  results = without_gradient(differentiated, refused->sentence, results);
  torch::jit::drop(*stack, outputs);
  for (const Tensor& result : results) stack->push_back(result);
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
  call_below(op, stack);
  for (const Tensor& t : written) torch::autograd::impl::bump_version(t);
}

// Linear in grad, so its derivative is the same op: double backward works.
Tensor fake_quant_backward(const Tensor& grad, const Tensor& mask, at::IntArrayRef order) {
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return backward_op(grad, mask, order);
  };
  if (!is_differentiated(kFakeQuant, grad)) return below();
  return StraightThrough::apply(grad, [&] { return Masked{below(), mask, order.vec()}; });
}

Tensor snapshot(const Tensor& x, bool changes) {
  TORCH_CHECK(
      !changes || torch::autograd::get_current_graph_task_id() == -1,
      "a compiled forward with batch norms that train runs in backward, where gradient checkpointing recomputes "
      "it: it would read running statistics that have moved since, and gradients would differ. Call "
      "torch.utils.checkpoint inside of the function that torch.compile compiles, freeze the batch norms with "
      "qtoolkit.freeze_batch_norm, or leave the checkpoint out.");
  return x.detach().clone();
}

Tensor snapshot_without_gradient(const Tensor& x, bool changes) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<Tensor(const Tensor&, bool)>("qtoolkit::snapshot");
  return op.call(x, changes);
}

}  // namespace

variable_list without_gradient(const variable_list& differentiated, std::string_view sentence,
                               const variable_list& results) {
  return NoGradient::apply(at::TensorList(differentiated), sentence, results);
}

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) {
  using torch::CppFunction;
  m.impl("fake_quant", fake_quant);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("snapshot", snapshot_without_gradient);
  for (const char* name : {"fake_quant_float", "fake_quant_block", "observe_fake_quant"}) {
    m.impl(name, CppFunction::makeFromBoxedFunction<&straight_through_in_x_only>());
  }
  // The ranges have no gradient, as in pytorch-quantization.
  for (const char* name : {"tensor_quant", "fake_tensor_quant", "fake_affine_tensor_quant", "scaled_e4m3"}) {
    m.impl(name, CppFunction::makeFromBoxedFunction<&straight_through>());
  }
  for (const WithoutGradient& each : kWithoutGradient) {
    m.impl(each.op.data(), CppFunction::makeFromBoxedFunction<&call_without_gradient>());
  }
}

TORCH_LIBRARY_IMPL(qtoolkit, CompositeExplicitAutograd, m) { m.impl("snapshot", snapshot); }

TORCH_LIBRARY_IMPL(qtoolkit, ADInplaceOrView, m) {
  for (const char* name : {"fake_quant_", "observe_fake_quant", "observe_minmax_", "observe_histogram_", "take_range_",
                           "batch_norm_track_", "batch_norm_rescale_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
  }
}

}  // namespace qtoolkit
