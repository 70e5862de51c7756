// Autograd of quant_layer and quant_weight. A node keeps the arguments that the backward op shares with the op, found
// by their names.
#include "autograd.h"
#include "layer_weight.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// An op with a backward op of its own.
struct Differentiated {
  const char *op, *backward;
  std::vector<const char*> differentiable;  // the backward's results are their gradients, in this order
  std::vector<const char*> constant;        // arguments that must not require grad
  // Replaces the arguments of the backward op by its results, by differentiable ops; false where there are none.
  bool (*differentiably)(Stack& stack);
};

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

// A scale that is no parameter may be a buffer, which an observer changes before backward.
Tensor kept(const Tensor& t, const std::string& name) {
  const bool is_grid = name.find("scale") != std::string::npos || name.find("zero_point") != std::string::npos;
  return is_grid && !t.requires_grad() ? t.clone() : t;
}

void call_below(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

// A call that is recorded. `edges` are the places in `differentiable` of the tensors that were given.
struct Recorded {
  const c10::OperatorHandle& op;
  Stack* stack;
  std::vector<int64_t> edges;
};

template <const Differentiated& kSpec>
const c10::OperatorHandle& backward_handle() {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(kSpec.backward, "");
  return op;
}

template <const Differentiated& kSpec>
struct Node : torch::autograd::Function<Node<kSpec>> {
  static Tensor forward(AutogradContext* ctx, at::TensorList inputs, const Recorded& call) {
    const Arguments given(call.op, *call.stack);
    auto& data = ctx->saved_data;
    variable_list tensors;
    for (const auto& argument : backward_handle<kSpec>().schema().arguments()) {
      const IValue* value = given.find(argument.name());
      if (value == nullptr) continue;
      if (value->isTensor()) {
        tensors.push_back(kept(value->toTensor(), argument.name()));
      } else {
        data[argument.name()] = *value;
      }
    }
    const Tensor& x = inputs[0];  // or the weight
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
    std::vector<bool> wanted(kSpec.differentiable.size());
    for (size_t i = 0; i < edges.size(); ++i) wanted[edges[i]] = ctx->needs_input_grad(i);

    const variable_list saved = ctx->get_saved_variables();
    auto tensor = saved.begin();
    Stack stack;
    for (const auto& argument : backward_handle<kSpec>().schema().arguments()) {
      const auto value = data.find(argument.name());
      if (argument.name() == "grad") {
        stack.emplace_back(grads[0]);
      } else if (argument.name() == "wanted") {
        stack.emplace_back(wanted);
      } else {
        stack.push_back(value != data.end() ? value->second : IValue(*tensor++));
      }
    }
    const bool again = at::GradMode::is_enabled() && kSpec.differentiably != nullptr;
    if (!again || !kSpec.differentiably(stack)) backward_handle<kSpec>().callBoxed(&stack);
    for (size_t i = 0; i < edges.size(); ++i) {
      if (wanted[edges[i]]) result[i] = stack[edges[i]].toTensor();
    }
    // The ops before are fastest, and fewer, with gradients in the format of their results.
    if (wanted[0]) result[0] = result[0].contiguous(data["x_format"].toMemoryFormat());
    return result;
  }
};

template <const Differentiated& kSpec>
void recorded(const c10::OperatorHandle& op, Stack* stack) {
  const Arguments given(op, *stack);
  for (const char* name : kSpec.constant) {
    const IValue& value = *given.find(name);
    TORCH_CHECK_NOT_IMPLEMENTED(!value.isTensor() || !is_differentiated(kSpec.op, value.toTensor()), kSpec.op, ": ",
                                name, " must not require grad, since the gradient of the input is that of x; pass ",
                                name, ".detach().");
  }
  variable_list inputs;
  Recorded call = {op, stack, {}};
  bool any = false;
  for (size_t i = 0; i < kSpec.differentiable.size(); ++i) {
    const IValue& value = *given.find(kSpec.differentiable[i]);
    if (!value.isTensor()) continue;
    any |= is_differentiated(kSpec.op, value.toTensor());
    inputs.push_back(value.toTensor());
    call.edges.push_back(static_cast<int64_t>(i));
  }
  if (!any) return call_below(op, stack);
  const Tensor y = Node<kSpec>::apply(at::TensorList(inputs), call);
  stack->emplace_back(y);
}

// The gradients of a weight whose scale and zero point have none.
bool weight_differentiably(Stack& stack) {
  Tensor grad;
  LayerWeight w;
  Geometry g;
  WantedOfWeight wanted;
  Reader(torch::jit::last(stack, stack.size())) >> grad >> w >> g.transposed >> g.groups >> wanted;
  if (wanted[2] || wanted[3]) return false;
  stack.clear();
  for (const Tensor& gradient : differentiable_weight_backward(grad, w, g, wanted)) stack.emplace_back(gradient);
  return true;
}

const Differentiated kQuantLayer = {"quant_layer",
                                    "qtoolkit::quant_layer_backward",
                                    {"x", "weight", "factor", "scale", "zero_point", "bias", "raw_scale"},
                                    {"codes", "x_scale", "x_zero_point", "raw"},
                                    nullptr};
const Differentiated kQuantWeight = {"quant_weight",
                                     "qtoolkit::quant_weight_backward",
                                     {"weight", "factor", "scale", "zero_point"},
                                     {},
                                     &weight_differentiably};

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) {
  using torch::CppFunction;
  m.impl("quant_layer", CppFunction::makeFromBoxedFunction<&recorded<kQuantLayer>>());
  m.impl("quant_weight", CppFunction::makeFromBoxedFunction<&recorded<kQuantWeight>>());
}

}  // namespace qtoolkit
