// A layer with a fake-quantized weight and an input on a grid, in one op. Backward keeps the input as its codes and the
// weight as the parameters that it comes from; it computes both again, with the same bits.
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>

#include "call_op.h"
#include "integer_layer.h"
#include "layer_checks.h"
#include "layer_ops.h"
#include "layout.h"
#include "registration.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

// The ops compute in the dtype that they are told, under autocast too.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

optional<Tensor> cast(const optional<Tensor>& t, at::ScalarType dtype) {
  return t.has_value() ? optional<Tensor>(t->to(dtype)) : std::nullopt;
}

Tensor quant_layer(const Tensor& x, const optional<Tensor>& bias, const Layer& l, optional<at::ScalarType> dtype) {
  constexpr const char* kOp = "quant_layer";
  check_float(kOp, "x", x);
  check_layer(kOp, l, x.sym_sizes(), x);
  check_per_output(kOp, "bias", bias, output_channels(l.weight, l.geometry), x);
  const at::ScalarType type = dtype.value_or(x.scalar_type());
  check_float_dtype(kOp, type);
  const WithoutAutocast guard;
  if (l.integer && !x.is_meta()) return integer_layer(x, bias, l, type);
  const Tensor weight = std::get<0>(fake_quant_weight(scaled_weight(l), l, false));
  return apply(x.to(type), weight.to(type), cast(bias, type), l.geometry).contiguous(output_format(x, l));
}

// ---- backward

// The gradients that are wanted, of: x, weight, factor, scale, zero_point, bias.
using Wanted = std::array<bool, 6>;

std::tuple<Tensor, Tensor, Tensor> layer_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                  const Geometry& g, std::array<bool, 3> wanted) {
  if (!g.is_linear()) {
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
  const Tensor x = dequantize_input(l, size, first).to(type);
  return is_image ? x.contiguous(format) : x;
}

struct WeightGradients {
  Tensor weight, factor, scale, zero_point;
};

// From the gradient of the fake-quantized product of weight and factor to those of what it comes from.
WeightGradients weight_backward(const Tensor& grad, const Tensor& product, const Tensor& mask, at::IntArrayRef order,
                                const Layer& l, const Wanted& wanted) {
  WeightGradients result;
  Tensor of_product;
  if (mask.sym_numel() == 0) {  // of a learned grid
    std::tie(of_product, result.scale, result.zero_point) = weight_learned_backward(grad, product, l);
  } else {
    of_product = backward_op(grad, mask, order);
  }
  if (!l.factor.has_value()) {
    result.weight = of_product.to(l.weight.scalar_type());
    return result;
  }
  const Tensor each = grouped(of_product, l.geometry);
  if (wanted[1]) {
    const Tensor factor = over_grouped(*l.factor, l.weight, l.geometry);
    result.weight = at::mul(each, factor).reshape_symint(l.weight.sym_sizes()).to(l.weight.scalar_type());
  }
  if (wanted[2]) {
    const Tensor terms = at::mul(each, grouped(l.weight, l.geometry));
    result.factor = terms.sum(but_outputs(terms.dim(), l.geometry)).reshape_symint(l.factor->sym_sizes());
    result.factor = result.factor.to(l.factor->scalar_type());
  }
  return result;
}

std::array<Tensor, 6> quant_layer_backward(const Tensor& grad, c10::SymIntArrayRef size, const Layer& l,
                                           at::ScalarType x_dtype, const Wanted& wanted) {
  constexpr const char* kOp = "quant_layer_backward";
  check_float(kOp, "grad", grad);
  check_float_dtype(kOp, x_dtype);
  check_layer(kOp, l, size, grad);
  const std::vector<c10::SymInt> expected = output_size(size, l.weight, l.geometry);
  TORCH_CHECK_VALUE(grad.sym_sizes() == c10::SymIntArrayRef(expected), kOp,
                    ": grad must have the shape of the output, ", c10::SymIntArrayRef(expected), ", got ",
                    grad.sym_sizes(), ".");
  const WithoutAutocast guard;
  const bool learned = wanted[3] || (wanted[4] && l.zero_point.has_value());
  const bool in_weight = learned || wanted[1] || (wanted[2] && l.factor.has_value());
  const Tensor product = scaled_weight(l), x = rebuilt(l, size, x_dtype, grad, in_weight);
  const Tensor dy = x.suggest_memory_format() == at::MemoryFormat::ChannelsLast && l.integer
                        ? grad.contiguous(at::MemoryFormat::ChannelsLast)
                        : grad;
  const auto [weight, mask] = fake_quant_weight(product, l, in_weight && !learned);
  const auto [dx, dweight, dbias] =
      layer_backward(dy, x, weight.to(grad.scalar_type()), l.geometry, {wanted[0], in_weight, wanted[5]});
  WeightGradients w;
  if (in_weight) {
    // In the order of the weight: elementwise loops over two orders take many times as long as this copy.
    const Tensor grad_of_weight = dweight.to(product.scalar_type()).contiguous(l.weight.suggest_memory_format());
    w = weight_backward(grad_of_weight, product, mask, memory_order(weight), l, wanted);
  }
  std::array<Tensor, 6> gradients = {dx, w.weight, w.factor, w.scale, w.zero_point, dbias};
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!wanted[i] || !gradients[i].defined()) gradients[i] = at::empty({0}, grad.options());
  }
  if (wanted[0]) gradients[0] = dx.to(x_dtype).contiguous(x.suggest_memory_format());
  if (wanted[1]) gradients[1] = w.weight.contiguous(l.weight.suggest_memory_format());
  return gradients;
}

// ---- boxed, as most of their arguments make one Layer

void quant_layer_boxed(const c10::OperatorHandle& op, Stack* stack) {
  Tensor x;
  optional<Tensor> bias;
  Layer layer;
  optional<at::ScalarType> dtype;
  const size_t count = op.schema().arguments().size();
  Reader(torch::jit::last(*stack, count)) >> x >> bias >> layer >> dtype;
  torch::jit::drop(*stack, count);
  stack->emplace_back(quant_layer(x, bias, layer, dtype));
}

void quant_layer_backward_boxed(const c10::OperatorHandle& op, Stack* stack) {
  Tensor grad;
  std::vector<c10::SymInt> size;
  Layer layer;
  at::ScalarType x_dtype;
  Wanted wanted;
  const size_t count = op.schema().arguments().size();
  Reader(torch::jit::last(*stack, count)) >> grad >> size >> layer >> x_dtype >> wanted;
  torch::jit::drop(*stack, count);
  for (Tensor& gradient : quant_layer_backward(grad, size, layer, x_dtype, wanted)) {
    stack->emplace_back(std::move(gradient));
  }
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("quant_layer", torch::CppFunction::makeFromBoxedFunction<&quant_layer_boxed>());
  m.impl("quant_layer_backward", torch::CppFunction::makeFromBoxedFunction<&quant_layer_backward_boxed>());
}

}  // namespace qtoolkit
