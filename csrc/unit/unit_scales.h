// What a unit makes of its small tensors: the factor of a batch norm and the scales, and their gradients. One launch
// each, where torch's ops take a dozen. Both devices read the same structs.
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
};

// The scales of a weight that follow it: start, lo and hi are those of its quantizer, low and high the ends of each
// output channel of the weight, which the factor multiplies.
struct FollowedScale {
  const double *low = nullptr, *high = nullptr;
  void *start = nullptr, *lo = nullptr, *hi = nullptr;
  CodeRange codes;
};

struct UnitScales {
  bool f64 = false;
  int64_t channels = 0;
  double eps = 0;
  const void *variance = nullptr, *gamma = nullptr;
  void* factor = nullptr;
  TrainedScale weight, output;
  FollowedScale followed;
};

struct RatioGradient {
  int64_t count = 0;
  const void *grad = nullptr, *start = nullptr, *ratio = nullptr, *rate = nullptr;
  void* result = nullptr;
};

// The gradient of gamma is its own in the batch norm, and that of the factor: as a divisor, and of the weight.
struct UnitGradients {
  bool f64 = false;
  int64_t channels = 0;
  double eps = 0;
  const void *variance = nullptr, *gamma = nullptr;
  const void *of_gamma = nullptr, *of_divisor = nullptr, *of_factor = nullptr;
  void* result = nullptr;
  RatioGradient weight, output;
};

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
QT_FN void trained_scale(const TrainedScale& t, int64_t i) {
  if (i >= t.count) return;
  const A start = of<A>(t.start)[i];
  static_cast<A*>(t.scale)[i] = t.ratio == nullptr ? start : positive_scale_of(start, of<A>(t.ratio)[i]);
}

// The nonzero factor by which folding a batch norm multiplies a channel of the weight; 1 without a batch norm.
template <class A>
QT_FN A weight_factor(const UnitScales& u, int64_t i) {
  if (u.variance == nullptr) return A(1);
  const A inverse = inverse_deviation(of<A>(u.variance)[i], u.eps);
  const A folded = u.gamma == nullptr ? inverse : of<A>(u.gamma)[i] * inverse;
  return folded != 0 ? folded : A(1);
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

template <class A>
QT_FN void unit_scales_at(const UnitScales& u, int64_t i) {
  if (i < u.channels) {
    if (u.variance != nullptr) static_cast<A*>(u.factor)[i] = weight_factor<A>(u, i);
    if (u.followed.low != nullptr) followed_scale<A>(u, i);
  }
  trained_scale<A>(u.weight, i);
  trained_scale<A>(u.output, i);
}

template <class A>
QT_FN void ratio_gradient(const RatioGradient& r, int64_t i) {
  if (i >= r.count) return;
  const A gradient = of<A>(r.grad)[i] / std::copysign(of<A>(r.start)[i], of<A>(r.ratio)[i]);
  static_cast<A*>(r.result)[i] = r.rate == nullptr ? gradient : gradient * of<A>(r.rate)[i];
}

template <class A>
QT_FN void unit_gradients_at(const UnitGradients& u, int64_t i) {
  if (i < u.channels) {
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
int64_t largest_count(const U& u) {
  const int64_t scales = u.weight.count > u.output.count ? u.weight.count : u.output.count;
  return u.channels > scales ? u.channels : scales;
}

}  // namespace qtoolkit
