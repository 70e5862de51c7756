// A unit of a network in training: a layer on grids, its batch norm, a residual add, an activation and a quantizer,
// with everything of which its grids are made. The steps are those of the single ops, with their bits; what a training
// step saves is their calls, and a node of autograd for each.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include <cmath>
#include <tuple>

#include "../batch_norm/batch_norm_ops.h"
#include "../checks.h"
#include "../layer/layer_checks.h"
#include "../layer/layer_ops.h"
#include "../registration.h"
#include "unit_parts.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

// A residual, its codes if it has some, and an activation.
struct Following {
  optional<Tensor> residual, codes, scale, zero_point;
  double low, high, slope;
};

Reader& operator>>(Reader& reader, Following& f) {
  reader >> f.residual >> f.codes >> f.scale >> f.zero_point;
  return reader >> f.low >> f.high >> f.slope;
}

// What follows a frozen batch norm.
Epilogue epilogue_of(const Following& f, const Output& o, const optional<Tensor>& y_scale) {
  return {f.residual, f.codes, f.scale,      f.zero_point, f.low,  f.high,
          f.slope,    y_scale, o.zero_point, o.qmin,       o.qmax, o.grad_factor};
}

bool quantizes_alone(const Epilogue& e) {
  const bool activates = e.low != -INFINITY || e.high != INFINITY;
  return !e.residual.has_value() && !e.residual_codes.has_value() && !activates;
}

void unit(const c10::OperatorHandle& op, Stack* stack) {
  Tensor x;
  Layer layer;
  Trained weight;
  optional<at::ScalarType> dtype;
  optional<at::MemoryFormat> format;
  optional<Tensor> bias, running_mean, running_var, batches;
  bool rounds_bias;
  Followed followed;
  Norm norm;
  double momentum;
  optional<std::string> process_group;
  Following following;
  Quantized output;
  RawInput raw;
  const size_t count = op.schema().arguments().size();
  Reader reader(torch::jit::last(*stack, count));
  reader >> x;
  read_layer(reader, layer, weight) >> followed >> dtype >> format >> bias >> rounds_bias >> norm;
  reader >> norm.frozen_mean >> running_mean >> running_var >> batches >> momentum >> process_group >> following;
  reader >> static_cast<Output&>(output) >> output.learned >> raw;
  torch::jit::drop(*stack, count);

  TORCH_CHECK_VALUE(running_mean.has_value() == running_var.has_value(),
                    "unit: running_mean and running_var belong together; pass both, or neither.");
  const WithoutAutocast guard;
  const GivenBias in_layer = norm.is_frozen() ? GivenBias{bias, rounds_bias} : GivenBias{};
  check_per_output("unit", "bias", in_layer.bias, output_channels(layer.weight, layer.geometry), x);
  Scales scales = make_scales({"unit", &norm, &layer, &weight, &output.trained}, followed, in_layer);
  layer.factor = std::move(scales.factor);
  layer.scale = std::move(scales.scale);
  const optional<Tensor>& y_scale = scales.y_scale;
  const Following& f = following;
  const auto push = [&](std::initializer_list<Tensor> results) {
    for (const Tensor& t : results) stack->emplace_back(or_empty(t, x.options()));
  };
  if (norm.is_frozen()) {
    const Tensor z = quant_layer(x, scales.bias, layer, dtype, format, raw);
    const Epilogue epilogue = epilogue_of(f, output, y_scale);
    QuantizedTensor q;
    Tensor kept = z;
    if (quantizes_alone(epilogue)) {
      output.with_codes = fit_a_byte(output.qmin, output.qmax);
      q = quantize_output(z, output, y_scale);
      if (!y_scale.has_value() || !output.learned) kept = q.mask;
    } else {
      std::tie(q.y, q.codes) = epilogue_fake_quant(z, epilogue);
    }
    return push({q.y, q.codes, y_scale.value_or(Tensor()), *layer.factor, layer.scale, kept, norm.frozen_mean->clone(),
                 norm.variance.clone(), Tensor()});
  }
  const Tensor undivided = quant_layer(x, std::nullopt, layer, dtype, format, raw);
  optional<Tensor> totals;
  if (process_group.has_value()) totals = batch_norm_totals(undivided, layer.factor, bias, process_group);
  const auto [y, codes, mean, variance] = batch_norm_fake_quant(
      undivided, norm.gamma, norm.beta, layer.factor, f.residual, f.codes, f.scale, f.zero_point, norm.eps, f.low,
      f.high, f.slope, y_scale, output.zero_point, output.qmin, output.qmax, output.grad_factor, totals, process_group,
      /*packed=*/true);
  if (running_mean.has_value()) {
    if (batches.has_value()) {
      batches->add_(1);
      note_change(*batches);
    }
    batch_norm_track_(*running_mean, *running_var, mean, variance, layer.factor, bias, momentum,
                      undivided.sym_numel() / undivided.sym_size(1), totals);
    note_change(*running_mean);
    note_change(*running_var);
  }
  push({y, codes, y_scale.value_or(Tensor()), *layer.factor, layer.scale, undivided, mean, variance,
        totals.value_or(Tensor())});
}

