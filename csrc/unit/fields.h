// The named fields of a unit (see unit.h): it is filled from a dict of Python by their names, and not by an order.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace qtoolkit {

using NamedValues = c10::Dict<std::string, c10::IValue>;

// A tensor that may have a gradient has a place among them; the others must not require grad.
enum class GradientOf {
  x,
  weight,
  start,
  ratio,
  zero_point,
  bias,
  gamma,
  beta,
  residual,
  y_start,
  y_ratio,
  y_zero_point,
  raw_scale,
  k,  // of an attention, whose q is x
  v,
  count,
  none
};

// One value for each gradient.
template <class T>
struct ForGradients {
  std::array<T, static_cast<size_t>(GradientOf::count)> values = {};

  T& operator[](GradientOf g) { return values[static_cast<size_t>(g)]; }
  const T& operator[](GradientOf g) const { return values[static_cast<size_t>(g)]; }
};

// What backward keeps of a tensor. A scale or zero point without a gradient may be a buffer that an observer changes
// before backward: it keeps a copy, but where nobody changes the tensor.
enum class Keeps { nothing, tensor, copy };

// What a tensor of a unit is to autograd.
struct Role {
  GradientOf gradient;
  Keeps keeps;
};

constexpr Role kOfForward = {GradientOf::none, Keeps::nothing}, kConstant = {GradientOf::none, Keeps::tensor};

inline Keeps keeps_if(bool kept) { return kept ? Keeps::tensor : Keeps::nothing; }

// Tensors that are always there and those that may not be, read and written alike: an undefined one is not there.
inline const at::Tensor& tensor_in(const at::Tensor& field) { return field; }
inline at::Tensor tensor_in(const std::optional<at::Tensor>& field) { return field.value_or(at::Tensor()); }
inline void put(at::Tensor& field, at::Tensor t) { field = std::move(t); }
inline void put(std::optional<at::Tensor>& field, at::Tensor t) {
  field = t.defined() ? std::optional<at::Tensor>(std::move(t)) : std::nullopt;
}

// ---- from a dict

namespace fields {

struct Place {
  const char *owner, *name;

  void expect(bool fits, const char* what, const c10::IValue& value) const {
    TORCH_CHECK_TYPE(fits, owner, ": ", name, " must be ", what, ", got ", value.tagKind(), ".");
  }
};

inline void read(const Place& place, const c10::IValue& value, at::Tensor& field) {
  place.expect(value.isTensor() && value.toTensor().defined(), "a tensor", value);
  field = value.toTensor();
}

inline void read(const Place& place, const c10::IValue& value, int64_t& field) {
  place.expect(value.isInt(), "an int", value);
  field = value.toInt();
}

inline void read(const Place& place, const c10::IValue& value, double& field) {
  place.expect(value.isDouble() || value.isInt(), "a float", value);
  field = value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
}

inline void read(const Place& place, const c10::IValue& value, bool& field) {
  place.expect(value.isBool(), "a bool", value);
  field = value.toBool();
}

inline void read(const Place& place, const c10::IValue& value, std::string& field) {
  place.expect(value.isString(), "a str", value);
  field = value.toStringRef();
}

inline void read(const Place& place, const c10::IValue& value, at::ScalarType& field) {
  const bool known =
      value.isInt() && value.toInt() >= 0 && value.toInt() < static_cast<int>(at::ScalarType::NumOptions);
  place.expect(known, "a torch.dtype", value);
  field = value.toScalarType();
}

// A list or a tuple of ints.
template <class T>
void read(const Place& place, const c10::IValue& value, std::vector<T>& field) {
  place.expect(value.isList() || value.isTuple(), "a sequence of ints", value);
  field.clear();
  const auto take = [&](const c10::IValue& each) {
    place.expect(each.isInt(), "a sequence of ints", value);
    field.emplace_back(each.toInt());
  };
  if (value.isTuple()) {
    for (const c10::IValue& each : value.toTupleRef().elements()) take(each);
  } else {
    for (const c10::IValue& each : value.toListRef()) take(each);
  }
}

template <class T>
void read(const Place& place, const c10::IValue& value, std::optional<T>& field) {
  field.reset();
  if (value.isNone()) return;
  T given;
  read(place, value, given);
  field = std::move(given);
}

// What `read` takes again. Lists are tuples, and types ints: compiled autograd hashes what a node keeps.
template <class T>
c10::IValue written(const T& field) {
  return field;
}

inline c10::IValue written(const at::ScalarType& field) { return static_cast<int64_t>(field); }

template <class T>
c10::IValue written(const std::vector<T>& field) {
  return c10::ivalue::Tuple::create(std::vector<c10::IValue>(field.begin(), field.end()));
}

template <class T>
c10::IValue written(const std::optional<T>& field) {
  return field.has_value() ? written(*field) : c10::IValue();
}

}  // namespace fields

// Fills the fields that a unit lists. Each name must be there, until `may_be_absent` is set.
class Filling {
 public:
  Filling(const char* owner, const NamedValues& given) : owner_(owner), given_(given) {}

  template <class T>
  void operator()(const char* name, T& field, Role /*role*/ = kOfForward) {
    names_.push_back(name);
    const auto found = given_.find(name);
    if (found == given_.end()) {
      TORCH_CHECK_VALUE(may_be_absent, owner_, ": the field ", name, " is missing.");
      return;
    }
    ++found_;
    fields::read({owner_, name}, found->value(), field);
  }

  void check_names() const {
    if (found_ == given_.size()) return;
    for (const auto& each : given_) {
      const bool is_field = std::find(names_.begin(), names_.end(), each.key()) != names_.end();
      TORCH_CHECK_VALUE(is_field, owner_, ": there is no field ", each.key(), ".");
    }
  }

  bool may_be_absent = false;

 private:
  const char* owner_;
  const NamedValues& given_;
  std::vector<std::string_view> names_;
  size_t found_ = 0;
};

}  // namespace qtoolkit
