// A unit of a network in training: a layer on grids, its batch norm, a residual add, an activation and a quantizer,
// with everything of which its grids are made. The steps are those of the single ops, with their bits; what a training
// step saves is their calls, and a node of autograd for each.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include "../batch_norm/batch_norm_ops.h"
#include "../checks.h"
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

void unit(const c10::OperatorHandle& op, Stack* stack) {
  Tensor x;
  Layer layer;
  Trained weight;
  optional<at::ScalarType> dtype;
  optional<at::MemoryFormat> format;
  optional<Tensor> bias, running_mean, running_var, batches;
  Followed followed;
  Norm norm;
  double momentum;
  optional<std::string> process_group;
  Following following;
  Output output;
  RawInput raw;
  const size_t count = op.schema().arguments().size();
  Reader reader(torch::jit::last(*stack, count));
  reader >> x;
  read_layer(reader, layer, weight) >> followed >> dtype >> format >> bias >> norm;
  reader >> running_mean >> running_var >> batches >> momentum >> process_group >> following >> output >> raw;
  torch::jit::drop(*stack, count);

  TORCH_CHECK_VALUE(running_mean.has_value() == running_var.has_value(),
                    "unit: running_mean and running_var belong together; pass both, or neither.");
  const WithoutAutocast guard;
  Scales scales = make_scales({"unit", &norm, &layer, &weight, &output.trained}, followed);
  layer.factor = std::move(scales.factor);
  layer.scale = std::move(scales.scale);
  const optional<Tensor>& y_scale = scales.y_scale;
  const Tensor undivided = quant_layer(x, std::nullopt, layer, dtype, format, raw);
  const Following& f = following;
  optional<Tensor> totals;
  if (process_group.has_value()) totals = batch_norm_totals(undivided, layer.factor, bias, process_group);
  const auto [y, codes, mean, variance] = batch_norm_fake_quant(
      undivided, norm.gamma, norm.beta, layer.factor, f.residual, f.codes, f.scale, f.zero_point, norm.eps, f.low,
      f.high, f.slope, y_scale, output.zero_point, output.qmin, output.qmax, output.grad_factor, totals, process_group);
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
  const auto or_none = [&](const optional<Tensor>& t) { return t.has_value() ? *t : at::empty({0}, x.options()); };
  for (const Tensor& t :
       {y, codes, or_none(y_scale), *layer.factor, layer.scale, undivided, mean, variance, or_none(totals)}) {
    stack->emplace_back(t);
  }
}

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
using Wanted = std::array<bool, kCount>;

void unit_backward(const c10::OperatorHandle& op, Stack* stack) {
  Tensor grad, undivided, mean, variance, totals;
  std::vector<c10::SymInt> size;
  at::ScalarType x_dtype;
  Layer layer;
  Trained weight;
  optional<Tensor> bias, y_scale;
  Norm norm;
  Following f;
  Output output;
  Wanted wanted;
  optional<std::string> process_group;
  RawInput raw;
  const size_t count = op.schema().arguments().size();
  Reader reader(torch::jit::last(*stack, count));
  reader >> grad >> size >> x_dtype;
  read_layer(reader, layer, weight) >> bias >> norm >> f >> output >> y_scale >> layer.factor >> layer.scale >>
      undivided >> mean >> variance >> totals >> wanted >> process_group >> raw;
  torch::jit::drop(*stack, count);

  const UnitParts parts = {"unit_backward", &norm, &layer, &weight, &output.trained};
  check_parts(parts, layer.scale.sym_numel());
  const WithoutAutocast guard;
  std::array<Tensor, kCount> gradients;
  const bool is_quantized = y_scale.has_value() && y_scale->sym_numel() > 0;
  const bool of_y_scale = is_quantized && (wanted[kYStart] || wanted[kYRatio] || wanted[kYZeroPoint]);
  const auto [dz, dgamma, dbeta, ddivisor, dresidual, dy_scale, dy_zero_point] = batch_norm_fake_quant_backward(
      grad, undivided, norm.gamma, norm.beta, layer.factor, f.residual, f.codes, f.scale, f.zero_point, mean, variance,
      norm.eps, f.low, f.high, f.slope, is_quantized ? y_scale : std::nullopt, output.zero_point, output.qmin,
      output.qmax, output.grad_factor, wanted[kResidual], of_y_scale,
      process_group.has_value() ? optional<Tensor>(totals) : std::nullopt, process_group);

  const bool of_gamma = wanted[kGamma] && norm.gamma.has_value();
  const bool of_scale = wanted[kStart] || wanted[kRatio];
  const GradientsOfLayer in_layer = quant_layer_backward(
      dz, size, layer, x_dtype,
      {wanted[kX], wanted[kWeight], of_gamma, of_scale, wanted[kZeroPoint], /*bias=*/false, wanted[kRawScale]}, raw);
  if (wanted[kX]) gradients[kX] = in_layer[0];
  if (wanted[kWeight]) gradients[kWeight] = in_layer[1];
  if (wanted[kZeroPoint]) gradients[kZeroPoint] = in_layer[4];
  if (wanted[kRawScale]) gradients[kRawScale] = in_layer[6];
  // The batch norm subtracts the bias: its gradient is zero, not absent.
  if (wanted[kBias] && bias.has_value()) gradients[kBias] = at::mul(ddivisor, 0).to(bias->scalar_type());
  if (wanted[kBeta]) gradients[kBeta] = dbeta;
  if (wanted[kResidual]) gradients[kResidual] = dresidual;
  if (wanted[kYZeroPoint]) gradients[kYZeroPoint] = dy_zero_point;
  const PartGradients of_parts =
      gradients_of_parts(parts,
                         {of_scale ? in_layer[3] : Tensor(), of_y_scale ? dy_scale : Tensor(), dgamma, ddivisor,
                          of_gamma ? in_layer[2] : Tensor()},
                         {wanted[kStart], wanted[kRatio], wanted[kYStart], wanted[kYRatio]});
  gradients[kStart] = of_parts.start;
  gradients[kRatio] = of_parts.ratio;
  gradients[kGamma] = of_parts.gamma;
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
