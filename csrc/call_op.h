// Calls of the library's ops through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace qtoolkit {

// Callers keep the handle in a static variable of their own: finding it is slow.
template <class Schema>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
}

inline at::Tensor backward_op(const at::Tensor& grad, const at::Tensor& mask, at::IntArrayRef order) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef)>("qtoolkit::fake_quant_backward");
  return op.call(grad, mask, order);
}

}  // namespace qtoolkit
