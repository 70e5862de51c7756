// Ops of LiteRT's reference kernels whose fixed point is their own, in integers of 64 bits by torch's ops: few tensors
// of a network, on any device. Sources are files of tensorflow/lite/kernels/internal/reference and of gemmlowp.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "../batch_norm/norm_checks.h"
#include "../checks.h"
#include "../registration.h"

namespace qtoolkit {
namespace {

using at::Tensor;

Tensor right(const Tensor& x, int64_t bits) { return at::bitwise_right_shift(x, at::Scalar(bits)); }
Tensor left(const Tensor& x, int64_t bits) { return at::bitwise_left_shift(x, at::Scalar(bits)); }
Tensor integers(const Tensor& x) { return x.round().to(at::kLong); }

// a b / 2^31, halves rounded up: SaturatingRoundingDoublingHighMul (gemmlowp, fixedpoint.h).
template <class B>
Tensor high_product(const Tensor& a, const B& b) {
  return right(a * b + (int64_t{1} << 30), 31);
}

// x / 2^bits, halves rounded away from zero: RoundingDivideByPOT. bits is an integer or a tensor of such.
Tensor divided(const Tensor& x, const Tensor& bits) {
  const Tensor mask = at::bitwise_left_shift(at::full_like(bits, 1), bits) - 1;
  return at::bitwise_right_shift(x, bits) + (x.bitwise_and(mask) > right(mask, 1) + (x < 0).to(at::kLong));
}
Tensor divided(const Tensor& x, int64_t bits) { return divided(x, at::full_like(x, bits)); }

struct Multiplier {
  int64_t bits, exponent;
};

// A factor as 31 bits and the exponent of two: QuantizeMultiplier (quantization_util.cc).
Multiplier multiplier_of(double real) {
  int exponent = 0;
  const double fraction = std::frexp(real, &exponent);
  int64_t bits = static_cast<int64_t>(std::floor(fraction * 0x1p31 + 0.5));
  if (bits == int64_t{1} << 31) bits /= 2, ++exponent;
  return {bits, exponent};
}

// ---- softmax.h

// exp of numbers in (-32, 0] with 26 bits after the point, with 31 bits: exp_on_negative_values of fixedpoint.h. The
// factors are exp(-2^k), k from -2 to 4.
Tensor exp_of_negative(const Tensor& a) {
  constexpr std::array<int64_t, 7> kFactors = {1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242};
  constexpr int64_t kExpOfEighth = 1895147668, kThird = 715827883;
  const Tensor behind = a.bitwise_and((int64_t{1} << 24) - 1) - (int64_t{1} << 24);  // in [-1/4, 0)
  const Tensor x = left(behind, 5) + (int64_t{1} << 28);
  const Tensor x2 = high_product(x, x), x3 = high_product(x2, x), x4 = high_product(x2, x2);
  const Tensor series = divided(high_product(divided(x4, 2) + x3, kThird) + x2, 1);
  Tensor found = high_product(x + series, kExpOfEighth) + kExpOfEighth;
  for (size_t k = 0; k < kFactors.size(); ++k) {
    const Tensor has = (behind - a).bitwise_and(int64_t{1} << (24 + k)) != 0;
    found = at::where(has, high_product(found, kFactors[k]), found);
  }
  return at::where(a == 0, at::full_like(found, (int64_t{1} << 31) - 1), found);
}

// 1 / (1 + a) for a in [0, 1), both with 31 bits after the point: one_over_one_plus_x_for_x_in_0_1.
Tensor inverse_of_one_plus(const Tensor& a) {
  const Tensor half = right(a + (int64_t{1} << 31), 1);
  Tensor x = high_product(half, int64_t{-1010580540}) + int64_t{1515870810};  // 48/17 - 32/17 half, with 29 bits
  for (int step = 0; step < 3; ++step) x = x + left(high_product(x, (int64_t{1} << 29) - high_product(half, x)), 2);
  return left(x, 1).clamp_max((int64_t{1} << 31) - 1);
}

// Exponentials have 31 bits, and their sum 19.
Tensor softmax_codes(const Tensor& x, double scale, int64_t dim) {
  check_float("softmax_codes", "x", x);
  TORCH_CHECK_VALUE(scale >= 0x1p-26 && scale < 16, "softmax_codes: scale must lie in [2^-26, 16), got ", scale, ".");
  const int64_t dims = x.dim();
  TORCH_CHECK_VALUE(dim >= -dims && dim < dims, "softmax_codes: dim must lie in [", -dims, ", ", dims - 1,
                    "] for an input of ", dims, " dimensions, got ", dim, ".");
  TORCH_CHECK_VALUE(x.sym_size(dim) > 0, "softmax_codes: x must have elements along dim, got shape ", x.sym_sizes(),
                    ".");
  const Multiplier factor = multiplier_of(scale * 0x1p26);
  const int64_t least = -((int64_t{31} << 26) >> factor.exponent);
  const Tensor codes = integers(x), differences = codes - codes.amax(dim, true);
  const Tensor powers = exp_of_negative(high_product(left(differences.clamp_min(least), factor.exponent), factor.bits));
  const Tensor counted = differences >= least;
  const Tensor sums = (divided(powers, 12) * counted).sum(dim, true);
  const Tensor zeros = 31 - sums.to(at::kDouble).log2().floor().to(at::kLong);
  const Tensor parts =
      high_product(powers, inverse_of_one_plus(at::bitwise_left_shift(sums, zeros) - (int64_t{1} << 31)));
  const Tensor bits = (35 - zeros).expand(parts.sizes());
  return (divided(parts, bits).clamp(0, 255) * counted).to(at::kFloat);
}

// ---- hard_swish.h: integers of 16 bits, with 7 of them after the input's code

Tensor saturated(const Tensor& x) { return x.clamp(-(1 << 15), (1 << 15) - 1); }

Multiplier multiplier16_of(double real) {
  const Multiplier wide = multiplier_of(real);
  return {std::min<int64_t>((wide.bits + (1 << 15)) >> 16, (1 << 15) - 1), wide.exponent};
}

Tensor hard_swish_codes(const Tensor& x, double x_scale, double scale, int64_t qmin, int64_t qmax) {
  check_float("hard_swish_codes", "x", x);
  check_code_range("hard_swish_codes", qmin, qmax);
  TORCH_CHECK_VALUE(x_scale > 0x1p-20 && x_scale < 256, "hard_swish_codes: x_scale must lie in (2^-20, 256), got ",
                    x_scale, ".");
  TORCH_CHECK_VALUE(
      x_scale < 127 * scale && scale < 0x1p20 * x_scale,
      "hard_swish_codes: scale must be more than a part in 127 of x_scale, and less than 2^20 of it, got ", scale,
      " for an x_scale of ", x_scale, ".");
  const float step = static_cast<float>(x_scale) / 128.0f;
  const Multiplier of_output = multiplier16_of(step / static_cast<float>(scale));
  const Multiplier of_gate = multiplier16_of(step / static_cast<float>(3.0 / 32768));
  const Tensor fine = left(integers(x), 7);
  Tensor gate = saturated(left(fine, std::max<int64_t>(of_gate.exponent - 1, 0)));
  gate = saturated(right(gate * of_gate.bits + (1 << 14), 15));
  gate = of_gate.exponent > 0 ? saturated(left(gate, 1)) : divided(gate, -of_gate.exponent);
  const Tensor output = saturated(right(fine * of_output.bits + (1 << 14), 15));
  const Tensor product = right(gate + (1 << 15), 1) * output;
  const Tensor truncated = saturated(product.sign() * right(product.abs(), 15));
  return divided(truncated, -of_output.exponent).clamp(qmin, qmax).to(at::kFloat);
}

// ---- quantize.h

Tensor fake_quant_away(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point, int64_t qmin,
                       int64_t qmax) {
  constexpr const char* kOp = "fake_quant_away";
  check_float(kOp, "x", x);
  check_code_range(kOp, qmin, qmax);
  check_one_grid(kOp, "", scale, zero_point, x);
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor step = scale.to(type).reshape({}).abs().clamp_min(0x1p-126), quotient = x.to(type) / step;
  const Tensor whole = quotient.trunc(), rest = quotient - whole;
  Tensor codes = whole + at::where(rest.abs() >= 0.5, rest.sign(), at::zeros_like(rest));
  const Tensor zero = zero_point.has_value() ? zero_point->to(type).reshape({}).round() : at::zeros_like(step);
  codes = (codes + zero).clamp(static_cast<double>(qmin), static_cast<double>(qmax)) - zero;
  return (codes * step).to(x.scalar_type());
}

// ---- integer_ops/pooling.h

Tensor average_codes(const Tensor& sums, const Tensor& counts) {
  constexpr const char* kOp = "average_codes";
  check_float(kOp, "sums", sums);
  check_float(kOp, "counts", counts);
  check_same_device(kOp, "counts", counts, sums);
  TORCH_CHECK_VALUE(sums.sym_sizes() == counts.sym_sizes(), kOp, ": counts must have the shape of sums, ",
                    sums.sym_sizes(), ", got ", counts.sym_sizes(), ".");
  const Tensor whole = sums.to(at::kDouble), of = counts.to(at::kDouble);
  return (whole.sign() * ((whole.abs() + (of / 2).floor()) / of).floor()).to(at::kFloat);
}

// ---- resize_bilinear.h: positions have 10 bits after the point, and weights too

Tensor resize_linear_codes(const Tensor& x, at::IntArrayRef size, bool align_corners) {
  check_float("resize_linear_codes", "x", x);
  TORCH_CHECK_VALUE(x.dim() == 4 && x.sym_size(2) > 0 && x.sym_size(3) > 0,
                    "resize_linear_codes: x must be images (N, C, H, W) of some height and width, got shape ",
                    x.sym_sizes(), ".");
  TORCH_CHECK_VALUE(size.size() == 2 && std::min(size[0], size[1]) > 0 && std::max(size[0], size[1]) <= 1 << 20,
                    "resize_linear_codes: size must be height and width, from 1 to 2^20, got ", size, ".");
  Tensor found = integers(x);
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t from = x.sym_size(2 + d).guard_int(__FILE__, __LINE__), to = size[d];
    const bool aligned = align_corners && to > 1;
    const int64_t step = aligned ? (1024 * (from - 1) + (to - 1) / 2) / (to - 1) : (1024 * from + to / 2) / to;
    const Tensor places = at::arange(to, found.options()) * step + (align_corners ? int64_t{0} : step / 2 - 512);
    const Tensor low = right(places, 10).clamp(0, from - 1);
    const Tensor high = right(places + 1023, 10).clamp(0, from - 1);
    const Tensor along = places - left(low, 10), weight = d == 0 ? along.unsqueeze(1) : along;
    found = found.index_select(2 + d, low) * (1024 - weight) + found.index_select(2 + d, high) * weight;
  }
  return (found.sign() * right(found.abs() + (int64_t{1} << 19), 20)).to(at::kFloat);  // halves away from zero
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("fake_quant_away", fake_quant_away);
  m.impl("softmax_codes", softmax_codes);
  m.impl("hard_swish_codes", hard_swish_codes);
  m.impl("average_codes", average_codes);
  m.impl("resize_linear_codes", resize_linear_codes);
}

}  // namespace qtoolkit
