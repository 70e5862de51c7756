// A unit without a batch norm: a layer on grids, with its bias on the grid of its sums, and a quantizer after it.
#include "../layer/layer_checks.h"
#include "../layer/layer_ops.h"
#include "../registration.h"
#include "unit.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using G = GradientOf;
using torch::jit::Stack;

void layer_fake_quant(const c10::OperatorHandle& /*op*/, Stack* stack) {
  LayerUnit u = *torch::jit::peek(*stack, 0, 2).toCustomClass<LayerUnit>();
  const WithoutAutocast guard;
  check_per_output(LayerUnit::kOp, "bias", u.bias.bias, output_channels(u.layer.weight, u.layer.geometry), u.x);
  u.bias.dtype = u.bias_dtype();
  const UnitParts parts = {LayerUnit::kOp, nullptr, &u.layer, &u.weight, &u.output.trained};
  const Scales scales = make_scales(parts, u.followed, u.bias, Made::later);
  u.layer.unmade = scales.unmade ? &*scales.unmade : nullptr;
  u.layer.scale = scales.scale;
  const Tensor z = quant_layer(u.x, scales.bias, u.layer, u.dtype, u.format(), u.raw);
  const QuantizedTensor q = quantize_output(z, u.output, scales.y_scale);
  u.y_scale = scales.y_scale;
  u.scale = scales.scale;
  if (u.y_scale.has_value()) u.kept = u.output.learned ? z : q.mask;
  push_output(stack, q.y, q.codes, u);
}

void layer_fake_quant_backward(const c10::OperatorHandle& /*op*/, Stack* stack) {
  const UnitBackward<LayerUnit> given(*stack);
  const auto& [unit, grad, wanted] = given;
  const LayerUnit& u = *unit;
  Layer layer = u.layer;
  layer.scale = given.kept("scale", u.scale);
  const UnitParts parts = {LayerUnit::kBackward, nullptr, &layer, &u.weight, &u.output.trained};
  check_parts(parts, layer.scale.sym_numel());
  const WithoutAutocast guard;
  QuantizedGradients behind = {grad, {}, {}};
  LaterGradients later;
  if (u.y_scale.has_value()) {
    behind = quantize_output_backward(grad, u.kept, given.kept("kept", u.kept), u.order, u.output, *u.y_scale, later);
  }
  const bool of_scale = wanted[G::start] || wanted[G::ratio];
  const GradientsOfLayer in_layer = quant_layer_backward(behind.z, u.size, layer, u.x_dtype,
                                                         {wanted[G::x], wanted[G::weight], /*factor=*/false, of_scale,
                                                          wanted[G::zero_point], wanted[G::bias], wanted[G::raw_scale]},
                                                         u.raw, &later);
  const PartGradients of_parts = gradients_of_parts(
      parts, {of_scale ? in_layer[3] : Tensor(), behind.scale, {}, {}, {}},
      {wanted[G::start], wanted[G::ratio], wanted[G::y_start], wanted[G::y_ratio]}, {}, std::move(later));
  ForGradients<Tensor> gradients;
  gradients[G::x] = in_layer[0];
  gradients[G::weight] = in_layer[1];
  gradients[G::start] = of_parts.start;
  gradients[G::ratio] = of_parts.ratio;
  gradients[G::zero_point] = in_layer[4];
  gradients[G::bias] = in_layer[5];
  gradients[G::y_start] = of_parts.y_start;
  gradients[G::y_ratio] = of_parts.y_ratio;
  gradients[G::y_zero_point] = behind.zero_point;
  gradients[G::raw_scale] = in_layer[6];
  given.push(stack, gradients);
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("layer_fake_quant", torch::CppFunction::makeFromBoxedFunction<&layer_fake_quant>());
  m.impl("layer_fake_quant_backward", torch::CppFunction::makeFromBoxedFunction<&layer_fake_quant_backward>());
}

}  // namespace qtoolkit
