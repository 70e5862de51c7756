// A layer with a fake-quantized weight and an input on a grid, in one op. Backward keeps the input as its codes and the
// weight as the parameters that it comes from; it computes both again, with the same bits.
#include <ATen/Parallel.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>

#include <numeric>

#include "../call_op.h"
#include "../quantize/elementwise.h"
#include "../registration.h"
#include "integer_layer.h"
#include "layer_checks.h"
#include "layer_ops.h"
#include "layer_weight.h"
#include "strided_pointwise.h"
#include "sub_pixel.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

optional<Tensor> cast(const optional<Tensor>& t, at::ScalarType dtype) {
  return t.has_value() ? optional<Tensor>(as_type(*t, dtype)) : std::nullopt;
}

}  // namespace

Tensor quant_layer(const Tensor& x, const optional<Tensor>& bias, const Layer& l, optional<at::ScalarType> dtype,
                   optional<at::MemoryFormat> format, const RawInput& raw) {
  constexpr const char* kOp = "quant_layer";
  check_float(kOp, "x", x);
  check_layer(kOp, l, x.sym_sizes(), x);
  check_per_output(kOp, "bias", bias, output_channels(l.weight, l.geometry), x);
  const at::ScalarType type = dtype.value_or(x.scalar_type());
  check_float_dtype(kOp, type);
  check_memory_format(kOp, format, l);
  check_raw(kOp, raw, x.sym_sizes(), x);
  const WithoutAutocast guard;
  const at::MemoryFormat of_output = format.value_or(output_format(x, l));
  if (l.integer) make_now(l);
  if (l.integer && !x.is_meta()) return as_type(integer_layer(x, bias, l).contiguous(of_output), type);
  const Tensor weight = fake_quant_weight(l, l.geometry, l.weight.suggest_memory_format(), type, Lifetime::call);
  const auto compute = l.geometry.is_linear() ? &apply : &strided_pointwise::convolution;
  return compute(as_type(x, type), weight, cast(bias, type), l.geometry).contiguous(of_output);
}

// ---- backward

namespace {

using OfLayer = std::tuple<Tensor, Tensor, Tensor>;  // of x, weight and bias

OfLayer layer_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Geometry& g,
                       std::array<bool, 3> wanted);

// Without the rows that strided_pointwise.h cuts off, where the weight's gradient needs that.
optional<OfLayer> backward_without_unread(const Tensor& grad, const Tensor& x, const Tensor& weight, const Geometry& g,
                                          std::array<bool, 3> wanted) {
  const auto size = g.transposed ? grad.sym_sizes() : x.sym_sizes();
  const optional<int64_t> dimension = strided_pointwise::unread_dimension(size, x, weight, g);
  if (!dimension) return std::nullopt;
  const auto cut = [&](const Tensor& t) { return strided_pointwise::without_unread(t, *dimension, g); };
  const Tensor dx = wanted[0] ? std::get<0>(layer_backward(grad, x, weight, g, {true, false, false})) : Tensor();
  if (!g.transposed) {
    const auto others = layer_backward(grad, cut(x), weight, g, {false, wanted[1], wanted[2]});
    return OfLayer(dx, std::get<1>(others), std::get<2>(others));
  }
  Geometry shorter = g;
  shorter.output_padding[*dimension] = 0;
  const auto others = layer_backward(cut(grad), x, weight, shorter, {false, wanted[1], false});
  const Tensor dbias = wanted[2] ? grad.transpose(0, 1).flatten(1).sum(1) : Tensor();
  return OfLayer(dx, std::get<1>(others), dbias);
}

