// Autograd of quant_layer, quant_weight, batch_norm_fake_quant, function_fake_quant and the products of activations. A
// node keeps the arguments that the backward op shares with the op, found by their names: once, since a small layer
// takes less time than that.
#include <algorithm>
#include <unordered_map>

#include "../layer/layer_weight.h"
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Backward keeps an argument only if another one is given (or True), or only if it is not.
struct Condition {
  const char *argument, *other;
  bool given;
};

// An op with a backward op of its own.
struct Differentiated {
  const char *op, *backward;
  std::vector<const char*> differentiable;  // the backward's results are their gradients, in this order
  std::vector<const char*> constant;        // arguments that must not require grad
  // Replaces the arguments of the backward op by its results, by differentiable ops; false where there are none.
  bool (*differentiably)(Stack& stack) = nullptr;
  std::vector<Condition> conditions = {};
  // Scales and zero points that nobody changes before backward; others without gradients are copied.
  std::vector<const char*> unchanged = {};
  // Whether the last result is the sum of x and residual, with a gradient of its own, grad_sum. The results of
  // backward have its gradient at the place of x, and at the place of residual the same in the type of the addend with
  // another.
  bool adds = false;
};

// Where an argument of a backward op comes from.
struct Source {
  enum { grad, grad_sum, wanted, size, x_dtype, narrow, order, tensor, number, result, other } from;
  std::string name;
  size_t index = 0;  // of a tensor or another argument among the op's, of a result among its results
  bool copied = false;
  std::optional<size_t> condition = std::nullopt;  // the argument on which it depends whether this one is kept:
  bool given = false;                              // if that is given, or if not
};

// What the schemas of an op and of its backward op say.
class Plan {
 public:
  explicit Plan(const Differentiated& spec) : backward(handle(spec.backward)) {
    const c10::FunctionSchema& schema = handle((std::string("qtoolkit::") + spec.op).c_str()).schema();
    const auto place = [&](const std::string& name) {
      return static_cast<size_t>(schema.argumentIndexWithName(name).value());
    };
    count = schema.arguments().size();
    for (const char* name : spec.differentiable) differentiable.push_back(place(name));
    for (const char* name : spec.constant) constant.push_back(place(name));
    std::unordered_map<std::string, size_t> results;
    for (const auto& result : schema.returns()) results.emplace(result.name(), results.size());
    for (const auto& argument : backward.schema().arguments()) {
      const std::string& name = argument.name();
      // By the name: a scale or a zero point must have this in its name, or `kept` does not copy it.
      const bool is_grid = name.find("scale") != std::string::npos || name.find("zero_point") != std::string::npos;
      if (name == "grad") {
        sources.push_back({Source::grad, name});
      } else if (name == "grad_sum") {
        sources.push_back({Source::grad_sum, name});
      } else if (name == "narrow") {
        sources.push_back({Source::narrow, name});
      } else if (name == "wanted") {
        sources.push_back({Source::wanted, name});
      } else if (name == "size") {
        sources.push_back({Source::size, name});
      } else if (name == "x_dtype") {
        sources.push_back({Source::x_dtype, name});
      } else if (name == "order") {
        sources.push_back({Source::order, name});
      } else if (const auto found = results.find(name); found != results.end()) {
        sources.push_back({Source::result, name, found->second});
      } else {
        const bool is_tensor = argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
        const auto& same = spec.unchanged;
        const bool copies = is_grid && std::find(same.begin(), same.end(), name) == same.end();
        // Compiled autograd takes lists as entries of their own alone.
        const bool is_list = argument.type()->kind() == c10::TypeKind::ListType;
        const auto from = is_tensor ? Source::tensor : is_list ? Source::other : Source::number;
        sources.push_back({from, name, place(name), copies});
        for (const Condition& condition : spec.conditions) {
          if (name != condition.argument) continue;
          sources.back().condition = place(condition.other);
          sources.back().given = condition.given;
        }
      }
    }
  }

  c10::OperatorHandle backward;
  size_t count;                                  // of the op's arguments
  std::vector<size_t> differentiable, constant;  // places among them
  std::vector<Source> sources;                   // of the arguments of the backward op

