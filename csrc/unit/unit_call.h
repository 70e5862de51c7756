// A call of a unit's op that training steps repeat. Most of its fifty arguments are the same each time, and to read
// them from Python takes a sixth of the time of a short unit: they are kept here, and Python passes the others.
#pragma once

#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <vector>

namespace qtoolkit {

// What a tensor was when the arguments of a call were decided.
class TensorKind {
 public:
  explicit TensorKind(const c10::IValue& argument);

  // Whether an argument is of this kind: a tensor like it, or None as it was.
  bool is_that_of(const c10::IValue& argument) const;

 private:
  bool given_, requires_grad_ = false;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
  c10::DimVector sizes_, strides_;
};

class UnitCall : public torch::CustomClassHolder {
 public:
  // op: a unit's, whose first results are its output, the codes of that and their scale. varying: the names of the
  // tensors that are passed at each call.
  UnitCall(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments, const std::vector<std::string>& varying);

  // Returns the output, its codes (empty where there are none), their scale, positive, and their rounded zero point, if
  // there is one. Returns nothing where this is another call than the one that was kept: a tensor has another kind, or
  // gradients or autocast are switched.
  std::vector<at::Tensor> call(const c10::List<std::optional<at::Tensor>>& varying) const;

 private:
  bool is_the_same(const torch::jit::Stack& arguments) const;

  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;
  std::vector<size_t> varying_;                         // places of arguments
  std::vector<std::pair<size_t, TensorKind>> tensors_;  // places and kinds of all that may be tensors
  std::optional<size_t> zero_point_;                    // the place of the output's
  bool positive_;                                       // whether the op's scale is, or there is none
  std::optional<at::ScalarType> autocast_;
};

}  // namespace qtoolkit