OfLayer layer_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Geometry& g,
                       std::array<bool, 3> wanted) {
  if (!g.is_linear()) {
    if (wanted[0] && sub_pixel::has_few_channels(weight, g)) {
      const Tensor dx = sub_pixel::input_gradient(grad, x.sizes(), weight, g);
      if (!wanted[1] && !wanted[2]) return {dx, {}, {}};
      const auto others = layer_backward(grad, x, weight, g, {false, wanted[1], wanted[2]});
      return {dx, std::get<1>(others), std::get<2>(others)};
    }
    if (wanted[1] || wanted[2]) {  // oneDNN computes both together
      if (auto safe = backward_without_unread(grad, x, weight, g, wanted)) return *safe;
    }
    const std::vector<c10::SymInt> channels = {grad.sym_size(1)};
    return at::convolution_backward_symint(grad, x, weight, c10::SymIntArrayRef(channels),
                                           c10::fromIntArrayRefSlow(g.stride), c10::fromIntArrayRefSlow(g.padding),
                                           c10::fromIntArrayRefSlow(g.dilation), g.transposed,
                                           c10::fromIntArrayRefSlow(g.output_padding), g.groups, wanted);
  }
  const auto rows = [](const Tensor& t) { return t.reshape_symint({t.sym_numel() / t.sym_size(-1), t.sym_size(-1)}); };
  const Tensor dy = rows(grad);
  return {wanted[0] ? at::mm(dy, weight).view_symint(x.sym_sizes()) : Tensor(),
          wanted[1] ? at::mm(dy.t(), rows(x)) : Tensor(), wanted[2] ? dy.sum(0) : Tensor()};
}

// The input that the codes stand for; without values where only its size counts.
Tensor rebuilt(const Layer& l, c10::SymIntArrayRef size, at::ScalarType x_dtype, const Tensor& grad, bool values) {
  const bool is_image = size.size() == 4 && l.integer;  // convolutions are fastest in channels_last
  const auto type = grad.scalar_type();
  const auto format = is_image ? at::MemoryFormat::ChannelsLast : l.codes.suggest_memory_format();
  if (!values) return at::empty_symint(size, grad.options().memory_format(format));
  // The values were rounded to x_dtype. From float32, one rounding gives the type of the gradient.
  const auto first = x_dtype == at::kFloat && type != at::kDouble ? type : x_dtype;
  const Tensor x = as_type(dequantize_input(l, size, first), type);
  return is_image ? x.contiguous(format) : x;
}

// The gradient of a bias, in a type: a GPU's sum of 16-bit values is of that type at once.
Tensor sum_of_channels(const Tensor& dy, const Geometry& g, at::ScalarType type) {
  std::vector<int64_t> others(dy.dim());
  std::iota(others.begin(), others.end(), 0);
  others.erase(g.is_linear() ? others.end() - 1 : others.begin() + 1);
  return dy.sum(others, /*keepdim=*/false, type);
}

template <class T>
void gather(const T* rows, int64_t size, at::ArrayRef<int64_t> places, T* result, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for (size_t i = 0; i < places.size(); ++i) result[row * places.size() + i] = rows[row * size + places[i]];
  }
}

// index_select along the last dimension. On the CPU torch's takes three nanoseconds an element there.
Tensor from_rows(const Tensor& t, const Tensor& index) {
  if (!t.is_cpu() || t.element_size() > 8 || !t.is_contiguous()) return t.index_select(-1, index);
  std::vector<int64_t> sizes = t.sizes().vec();
  constexpr int64_t kGrain = 32768;  // elements, of torch's own loops
  const int64_t size = sizes.back(), count = index.numel();
  sizes.back() = count;
  Tensor result = at::empty(sizes, t.options());
  const Tensor indices = index.contiguous();
  const at::ArrayRef<int64_t> places(indices.const_data_ptr<int64_t>(), count);
  at::parallel_for(0, t.numel() / size, kGrain / count + 1, [&](auto b, auto e) {
    const void* from = t.const_data_ptr();
    void* to = result.mutable_data_ptr();
    const auto run = [&](auto type) {
      using T = decltype(type);
      gather(static_cast<const T*>(from), size, places, static_cast<T*>(to), b, e);
    };
    switch (t.element_size()) {
      case 1: return run(uint8_t{});
      case 2: return run(uint16_t{});
      case 4: return run(uint32_t{});
      default: return run(uint64_t{});
    }
  });
  return result;
}

// The channels of a tensor of a layer's outputs, in its memory format.
Tensor channels_of(const Tensor& t, const Geometry& g, const Tensor& channels) {
  if (g.is_linear()) return from_rows(t, channels);
  const bool is_last = t.dim() == 4 && t.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  if (!is_last) return t.index_select(1, channels);
  return from_rows(t.permute({0, 2, 3, 1}), channels).permute({0, 3, 1, 2});
}

