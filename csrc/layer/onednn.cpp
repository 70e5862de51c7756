#include "onednn.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <future>

namespace qtoolkit::onednn {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

// Boxed: the signatures are torch's own affair, and are compared with the arguments before a call.
Tensor call(const char* name, Stack stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  op.schema().checkAndNormalizeInputs(stack);
  op.callBoxed(&stack);
  return stack.at(0).toTensor();
}

// Sums near those that saturate where pairs of products are added in int16.
bool passes_trial(Geometry geometry, std::vector<int64_t> size) {
  const Tensor codes = at::tensor({255, 254, 253, 0}, at::kByte).repeat({16});
  const Tensor weight = at::tensor({127, 127, -128, -128}, at::kChar).repeat({16});
  const Tensor expected = codes.to(at::kDouble).sub_(3).dot(weight.to(at::kDouble));
  const Int8Layer layer(weight.view(size), at::ones({1}, at::kFloat), std::nullopt, geometry, size);
  return layer(codes.view(size), 3).item<double>() == expected.item<double>();
}

bool try_out() {
  try {
    return passes_trial({{1, 1}, {0, 0}, {1, 1}, {0, 0}, false, 1}, {1, 64, 1, 1}) &&
           passes_trial({{}, {}, {}, {}, false, 1}, {1, 64});
  } catch (const std::exception&) {  // torch lacks the ops, or has others of these names
    return false;
  }
}

}  // namespace

// In a thread of its own, with which the threads of its kernels end: a process that has threads cannot be forked. It
// also has none of the caller's dispatch modes, such as that of fake tensors.
bool is_exact() {
  static const bool exact = std::async(std::launch::async, try_out).get();
  return exact;
}

Int8Layer::Int8Layer(const Tensor& weight, const Tensor& steps, const optional<Tensor>& bias, const Geometry& geometry,
                     at::IntArrayRef size)
    : steps_(steps),
      zeros_(at::zeros({steps.numel()}, steps.options().dtype(at::kInt))),
      bias_(bias),
      geometry_(geometry) {
  const Geometry& g = geometry;
  const Tensor one = at::ones({1}, steps.options());  // the layout depends on no scale, and each one would be read
  const Tensor dense = weight.contiguous(weight.suggest_memory_format());  // others are read in a wrong order
  packed_ = g.is_linear() ? call("onednn::qlinear_prepack", {dense, size})
                          : call("onednn::qconv_prepack",
                                 {dense, one, 1.0, int64_t{0}, g.stride, g.padding, g.dilation, g.groups, size});
}

Tensor Int8Layer::operator()(const Tensor& codes, int64_t zero_point) const {
  const Geometry& g = geometry_;
  Stack stack = {codes, 1.0, zero_point, packed_, steps_, zeros_, bias_};
  if (!g.is_linear()) torch::jit::push(stack, g.stride, g.padding, g.dilation, g.groups);
  const c10::List<optional<at::Scalar>> no_arguments;
  torch::jit::push(stack, 1.0, int64_t{0}, at::kFloat, "none", no_arguments, "");  // no op after it
  return call(g.is_linear() ? "onednn::qlinear_pointwise" : "onednn::qconv_pointwise", std::move(stack));
}

// For Python, which keeps layouts of the weights of converted models.
struct Holder : torch::CustomClassHolder {
  Int8Layer layer;

  Holder(const Tensor& weight, std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
         int64_t groups, std::vector<int64_t> size)
      : layer(weight, at::ones({weight.size(0)}, at::kFloat), std::nullopt,
              {stride, padding, dilation, {}, false, groups}, size) {}

  Tensor sums(const Tensor& codes, int64_t zero_point) { return layer(codes, zero_point); }
};

TORCH_LIBRARY_FRAGMENT(qtoolkit, m) {
  m.class_<Holder>("Int8Layer")
      .def(torch::init<Tensor, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, int64_t,
                       std::vector<int64_t>>())
      .def("sums", &Holder::sums);
}

}  // namespace qtoolkit::onednn