 private:
  static c10::OperatorHandle handle(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  }
};

template <const Differentiated& kSpec>
const Plan& plan() {
  static const Plan found(kSpec);
  return found;
}

// A scale that is no parameter may be a buffer, which an observer changes before backward.
Tensor kept(const IValue& value, bool copied) {
  if (!value.isTensor()) return {};
  const Tensor& t = value.toTensor();
  return copied && !t.requires_grad() ? t.clone() : t;
}

bool is_given(const IValue& value) { return value.isBool() ? value.toBool() : value.isTensor(); }

// A call that is recorded. `edges` are the places in `differentiable` of the tensors that were given, `others` the
// results after the first one.
struct Recorded {
  const c10::OperatorHandle& op;
  Stack* stack;
  std::vector<int64_t> edges;
  std::vector<IValue>& others;
};

// The types of a sum's addends.
struct Addends {
  at::ScalarType x, residual;

  at::ScalarType sum() const { return c10::promoteTypes(x, residual); }
  std::optional<at::ScalarType> narrow() const {
    return x != sum() ? std::optional(x) : residual != sum() ? std::optional(residual) : std::nullopt;
  }
};

// The gradient of an addend from that of the sum, or from the same in the narrow type, if there is one.
Tensor gradient_of_addend(at::ScalarType type, const Tensor& of_sum, const Tensor& narrow) {
  return narrow.defined() && narrow.numel() == of_sum.numel() && narrow.scalar_type() == type ? narrow
                                                                                              : as_type(of_sum, type);
}

