#include "strided_pointwise.h"

#include <ATen/ops/add.h>
#include <ATen/ops/constant_pad_nd.h>
#include <torch/library.h>

#include "layer_ops.h"

namespace qtoolkit::strided_pointwise {
namespace {

using at::Tensor;
using std::optional;

constexpr int64_t kVector = 16;  // float32 in the longest vector

// A 1-d convolution is computed as one of images with one row.
bool is_channels_last(const Tensor& t) {
  const Tensor image = t.dim() == 3 ? t.unsqueeze(2) : t;
  return image.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}

Tensor padded(const Tensor& y, int64_t dimension, const Geometry& g) {
  const size_t dims = g.stride.size();
  std::vector<int64_t> edges(2 * dims, 0);  // the last dimension first
  edges[2 * (dims - 1 - dimension) + 1] = g.stride[dimension] - 1;
  return at::constant_pad_nd(y, edges);
}

Tensor convolution_op(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                      at::IntArrayRef output_padding, int64_t groups) {
  return convolution(x, weight, bias,
                     {stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(), transposed, groups});
}

}  // namespace

optional<int64_t> unread_dimension(c10::SymIntArrayRef size, const Tensor& input, const Tensor& weight,
                                   const Geometry& g) {
  if (g.stride.empty() || g.stride.size() > 2 || g.groups != 1 || !input.device().is_cpu()) return std::nullopt;
  optional<int64_t> found;
  for (size_t d = 0; d < g.stride.size(); ++d) {
    if (weight.sym_size(static_cast<int64_t>(d) + 2) != 1 || g.padding[d] != 0) return std::nullopt;
    if (size[d + 2] % g.stride[d] != 0) return std::nullopt;
    if (g.stride[d] > 1 && !found) found = d;
  }
  const bool few = found && weight.sym_size(1) < kVector;
  return few && (is_channels_last(input) || is_channels_last(weight)) ? found : std::nullopt;
}

Tensor without_unread(const Tensor& t, int64_t dimension, const Geometry& g) {
  return t.narrow_symint(dimension + 2, 0, t.sym_size(dimension + 2) - (g.stride[dimension] - 1));
}

Tensor convolution(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias, const Geometry& g) {
  const std::vector<c10::SymInt> size = g.transposed ? output_size(x.sym_sizes(), weight, g) : x.sym_sizes().vec();
  const optional<int64_t> dimension = unread_dimension(size, x, weight, g);
  if (!dimension) return apply(x, weight, bias, g);
  if (!g.transposed) return apply(without_unread(x, *dimension, g), weight, bias, g);
  Geometry shorter = g;
  shorter.output_padding[*dimension] = 0;
  const Tensor y = padded(apply(x, weight, std::nullopt, shorter), *dimension, g);
  if (!bias.has_value()) return y;
  std::vector<int64_t> shape(y.dim() - 1, 1);
  shape[0] = -1;
  return at::add(y, bias->view(shape));
}

TORCH_LIBRARY_IMPL(qtoolkit, CompositeImplicitAutograd, m) { m.impl("convolution", convolution_op); }

}  // namespace qtoolkit::strided_pointwise
