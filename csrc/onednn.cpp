#include "onednn.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/zeros.h>

namespace qtoolkit::onednn {
namespace {

using at::Tensor;
using torch::jit::Stack;

// Boxed: the signatures are torch's own affair.
Tensor call(const char* name, Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  return stack.at(0).toTensor();
}

Tensor packed(const Tensor& weight, const Tensor& steps, const Tensor& codes, const Geometry& g) {
  if (g.is_linear()) return call("onednn::qlinear_prepack", {weight, codes.sizes().vec()});
  return call("onednn::qconv_prepack",
              {weight, steps, 1.0, int64_t{0}, g.stride, g.padding, g.dilation, g.groups, codes.sizes().vec()});
}

}  // namespace

Tensor layer(const Tensor& codes, int64_t zero_point, const Tensor& weight, const Tensor& steps,
             const std::optional<Tensor>& bias, const Geometry& g) {
  const Tensor zeros = at::zeros({steps.numel()}, steps.options().dtype(at::kInt));
  Stack stack = {codes, 1.0, zero_point, packed(weight, steps, codes, g), steps, zeros, bias};
  if (!g.is_linear()) torch::jit::push(stack, g.stride, g.padding, g.dilation, g.groups);
  const c10::List<std::optional<at::Scalar>> no_arguments;
  torch::jit::push(stack, 1.0, int64_t{0}, at::kFloat, "none", no_arguments, "");  // no op after it
  return call(g.is_linear() ? "onednn::qlinear_pointwise" : "onednn::qconv_pointwise", std::move(stack));
}

}  // namespace qtoolkit::onednn