template <const Differentiated& kSpec>
struct Node : torch::autograd::Function<Node<kSpec>> {
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const Recorded& call) {
    const auto given = torch::jit::last(*call.stack, plan<kSpec>().count);
    const Tensor& x = inputs[0];  // or the weight
    variable_list tensors;
    auto& data = ctx->saved_data;
    std::vector<IValue> numbers;  // in one entry: some twenty of them take microseconds of a short step
    for (const Source& source : plan<kSpec>().sources) {
      if (source.from == Source::tensor) {
        const bool keeps = !source.condition.has_value() || is_given(given[*source.condition]) == source.given;
        tensors.push_back(keeps ? kept(given[source.index], source.copied) : Tensor());
      }
      if (source.from == Source::result) tensors.emplace_back();
      if (source.from == Source::number) numbers.push_back(given[source.index]);
      if (source.from == Source::other) data[source.name] = given[source.index];
      if (source.from == Source::size) data[source.name] = x.sym_sizes();
      if (source.from == Source::x_dtype) data[source.name] = x.scalar_type();
    }
    if (kSpec.adds)
      data["addends"] = std::vector<int64_t>{int64_t(x.scalar_type()), int64_t(inputs.back().scalar_type())};
    data["numbers"] = c10::ivalue::Tuple::create(std::move(numbers));
    data["edges"] = call.edges;
    data["x_format"] = format_of_gradient(x);
    ctx->set_materialize_grads(false);
    call_below(call.op, call.stack);
    const size_t count = call.op.schema().returns().size();
    const auto results = torch::jit::last(*call.stack, count);
    size_t place = 0;
    for (const Source& source : plan<kSpec>().sources) {
      if (source.from == Source::result) tensors[place] = results[source.index].toTensor();
      if (source.from == Source::order) data[source.name] = memory_order(results[0].toTensor());
      place += source.from == Source::result || source.from == Source::tensor;
    }
    ctx->save_for_backward(tensors);
    variable_list ys = {results[0].toTensor()};
    if (kSpec.adds) {
      ys.push_back(results[count - 1].toTensor());
      if (!x.requires_grad() && !inputs.back().requires_grad()) ctx->mark_non_differentiable({ys.back()});
    }
    call.others.assign(results.begin() + 1, results.end() - (kSpec.adds ? 1 : 0));
    torch::jit::drop(*call.stack, count);
    return ys;
  }

  static Addends addends(AutogradContext* ctx) {
    const std::vector<int64_t> types = ctx->saved_data["addends"].toIntVector();
    return {at::ScalarType(types[0]), at::ScalarType(types[1])};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& data = ctx->saved_data;
    const std::vector<int64_t> edges = data["edges"].toIntVector();
    variable_list result(edges.size() + 1);
    const Tensor of_sum = kSpec.adds ? grads[1] : Tensor();
    if (!grads[0].defined()) {  // nobody takes the norm
      if (of_sum.defined()) to_addends(ctx, of_sum, {}, result);
      return result;
    }
    std::vector<bool> wanted(kSpec.differentiable.size());
    for (size_t i = 0; i < edges.size(); ++i) wanted[edges[i]] = ctx->needs_input_grad(i);

    const variable_list saved = ctx->get_saved_variables();
    auto tensor = saved.begin();
    const auto numbers = data["numbers"].toTuple();
    auto number = numbers->elements().begin();
    Stack stack;
    stack.reserve(plan<kSpec>().sources.size());
    for (const Source& source : plan<kSpec>().sources) {
      if (source.from == Source::grad) {
        stack.emplace_back(grads[0]);
      } else if (source.from == Source::grad_sum) {
        stack.push_back(of_sum.defined() ? IValue(of_sum) : IValue());
      } else if (source.from == Source::narrow) {
        const auto narrow = addends(ctx).narrow();
        stack.push_back(narrow.has_value() ? IValue(*narrow) : IValue());
      } else if (source.from == Source::wanted) {
        stack.emplace_back(wanted);
      } else if (source.from == Source::tensor || source.from == Source::result) {
        stack.push_back(tensor->defined() ? IValue(*tensor) : IValue());
        ++tensor;
      } else if (source.from == Source::number) {
        stack.push_back(*number++);
      } else {
        stack.push_back(data[source.name]);
      }
    }
    const bool again = at::GradMode::is_enabled() && kSpec.differentiably != nullptr;
    if (!again || !kSpec.differentiably(stack)) plan<kSpec>().backward.callBoxed(&stack);
    for (size_t i = 0; i < edges.size(); ++i) {
      if (wanted[edges[i]]) result[i] = stack[edges[i]].toTensor();
    }
    if (kSpec.adds) to_addends(ctx, stack.front().toTensor(), stack.back().toTensor(), result);
    const auto format = data["x_format"].toOptional<at::MemoryFormat>();
    if (wanted[0] && format.has_value()) result[0] = result[0].contiguous(*format);
    return result;
  }

  // Gives x and residual, the first and the last input, the gradient of their sum.
  static void to_addends(AutogradContext* ctx, const Tensor& of_sum, const Tensor& narrow, variable_list& result) {
    const Addends types = addends(ctx);
    const size_t last = result.size() - 2;  // behind it is none: of the call
    if (ctx->needs_input_grad(0)) result[0] = gradient_of_addend(types.x, of_sum, narrow);
    if (ctx->needs_input_grad(last)) result[last] = gradient_of_addend(types.residual, of_sum, narrow);
  }
};

template <const Differentiated& kSpec>
void recorded(const c10::OperatorHandle& op, Stack* stack) {
  const auto given = torch::jit::last(*stack, plan<kSpec>().count);
  for (size_t i = 0; i < kSpec.constant.size(); ++i) {
    const IValue& value = given[plan<kSpec>().constant[i]];
    TORCH_CHECK_NOT_IMPLEMENTED(
        !value.isTensor() || !is_differentiated(kSpec.op, value.toTensor()), kSpec.op, ": ", kSpec.constant[i],
        " must not require grad, since the gradient of the input goes to x; pass ", kSpec.constant[i], ".detach().");
  }
  variable_list inputs;
  std::vector<IValue> others;
  Recorded call = {op, stack, {}, others};
  bool any = false;
  for (size_t i = 0; i < kSpec.differentiable.size(); ++i) {
    const IValue& value = given[plan<kSpec>().differentiable[i]];
    if (!value.isTensor()) continue;
    any |= is_differentiated(kSpec.op, value.toTensor());
    inputs.push_back(value.toTensor());
    call.edges.push_back(static_cast<int64_t>(i));
  }
  if (!any) return call_below(op, stack);
  const variable_list ys = Node<kSpec>::apply(at::TensorList(inputs), call);
  stack->emplace_back(ys[0]);
  stack->insert(stack->end(), others.begin(), others.end());
  if (kSpec.adds) stack->emplace_back(ys[1]);
}