// Whether each output channel reads one channel of the input alone, whose codes have the input's shape.
bool reads_one_channel(const Layer& l, c10::SymIntArrayRef size) {
  const Geometry& g = l.geometry;
  return g.groups > 1 && !g.transposed && l.weight.sym_size(1) == 1 && l.codes.sym_sizes() == size;
}

// The gradient of a weight in some output channels: that of the layer that has these channels alone, and zeros in the
// others. Such a layer reads all of the input x, or, where each output reads one channel, that many channels of it. In
// other groups, where this would be as much as the input or more, all of the gradient is computed.
Tensor gradient_of_updated(const Tensor& dy, const Tensor& x, c10::SymIntArrayRef size, at::ScalarType x_dtype,
                           const Tensor& weight, const Layer& l) {
  const std::array<bool, 3> of_weight = {false, true, false};
  const c10::SymInt count = l.updated->sym_numel();
  const Tensor result = at::zeros_like(weight);
  if (count == 0) return result;
  const bool in_one = reads_one_channel(l, size);
  if (l.geometry.groups > 1 && !in_one) {
    return only_updated(std::get<1>(layer_backward(dy, x, weight, l.geometry, of_weight)), l, l.geometry);
  }
  Tensor read = x;
  Geometry g = l.geometry;
  const Tensor in_part = channels_of(dy, g, *l.updated);
  if (in_one) {
    Layer part = l;
    const int64_t readers = (weight.sym_size(0) / g.groups).guard_int(__FILE__, __LINE__);
    part.codes = channels_of(l.codes, g, readers == 1 ? *l.updated : at::floor_divide(*l.updated, readers));
    read = rebuilt(part, part.codes.sym_sizes(), x_dtype, dy, true);
    g.groups = count.guard_int(__FILE__, __LINE__);
  }
  const int64_t axis = g.transposed ? 1 : 0;
  std::vector<c10::SymInt> shape = weight.sym_sizes().vec();
  shape[axis] = count;
  const Tensor like = at::empty_symint(shape, weight.options().memory_format(weight.suggest_memory_format()));
  const Tensor part = std::get<1>(layer_backward(in_part, read, like, g, of_weight));
  return result.index_copy_(axis, *l.updated, part.to(result.scalar_type()));
}

// The gradient of the scale of the input: the sum of dx times the terms of LSQ. dx is linear in the weight, so this is
// the sum of the weight times its own gradient for an input of these terms. For an image, which has few channels and no
// gradient of its own, that takes a fifth to three fifths of the time of dx.
Tensor raw_scale_gradient(const Tensor& dy, const Tensor& weight, const Layer& l, const RawInput& raw,
                          at::MemoryFormat format) {
  const Tensor result = at::empty_symint(raw.scale->sym_sizes(), raw.scale->options());
  if (result.is_meta()) return result;
  const Tensor terms = at::empty_like(*raw.x, raw.x->options().memory_format(format));
  KernelArgs args;
  args.bounds = representable(l.x_qmin, l.x_qmax, *raw.x);
  run_elementwise(KernelId::scale_terms, args, terms, empty_mask(terms, false), *raw.x, l.x_scale, l.x_zero_point, {});
  const Tensor dw = std::get<1>(
      layer_backward(dy, terms.to(dy.scalar_type()), weight, l.geometry, std::array<bool, 3>{false, true, false}));
  const Tensor sum = at::sum(at::mul(dw, weight), at::kDouble);
  on(sum.device()).learned_gradients(GradientOfSums{sum.const_data_ptr<double>(), raw.factor, *raw.scale, result});
  return result;
}

}  // namespace

