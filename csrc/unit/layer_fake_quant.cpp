// A unit without a batch norm: a layer on grids, with its bias on the grid of its sums, and a quantizer behind it.
#include "../layer/layer_checks.h"
#include "../layer/layer_ops.h"
#include "../registration.h"
#include "unit_parts.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

void layer_fake_quant(const c10::OperatorHandle& op, Stack* stack) {
  Tensor x;
  Layer layer;
  Trained weight;
  Followed followed;
  optional<at::ScalarType> dtype;
  optional<at::MemoryFormat> format;
  optional<Tensor> bias;
  bool rounds_bias;
  Quantized output;
  RawInput raw;
  const size_t count = op.schema().arguments().size();
  Reader reader(torch::jit::last(*stack, count));
  reader >> x;
  read_layer(reader, layer, weight) >> followed >> dtype >> format >> bias >> rounds_bias >> output >> raw;
  torch::jit::drop(*stack, count);

  constexpr const char* kOp = "layer_fake_quant";
  const WithoutAutocast guard;
  check_per_output(kOp, "bias", bias, output_channels(layer.weight, layer.geometry), x);
  const Scales scales = make_scales({kOp, nullptr, &layer, &weight, &output.trained}, followed, {bias, rounds_bias});
  layer.scale = scales.scale;
  const Tensor z = quant_layer(x, scales.bias, layer, dtype, format, raw);
  const QuantizedTensor q = quantize_output(z, output, scales.y_scale);
  const bool keeps_z = scales.y_scale.has_value() && output.learned;
  for (const Tensor& t : {q.y, q.codes, scales.y_scale.value_or(Tensor()), layer.scale, keeps_z ? z : q.mask}) {
    stack->emplace_back(or_empty(t, x.options()));
  }
}

void layer_fake_quant_backward(const c10::OperatorHandle& op, Stack* stack) {
  // The places of gradients in the results of layer_fake_quant_backward.
  enum { kX, kWeight, kStart, kRatio, kZeroPoint, kBias, kYStart, kYRatio, kYZeroPoint, kRawScale, kCount };
  Tensor grad, y_scale, kept;
  std::vector<c10::SymInt> size;
  at::ScalarType x_dtype;
  std::vector<int64_t> order;
  Layer layer;
  Trained weight;
  Quantized output;
  std::array<bool, kCount> wanted;
  RawInput raw;
  const size_t count = op.schema().arguments().size();
  Reader reader(torch::jit::last(*stack, count));
  reader >> grad >> size >> x_dtype >> order;
  read_layer(reader, layer, weight) >> output >> y_scale >> layer.scale >> kept >> wanted >> raw;
  torch::jit::drop(*stack, count);

  const UnitParts parts = {"layer_fake_quant_backward", nullptr, &layer, &weight, &output.trained};
  check_parts(parts, layer.scale.sym_numel());
  const WithoutAutocast guard;
  QuantizedGradients behind = {grad, {}, {}};
  if (y_scale.sym_numel() > 0) behind = quantize_output_backward(grad, kept, kept, order, output, y_scale);
  const bool of_scale = wanted[kStart] || wanted[kRatio];
  const GradientsOfLayer in_layer = quant_layer_backward(
      behind.z, size, layer, x_dtype,
      {wanted[kX], wanted[kWeight], /*factor=*/false, of_scale, wanted[kZeroPoint], wanted[kBias], wanted[kRawScale]},
      raw);
  const PartGradients of_parts =
      gradients_of_parts(parts, {of_scale ? in_layer[3] : Tensor(), behind.scale, {}, {}, {}},
                         {wanted[kStart], wanted[kRatio], wanted[kYStart], wanted[kYRatio]});
  const std::array<Tensor, kCount> gradients = {in_layer[0],       in_layer[1], of_parts.start,   of_parts.ratio,
                                                in_layer[4],       in_layer[5], of_parts.y_start, of_parts.y_ratio,
                                                behind.zero_point, in_layer[6]};
  push_wanted(stack, gradients, wanted, grad.options());
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("layer_fake_quant", torch::CppFunction::makeFromBoxedFunction<&layer_fake_quant>());
  m.impl("layer_fake_quant_backward", torch::CppFunction::makeFromBoxedFunction<&layer_fake_quant_backward>());
}

}  // namespace qtoolkit
