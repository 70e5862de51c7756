// Fake quantization of one element (V a scalar) or of one vector of them: whether it was clamped, and the gradients of
// a learned scale and zero point (LSQ, arXiv 1902.08153; LSQ+, 2004.09576).
#pragma once

#include "float_grid.h"
#include "grid.h"
#include "kernel_args.h"
#include "log_grid.h"

namespace qtoolkit {

// True where the gradient passes: judged after rounding, false for NaN. A vector V gives a vector of masks.
template <class V>
QT_FN auto is_inside(const GridPoint<V>& p) {
  return p.level == p.code;
}

// Comparisons as bits: one, of a scalar; of a vector one for each lane. A class, for the same reason as Round.
template <class V>
struct Bits {
  QT_FN unsigned equal(V a, V b) { return a == b; }
  QT_FN unsigned at_most(V a, V b) { return a <= b; }
};

template <class V>
QT_FN unsigned inside_bits(const GridPoint<V>& p) {
  return Bits<V>::equal(p.level, p.code);
}

// What an op that maps element by element gives of each: its value, and whether its gradient passes. A rule below reads
// what it needs of a Job (A is V's scalar) and is what the loops of the back ends are told.
template <class V>
struct Mapped {
  V value;
  unsigned inside;  // as Bits
};

template <class A, class V>
struct IntegerRule {
  V lo, hi;
  QT_FN IntegerRule of(const Job& job) {
    return {same<V>(static_cast<A>(job.ends.lo)), same<V>(static_cast<A>(job.ends.hi))};
  }
  QT_FN Mapped<V> map(const IntegerRule& rule, V x, V scale, V zero_point) {
    const auto point = snap(x, scale, zero_point, rule.lo, rule.hi);
    return {value_of(point.code, scale, zero_point), inside_bits(point)};
  }
};

template <class A, class V>
struct FloatRule {
  FloatGrid<V> grid;
  QT_FN FloatRule of(const Job& job) { return {float_grid<A, V>(job.format)}; }
  QT_FN Mapped<V> map(const FloatRule& rule, V x, V scale, V) {
    const auto point = snap(rule.grid, x, scale);
    return {point.code * scale, inside_bits(point)};
  }
};

template <class A, class V>
struct LogRule {
  QT_FN LogRule of(const Job&) { return {}; }
  QT_FN Mapped<V> map(const LogRule&, V x, V scale, V) {
    const auto point = snap_log<A>(x, scale);
    return {point.code, inside_bits(point)};
  }
};

// Legacy: job.scale holds amax (by its magnitude and never zero, as every scale), and the gradient is judged by x
// itself, before rounding.
template <class A, class V, bool kCodes>
struct LegacyRule {
  V lo, hi;
  QT_FN LegacyRule of(const Job& job) {
    return {same<V>(static_cast<A>(job.ends.lo)), same<V>(static_cast<A>(job.ends.hi))};
  }
  QT_FN Mapped<V> map(const LegacyRule& rule, V x, V amax, V) {
    const auto point = snap_legacy(x, amax, rule.lo, rule.hi);
    return {kCodes ? point.code : point.value, Bits<V>::at_most(x, amax) & Bits<V>::at_most(-amax, x)};
  }
};
template <class A, class V>
using LegacyCodeRule = LegacyRule<A, V, true>;
template <class A, class V>
using LegacyValueRule = LegacyRule<A, V, false>;

// d(value)/d(scale), times the incoming gradient.
template <class V>
QT_FN V scale_gradient(const GridPoint<V>& p, V grad, V zero_point) {
  const V steps = p.code - zero_point;
  const V residual = steps - p.quotient;
  return grad * (is_inside(p) ? residual : steps);
}

// A channel's sum of such gradients times the gradient factor, as `scale` gets it: it counts by its magnitude
// (usable_scale), so its gradient has its sign. For a zero point, pass 1.
template <class A>
QT_FN A learned_gradient(double sum, double factor, A scale) {
  const A gradient = static_cast<A>(sum * factor);
  return scale >= 0 ? gradient : -gradient;
}

// d(value)/d(zero_point), times the incoming gradient: only clamped elements move with the zero point.
template <class V>
QT_FN V zero_point_gradient(const GridPoint<V>& p, V grad, V scale) {
  const V moved = -(grad * scale);
  return is_inside(p) ? V{} : moved;
}

}  // namespace qtoolkit
