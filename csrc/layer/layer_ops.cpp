#include "layer_ops.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/linear.h>

#include "../call_op.h"

namespace qtoolkit {

using at::Tensor;
using std::optional;

// ---- the input

Tensor dequantize_input(const Layer& l, c10::SymIntArrayRef size, at::ScalarType dtype) {
  if (!is_packed(l, size)) return dequantize_op(l.codes, l.x_scale, l.x_zero_point, dtype);
  const auto unpacked = [&](const Tensor& codes, c10::SymIntArrayRef sizes) {
    return dequantize_int4_op(codes, sizes, l.x_scale, l.x_zero_point, l.x_qmin < 0, dtype);
  };
  if (l.codes.dim() == 1) return unpacked(l.codes, size);
  const std::vector<c10::SymInt> channels_behind = {size[0], size[2], size[3], size[1]};
  const Tensor bytes = l.codes.permute({0, 2, 3, 1});
  return unpacked(bytes.reshape_symint({bytes.sym_numel()}), channels_behind).permute({0, 3, 1, 2});
}

Tensor quantize_input(const Tensor& x, const Layer& l) {
  const auto dtype = l.x_qmin < 0 ? at::kChar : at::kByte;
  return quantize_op(x, l.x_scale, l.x_zero_point, l.x_qmin, l.x_qmax, std::nullopt, 1, dtype);
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
