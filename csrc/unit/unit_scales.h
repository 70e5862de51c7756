// What a unit makes of its small tensors: the factor of a batch norm, the scales and the bias, and their gradients. One
// launch each, where torch's ops take two dozen. Both devices read the same structs.
#pragma once

#include <cmath>
#include <cstdint>

#include "../range_grid.h"

namespace qtoolkit {

// Tensors of one element or one for each channel, all in float64 or all in float32; absent ones are null.

struct TrainedScale {
  int64_t count = 0;
  const void *start = nullptr, *ratio = nullptr;
  void* scale = nullptr;
  bool float16 = false;  // whether the scale is rounded to a number of float16
};

// The scales of a weight that follow it: start, lo and hi are those of its quantizer, low and high the ends of each
// output channel of the weight, which the factor multiplies.
struct FollowedScale {
  const double *low = nullptr, *high = nullptr;
  void *start = nullptr, *lo = nullptr, *hi = nullptr;
  CodeRange codes;
};

// What a layer adds: its bias, or what folding a frozen batch norm makes of it. It lies on the grid of the sums of
// products of codes, as a runtime adds it, if x_scale is given, the scale of the input.
struct UnitBias {
  const void *bias = nullptr, *mean = nullptr, *beta = nullptr, *x_scale = nullptr;
  void* result = nullptr;
  Dtype dtype = Dtype::f32;  // of the result: a layer in a 16-bit type adds such a bias
};

struct UnitScales {
  bool f64 = false, frozen = false;
  int64_t channels = 0;
  double eps = 0;
  const void *variance = nullptr, *gamma = nullptr;
  void* factor = nullptr;
  unsigned* arrived = nullptr;  // of each channel: becomes zero, for the kernels of the batch norm
  TrainedScale weight, output;
  FollowedScale followed;
  UnitBias bias;
};

struct RatioGradient {
  int64_t count = 0;
  const void *grad = nullptr, *start = nullptr, *ratio = nullptr, *rate = nullptr;
  void* result = nullptr;
};

// The gradient of gamma is its own in the batch norm, and that of the factor: as a divisor, and of the weight. If the
// batch norm is frozen, it is that of the factor in the weight and in the bias.
struct UnitGradients {
  bool f64 = false, frozen = false;
  int64_t channels = 0;
  double eps = 0;
  const void *variance = nullptr, *gamma = nullptr, *bias = nullptr, *mean = nullptr;
  const void *of_gamma = nullptr, *of_divisor = nullptr, *of_factor = nullptr, *of_bias = nullptr;
  void *result = nullptr, *bias_result = nullptr;
  RatioGradient weight, output;
};

// Scales of a weight in units of the weight: those of the product take each change of the factor's magnitude, and so
// does their rate, by its square (see positive_scale.cpp). `known` is the magnitude that they have taken; 0 before the
// first. One scale for all channels takes the root of the mean square of their magnitudes.
struct FactorChange {
  static constexpr bool frozen = false;
  bool f64 = false;
  int64_t scales = 0, channels = 0;  // 0 where no scale takes a factor
  double eps = 0;
  const void *variance = nullptr, *gamma = nullptr;
  const void* present = nullptr;  // the variance for which scales are that have taken no magnitude
  void *start = nullptr, *rate = nullptr, *known = nullptr;
};

// The running variance of a step: `held` takes the present one if the clock of steps has moved since it was `taken`,
// and `copy` is what it then is. Elements have `size` bytes, and are only copied. Without channels there is none.
struct HeldVariance {
  int64_t channels = 0, size = 0;
  const void* variance = nullptr;
  void *held = nullptr, *copy = nullptr;
  int64_t* taken = nullptr;
  const int64_t* clock = nullptr;
};

// Codes of a bias: half of int32. quantizers/bias.py has the rule and its source, for exporters, which record its ops,
// and modules that are called one by one.
constexpr int64_t kLargestBias = int64_t{1} << 30;

// ---- the formulas, rounded as torch's ops round them

// torch.rsqrt(variance + eps)
template <class A>
QT_FN A inverse_deviation(A variance, double eps) {
#ifdef __CUDA_ARCH__
  return ::rsqrt(variance + A(eps));
#else
  return A(1) / std::sqrt(variance + A(eps));
#endif
}

// See positive_scale.cpp.
template <class A>
QT_FN A positive_scale_of(A start, A ratio) {
  const A magnitude = std::fabs(ratio), least = A(0x1p-24);
  return start * (magnitude < least ? least : magnitude);  // a NaN stays
}

template <class A>
QT_FN const A* of(const void* data) {
  return static_cast<const A*>(data);
}

template <class A>
QT_FN A trained_scale_at(const TrainedScale& t, int64_t i) {
  const A start = of<A>(t.start)[i];
  const A scale = t.ratio == nullptr ? start : positive_scale_of(start, of<A>(t.ratio)[i]);
  return t.float16 ? float16_scale(scale) : scale;
}

template <class A>
QT_FN void trained_scale(const TrainedScale& t, int64_t i) {
  if (i < t.count) static_cast<A*>(t.scale)[i] = trained_scale_at<A>(t, i);
}

// The factor by which folding a batch norm multiplies a channel; 1 without a batch norm. The layer's output is divided
// by it unless the batch norm is frozen, and a zero is 1 then.
template <class A, class U>
QT_FN A weight_factor(const U& u, int64_t i) {
  if (u.variance == nullptr) return A(1);
  const A inverse = inverse_deviation(of<A>(u.variance)[i], u.eps);
  const A folded = u.gamma == nullptr ? inverse : of<A>(u.gamma)[i] * inverse;
  return folded != 0 || u.frozen ? folded : A(1);
}

// The range of a product is the product of the range: rounding keeps the order.
template <class A>
struct FollowedRanges {
  const UnitScales& u;
  QT_METHOD Range<A> operator()(int64_t i) const {
    const A factor = weight_factor<A>(u, i);
    const A one = A(u.followed.low[i]) * factor, other = A(u.followed.high[i]) * factor;
    return factor < 0 ? Range<A>{other, one} : Range<A>{one, other};
  }
};

template <class A>
QT_FN void followed_scale(const UnitScales& u, int64_t i) {
  const FollowedScale& f = u.followed;
  const FollowedRanges<A> ranges = {u};
  const Range<A> range = ranges(i);
  static_cast<A*>(f.lo)[i] = range.lo;
  static_cast<A*>(f.hi)[i] = range.hi;
  static_cast<A*>(f.start)[i] = covering_grid<A>(ranges, i, u.channels, f.codes).scale;
}

// The bias minus the mean of a frozen batch norm.
template <class A>
QT_FN A centred_bias(const void* bias, const void* mean, int64_t i) {
  return bias == nullptr ? -of<A>(mean)[i] : of<A>(bias)[i] - of<A>(mean)[i];
}

template <class A>
QT_FN A folded_bias(const UnitScales& u, int64_t i) {
  const UnitBias& b = u.bias;
  if (b.mean == nullptr) return of<A>(b.bias)[i];
  const A folded = centred_bias<A>(b.bias, b.mean, i) * weight_factor<A>(u, i);
  return b.beta == nullptr ? folded : folded + of<A>(b.beta)[i];
}

// Larger steps where the code would not fit. unit_parts.cpp computes it by torch's ops for types that a launch does not
// take (16-bit floats, mixed ones): each op rounds to them.
template <class A>
QT_FN A bias_on_grid(A bias, A step) {
  const A least = std::fabs(A(float(bias))) / A(kLargestBias), largest = A(kLargestBias);
  const A wide = step == step && !(step >= least) ? least : step;  // a NaN of either stays
  const auto point = snap(bias, usable_scale(wide), A(0), -largest, largest);
  return value_of(point.code, usable_scale(wide), A(0));
}

// For which the device has a store in each type. After the scales: those that follow a weight are set then.
template <class A>
QT_FN A unit_bias(const UnitScales& u, int64_t i) {
  const A bias = folded_bias<A>(u, i);
  if (u.bias.x_scale == nullptr) return bias;
  const A scale = trained_scale_at<A>(u.weight, u.weight.count == 1 ? 0 : i);
  return bias_on_grid(bias, *of<A>(u.bias.x_scale) * scale);
}

template <class A>
QT_FN void unit_scales_at(const UnitScales& u, int64_t i) {
  if (i < u.channels) {
    if (u.variance != nullptr) static_cast<A*>(u.factor)[i] = weight_factor<A>(u, i);
    if (u.arrived != nullptr) u.arrived[i] = 0;
    if (u.followed.low != nullptr) followed_scale<A>(u, i);
  }
  trained_scale<A>(u.weight, i);
  trained_scale<A>(u.output, i);
}

// Within bounds for which no product of a scale or of its rate is 0 or infinite; a NaN stays.
template <class A>
QT_FN A factor_magnitude(const FactorChange& u, int64_t channel) {
  constexpr double kLeast = 0x1p-30, kLargest = 0x1p30;
  const A magnitude = std::fabs(weight_factor<A>(u, channel));
  return magnitude < A(kLeast) ? A(kLeast) : magnitude > A(kLargest) ? A(kLargest) : magnitude;
}

// The same as the scales were set.
QT_FN FactorChange as_set(FactorChange u) {
  u.variance = u.present;
  return u;
}

// The sum of squares of the magnitudes of every `kSquares`th channel. Both devices add up so many sums in one order.
constexpr int kSquares = 256;

template <class A>
QT_FN double squares_of(const FactorChange& u, int64_t first) {
  double squares = 0;
  for (int64_t channel = first; channel < u.channels; channel += kSquares) {
    const double magnitude = factor_magnitude<A>(u, channel);
    squares += magnitude * magnitude;
  }
  return squares;
}

template <class A>
QT_FN A shared_magnitude(const FactorChange& u, double squares) {
  return A(std::sqrt(squares / double(u.channels)));
}

// Whether a scale has taken no magnitude, so that the magnitude as it was set is needed.
template <class A>
QT_FN bool is_first(const FactorChange& u, int64_t i) {
  return !(of<A>(u.known)[i] > 0);
}

// `now` is the magnitude of the factor, `first` what it was when the scale was set, if `is_first`.
template <class A>
QT_FN void take_factor(const FactorChange& u, int64_t i, A now, A first) {
  if (now != now) return;
  A& known = static_cast<A*>(u.known)[i];
  const A before = known > 0 ? known : first;
  const A ratio = before > 0 ? now / before : A(1);
  known = now;
  static_cast<A*>(u.start)[i] *= ratio;
  if (u.rate != nullptr) static_cast<A*>(u.rate)[i] *= ratio * ratio;
}

template <class A>
QT_FN void take_own_factor(const FactorChange& u, int64_t i) {
  take_factor(u, i, factor_magnitude<A>(u, i), is_first<A>(u, i) ? factor_magnitude<A>(as_set(u), i) : A(0));
}

template <class T>
QT_FN void hold_variance_at(const HeldVariance& h, bool moved, int64_t i) {
  T& held = static_cast<T*>(h.held)[i];
  if (moved) held = static_cast<const T*>(h.variance)[i];
  static_cast<T*>(h.copy)[i] = held;
}

QT_FN void hold_variance(const HeldVariance& h, bool moved, int64_t i) {
  h.size == 8   ? hold_variance_at<uint64_t>(h, moved, i)
  : h.size == 4 ? hold_variance_at<uint32_t>(h, moved, i)
                : hold_variance_at<uint16_t>(h, moved, i);
}

template <class A>
QT_FN void ratio_gradient(const RatioGradient& r, int64_t i) {
  if (i >= r.count) return;
  const A gradient = of<A>(r.grad)[i] / std::copysign(of<A>(r.start)[i], of<A>(r.ratio)[i]);
  static_cast<A*>(r.result)[i] = r.rate == nullptr ? gradient : gradient * of<A>(r.rate)[i];
}

template <class A>
QT_FN void frozen_gradients(const UnitGradients& u, int64_t i) {
  const A of_bias = of<A>(u.of_bias)[i];
  if (u.result != nullptr) {
    const A of_both = of<A>(u.of_factor)[i] + of_bias * centred_bias<A>(u.bias, u.mean, i);
    static_cast<A*>(u.result)[i] = of_both * inverse_deviation(of<A>(u.variance)[i], u.eps);
  }
  if (u.bias_result != nullptr) static_cast<A*>(u.bias_result)[i] = of_bias * weight_factor<A>(u, i);
}

template <class A>
QT_FN void unit_gradients_at(const UnitGradients& u, int64_t i) {
  if (i < u.channels && u.frozen) {
    frozen_gradients<A>(u, i);
  } else if (i < u.channels) {
    const A inverse = inverse_deviation(of<A>(u.variance)[i], u.eps);
    const bool is_zero = of<A>(u.gamma)[i] * inverse == 0;
    const A of_factor = is_zero ? A(0) : of<A>(u.of_divisor)[i] + of<A>(u.of_factor)[i];
    static_cast<A*>(u.result)[i] = of<A>(u.of_gamma)[i] + of_factor * inverse;
  }
  ratio_gradient<A>(u.weight, i);
  ratio_gradient<A>(u.output, i);
}

// Of UnitScales or UnitGradients: up to which index there is something to compute.
template <class U>
QT_FN int64_t largest_count(const U& u) {
  const int64_t scales = u.weight.count > u.output.count ? u.weight.count : u.output.count;
  return u.channels > scales ? u.channels : scales;
}

}  // namespace qtoolkit
