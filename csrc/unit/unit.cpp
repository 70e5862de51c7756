// A unit of a network in training: a layer on grids, its batch norm, a residual add, an activation and a quantizer,
// with everything of which its grids are made. The steps are those of the single ops, with their bits; what a training
// step saves is their calls, and a node of autograd for each.
#include "unit.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include <cmath>
#include <tuple>

#include "../batch_norm/batch_norm_ops.h"
#include "../checks.h"
#include "../layer/layer_checks.h"
#include "../layer/layer_ops.h"
#include "../layer/layer_weight.h"
#include "../registration.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using G = GradientOf;
using torch::jit::Stack;

// What follows a batch norm.
Epilogue epilogue_of(const Following& f, const Output& o, const optional<Tensor>& y_scale) {
  return {f.residual, f.codes, f.scale,      f.zero_point, f.low,  f.high,
          f.slope,    y_scale, o.zero_point, o.qmin,       o.qmax, o.grad_factor};
}

// The batch norm of a layer's output times the factor.
BatchNorm batch_norm_of(const BatchNormUnit& u, const optional<Tensor>& factor) {
  const Epilogue epilogue = epilogue_of(u.following, u.output, u.y_scale);
  return {epilogue, u.norm.gamma, u.norm.beta, factor, u.norm.eps, u.totals, u.process_group};
}

bool quantizes_alone(const Epilogue& e) {
  const bool activates = e.low != -INFINITY || e.high != INFINITY;
  return !e.residual.has_value() && !e.residual_codes.has_value() && !activates;
}

void unit(const c10::OperatorHandle& /*op*/, Stack* stack) {
  BatchNormUnit u = *torch::jit::peek(*stack, 0, 2).toCustomClass<BatchNormUnit>();
  const Norm& norm = u.norm;
  const Following& f = u.following;
  TORCH_CHECK_VALUE(u.running_mean.has_value() == u.running_var.has_value(),
                    "unit: running_mean and running_var belong together; pass both, or neither.");
  const WithoutAutocast guard;
  u.bias.dtype = u.bias_dtype();
  const GivenBias in_layer = norm.is_frozen() ? u.bias : GivenBias{};
  check_per_output("unit", "bias", in_layer.bias, output_channels(u.layer.weight, u.layer.geometry), u.x);
  const UnitParts parts = {"unit", &norm, &u.layer, &u.weight, &u.output.trained};
  Scales scales = make_scales(parts, u.followed, in_layer, Made::later);
  u.layer.unmade = scales.unmade ? &*scales.unmade : nullptr;
  u.layer.factor = scales.factor;
  u.layer.scale = scales.scale;
  u.factor = std::move(scales.factor);
  u.scale = std::move(scales.scale);
  u.y_scale = scales.y_scale;
  if (norm.is_frozen()) {
    u.undivided = quant_layer(u.x, scales.bias, u.layer, u.dtype, u.format(), u.raw);
    u.mean = norm.frozen_mean->clone();
    u.batch_variance = norm.variance.clone();
    const Epilogue epilogue = epilogue_of(f, u.output, u.y_scale);
    if (!quantizes_alone(epilogue)) {
      const auto [y, codes] = epilogue_fake_quant(*u.undivided, epilogue);
      return push_output(stack, y, codes, u);
    }
    u.output.with_codes = fit_a_byte(u.output.qmin, u.output.qmax);
    const QuantizedTensor q = quantize_output(*u.undivided, u.output, u.y_scale);
    if (!u.y_scale.has_value() || !u.output.learned) put(u.undivided, q.mask);
    return push_output(stack, q.y, q.codes, u);
  }
  const Tensor undivided = quant_layer(u.x, std::nullopt, u.layer, u.dtype, u.format(), u.raw);
  if (u.process_group.has_value()) u.totals = batch_norm_totals(undivided, u.factor, u.bias.bias, u.process_group);
  optional<Tracking> tracking;
  if (u.tracks && u.running_mean.has_value()) {
    const c10::SymInt count = undivided.sym_numel() / undivided.sym_size(1);
    tracking = {*u.running_mean, *u.running_var, u.factor, u.bias.bias, u.momentum, count, u.totals, u.batches};
  }
  const auto [y, codes, mean, variance] = batch_norm_fake_quant(undivided, batch_norm_of(u, u.factor),
                                                                /*packs_codes=*/true, tracking, scales.arrived);
  if (tracking.has_value()) {
    if (u.batches.has_value()) note_change(*u.batches);
    note_change(*u.running_mean);
    note_change(*u.running_var);
  }
  u.undivided = undivided;
  u.mean = mean;
  u.batch_variance = variance;
  push_output(stack, y, codes, u);
}

// Gradients after the layer: of its output, the batch norm and the ops that follow; `bias` is the gradient of the
// folded bias. A gradient that is not needed is undefined or empty.
struct Behind {
  Tensor z, gamma, beta, divisor, residual, y_scale, y_zero_point, bias;
};

