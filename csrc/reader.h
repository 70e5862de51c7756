// The arguments of a boxed op, read in the order of its schema.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string_view>
#include <utility>
#include <vector>

namespace qtoolkit {

// A struct that stands for several arguments has an operator>> of its own. One that is a list in the schema, as torch
// has no named lists, is made by one function of qtoolkit/ops and read by one here.
class Reader {
 public:
  // Those on the stack, which are dropped when they are read.
  Reader(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : Reader(op.schema().name(), torch::jit::last(*stack, op.schema().arguments().size())) {
    stack_ = stack;
  }
  Reader(std::string_view op, at::ArrayRef<c10::IValue> values)
      : op_(op.substr(sizeof("qtoolkit::") - 1)), next_(values.begin()), count_(values.size()) {}
  ~Reader() {
    if (stack_ != nullptr) torch::jit::drop(*stack_, count_);
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // The name of the op, for sentences.
  std::string_view op() const { return op_; }

  template <class T>
  Reader& operator>>(T& argument) & {
    argument = (next_++)->to<T>();
    return *this;
  }
  Reader& operator>>(std::vector<c10::SymInt>& argument) & {
    argument = (next_++)->toSymIntVector();
    return *this;
  }

 private:
  std::string_view op_;
  const c10::IValue* next_;
  size_t count_;
  torch::jit::Stack* stack_ = nullptr;
};

template <class T>
Reader& operator>>(Reader&& reader, T& argument) {
  return reader >> argument;
}

}  // namespace qtoolkit
