#include "unit_call.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/round.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace qtoolkit {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr std::string_view kBind = "bind_";

std::optional<at::ScalarType> autocast_on(at::DeviceType device) {
  if (!at::autocast::is_autocast_enabled(device)) return std::nullopt;
  return at::autocast::get_autocast_dtype(device);
}

size_t place_of(const c10::FunctionSchema& schema, const std::string& name) {
  const std::optional<int> place = schema.argumentIndexWithName(name);
  TORCH_CHECK_VALUE(place.has_value(), "varying must be names of arguments of ", schema.name(), ", got '", name, "'.");
  return static_cast<size_t>(*place);
}

// bind_NAME(varying, *arguments of NAME) -> UnitCall
void bind(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  const auto names = arguments.front().to<std::vector<std::string>>();
  arguments.erase(arguments.begin());
  std::string name = op.operator_name().name;
  name.erase(name.find(kBind), kBind.size());
  const c10::OperatorHandle bound = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  stack->emplace_back(c10::make_intrusive<UnitCall>(bound, std::move(arguments), names));
}

}  // namespace

TensorKind::TensorKind(const IValue& argument) : given_(argument.isTensor()) {
  if (!given_) return;
  const Tensor& t = argument.toTensor();
  requires_grad_ = t.requires_grad();
  dtype_ = t.scalar_type();
  device_ = t.device();
  sizes_ = t.sizes();
  strides_ = t.strides();
}

bool TensorKind::is_that_of(const IValue& argument) const {
  if (argument.isTensor() != given_) return false;
  if (!given_) return true;
  const Tensor& t = argument.toTensor();
  return t.scalar_type() == dtype_ && t.device() == device_ && t.requires_grad() == requires_grad_ &&
         t.sizes() == sizes_ && t.strides() == strides_;
}

UnitCall::UnitCall(const c10::OperatorHandle& op, std::vector<IValue> arguments,
                   const std::vector<std::string>& varying)
    : op_(op), arguments_(std::move(arguments)) {
  const c10::FunctionSchema& schema = op.schema();
  for (const std::string& name : varying) varying_.push_back(place_of(schema, name));
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (schema.arguments()[i].type()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
      tensors_.emplace_back(i, TensorKind(arguments_[i]));
    }
  }
  const size_t zero_point = place_of(schema, "y_zero_point");
  if (arguments_[zero_point].isTensor()) zero_point_ = zero_point;
  positive_ = arguments_[place_of(schema, "y_ratio")].isTensor() || !arguments_[place_of(schema, "y_start")].isTensor();
  autocast_ = autocast_on(arguments_.front().toTensor().device().type());
  for (const size_t place : varying_) arguments_[place] = IValue();  // nothing of a step is kept
}

bool UnitCall::is_the_same(const Stack& arguments) const {
  if (!at::GradMode::is_enabled()) return false;
  for (const auto& [place, kind] : tensors_) {
    if (!kind.is_that_of(arguments[place])) return false;
  }
  return autocast_on(arguments.front().toTensor().device().type()) == autocast_;
}

std::vector<Tensor> UnitCall::call(const c10::List<std::optional<Tensor>>& varying) const {
  TORCH_CHECK_VALUE(varying.size() == varying_.size(), "varying must have ", varying_.size(), " tensors, got ",
                    varying.size(), ".");
  Stack stack = arguments_;
  for (size_t i = 0; i < varying_.size(); ++i) stack[varying_[i]] = varying.get(i);
  if (!is_the_same(stack)) return {};
  const IValue zero_point = zero_point_.has_value() ? stack[*zero_point_] : IValue();
  op_.callBoxed(&stack);
  std::vector<Tensor> results;
  results.reserve(4);
  for (size_t i = 0; i < 3; ++i) results.push_back(std::move(stack[i]).toTensor());
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (!positive_) results[2] = at::abs(results[2]);
  if (zero_point.isTensor()) results.push_back(at::round(zero_point.toTensor()));
  return results;
}

TORCH_LIBRARY_IMPL(qtoolkit, CompositeImplicitAutograd, m) {
  for (const char* name : {"bind_unit", "bind_layer_fake_quant", "bind_function_fake_quant"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&bind>());
  }
}

}  // namespace qtoolkit
