// The only rule by which a range becomes a grid: the scale and zero point whose codes cover it.
#pragma once

#include "float_grid.h"
#include "observe.h"

namespace qtoolkit {

// Codes [qmin, qmax], with a zero point among them unless symmetric.
struct CodeRange {
  double qmin = 0, qmax = 0;
  bool symmetric = true, pow2_scale = false;
};

template <class A>
struct RangeGrid {
  A scale, zero_point;
};

// The power of two at or above a positive normal number. NaN and infinity stay.
template <class A>
QT_FN A power_above(A v) {
  const A power = PowerBelow<A>::of(v);
  return power < v ? power + power : v;
}

// What the codes have to span; zero is always among them. Symmetric codes from 0 up span what is above zero.
template <class A>
QT_FN A width_of(A lo, A hi, const CodeRange& codes) {
  if (!codes.symmetric) return hi - lo;
  if (codes.qmin >= 0) return hi;
  return hi > -lo || hi != hi ? hi : -lo;
}

// A range of zero width gets scale 1. Comparisons are such that NaN stays NaN: a broken range is never a usable grid.
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
