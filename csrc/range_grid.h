// The rule that turns a range into a grid: the scale and zero point whose codes cover the range.
#pragma once

#include "float_grid.h"
#include "observe.h"

namespace qtoolkit {

// Codes [qmin, qmax]; affine unless symmetric.
struct CodeRange {
  double qmin = 0, qmax = 0;
  bool symmetric = true, pow2_scale = false;
};

template <class A>
struct RangeGrid {
  A scale, zero_point;
};

// The power of two at or above a positive normal number. NaN and infinity stay as they are.
template <class A>
QT_FN A power_above(A v) {
  const A power = PowerBelow<A>::of(v);
  return power < v ? power + power : v;
}

// The width that the codes must span; the range always includes zero. Symmetric codes from 0 up span the positive part.
template <class A>
QT_FN A width_of(A lo, A hi, const CodeRange& codes) {
  if (!codes.symmetric) return hi - lo;
  if (codes.qmin >= 0) return hi;
  return hi > -lo || hi != hi ? hi : -lo;
}

// A range of zero width gets scale 1. The comparisons keep NaN: a range with NaN never gives a usable grid.
template <class A>
QT_FN RangeGrid<A> covering_grid(Range<A> range, const CodeRange& codes) {
  const A smallest = static_cast<A>(0x1p-126);  // the smallest normal float32
  const A qmin = static_cast<A>(codes.qmin), qmax = static_cast<A>(codes.qmax);
  const A lo = range.lo > 0 ? A(0) : range.lo, hi = range.hi < 0 ? A(0) : range.hi;
  const A width = width_of(lo, hi, codes);
  const A step = width / static_cast<A>(codes.symmetric ? codes.qmax : codes.qmax - codes.qmin);
  const A exact = width == 0 ? A(1) : step < smallest ? smallest : step;
  const A scale = codes.pow2_scale ? power_above(exact) : exact;
  return {scale, clamp(qmin - Round<A>::half_even(lo / scale), qmin, qmax)};
}

}  // namespace qtoolkit
