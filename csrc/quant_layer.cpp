// A layer with a fake-quantized weight and an input on a grid, in one op. Backward keeps the input as its codes and the
// weight as the parameters that it comes from; it computes both again, with the same bits.
#include <ATen/ops/add.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>

#include <array>

#include "autograd.h"
#include "checks.h"
#include "geometry.h"
#include "onednn.h"
#include "registration.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "quant_layer";
constexpr int64_t kExactInFloat32 = 1 << 24;

// The arguments that are no tensors with a gradient.
struct Call {
  Tensor codes, x_scale;
  optional<Tensor> x_zero_point;
  int64_t x_qmin, x_qmax, qmin, qmax;
  optional<int64_t> axis;
  int64_t group, block_size;
  double grad_factor;
  Geometry geometry;
  bool integer;
  optional<at::ScalarType> dtype;
};

struct Weight {
  Tensor weight;
  optional<Tensor> factor;
  Tensor scale;
  optional<Tensor> zero_point;
};

// ---- the ops that it is made of, through the dispatcher

std::tuple<Tensor, Tensor> fake_quant(const Tensor& x, const Weight& w, const Call& c, bool mask) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const optional<Tensor>&, int64_t, int64_t,
                                         optional<int64_t>, int64_t, int64_t, double, bool)>("qtoolkit::fake_quant");
  return op.call(x, w.scale, w.zero_point, c.qmin, c.qmax, c.axis, c.group, c.block_size, c.grad_factor, mask);
}

std::tuple<Tensor, Tensor, Tensor> learned_backward(const Tensor& grad, const Tensor& x, const Weight& w,
                                                    const Call& c) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&,
                                                 int64_t, int64_t, optional<int64_t>, int64_t, int64_t, double)>(
          "qtoolkit::fake_quant_learned_backward");
  return op.call(grad, x, w.scale, w.zero_point, c.qmin, c.qmax, c.axis, c.group, c.block_size, c.grad_factor);
}

Tensor quantize(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                optional<int64_t> axis, int64_t group, at::ScalarType dtype) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, const optional<Tensor>&, int64_t, int64_t,
                                        optional<int64_t>, int64_t, int64_t, at::ScalarType)>("qtoolkit::quantize");
  return op.call(x, scale, zero_point, qmin, qmax, axis, group, 0, dtype);
}

Tensor dequantize(const Tensor& codes, const Call& c, at::ScalarType dtype) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, const optional<Tensor>&, optional<int64_t>,
                                        int64_t, int64_t, at::ScalarType)>("qtoolkit::dequantize");
  return op.call(codes, c.x_scale, c.x_zero_point, std::nullopt, 1, 0, dtype);
}

Tensor dequantize_int4(const Tensor& packed, c10::SymIntArrayRef size, const Call& c, at::ScalarType dtype) {
  static const auto op =
      find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const Tensor&, const optional<Tensor>&, bool,
                     optional<int64_t>, int64_t, int64_t, at::ScalarType)>("qtoolkit::dequantize_int4");
  return op.call(packed, size, c.x_scale, c.x_zero_point, c.x_qmin < 0, std::nullopt, 1, 0, dtype);
}

// ---- the layer

bool is_packed(const Tensor& codes, int64_t dims) { return codes.dim() == 1 && dims > 1; }

// One value per output channel, shaped to broadcast over the weight seen as `grouped`.
Tensor over_weight(const Tensor& values, const Tensor& weight, const Geometry& g) {
  if (!g.transposed) {
    std::vector<int64_t> shape(weight.dim(), 1);
    shape[0] = -1;
    return values.view(shape);
  }
  std::vector<int64_t> shape(weight.dim() + 1, 1);
  shape[0] = g.groups;
  shape[2] = -1;
  return values.view(shape);
}

// The weight of a transposed convolution is (in, out / groups, k...): its output channels run along groups and axis 1.
Tensor grouped(const Tensor& weight, const Geometry& g) {
  if (!g.transposed) return weight;
  std::vector<c10::SymInt> shape = weight.sym_sizes().vec();
  shape[0] = shape[0] / g.groups;
  shape.insert(shape.begin(), g.groups);
  return weight.view_symint(shape);
}

