// Autograd of quant_layer. A node keeps the arguments that the backward op shares with the op, found by their names.
#include <array>

#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

constexpr const char* kOp = "quant_layer";
// The backward's results are their gradients, in this order.
constexpr std::array<const char*, 6> kDifferentiable = {"x", "weight", "factor", "scale", "zero_point", "bias"};
constexpr std::array<const char*, 3> kConstant = {"codes", "x_scale", "x_zero_point"};

// The arguments of a call by name.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack)
      : schema_(op.schema()), values_(torch::jit::last(stack, op.schema().arguments().size())) {}

  // nullptr where the op has no such argument.
  const IValue* find(const std::string& name) const {
    const auto index = schema_.argumentIndexWithName(name);
    return index.has_value() ? &values_[*index] : nullptr;
  }

 private:
  const c10::FunctionSchema& schema_;
  at::ArrayRef<IValue> values_;
};

const c10::OperatorHandle& backward_handle() {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("qtoolkit::quant_layer_backward", "");
  return op;
}

// A scale that is no parameter may be a buffer, which an observer changes before backward.
Tensor kept(const Tensor& t, const std::string& name) {
  const bool is_grid = name.find("scale") != std::string::npos || name.find("zero_point") != std::string::npos;
  return is_grid && !t.requires_grad() ? t.clone() : t;
}

void call_below(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

// A call that is recorded. `edges` are the places in kDifferentiable of the tensors that were given.
struct Recorded {
  const c10::OperatorHandle& op;
  Stack* stack;
  std::vector<int64_t> edges;
};

struct QuantLayer : torch::autograd::Function<QuantLayer> {
  static Tensor forward(AutogradContext* ctx, at::TensorList inputs, const Recorded& call) {
    const Arguments given(call.op, *call.stack);
    auto& data = ctx->saved_data;
    variable_list tensors;
    for (const auto& argument : backward_handle().schema().arguments()) {
      const IValue* value = given.find(argument.name());
      if (value == nullptr) continue;
      if (value->isTensor()) {
        tensors.push_back(kept(value->toTensor(), argument.name()));
      } else {
        data[argument.name()] = *value;
      }
    }
    const Tensor& x = inputs[0];
    data["edges"] = call.edges;
    data["size"] = x.sym_sizes();
    data["x_dtype"] = x.scalar_type();
    data["x_format"] = x.suggest_memory_format();
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(tensors);
    call_below(call.op, call.stack);
    return torch::jit::pop(*call.stack).toTensor();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& data = ctx->saved_data;
    const std::vector<int64_t> edges = data["edges"].toIntVector();
    variable_list result(edges.size() + 1);
    if (!grads[0].defined()) return result;
    std::vector<bool> wanted(kDifferentiable.size());
    for (size_t i = 0; i < edges.size(); ++i) wanted[edges[i]] = ctx->needs_input_grad(i);

    const variable_list saved = ctx->get_saved_variables();
    auto tensor = saved.begin();
    Stack stack;
    for (const auto& argument : backward_handle().schema().arguments()) {
      const auto value = data.find(argument.name());
      if (argument.name() == "grad") {
        stack.emplace_back(grads[0]);
      } else if (argument.name() == "wanted") {
        stack.emplace_back(wanted);
      } else {
        stack.push_back(value != data.end() ? value->second : IValue(*tensor++));
      }
    }
    backward_handle().callBoxed(&stack);
    for (size_t i = 0; i < edges.size(); ++i) {
      if (wanted[edges[i]]) result[i] = stack[edges[i]].toTensor();
    }
    // The ops before the layer are fastest, and fewer, with gradients in the format of their results.
    if (wanted[0]) result[0] = result[0].contiguous(data["x_format"].toMemoryFormat());
    return result;
  }
};

void quant_layer(const c10::OperatorHandle& op, Stack* stack) {
  const Arguments given(op, *stack);
  for (const char* name : kConstant) {
    const IValue& value = *given.find(name);
    TORCH_CHECK_NOT_IMPLEMENTED(!value.isTensor() || !is_differentiated(kOp, value.toTensor()), kOp, ": ", name,
                                " must not require grad, since the gradient of the input is that of x; pass ", name,
                                ".detach().");
  }
  variable_list inputs;
  Recorded call = {op, stack, {}};
  bool any = false;
  for (size_t i = 0; i < kDifferentiable.size(); ++i) {
    const IValue& value = *given.find(kDifferentiable[i]);
    if (!value.isTensor()) continue;
    any |= is_differentiated(kOp, value.toTensor());
    inputs.push_back(value.toTensor());
    call.edges.push_back(static_cast<int64_t>(i));
  }
  if (!any) return call_below(op, stack);
  const Tensor y = QuantLayer::apply(at::TensorList(inputs), call);
  stack->emplace_back(y);
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) {
  m.impl("quant_layer", torch::CppFunction::makeFromBoxedFunction<&quant_layer>());
}

}  // namespace qtoolkit