GradientsOfLayer quant_layer_backward(const Tensor& grad, c10::SymIntArrayRef size, const Layer& l,
                                      at::ScalarType x_dtype, const WantedOfLayer& wanted, const RawInput& raw,
                                      LaterGradients* later) {
  constexpr const char* kOp = "quant_layer_backward";
  check_float(kOp, "grad", grad);
  check_float_dtype(kOp, x_dtype);
  check_layer(kOp, l, size, grad);
  check_raw(kOp, raw, size, grad);
  const std::vector<c10::SymInt> expected = output_size(size, l.weight, l.geometry);
  TORCH_CHECK_VALUE(grad.sym_sizes() == c10::SymIntArrayRef(expected), kOp,
                    ": grad must have the shape of the output, ", c10::SymIntArrayRef(expected), ", got ",
                    grad.sym_sizes(), ".");
  const WithoutAutocast guard;
  const bool learned = wanted[3] || (wanted[4] && l.zero_point.has_value());
  const bool in_weight = learned || wanted[1] || (wanted[2] && l.factor.has_value());
  const bool in_part = in_weight && l.updated.has_value();
  const bool reads_part = in_part && (l.updated->sym_numel() == 0 || reads_one_channel(l, size));
  const Tensor x = rebuilt(l, size, x_dtype, grad, in_weight && !reads_part);
  const bool is_last = x.suggest_memory_format() == at::MemoryFormat::ChannelsLast && l.integer;
  const Tensor dy = is_last ? grad.contiguous(at::MemoryFormat::ChannelsLast) : grad;
  const auto format = is_last ? at::MemoryFormat::ChannelsLast : l.weight.suggest_memory_format();
  const Tensor weight = fake_quant_weight(l, l.geometry, format, grad.scalar_type(), Lifetime::call);
  // On a processor oneDNN computes those of weight and bias together.
  const bool sums_bias = wanted[5] && on(grad.device()).on_gpu;
  auto [dx, dweight, dbias] =
      layer_backward(dy, x, weight, l.geometry, {wanted[0], in_weight && !in_part, wanted[5] && !sums_bias});
  const at::ScalarType of_bias = l.weight.scalar_type();
  if (wanted[5]) dbias = sums_bias ? sum_of_channels(dy, l.geometry, of_bias) : as_type(dbias, of_bias);
  if (in_part) dweight = gradient_of_updated(dy, x, size, x_dtype, weight, l);
  WeightGradients w;
  if (in_weight) {
    w = weight_backward(dweight, l, l.geometry, {wanted[1], wanted[2], wanted[3], wanted[4]}, OfGrad::taken, later);
  }
  if (wanted[0]) dx = as_type(dx, x_dtype).contiguous(x.suggest_memory_format());
  GradientsOfLayer gradients = {dx, w[0], w[1], w[2], w[3], dbias};
  if (wanted[6] && raw.x.has_value()) {
    gradients[6] = raw_scale_gradient(dy, weight, l, raw, x.suggest_memory_format());
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!wanted[i]) gradients[i] = Tensor();
  }
  return gradients;
}

namespace {

// ---- boxed, as most of their arguments make one Layer

void quant_layer_boxed(const c10::OperatorHandle& op, Stack* stack) {
  Tensor x;
  optional<Tensor> bias;
  Layer layer;
  optional<at::ScalarType> dtype;
  optional<at::MemoryFormat> format;
  RawInput raw;
  Reader(op, stack) >> x >> bias >> layer >> dtype >> format >> raw;
  stack->emplace_back(quant_layer(x, bias, layer, dtype, format, raw));
}

void quant_layer_backward_boxed(const c10::OperatorHandle& op, Stack* stack) {
  Tensor grad;
  std::vector<c10::SymInt> size;
  Layer layer;
  at::ScalarType x_dtype;
  WantedOfLayer wanted;
  RawInput raw;
  Reader(op, stack) >> grad >> size >> layer >> x_dtype >> wanted >> raw;
  for (Tensor& gradient : quant_layer_backward(grad, size, layer, x_dtype, wanted, raw)) {
    stack->emplace_back(gradient.defined() ? std::move(gradient) : at::empty({0}, grad.options()));
  }
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("quant_layer", torch::CppFunction::makeFromBoxedFunction<&quant_layer_boxed>());
  m.impl("quant_layer_backward", torch::CppFunction::makeFromBoxedFunction<&quant_layer_backward_boxed>());
}

}  // namespace qtoolkit