Tensor scaled(const Weight& w, const Geometry& g) {
  if (!w.factor.has_value()) return w.weight;
  return at::mul(grouped(w.weight, g), over_weight(*w.factor, w.weight, g)).view_symint(w.weight.sym_sizes());
}

Tensor apply(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias, const Geometry& g) {
  if (g.is_linear()) return at::linear(x, weight, bias);
  return at::convolution(x, weight, bias, g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups);
}

optional<Tensor> cast(const optional<Tensor>& t, at::ScalarType dtype) {
  return t.has_value() ? optional<Tensor>(t->to(dtype)) : std::nullopt;
}

// ---- on integers

// One value per channel for a tensor that has one for all.
Tensor per_channel(const Tensor& values, int64_t channels) {
  return values.numel() == channels ? values.reshape({channels}) : values.reshape({1}).expand({channels}).contiguous();
}

int64_t output_channels(const Tensor& weight, const Geometry& g) {
  return g.transposed ? weight.size(1) * g.groups : weight.size(0);
}

// Sums of products in float: exact while no sum may exceed 2^24, else in float64.
Tensor sums_in_float(const Tensor& x, const Tensor& weight, const Geometry& g, int64_t largest) {
  const int64_t terms =
      weight.numel() / (g.transposed ? weight.size(1) : weight.size(0)) / (g.transposed ? g.groups : 1);
  const bool exact = largest * 128 * terms <= kExactInFloat32;
  const auto type = exact ? at::kFloat : at::kDouble;
  return apply(x.to(type), weight.to(type), std::nullopt, g);
}

Tensor on_integers(const Tensor& x, const Weight& w, const optional<Tensor>& bias, const Call& c) {
  const Geometry& g = c.geometry;
  const Tensor weight = quantize(scaled(w, g), w.scale, std::nullopt, c.qmin, c.qmax, c.axis, c.group, at::kChar);
  const int64_t channels = output_channels(weight, g);
  const Tensor steps =
      per_channel(at::mul(w.scale.abs().to(at::kFloat), c.x_scale.abs().to(at::kFloat).reshape({})), channels);
  const Tensor codes = is_packed(c.codes, x.dim()) ? quantize(x, c.x_scale, c.x_zero_point, c.x_qmin, c.x_qmax,
                                                              std::nullopt, 1, c.x_qmin < 0 ? at::kChar : at::kByte)
                                                   : c.codes;
  const bool is_signed = codes.scalar_type() == at::kChar;
  if (x.is_cpu() && !g.transposed) {
    const int64_t zero_point = c.x_zero_point.has_value() ? c.x_zero_point->round().item<int64_t>() : 0;
    const Tensor bytes = is_signed ? codes.view(at::kByte).bitwise_xor(128) : codes;
    return onednn::layer(bytes, zero_point + (is_signed ? 128 : 0), weight, steps, cast(bias, at::kFloat), g);
  }
  Tensor centred = codes.to(at::kFloat);
  if (c.x_zero_point.has_value()) centred = at::sub(centred, c.x_zero_point->round().to(at::kFloat).reshape({}));
  const Tensor sums = sums_in_float(centred, weight, g, c.x_qmax - c.x_qmin);
  std::vector<int64_t> shape(sums.dim(), 1);
  shape[g.is_linear() ? sums.dim() - 1 : 1 + (sums.dim() - weight.dim())] = channels;
  const Tensor y = at::mul(sums, steps.view(shape)).to(at::kFloat);
  return bias.has_value() ? at::add(y, bias->to(at::kFloat).view(shape)) : y;
}

// In the memory format of the plain layer: the int8 kernels return channels_last.
Tensor in_format_of(const Tensor& y, const Tensor& x) { return y.contiguous(x.suggest_memory_format()); }

