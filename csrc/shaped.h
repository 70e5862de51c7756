// The learned quantizers that are no LSQ: trained ranges (PACT, arXiv 1805.06085; TensorFlow's
// fake_quant_with_min_max_vars), a soft staircase between them (DSQ, 1908.05033), levels that are not uniform (APoT,
// 1909.13144), and an interval of magnitudes (QIL, 1808.05779). Functors as in fake_quant.h.
#pragma once

#include "elementary.h"
#include "fake_quant.h"

namespace qtoolkit {

// The range is trained: the gradient of x passes inside it, judged before rounding, and an element beyond a bound
// moves with it. In terms of scale and zero point, the bounds are (lo - zero_point) scale and (hi -
// zero_point) scale.
template <class A, class V>
struct ClippedGradient {
  static constexpr bool kMemoryBound = true;
  static constexpr bool kMasks = true;
  static constexpr unsigned kSums = kScaleSum | kBothSums;
  V lo, hi;
  QT_FN ClippedGradient from(const KernelArgs& args) {
    return {broadcast<V>(static_cast<A>(args.bounds.lo)), broadcast<V>(static_cast<A>(args.bounds.hi))};
  }
  QT_FN Gradient<V> apply(const ClippedGradient& functor, V x, V grad, V scale, V zero_point) {
    const V below = functor.lo - zero_point, above = functor.hi - zero_point;
    const V low = below * scale, high = above * scale, moved = -(grad * scale);
    const unsigned inside = Bits<V>::at_most(low, x) & Bits<V>::at_most(x, high);
    const V passed = x >= low ? grad : V{};
    return {x <= high ? passed : V{}, inside, x < low ? grad * below : (x > high ? grad * above : V{}),
            x < low ? moved : (x > high ? moved : V{})};
  }
};

// The gradient of the soft staircase, where `grad` is 0 beyond the range. At f in [0, 1] of the step between two codes,
// the staircase is (tanh(k (f - 1/2)) / tanh(k / 2) + 1) / 2. The zero point is the steepness k, and the sum is its
// gradient.
template <class A, class V>
struct SoftGradient {
  static constexpr bool kMemoryBound = false;
  static constexpr bool kMasks = false;
  static constexpr unsigned kSums = kScaleSum;
  QT_FN SoftGradient from(const KernelArgs&) { return {}; }
  QT_FN Gradient<V> apply(const SoftGradient&, V x, V grad, V scale, V steepness) {
    const V quotient = x / scale, near = Round<V>::half_even(quotient), before = near - A(1);
    const V place = quotient - (near > quotient ? before : near) - A(0.5), opposite = -place;
    const V magnitude = place < 0 ? opposite : place;
    const Tanh<V> here = tanh_of_positive<A>(steepness * magnitude), end = tanh_of_positive<A>(steepness * A(0.5));
    const V slope = steepness * here.slope / end.value * A(0.5);
    const V steeper = (magnitude * here.slope - here.value / end.value * end.slope * A(0.5)) / end.value;
    const V moved = grad * scale * A(0.5) * (place < 0 ? -steeper : steeper), dx = grad * slope;
    return {grad == 0 ? V{} : dx, 0, grad == 0 ? V{} : moved, V{}};  // x beyond the range may be infinite
  }
};

template <class V>
struct LevelPoint {
  V quotient, clipped, level;
};

// The level nearest to x in units of the scale, with the sign of x; the lower magnitude of two as near.
template <class A, class V>
QT_FN LevelPoint<V> nearest_level(const Levels& levels, V x, V scale, V lo, V hi) {
  const V quotient = x / scale, clipped = clamp(quotient, lo, hi), opposite = -clipped;
  const V magnitude = clipped < 0 ? opposite : clipped;
  V level = V{};
  for (int i = 1; i < levels.count; ++i) {
    const A before = static_cast<A>(levels.values[i - 1]), next = static_cast<A>(levels.values[i]);
    level = magnitude > broadcast<V>((before + next) / 2) ? broadcast<V>(next) : level;
  }
  const V negative = V{} - level;
  level = clipped < 0 ? negative : level;
  return {quotient, clipped, clipped == clipped ? level : clipped};
}

template <class A, class V>
struct LevelsFunctor {
  static constexpr bool kMemoryBound = false;
  const Levels* levels;
  V lo, hi;
  QT_FN LevelsFunctor from(const KernelArgs& args) {
    return {&args.levels, broadcast<V>(static_cast<A>(args.bounds.lo)), broadcast<V>(static_cast<A>(args.bounds.hi))};
  }
  QT_FN Quantized<V> apply(const LevelsFunctor& functor, V x, V scale, V) {
    const auto point = nearest_level<A>(*functor.levels, x, scale, functor.lo, functor.hi);
    return {point.level * scale, Bits<V>::equal(point.quotient, point.clipped)};
  }
};

template <class A, class V>
struct LevelsGradient {
  static constexpr bool kMemoryBound = false;
  static constexpr bool kMasks = true;
  static constexpr unsigned kSums = kScaleSum;
  LevelsFunctor<A, V> grid;
  QT_FN LevelsGradient from(const KernelArgs& args) { return {LevelsFunctor<A, V>::from(args)}; }
  QT_FN Gradient<V> apply(const LevelsGradient& functor, V x, V grad, V scale, V) {
    const auto point = nearest_level<A>(*functor.grid.levels, x, scale, functor.grid.lo, functor.grid.hi);
    const V residual = point.level - point.quotient;
    const auto inside = point.quotient == point.clipped;
    return {inside ? grad : V{}, Bits<V>::equal(point.quotient, point.clipped),
            grad * (inside ? residual : point.level), V{}};
  }
};

template <class V>
struct IntervalPoint {
  V distance;  // of the magnitude from the center, in widths of the interval
  V place;     // in the interval: from 0 to 1
};

// The scale is the distance of the interval's bounds from its center, and the zero point is the center.
template <class A, class V>
struct IntervalFunctor {
  static constexpr bool kMemoryBound = false;
  bool is_signed;
  QT_FN IntervalFunctor from(const KernelArgs& args) { return {args.bounds.lo < 0}; }
  QT_FN IntervalPoint<V> point(const IntervalFunctor& functor, V x, V scale, V center) {
    const V opposite = -x, magnitude = functor.is_signed ? (x < 0 ? opposite : x) : x;
    const V distance = (magnitude - center) * A(0.5) / scale;
    return {distance, distance + A(0.5)};
  }
  QT_FN Quantized<V> apply(const IntervalFunctor& functor, V x, V scale, V center) {
    const V place = point(functor, x, scale, center).place;
    const V value = clamp(place, V{}, broadcast<V>(A(1))), opposite = -value;
    const V with_sign = x < 0 ? opposite : (x == 0 ? V{} : value);
    return {functor.is_signed ? with_sign : value, 0};
  }
};

template <class A, class V>
struct IntervalGradient {
  static constexpr bool kMemoryBound = false;
  static constexpr bool kMasks = false;
  static constexpr unsigned kSums = kBothSums;
  IntervalFunctor<A, V> interval;
  QT_FN IntervalGradient from(const KernelArgs& args) { return {IntervalFunctor<A, V>::from(args)}; }
  QT_FN Gradient<V> apply(const IntervalGradient& functor, V x, V grad, V scale, V center) {
    const auto point = IntervalFunctor<A, V>::point(functor.interval, x, scale, center);
    const V slope = grad * A(0.5) / scale;
    const V high = broadcast<V>(A(1)), of_one = point.place > high ? V{} : slope;
    const V inside = point.place >= 0 ? of_one : V{}, opposite = -inside;
    const V with_sign = x < 0 ? opposite : (x == 0 ? V{} : inside);
    const V outwards = functor.interval.is_signed ? with_sign : inside;
    const V at_zero = functor.interval.is_signed ? V{} : inside;
    const V moved = outwards * point.distance * A(-2);  // the distance of an infinite x is infinite
    return {x == 0 ? at_zero : inside, 0, outwards == 0 ? V{} : moved, -outwards};
  }
};

}  // namespace qtoolkit
