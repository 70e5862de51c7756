#include "calls.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/round.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

#include "unit.h"

namespace qtoolkit {
namespace {

using at::Tensor;

std::optional<at::ScalarType> autocast_on(at::DeviceType device) {
  if (!at::autocast::is_autocast_enabled(device)) return std::nullopt;
  return at::autocast::get_autocast_dtype(device);
}

}  // namespace

// What a tensor was when a unit was made.
class TensorKind {
 public:
  explicit TensorKind(const Tensor& t) : given_(t.defined()) {
    if (!given_) return;
    requires_grad_ = t.requires_grad();
    dtype_ = t.scalar_type();
    device_ = t.device();
    sizes_ = t.sizes();
    strides_ = t.strides();
  }

  // Whether a tensor is of this kind: there is none as there was none, or it is like the one that was.
  bool is_that_of(const Tensor& t) const {
    if (t.defined() != given_) return false;
    if (!given_) return true;
    return t.scalar_type() == dtype_ && t.device() == device_ && t.requires_grad() == requires_grad_ &&
           t.sizes() == sizes_ && t.strides() == strides_;
  }

 private:
  bool given_, requires_grad_ = false;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
  c10::DimVector sizes_, strides_;
};

// What a unit was told when it was made, by which it knows a call for which it was not made.
struct Calls {
  int64_t count;                // of the tensors that are passed at each call
  std::vector<int64_t> places;  // for each tensor of the unit its place among them, or -1
  std::vector<TensorKind> kinds;
  std::optional<at::ScalarType> autocast;
};

namespace {

// The fields of backward alone.
template <class U>
void fill_backward(U& unit, Filling& fill) {
  unit.backward_numbers(fill);
  unit.results(fill);
}

void fill_backward(FunctionUnit& /*unit*/, Filling& /*fill*/) {}

// A unit with these fields.
template <class U>
c10::intrusive_ptr<U> filled(const NamedValues& given) {
  auto unit = c10::make_intrusive<U>();
  Filling fill(U::kClass, given);
  unit->numbers(fill);
  unit->tensors(fill);
  fill.may_be_absent = true;
  fill_backward(*unit, fill);
  fill.check_names();
  return unit;
}

// The same, to be called with the tensors of the names in `varying`, which it does not keep.
template <class U>
c10::intrusive_ptr<U> make_unit(const NamedValues& given, const std::vector<std::string>& varying) {
  const auto unit = filled<U>(given);
  auto calls = std::make_shared<Calls>();
  calls->count = static_cast<int64_t>(varying.size());
  if (unit->first().defined()) calls->autocast = autocast_on(unit->first().device().type());
  std::unordered_set<std::string> unknown(varying.begin(), varying.end());
  unit->tensors([&](const char* name, auto& field, Role) {
    calls->kinds.emplace_back(tensor_in(field));
    const auto found = std::find(varying.begin(), varying.end(), name);
    calls->places.push_back(found == varying.end() ? -1 : found - varying.begin());
    if (unknown.erase(name) > 0) put(field, Tensor());
  });
  TORCH_CHECK_VALUE(unknown.empty(), "varying must be names of tensors of a ", U::kClass, ", got '", *unknown.begin(),
                    "'.");
  unit->calls = calls;
  return unit;
}

// Gives a unit the tensors of a call; returns whether they are of the kinds for which it was made.
template <class U>
bool place_tensors(U& unit, const c10::List<std::optional<Tensor>>& varying) {
  const Calls& calls = *unit.calls;
  TORCH_CHECK_VALUE(static_cast<int64_t>(varying.size()) == calls.count, "varying must have ", calls.count,
                    " tensors, got ", varying.size(), ".");
  size_t tensor = 0;
  bool same = true;
  unit.tensors([&](const char*, auto& field, Role) {
    const int64_t place = calls.places[tensor];
    if (place >= 0) put(field, varying.get(place).value_or(Tensor()));
    same = same && calls.kinds[tensor].is_that_of(tensor_in(field));
    ++tensor;
  });
  return same;
}

// Returns the output, and if it has a quantizer its codes (empty where there are none), their scale, positive, and
// their rounded zero point, if there is one; last the sum, if the unit adds. Returns nothing where this is another call
// than the unit was made for: a tensor has another kind, or gradients or autocast are switched.
template <class U>
std::vector<Tensor> call(const c10::intrusive_ptr<U>& made, const c10::List<std::optional<Tensor>>& varying) {
  const auto unit = c10::make_intrusive<U>(*made);
  const bool same = place_tensors(*unit, varying);
  const auto autocast = autocast_on(unit->x.device().type());
  if (!same || !at::GradMode::is_enabled() || autocast != unit->calls->autocast) return {};
  UnitOutput found = call_op(unit);
  std::vector<Tensor> results = {std::move(found.y)};
  const OutputQuantizer& output = unit->output;
  if (!output.trained.start.has_value()) return results;
  const at::AutoDispatchBelowADInplaceOrView guard;
  results.push_back(std::move(found.codes));
  results.push_back(output.trained.ratio.has_value() ? std::move(found.y_scale) : at::abs(found.y_scale));
  if (output.zero_point.has_value()) results.push_back(at::round(*output.zero_point));
  if (found.sum.defined()) results.push_back(std::move(found.sum));
  return results;
}

// Returns the results of a unit's op.
template <class U>
torch::jit::Stack call_boxed(const c10::intrusive_ptr<U>& unit) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow((std::string("qtoolkit::") + U::kOp).c_str(), "");
  torch::jit::Stack stack = {c10::IValue(unit), unit->first()};
  op.callBoxed(&stack);
  return stack;
}

template <class U>
UnitOutput output_of(const c10::intrusive_ptr<U>& unit) {
  const torch::jit::Stack results = call_boxed(unit);
  // The first of what backward keeps is the scale.
  const c10::IValue& scale = results[2].toListRef()[0];
  return {results[0].toTensor(), results[1].toTensor(), scale.isTensor() ? scale.toTensor() : Tensor()};
}

// Returns the output of an attention, which is made for numbers alone: its tensors may be any.
Tensor call_attention(const c10::intrusive_ptr<AttentionUnit>& made, const c10::List<std::optional<Tensor>>& varying) {
  const auto unit = c10::make_intrusive<AttentionUnit>(*made);
  place_tensors(*unit, varying);
  return call_boxed(unit)[0].toTensor();
}

template <class U>
void register_unit(torch::Library& library) {
  library.class_<U>(U::kClass)
      .def(torch::init(&make_unit<U>), "", {torch::arg("fields"), torch::arg("varying")})
      .def("call", &call<U>);
}

}  // namespace

UnitOutput call_op(const c10::intrusive_ptr<LayerUnit>& unit) { return output_of(unit); }
UnitOutput call_op(const c10::intrusive_ptr<BatchNormUnit>& unit) { return output_of(unit); }

void register_units(torch::Library& library) {
  register_unit<LayerUnit>(library);
  register_unit<BatchNormUnit>(library);
  register_unit<FunctionUnit>(library);
  library.class_<AttentionUnit>(AttentionUnit::kClass)
      .def(torch::init(&make_unit<AttentionUnit>), "", {torch::arg("fields"), torch::arg("varying")})
      .def("call", &call_attention)
      .def_static("fits_dropout", &fits_dropout);
}

}  // namespace qtoolkit
