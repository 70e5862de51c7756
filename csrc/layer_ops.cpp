#include "layer_ops.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>

#include "call_op.h"

namespace qtoolkit {

using at::Tensor;
using std::optional;

namespace {

Tensor quantize(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                optional<int64_t> axis, int64_t group, at::ScalarType dtype) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, const optional<Tensor>&, int64_t, int64_t,
                                        optional<int64_t>, int64_t, int64_t, at::ScalarType)>("qtoolkit::quantize");
  return op.call(x, scale, zero_point, qmin, qmax, axis, group, 0, dtype);
}

}  // namespace

// ---- the input

Tensor dequantize_input(const Layer& l, c10::SymIntArrayRef size, at::ScalarType dtype) {
  if (l.codes.dim() == 1) {
    static const auto op =
        find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const Tensor&, const optional<Tensor>&, bool,
                       optional<int64_t>, int64_t, int64_t, at::ScalarType)>("qtoolkit::dequantize_int4");
    return op.call(l.codes, size, l.x_scale, l.x_zero_point, l.x_qmin < 0, std::nullopt, 1, 0, dtype);
  }
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, const optional<Tensor>&, optional<int64_t>,
                                        int64_t, int64_t, at::ScalarType)>("qtoolkit::dequantize");
  return op.call(l.codes, l.x_scale, l.x_zero_point, std::nullopt, 1, 0, dtype);
}

Tensor quantize_input(const Tensor& x, const Layer& l) {
  const auto dtype = l.x_qmin < 0 ? at::kChar : at::kByte;
  return quantize(x, l.x_scale, l.x_zero_point, l.x_qmin, l.x_qmax, std::nullopt, 1, dtype);
}

// ---- the weight

Tensor grouped(const Tensor& weight, const Geometry& g) {
  if (!g.transposed) return weight;
  std::vector<c10::SymInt> shape = weight.sym_sizes().vec();
  shape[0] = shape[0] / g.groups;
  shape.insert(shape.begin(), g.groups);
  return weight.view_symint(shape);
}

Tensor over_grouped(const Tensor& values, const Tensor& weight, const Geometry& g) {
  std::vector<int64_t> shape(weight.dim() + (g.transposed ? 1 : 0), 1);
  shape[0] = g.transposed ? g.groups : -1;
  if (g.transposed) shape[2] = -1;
  return values.reshape(shape);
}

std::vector<int64_t> but_outputs(int64_t dims, const Geometry& g) {
  std::vector<int64_t> others;
  for (int64_t d = 1; d < dims; ++d) {
    if (!(g.transposed && d == 2)) others.push_back(d);
  }
  return others;
}

Tensor scaled_weight(const Layer& l) {
  if (!l.factor.has_value()) return l.weight;
  const Tensor factor = over_grouped(*l.factor, l.weight, l.geometry);
  return at::mul(grouped(l.weight, l.geometry), factor).reshape_symint(l.weight.sym_sizes());
}

std::tuple<Tensor, Tensor> fake_quant_weight(const Tensor& product, const Layer& l, bool mask) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const optional<Tensor>&, int64_t, int64_t,
                                         optional<int64_t>, int64_t, int64_t, double, bool)>("qtoolkit::fake_quant");
  return op.call(product, l.scale, l.zero_point, l.qmin, l.qmax, l.axis, l.group, l.block_size, l.grad_factor, mask);
}

std::tuple<Tensor, Tensor, Tensor> weight_learned_backward(const Tensor& grad, const Tensor& product, const Layer& l) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&,
                                                 int64_t, int64_t, optional<int64_t>, int64_t, int64_t, double)>(
          "qtoolkit::fake_quant_learned_backward");
  return op.call(grad, product, l.scale, l.zero_point, l.qmin, l.qmax, l.axis, l.group, l.block_size, l.grad_factor);
}

Tensor quantize_weight(const Tensor& product, const Layer& l) {
  return quantize(product, l.scale, std::nullopt, l.qmin, l.qmax, l.axis, l.group, at::kChar);
}

// ---- the layer

at::MemoryFormat output_format(const Tensor& x, const Layer& l) {
  if (l.geometry.is_linear()) return at::MemoryFormat::Contiguous;
  const at::MemoryFormat of_input = x.suggest_memory_format();
  return of_input == at::MemoryFormat::Contiguous ? l.weight.suggest_memory_format() : of_input;
}

Tensor apply(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias, const Geometry& g) {
  if (g.is_linear()) return at::linear(x, weight, bias);
  return at::convolution(x, weight, bias, g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups);
}

}  // namespace qtoolkit