// The gradients of what is behind the layer: of its output, of the batch norm, and of what follows; `bias` is that of
// the folded one. A gradient that is not wanted is undefined or empty.
struct Behind {
  Tensor z, gamma, beta, divisor, residual, y_scale, y_zero_point, bias;
};

void unit_backward(const c10::OperatorHandle& op, Stack* stack) {
  // The places of gradients in the results of unit_backward.
  enum {
    kX,
    kWeight,
    kStart,
    kRatio,
    kZeroPoint,
    kBias,
    kGamma,
    kBeta,
    kResidual,
    kYStart,
    kYRatio,
    kYZeroPoint,
    kRawScale,
    kCount
  };
  Tensor grad, undivided, mean, variance, totals;
  std::vector<c10::SymInt> size;
  std::vector<int64_t> order;
  at::ScalarType x_dtype;
  Layer layer;
  Trained weight;
  optional<Tensor> bias, y_scale;
  Norm norm;
  Following f;
  Quantized output;
  std::array<bool, kCount> wanted;
  optional<std::string> process_group;
  RawInput raw;
  const size_t count = op.schema().arguments().size();
  Reader reader(torch::jit::last(*stack, count));
  reader >> grad >> size >> x_dtype >> order;
  read_layer(reader, layer, weight) >> bias >> norm >> f >> static_cast<Output&>(output) >> output.learned >> y_scale >>
      layer.factor >> layer.scale >> undivided >> mean >> variance >> totals >> wanted >> process_group >> raw;
  torch::jit::drop(*stack, count);
  if (y_scale.has_value() && y_scale->sym_numel() == 0) y_scale.reset();

  if (!norm.variance.defined()) {
    norm.variance = variance;
    norm.frozen_mean = mean;
  }
  const UnitParts parts = {"unit_backward", &norm, &layer, &weight, &output.trained};
  check_parts(parts, layer.scale.sym_numel());
  const WithoutAutocast guard;
  const bool of_gamma = wanted[kGamma] && norm.gamma.has_value();
  const bool of_bias = norm.is_frozen() && (of_gamma || wanted[kBeta] || wanted[kBias]);
  const bool of_y_scale = y_scale.has_value() && (wanted[kYStart] || wanted[kYRatio] || wanted[kYZeroPoint]);
  Behind behind = {grad};
  if (!norm.is_frozen()) {
    const auto shared = process_group.has_value() ? optional<Tensor>(totals) : std::nullopt;
    std::tie(behind.z, behind.gamma, behind.beta, behind.divisor, behind.residual, behind.y_scale,
             behind.y_zero_point) =
        batch_norm_fake_quant_backward(grad, undivided, norm.gamma, norm.beta, layer.factor, f.residual, f.codes,
                                       f.scale, f.zero_point, mean, variance, norm.eps, f.low, f.high, f.slope, y_scale,
                                       output.zero_point, output.qmin, output.qmax, output.grad_factor,
                                       wanted[kResidual], of_y_scale, shared, process_group);
  } else if (const Epilogue epilogue = epilogue_of(f, output, y_scale); quantizes_alone(epilogue)) {
    if (y_scale.has_value()) {
      const QuantizedGradients q = quantize_output_backward(grad, undivided, undivided, order, output, *y_scale);
      behind = {q.z, {}, {}, {}, {}, q.scale, q.zero_point};
    }
  } else {
    const EpilogueGradients in_epilogue =
        epilogue_fake_quant_backward(grad, undivided, epilogue, {of_bias, wanted[kResidual], of_y_scale});
    behind = {in_epilogue.x, {}, {}, {}, in_epilogue.residual, in_epilogue.scale, in_epilogue.zero_point};
    if (of_bias) behind.bias = in_epilogue.channels;
  }

  const bool of_scale = wanted[kStart] || wanted[kRatio];
  const bool bias_of_layer = of_bias && !behind.bias.defined();
  const GradientsOfLayer in_layer = quant_layer_backward(
      behind.z, size, layer, x_dtype,
      {wanted[kX], wanted[kWeight], of_gamma, of_scale, wanted[kZeroPoint], bias_of_layer, wanted[kRawScale]}, raw);
  if (bias_of_layer) behind.bias = in_layer[5];
  const Tensor of_factor = of_gamma ? in_layer[2] : Tensor();
  std::array<Tensor, kCount> gradients;
  if (wanted[kX]) gradients[kX] = in_layer[0];
  if (wanted[kWeight]) gradients[kWeight] = in_layer[1];
  if (wanted[kZeroPoint]) gradients[kZeroPoint] = in_layer[4];
  if (wanted[kRawScale]) gradients[kRawScale] = in_layer[6];
  if (wanted[kResidual]) gradients[kResidual] = behind.residual;
  if (wanted[kYZeroPoint]) gradients[kYZeroPoint] = behind.y_zero_point;
  ScaleGradients of_scales = {of_scale ? in_layer[3] : Tensor(), of_y_scale ? behind.y_scale : Tensor(), {}, {}, {}};
  of_scales.of_factor = of_factor;
  if (norm.is_frozen()) {
    of_scales.of_bias = behind.bias;
    if (wanted[kBeta] && norm.beta.has_value()) gradients[kBeta] = behind.bias.to(norm.beta->scalar_type());
  } else {
    // The batch norm subtracts the bias: its gradient is zero, not absent.
    if (wanted[kBias] && bias.has_value()) gradients[kBias] = at::mul(behind.divisor, 0).to(bias->scalar_type());
    if (wanted[kBeta]) gradients[kBeta] = behind.beta;
    of_scales.of_gamma = behind.gamma;
    of_scales.of_divisor = behind.divisor;
  }
  const PartGradients of_parts = gradients_of_parts(
      parts, of_scales, {wanted[kStart], wanted[kRatio], wanted[kYStart], wanted[kYRatio], wanted[kBias]}, bias);
  gradients[kStart] = of_parts.start;
  gradients[kRatio] = of_parts.ratio;
  gradients[kGamma] = of_parts.gamma;
  if (norm.is_frozen()) gradients[kBias] = of_parts.bias;
  gradients[kYStart] = of_parts.y_start;
  gradients[kYRatio] = of_parts.y_ratio;
  for (const Tensor& gradient : gradients) stack->emplace_back(or_empty(gradient, grad.options()));
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("unit", torch::CppFunction::makeFromBoxedFunction<&unit>());
  m.impl("unit_backward", torch::CppFunction::makeFromBoxedFunction<&unit_backward>());
}

}  // namespace qtoolkit
