// The fake-quantized weight of a layer as an op: what quant_layer computes inside, for layers that torch computes.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "../registration.h"
#include "layer_checks.h"
#include "layer_weight.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using torch::jit::Stack;

struct Weight : LayerWeight {
  Geometry geometry;

  void check(const char* op) const {
    const int64_t least = geometry.transposed ? 2 : 1;
    check_float(op, "weight", weight);
    TORCH_CHECK_VALUE(weight.dim() >= least, op, ": weight must have at least ", least, " dimensions, got shape ",
                      weight.sym_sizes(), ".");
    TORCH_CHECK_VALUE(geometry.groups >= 1 && weight.sym_size(0) % geometry.groups == 0, op,
                      ": groups must be at least 1 and divide weight.size(0) = ", weight.sym_size(0), ", got ",
                      geometry.groups, ".");
    check_layer_weight(op, *this, geometry, weight);
  }
};

Reader& operator>>(Reader& reader, Weight& w) {
  return reader >> static_cast<LayerWeight&>(w) >> w.geometry.transposed >> w.geometry.groups;
}

void quant_weight(const c10::OperatorHandle& op, Stack* stack) {
  Weight w;
  Reader(op, stack) >> w;
  w.check("quant_weight");
  stack->emplace_back(
      fake_quant_weight(w, w.geometry, w.weight.suggest_memory_format(), std::nullopt, Lifetime::result));
}

void quant_weight_backward(const c10::OperatorHandle& op, Stack* stack) {
  constexpr const char* kOp = "quant_weight_backward";
  Tensor grad;
  Weight w;
  WantedOfWeight wanted;
  Reader(op, stack) >> grad >> w >> wanted;
  w.check(kOp);
  check_float(kOp, "grad", grad);
  TORCH_CHECK_VALUE(grad.sym_sizes() == w.weight.sym_sizes(), kOp, ": grad must have the shape of weight, ",
                    w.weight.sym_sizes(), ", got ", grad.sym_sizes(), ".");
  check_same_device(kOp, "grad", grad, w.weight);
  const Tensor in = w.updated.has_value() ? only_updated(grad, w, w.geometry) : grad;
  const WeightGradients gradients = weight_backward(in, w, w.geometry, wanted, OfGrad::kept);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const bool given = wanted[i] && gradients[i].defined();
    stack->emplace_back(given ? gradients[i] : at::empty({0}, grad.options()));
  }
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("quant_weight", torch::CppFunction::makeFromBoxedFunction<&quant_weight>());
  m.impl("quant_weight_backward", torch::CppFunction::makeFromBoxedFunction<&quant_weight_backward>());
}

}  // namespace qtoolkit