Tensor quant_layer(const Tensor& x, const Tensor& codes, const Tensor& x_scale, const optional<Tensor>& x_zero_point,
                   const Tensor& weight, const optional<Tensor>& factor, const Tensor& scale,
                   const optional<Tensor>& zero_point, const optional<Tensor>& bias, int64_t x_qmin, int64_t x_qmax,
                   int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group, int64_t block_size,
                   double grad_factor, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   at::IntArrayRef output_padding, bool transposed, int64_t groups, bool integer,
                   optional<at::ScalarType> dtype) {
  const Weight w = {weight, factor, scale, zero_point};
  const Call c = {
      codes,      x_scale,     x_zero_point,
      x_qmin,     x_qmax,      qmin,
      qmax,       axis,        group,
      block_size, grad_factor, {stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(), transposed, groups},
      integer,    dtype};
  check_float(kOp, "x", x);
  check_float(kOp, "weight", weight);
  const auto type = dtype.value_or(x.scalar_type());
  if (integer && !x.is_meta()) return in_format_of(on_integers(x, w, bias, c), x).to(type);
  const Tensor wq = std::get<0>(fake_quant(scaled(w, c.geometry), w, c, false));
  return apply(x.to(type), wq.to(type), cast(bias, type), c.geometry);
}

// ---- backward

std::tuple<Tensor, Tensor, Tensor> layer_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                  const Geometry& g, std::array<bool, 3> wanted) {
  if (!g.is_linear()) {
    const std::vector<c10::SymInt> channels = {grad.sym_size(grad.dim() - weight.dim() + 1)};
    return at::convolution_backward_symint(grad, x, weight, c10::SymIntArrayRef(channels),
                                           c10::fromIntArrayRefSlow(g.stride), c10::fromIntArrayRefSlow(g.padding),
                                           c10::fromIntArrayRefSlow(g.dilation), g.transposed,
                                           c10::fromIntArrayRefSlow(g.output_padding), g.groups, wanted);
  }
  const Tensor rows = grad.reshape_symint({-1, grad.sym_size(-1)}), x_rows = x.reshape_symint({-1, x.sym_size(-1)});
  return {wanted[0] ? at::mm(rows, weight).view_symint(x.sym_sizes()) : Tensor(),
          wanted[1] ? at::mm(rows.t(), x_rows) : Tensor(), wanted[2] ? rows.sum(0) : Tensor()};
}

struct WeightGradients {
  Tensor weight, factor, scale, zero_point;
};

// From the gradient of the fake-quantized weight to those of what it comes from.
WeightGradients weight_backward(const Tensor& grad, const Tensor& product, const Tensor& mask, at::IntArrayRef order,
                                const Weight& w, const Call& c, bool learned) {
  WeightGradients result;
  Tensor of_product;
  if (learned) {
    std::tie(of_product, result.scale, result.zero_point) = learned_backward(grad, product, w, c);
  } else {
    of_product = backward_op(grad, mask, order);
  }
  if (!w.factor.has_value()) {
    result.weight = of_product.to(w.weight.scalar_type());
    return result;
  }
  const Geometry& g = c.geometry;
  const Tensor each = grouped(of_product, g), factor = over_weight(*w.factor, w.weight, g);
  result.weight = at::mul(each, factor).view_symint(w.weight.sym_sizes()).to(w.weight.scalar_type());
  std::vector<int64_t> others;
  for (int64_t d = 0; d < factor.dim(); ++d) {
    if (d != 0 && !(g.transposed && d == 2)) others.push_back(d);
  }
  result.factor =
      at::mul(each, grouped(w.weight, g)).sum(others).view_symint(w.factor->sym_sizes()).to(w.factor->scalar_type());
  return result;
}

