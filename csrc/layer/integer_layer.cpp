#include "integer_layer.h"

#include <ATen/ops/add.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/round.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>

#include <cmath>

#include "../exact_sums.h"
#include "code_sums.h"
#include "int8_product.h"
#include "layer_ops.h"
#include "layer_weight.h"
#include "onednn.h"
#include "sub_pixel.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

// How large sums may be, for all weights of the grid: to look at the weights would wait for a GPU.
struct Bounds {
  double input, weights;  // the largest magnitude of an input, and of the sum of an output's weights

  double sums() const { return input * weights; }
};

Bounds bounds_of(const Layer& l) {
  const Geometry& g = l.geometry;
  const int64_t outputs = output_channels(l.weight, g).guard_int(__FILE__, __LINE__);
  const double terms = static_cast<double>(l.weight.numel() / outputs);  // a transposed kernel's places overlap at most
  const double largest = static_cast<double>(std::max(-l.qmin, l.qmax));
  return {static_cast<double>(l.x_qmax - l.x_qmin), terms * largest};
}

// ---- sums of products

// The sums of products of x with the weight, integers in float32; in float64 where float32 cannot hold them, and for
// convolutions on a GPU, whose float32 kernels may transform the operands (Winograd, FFT): their errors exceed one
// half.
Tensor exact_sums(Tensor x, const Tensor& weight, const Geometry& g, const Bounds& bounds) {
  const bool transformed = x.is_cuda() && !g.is_linear();
  const bool wide = transformed || x.scalar_type() != at::kFloat;
  const int64_t bits = wide ? -1 : digit_bits(bounds.sums(), bounds.weights);
  const auto sums_of = [&](const Tensor& t) { return apply(t, weight.to(at::kFloat), std::nullopt, g); };
  if (bits == 0) return sums_of(x);
  if (bits < 0) {
    const Tensor sums = apply(x.to(at::kDouble), weight.to(at::kDouble), std::nullopt, g);
    return transformed ? at::round(sums) : sums;
  }
  Tensor sums;
  const double base = std::ldexp(1.0, static_cast<int>(bits));
  double factor = 1, largest = bounds.input;
  for (bool last = false; !last; factor *= base, largest /= base) {
    last = largest < base;
    const Tensor rest = last ? x : at::floor(at::mul(x, 1 / base));
    const Tensor digit = last ? x : at::sub(x, rest, base);
    const Tensor part = at::mul(sums_of(digit).to(at::kDouble), factor);
    sums = sums.defined() ? at::add(sums, part) : part;
    x = rest;
  }
  return sums;
}

// ---- the layer

// The steps of the sums, one per output channel.
Tensor steps_of(const Layer& l, at::ScalarType type) {
  const int64_t channels = output_channels(l.weight, l.geometry).guard_int(__FILE__, __LINE__);
  const Tensor steps = at::mul(usable_scales(l.scale, type).reshape({-1}), usable_scales(l.x_scale, type).reshape({1}));
  return steps.expand({channels}).contiguous();
}

// Zero, or NaN where a value is not finite, which has no code: added to the steps it makes every result NaN.
Tensor nan_or_zero(const Tensor& x, at::ScalarType type) { return at::mul(at::sum(x, type), 0); }

// The input's zero point, for kernels that take an integer; nullopt where it is none of the codes.
optional<int64_t> integer_zero_point(const Layer& l) {
  const double code = l.x_zero_point.has_value() ? std::nearbyint(l.x_zero_point->to(at::kDouble).item<double>()) : 0;
  const bool is_code = code >= static_cast<double>(l.x_qmin) && code <= static_cast<double>(l.x_qmax);
  return is_code ? optional<int64_t>(static_cast<int64_t>(code)) : std::nullopt;
}

Tensor by_int8_kernels(const Tensor& codes, int64_t zero_point, const Tensor& weight, const Tensor& steps,
                       const optional<Tensor>& bias, const Geometry& g) {
  const bool is_signed = codes.scalar_type() == at::kChar;
  const Tensor bytes = is_signed ? codes.view(at::kByte).bitwise_xor(128) : codes;
  const onednn::Int8Layer layer(weight, steps, bias, g, codes.sizes());
  return layer(bytes, zero_point + (is_signed ? 128 : 0));
}

