// Shared by the autograd kernels: which tensors are differentiated, and the straight-through gradient.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <vector>

#include "../call_op.h"
#include "../layout.h"

namespace qtoolkit {

// Calls an op below autograd, with its arguments on a stack, which then has its results.
inline void call_below(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

// The format in which a node returns the gradient of x, for the ops before, which are fastest, and fewer, with
// gradients in the format of their results. None where x is in no format, as a transposed tensor: the gradient is as
// the op returned it.
inline std::optional<at::MemoryFormat> format_of_gradient(const at::Tensor& x) {
  const at::MemoryFormat format = x.suggest_memory_format();
  return x.is_contiguous(format) ? std::optional(format) : std::nullopt;
}

// Whether autograd needs the gradient in t. All autograd kernels ask here, so that no op returns a zero derivative for
// a mode of differentiation that it does not support.
inline bool is_differentiated(std::string_view op, const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(0).defined(), op,
                              ": forward-mode AD (torch.func.jvp, torch.func.jacfwd, dual tensors) is not supported; "
                              "use reverse mode: torch.autograd.grad or backward.");
  if (!at::GradMode::is_enabled() || !t.requires_grad()) return false;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper), op,
      ": the gradient transforms of torch.func (grad, vjp, jacrev, hessian) are not supported; use torch.autograd.grad "
      "or backward, with torch.func.functional_call to pass parameters in.");
  return true;
}

inline bool is_differentiated(std::string_view op, const std::optional<at::Tensor>& t) {
  return t.has_value() && is_differentiated(op, *t);
}

// The results of an op without a gradient in tensors that need one. They require grad, and backward through them raises
// the sentence.
torch::autograd::variable_list without_gradient(const torch::autograd::variable_list& differentiated,
                                                std::string_view sentence,
                                                const torch::autograd::variable_list& results);

// The result of an op, the packed mask of its elements inside the range, and the memory order of both.
struct Masked {
  at::Tensor y, mask;
  std::vector<int64_t> order;
};

// The gradient in x is the incoming gradient where the mask's bit is set. `below` calls the op with mask=True. The mask
// is no output of the node: autograd would fill a gradient of its size with zeros.
struct StraightThrough : torch::autograd::Function<StraightThrough> {
  using variable_list = torch::autograd::variable_list;
  using AutogradContext = torch::autograd::AutogradContext;

  template <class Below>
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& /*x*/, const Below& below) {
    const Masked result = below();
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({result.mask});
    ctx->saved_data["order"] = result.order;
    return result.y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor()};
    return {backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["order"].toIntVector()), {}};
  }
};

}  // namespace qtoolkit