// Results that nobody wants, or that there are none of, are empty.
Tensor or_empty(const Tensor& t, const Tensor& like) { return t.defined() ? t : at::empty({0}, like.options()); }

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quant_layer_backward(
    const Tensor& grad, const Tensor& codes, c10::SymIntArrayRef size, const Tensor& x_scale,
    const optional<Tensor>& x_zero_point, const Tensor& weight, const optional<Tensor>& factor, const Tensor& scale,
    const optional<Tensor>& zero_point, int64_t x_qmin, int64_t qmin, int64_t qmax, optional<int64_t> axis,
    int64_t group, int64_t block_size, double grad_factor, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, at::IntArrayRef output_padding, bool transposed, int64_t groups, bool channels_last,
    at::ScalarType x_dtype, bool learned, std::array<bool, 3> wanted) {
  const Weight w = {weight, factor, scale, zero_point};
  const Call c = {
      codes,      x_scale,     x_zero_point,
      x_qmin,     0,           qmin,
      qmax,       axis,        group,
      block_size, grad_factor, {stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(), transposed, groups},
      false,      {}};
  const auto type = grad.scalar_type();
  const auto dims = static_cast<int64_t>(size.size());
  Tensor x = is_packed(codes, dims) ? dequantize_int4(codes, size, c, x_dtype) : dequantize(codes, c, x_dtype);
  x = x.to(type);
  Tensor dy = grad;
  if (channels_last && dims == 4) {
    x = x.contiguous(at::MemoryFormat::ChannelsLast);
    dy = dy.contiguous(at::MemoryFormat::ChannelsLast);
  }
  const Tensor product = scaled(w, c.geometry);
  const auto [wq, mask] = fake_quant(product, w, c, !learned && wanted[1]);
  const auto [dx, dwq, dbias] = layer_backward(dy, x, wq.to(type), c.geometry, wanted);
  WeightGradients gradients;
  if (wanted[1]) {
    gradients = weight_backward(dwq.to(product.scalar_type()), product, mask, memory_order(wq), w, c, learned);
  }
  return {or_empty(dx, grad),
          or_empty(gradients.weight, grad),
          or_empty(gradients.factor, grad),
          or_empty(gradients.scale, grad),
          or_empty(gradients.zero_point, grad),
          or_empty(dbias, grad)};
}

// ---- autograd

Tensor forward_below(const Tensor& x, const Weight& w, const optional<Tensor>& bias, const Call& c) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<decltype(quant_layer)>("qtoolkit::quant_layer");
  const Geometry& g = c.geometry;
  return op.call(x, c.codes, c.x_scale, c.x_zero_point, w.weight, w.factor, w.scale, w.zero_point, bias, c.x_qmin,
                 c.x_qmax, c.qmin, c.qmax, c.axis, c.group, c.block_size, c.grad_factor, g.stride, g.padding,
                 g.dilation, g.output_padding, g.transposed, g.groups, c.integer, c.dtype);
}

// A scale that is no parameter may be a buffer, which an observer changes before backward.
Tensor kept(const Tensor& t) { return !t.defined() || t.requires_grad() ? t : t.clone(); }
Tensor kept(const optional<Tensor>& t) { return t.has_value() ? kept(*t) : Tensor(); }

optional<Tensor> given(const Tensor& t) { return t.defined() ? optional<Tensor>(t) : std::nullopt; }