// The gradients of a weight whose scale and zero point have none.
bool weight_differentiably(Stack& stack) {
  Tensor grad;
  LayerWeight w;
  Geometry g;
  WantedOfWeight wanted;
  Reader("qtoolkit::quant_weight_backward", stack) >> grad >> w >> g.transposed >> g.groups >> wanted;
  if (wanted[2] || wanted[3]) return false;
  stack.clear();
  if (w.updated.has_value()) grad = only_updated(grad, w, g);
  for (const Tensor& gradient : differentiable_weight_backward(grad, w, g, wanted)) stack.emplace_back(gradient);
  return true;
}

const Differentiated kQuantLayer = {"quant_layer",
                                    "qtoolkit::quant_layer_backward",
                                    {"x", "weight", "factor", "scale", "zero_point", "bias", "raw_scale"},
                                    {"codes", "x_scale", "x_zero_point", "raw"}};
const Differentiated kQuantWeight = {"quant_weight",
                                     "qtoolkit::quant_weight_backward",
                                     {"weight", "factor", "scale", "zero_point"},
                                     {},
                                     &weight_differentiably};
const Differentiated kBatchNorm = {"batch_norm_fake_quant",
                                   "qtoolkit::batch_norm_fake_quant_backward",
                                   {"x", "weight", "bias", "divisor", "residual", "scale", "zero_point"},
                                   {},
                                   nullptr,
                                   {{"residual", "residual_codes", false}},
                                   {"residual_scale", "residual_zero_point"}};
const Differentiated kFunctionFakeQuant = {"function_fake_quant",
                                           "qtoolkit::function_fake_quant_backward",
                                           {"x", "weight", "bias", "y_start", "y_ratio", "y_zero_point"},
                                           {"y_rate"},
                                           nullptr,
                                           {{"x", "keeps_x", true}, {"y_start", "y_ratio", true}}};
const Differentiated kAddNorm = {"add_norm_fake_quant",
                                 "qtoolkit::add_norm_fake_quant_backward",
                                 {"x", "weight", "bias", "y_start", "y_ratio", "y_zero_point", "residual"},
                                 {"y_rate"},
                                 nullptr,
                                 {{"y_start", "y_ratio", true}},
                                 {},
                                 /*adds=*/true};
const Differentiated kProduct = {
    "product",
    "qtoolkit::product_backward",
    {"x", "other"},
    {"x_codes", "x_scale", "x_zero_point", "other_codes", "other_scale", "other_zero_point", "computed"},
    nullptr,
    {{"x", "x_kept", true}, {"other", "other_kept", true}},
    {"x_scale", "x_zero_point", "other_scale", "other_zero_point"}};
const Differentiated kFusedAttention = {
    "fused_attention",
    "qtoolkit::fused_attention_backward",
    {"q", "k", "v"},
    {"q_codes", "q_scale", "q_zero_point", "k_codes", "k_scale", "k_zero_point", "v_codes", "v_scale", "v_zero_point"},
    nullptr,
    {{"q", "q_codes", false}, {"k", "k_codes", false}, {"v", "v_codes", false}},
    {"q_scale", "q_zero_point", "k_scale", "k_zero_point", "v_scale", "v_zero_point"}};

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) {
  using torch::CppFunction;
  m.impl("quant_layer", CppFunction::makeFromBoxedFunction<&recorded<kQuantLayer>>());
  m.impl("quant_weight", CppFunction::makeFromBoxedFunction<&recorded<kQuantWeight>>());
  m.impl("batch_norm_fake_quant", CppFunction::makeFromBoxedFunction<&recorded<kBatchNorm>>());
  m.impl("function_fake_quant", CppFunction::makeFromBoxedFunction<&recorded<kFunctionFakeQuant>>());
  m.impl("add_norm_fake_quant", CppFunction::makeFromBoxedFunction<&recorded<kAddNorm>>());
  m.impl("product", CppFunction::makeFromBoxedFunction<&recorded<kProduct>>());
  m.impl("fused_attention", CppFunction::makeFromBoxedFunction<&recorded<kFusedAttention>>());
}

}  // namespace qtoolkit
