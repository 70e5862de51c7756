// Autograd of units: a node keeps the unit without its tensors, and of these what backward needs, as they say
// themselves (see unit/unit.h).
#include "../unit/unit.h"

#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

Tensor kept(const Tensor& t, Keeps keeps) {
  if (!t.defined() || keeps == Keeps::nothing) return {};
  return keeps == Keeps::copy && !t.requires_grad() ? t.clone() : t;
}

// A call that is recorded. The inputs of the node are those tensors that have a place among the gradients.
template <class U>
struct RecordedUnit {
  const c10::OperatorHandle& op;
  Stack* stack;  // takes the op's results
  U& unit;
  std::vector<int64_t> places;
};

template <class U>
struct UnitNode : torch::autograd::Function<UnitNode<U>> {
  static Tensor forward(AutogradContext* ctx, at::TensorList /*inputs*/, const RecordedUnit<U>& call) {
    variable_list saved;
    call.unit.tensors([&](const char*, auto& t, Role role) { saved.push_back(kept(tensor_in(t), role.keeps)); });
    call_below(call.op, call.stack);
    const Tensor y = torch::jit::peek(*call.stack, 0, U::kResults).toTensor();
    for (const IValue& result : call.stack->back().toListRef()) {
      saved.push_back(result.isTensor() ? result.toTensor() : Tensor());
    }
    U unit = call.unit;
    unit.note(call.unit, y);
    std::vector<IValue> numbers;
    const auto keep = [&](const char*, const auto& field) { numbers.push_back(fields::written(field)); };
    unit.numbers(keep);
    unit.backward_numbers(keep);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(saved);
    // As one tuple: compiled autograd takes no objects.
    ctx->saved_data["numbers"] = c10::ivalue::Tuple::create(std::move(numbers));
    ctx->saved_data["places"] = call.places;
    ctx->saved_data["x_format"] = format_of_gradient(call.unit.first());
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow((std::string("qtoolkit::") + U::kBackward).c_str(), "");
    const std::vector<int64_t> places = ctx->saved_data["places"].toIntVector();
    variable_list result(places.size() + 1);
    if (!grads[0].defined()) return result;
    const auto unit = c10::make_intrusive<U>();
    const auto numbers = ctx->saved_data["numbers"].toTuple();
    auto number = numbers->elements().begin();
    const auto read = [&](const char* name, auto& field) { fields::read({U::kClass, name}, *number++, field); };
    unit->numbers(read);
    unit->backward_numbers(read);
    const variable_list saved = ctx->get_saved_variables();
    auto next = saved.begin();
    const auto restore = [&](const char*, auto& t, Role) { put(t, *next++); };
    unit->tensors(restore);
    unit->results(restore);
    std::vector<bool> wanted(static_cast<size_t>(GradientOf::count));
    for (size_t i = 0; i < places.size(); ++i) wanted[places[i]] = ctx->needs_input_grad(i);
    Stack stack = {unit, grads[0], wanted};
    op.callBoxed(&stack);
    const c10::List<Tensor> found = stack[0].toTensorList();
    std::vector<size_t> place(wanted.size());  // of each gradient among those that were found
    for (size_t i = 1; i < wanted.size(); ++i) place[i] = place[i - 1] + wanted[i - 1];
    for (size_t i = 0; i < places.size(); ++i) {
      if (wanted[places[i]]) result[i] = found.get(place[places[i]]);
    }
    const auto format = ctx->saved_data["x_format"].toOptional<at::MemoryFormat>();
    if (wanted[0] && format.has_value()) result[0] = result[0].contiguous(*format);
    return result;
  }
};

template <class U>
void recorded_unit(const c10::OperatorHandle& op, Stack* stack) {
  const auto unit = torch::jit::peek(*stack, 0, 2).toCustomClass<U>();
  variable_list inputs;
  RecordedUnit<U> call = {op, stack, *unit, {}};
  bool any = false;
  unit->tensors([&](const char* name, auto& field, Role role) {
    const Tensor t = tensor_in(field);
    if (!t.defined()) return;
    const bool differentiated = is_differentiated(U::kOp, t);
    TORCH_CHECK_NOT_IMPLEMENTED(role.gradient != GradientOf::none || !differentiated, U::kOp, ": ", name,
                                " must not require grad, since the gradient of the input goes to x; pass ", name,
                                ".detach().");
    if (role.gradient == GradientOf::none) return;
    any |= differentiated;
    inputs.push_back(t);
    call.places.push_back(static_cast<int64_t>(role.gradient));
  });
  if (!any) return call_below(op, stack);
  const Tensor y = UnitNode<U>::apply(at::TensorList(inputs), call);
  torch::jit::peek(*stack, 0, U::kResults) = y;
}

// The backward ops have no gradients, so that none is lost in silence.
template <class U>
void unit_backward_without_gradient(const c10::OperatorHandle& op, Stack* stack) {
  const auto unit = torch::jit::peek(*stack, 0, 3).toCustomClass<U>();
  variable_list differentiated;
  const auto note = [&](const char*, auto& field, Role) {
    const Tensor t = tensor_in(field);
    if (t.defined() && is_differentiated(U::kOp, t)) differentiated.push_back(t);
  };
  unit->tensors(note);
  unit->results(note);
  const Tensor grad = torch::jit::peek(*stack, 1, 3).toTensor();
  if (is_differentiated(U::kOp, grad)) differentiated.push_back(grad);
  {
    const at::AutoDispatchBelowAutograd guard;
    op.callBoxed(stack);
  }
  if (differentiated.empty()) return;
  const std::string sentence =
      std::string(U::kOp) +
      ": double backward is not supported; compute the first gradient without create_graph=True, or prepare with "
      "training_arithmetic='float' and save='float'.";
  stack->back() = without_gradient(differentiated, sentence, stack->back().toTensorVector());
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) {
  using torch::CppFunction;
  m.impl("unit", CppFunction::makeFromBoxedFunction<&recorded_unit<BatchNormUnit>>());
  m.impl("unit_backward", CppFunction::makeFromBoxedFunction<&unit_backward_without_gradient<BatchNormUnit>>());
  m.impl("layer_fake_quant", CppFunction::makeFromBoxedFunction<&recorded_unit<LayerUnit>>());
  m.impl("layer_fake_quant_backward", CppFunction::makeFromBoxedFunction<&unit_backward_without_gradient<LayerUnit>>());
  m.impl("attention_fake_quant", CppFunction::makeFromBoxedFunction<&recorded_unit<AttentionUnit>>());
  m.impl("attention_fake_quant_backward",
         CppFunction::makeFromBoxedFunction<&unit_backward_without_gradient<AttentionUnit>>());
}

}  // namespace qtoolkit