struct QuantLayer : torch::autograd::Function<QuantLayer> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const optional<Tensor>& factor,
                        const Tensor& scale, const optional<Tensor>& zero_point, const optional<Tensor>& bias,
                        const Call& c) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({c.codes, kept(c.x_scale), kept(c.x_zero_point), weight, factor.value_or(Tensor()),
                            kept(scale), kept(zero_point)});
    auto& data = ctx->saved_data;
    data["absent"] = std::vector<bool>{!factor.has_value(), !zero_point.has_value(), !bias.has_value()};
    data["size"] = x.sym_sizes();
    data["x_dtype"] = x.scalar_type();
    data["x_format"] = x.suggest_memory_format();
    data["x_qmin"] = c.x_qmin;
    data["qmin"] = c.qmin;
    data["qmax"] = c.qmax;
    data["axis"] = c.axis;
    data["group"] = c.group;
    data["block_size"] = c.block_size;
    data["grad_factor"] = c.grad_factor;
    data["stride"] = c.geometry.stride;
    data["padding"] = c.geometry.padding;
    data["dilation"] = c.geometry.dilation;
    data["output_padding"] = c.geometry.output_padding;
    data["transposed"] = c.geometry.transposed;
    data["groups"] = c.geometry.groups;
    data["integer"] = c.integer;
    data["learned"] = scale.requires_grad() || (zero_point.has_value() && zero_point->requires_grad());
    return forward_below(x, {weight, factor, scale, zero_point}, bias, c);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(7);
    if (!grads[0].defined()) return result;
    static const auto op = find_op<decltype(quant_layer_backward)>("qtoolkit::quant_layer_backward");
    const variable_list saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const auto ints = [&](const char* name) { return data[name].toIntVector(); };
    // Absent tensors have no edge, so that those after them move up.
    const auto absent = data["absent"].toBoolList();
    std::array<bool, 6> needs = {};
    for (size_t i = 0, edge = 0; i < needs.size(); ++i) {
      const bool is_absent = (i == 2 && absent[0]) || (i == 4 && absent[1]) || (i == 5 && absent[2]);
      needs[i] = !is_absent && ctx->needs_input_grad(edge++);
    }
    const bool weight = needs[1] || needs[2] || needs[3] || needs[4];
    const auto [dx, dw, df, ds, dz, db] =
        op.call(grads[0], saved[0], data["size"].toSymIntVector(), saved[1], given(saved[2]), saved[3], given(saved[4]),
                saved[5], given(saved[6]), data["x_qmin"].toInt(), data["qmin"].toInt(), data["qmax"].toInt(),
                data["axis"].toOptional<int64_t>(), data["group"].toInt(), data["block_size"].toInt(),
                data["grad_factor"].toDouble(), ints("stride"), ints("padding"), ints("dilation"),
                ints("output_padding"), data["transposed"].toBool(), data["groups"].toInt(), data["integer"].toBool(),
                data["x_dtype"].toScalarType(), data["learned"].toBool(), {needs[0], weight, needs[5]});
    if (needs[0]) {
      result[0] = dx.to(data["x_dtype"].toScalarType()).contiguous(data["x_format"].toMemoryFormat());
    }
    if (needs[1]) result[1] = dw;
    if (needs[2]) result[2] = df;
    if (needs[3]) result[3] = ds;
    if (needs[4]) result[4] = dz;
    if (needs[5]) result[5] = db;
    return result;
  }
};

Tensor quant_layer_autograd(const Tensor& x, const Tensor& codes, const Tensor& x_scale,
                            const optional<Tensor>& x_zero_point, const Tensor& weight, const optional<Tensor>& factor,
                            const Tensor& scale, const optional<Tensor>& zero_point, const optional<Tensor>& bias,
                            int64_t x_qmin, int64_t x_qmax, int64_t qmin, int64_t qmax, optional<int64_t> axis,
                            int64_t group, int64_t block_size, double grad_factor, at::IntArrayRef stride,
                            at::IntArrayRef padding, at::IntArrayRef dilation, at::IntArrayRef output_padding,
                            bool transposed, int64_t groups, bool integer, optional<at::ScalarType> dtype) {
  const Weight w = {weight, factor, scale, zero_point};
  const Call c = {
      codes,      x_scale,     x_zero_point,
      x_qmin,     x_qmax,      qmin,
      qmax,       axis,        group,
      block_size, grad_factor, {stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(), transposed, groups},
      integer,    dtype};
  for (const Tensor* t : {&x_scale, &codes}) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_differentiated(kOp, *t), kOp,
        ": x_scale must not require grad, since x has its gradient already; pass x_scale.detach().");
  }
  bool any = is_differentiated(kOp, x) | is_differentiated(kOp, weight) | is_differentiated(kOp, scale);
  for (const optional<Tensor>* t : {&factor, &zero_point, &bias}) any |= is_differentiated(kOp, *t);
  if (!any) return forward_below(x, w, bias, c);
  return QuantLayer::apply(x, weight, factor, scale, zero_point, bias, c);
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("quant_layer", quant_layer);
  m.impl("quant_layer_backward", quant_layer_backward);
}

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("quant_layer", quant_layer_autograd); }

}  // namespace qtoolkit