void unit_backward(const c10::OperatorHandle& /*op*/, Stack* stack) {
  const UnitBackward<BatchNormUnit> given(*stack);
  const auto& [unit, grad, wanted] = given;
  const BatchNormUnit& u = *unit;
  const Following& f = u.following;
  const OutputQuantizer& output = u.output;
  const optional<Tensor>&bias = u.bias.bias, &y_scale = u.y_scale;
  const Tensor &mean = given.kept("mean", u.mean), &variance = given.kept("batch_variance", u.batch_variance);
  Layer layer = u.layer;
  layer.factor = given.kept("factor", u.factor);
  layer.scale = given.kept("scale", u.scale);
  Norm norm = u.norm;
  if (!norm.variance.defined()) {
    norm.variance = variance;
    norm.frozen_mean = mean;
  }
  const UnitParts parts = {"unit_backward", &norm, &layer, &u.weight, &output.trained};
  check_parts(parts, layer.scale.sym_numel());
  if (norm.is_frozen()) {
    check_per_output("unit_backward", "bias", bias, output_channels(layer.weight, layer.geometry), layer.weight);
  }
  const WithoutAutocast guard;
  const bool of_gamma = wanted[G::gamma] && norm.gamma.has_value();
  const bool of_bias = norm.is_frozen() && (of_gamma || wanted[G::beta] || wanted[G::bias]);
  const bool of_y_scale = y_scale.has_value() && (wanted[G::y_start] || wanted[G::y_ratio] || wanted[G::y_zero_point]);
  Behind behind = {grad};
  LaterGradients later;
  if (!norm.is_frozen()) {
    const Tensor& undivided = given.kept("undivided", u.undivided);
    const auto [z, gamma, beta, divisor, residual, of_scale, of_zero_point] = batch_norm_fake_quant_backward(
        grad, undivided, mean, variance, {true, true, true, true, wanted[G::residual], of_y_scale, of_y_scale},
        batch_norm_of(u, layer.factor), &later);
    behind = {z, gamma, beta, divisor, residual, of_scale, of_zero_point};
  } else if (const Epilogue epilogue = epilogue_of(f, output, y_scale); quantizes_alone(epilogue)) {
    if (y_scale.has_value()) {
      const Tensor& kept = given.kept("undivided", u.undivided);
      const QuantizedGradients q = quantize_output_backward(grad, kept, kept, u.order, output, *y_scale, later);
      behind = {q.z, {}, {}, {}, {}, q.scale, q.zero_point};
    }
  } else {
    const EpilogueGradients in_epilogue = epilogue_fake_quant_backward(
        grad, given.kept("undivided", u.undivided), epilogue, {of_bias, wanted[G::residual], of_y_scale});
    behind = {in_epilogue.x, {}, {}, {}, in_epilogue.residual, in_epilogue.scale, in_epilogue.zero_point};
    if (of_bias) behind.bias = in_epilogue.channels;
  }

  const bool of_scale = wanted[G::start] || wanted[G::ratio];
  const bool bias_of_layer = of_bias && !behind.bias.defined();
  const GradientsOfLayer in_layer = quant_layer_backward(
      behind.z, u.size, layer, u.x_dtype,
      {wanted[G::x], wanted[G::weight], of_gamma, of_scale, wanted[G::zero_point], bias_of_layer, wanted[G::raw_scale]},
      u.raw, &later);
  // Ops of torch take the gradients below.
  if (bias.has_value() || layer.updated.has_value()) write_now(later);
  if (bias_of_layer) behind.bias = in_layer[5];
  const Tensor of_factor = of_gamma ? in_layer[2] : Tensor();
  ForGradients<Tensor> gradients;
  if (wanted[G::x]) gradients[G::x] = in_layer[0];
  if (wanted[G::weight]) gradients[G::weight] = in_layer[1];
  if (wanted[G::zero_point]) gradients[G::zero_point] = in_layer[4];
  if (wanted[G::raw_scale]) gradients[G::raw_scale] = in_layer[6];
  if (wanted[G::residual]) gradients[G::residual] = behind.residual;
  if (wanted[G::y_zero_point]) gradients[G::y_zero_point] = behind.y_zero_point;
  ScaleGradients of_scales = {of_scale ? in_layer[3] : Tensor(), of_y_scale ? behind.y_scale : Tensor(), {}, {}, {}};
  of_scales.of_factor = of_factor;
  if (norm.is_frozen()) {
    of_scales.of_bias = behind.bias;
    if (wanted[G::beta] && norm.beta.has_value()) gradients[G::beta] = behind.bias.to(norm.beta->scalar_type());
  } else {
    // The batch norm subtracts the bias: its gradient is zero, not absent.
    if (wanted[G::bias] && bias.has_value()) gradients[G::bias] = at::mul(behind.divisor, 0).to(bias->scalar_type());
    if (wanted[G::beta]) gradients[G::beta] = behind.beta;
    of_scales.of_gamma = behind.gamma;
    of_scales.of_divisor = behind.divisor;
    // The output is divided by the factor that multiplies the weight. Of a channel whose weight has no gradient,
    // neither has the factor: one alone of the two would be far from their sum.
    if (layer.updated.has_value()) of_scales.of_divisor = only_updated(behind.divisor, *layer.updated);
  }
  const PartGradients of_parts = gradients_of_parts(
      parts, of_scales, {wanted[G::start], wanted[G::ratio], wanted[G::y_start], wanted[G::y_ratio], wanted[G::bias]},
      bias, std::move(later));
  gradients[G::start] = of_parts.start;
  gradients[G::ratio] = of_parts.ratio;
  gradients[G::gamma] = of_parts.gamma;
  if (norm.is_frozen() && of_gamma && layer.updated.has_value()) {
    gradients[G::gamma] = only_updated(of_parts.gamma, *layer.updated);
  }
  if (norm.is_frozen()) gradients[G::bias] = of_parts.bias;
  gradients[G::y_start] = of_parts.y_start;
  gradients[G::y_ratio] = of_parts.y_ratio;
  given.push(stack, gradients);
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("unit", torch::CppFunction::makeFromBoxedFunction<&unit>());
  m.impl("unit_backward", torch::CppFunction::makeFromBoxedFunction<&unit_backward>());
}

}  // namespace qtoolkit