// torch has int8 kernels for convolutions alone; undefined where a transposed one is none with stride 1.
Tensor transposed_by_int8_kernels(const Tensor& codes, int64_t zero_point, const Tensor& weight, const Tensor& steps,
                                  const optional<Tensor>& bias, const Geometry& g) {
  if (weight.dim() != 4 || g.groups != 1 || g.dilation[0] != 1 || g.dilation[1] != 1) return {};
  const std::vector<c10::SymInt> size = output_size(codes.sym_sizes(), weight, g);
  const std::vector<int64_t> out = c10::asIntArrayRefSlow(size, __FILE__, __LINE__).vec();
  const Tensor kernel = sub_pixel::kernel(weight, g.stride);
  if (!sub_pixel::reaches_all(codes.sizes(), out, kernel, g)) return {};
  const auto per_phase = [&](const Tensor& values) { return sub_pixel::per_phase(values, g.stride); };
  const optional<Tensor> biases = bias.has_value() ? optional<Tensor>(per_phase(*bias)) : std::nullopt;
  const Geometry of_phases = {{1, 1}, sub_pixel::padding(kernel), {1, 1}, {0, 0}, false, 1};
  return sub_pixel::output(by_int8_kernels(codes, zero_point, kernel, per_phase(steps), biases, of_phases), out, g);
}

// Whether the sums are int32 ones of a GPU, which are faster there than those of float32 and float64.
bool by_int8_product(const Layer& l) {
  const Geometry& g = l.geometry;
  return l.weight.is_cuda() && CodeSums::take(l.weight, g.transposed, g.groups) &&
         int8_product::is_on(l.weight.device());
}

// In float64 where float32 may not hold the zero point.
Tensor sums_in_float(const Tensor& codes, const Tensor& weight, const Layer& l, bool wide) {
  const auto type = wide ? at::kDouble : at::kFloat;
  Tensor centred = codes.to(type);
  if (l.x_zero_point.has_value()) centred = at::sub(centred, at::round(l.x_zero_point->to(type)).reshape({}));
  return exact_sums(centred, weight, l.geometry, bounds_of(l));
}

Tensor with_steps(const Tensor& sums, const Tensor& steps, const optional<Tensor>& bias, const Geometry& g) {
  std::vector<int64_t> shape(sums.dim(), 1);
  shape[g.channel_axis(sums.dim())] = -1;
  const Tensor y = at::mul(sums.to(steps.scalar_type()), steps.view(shape));
  return bias.has_value() ? at::add(y, bias->view(shape)) : y;
}

}  // namespace

Tensor integer_layer(const Tensor& x, const optional<Tensor>& bias, const Layer& l) {
  constexpr double kInt32 = 2147483647;
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto [weight, poison] = quantize_weight(l, l.geometry, type);
  const Tensor steps = at::add(at::add(steps_of(l, type), poison), nan_or_zero(x, type));
  const Tensor codes = is_packed(l, x.sym_sizes()) ? quantize_input(x, l) : l.codes;
  const auto b = bias.has_value() ? optional<Tensor>(bias->to(type)) : std::nullopt;
  const optional<int64_t> zero_point = x.is_cpu() ? integer_zero_point(l) : optional<int64_t>(0);
  const bool fits = 255 * bounds_of(l).weights <= kInt32;
  Tensor y;
  if (x.is_cpu() && zero_point && fits && x.numel() > 0 && type == at::kFloat && onednn::is_exact()) {
    const auto by_kernels = l.geometry.transposed ? &transposed_by_int8_kernels : &by_int8_kernels;
    y = by_kernels(codes, *zero_point, weight, steps, b, l.geometry);
  }
  if (y.defined()) return y;
  const Tensor sums = fits && by_int8_product(l) ? CodeSums(weight, l.geometry)(codes, l.x_zero_point, type)
                                                 : sums_in_float(codes, weight, l, !zero_point.has_value());
  return with_steps(sums, steps, b, l.geometry);
}

}  // namespace qtoolkit
