// Shared by the autograd kernels: calls of an op below autograd, and the straight-through gradient.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <functional>

#include "layout.h"

namespace qtoolkit {

template <class Schema>
const auto& op(const char* name) {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
  return handle;
}

inline at::Tensor backward_op(const at::Tensor& grad, const at::Tensor& mask, at::IntArrayRef order) {
  using Schema = at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef);
  return op<Schema>("qtoolkit::fake_quant_backward").call(grad, mask, order);
}

inline bool is_differentiated(const at::Tensor& x) { return at::GradMode::is_enabled() && x.requires_grad(); }

// The gradient in x is the incoming gradient where the mask's bit is set. `below` calls the op with mask=True; only its
// first result is differentiable, and its last result is the mask.
struct StraightThrough : torch::autograd::Function<StraightThrough> {
  using variable_list = torch::autograd::variable_list;
  using AutogradContext = torch::autograd::AutogradContext;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& /*x*/,
                               const std::function<variable_list()>& below) {
    variable_list results = below();
    ctx->save_for_backward({results.back()});
    ctx->saved_data["order"] = memory_order(results.front());
    ctx->mark_non_differentiable({results.begin() + 1, results.end()});
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["order"].toIntVector()), {}};
  }
};

}  // namespace qtoolkit
