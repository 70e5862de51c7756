// The rule that turns a range into a grid: the scale and zero point whose codes cover the range.
#pragma once

#include <cmath>

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

// The scale that a target takes whose scales are float16 numbers: the nearest number of 11 significant bits, ties to
// even, and at least 2^-14, since smaller numbers of float16 have fewer bits. Those above its largest one, 65,504, are
// rounded like the others: whoever reads scales refuses them, as it does NaN and infinity, which stay.
template <class A>
QT_FN A float16_scale(A scale) {
  const A magnitude = std::fabs(scale), least = static_cast<A>(0x1p-14);
  if (magnitude < least) return std::copysign(least, scale);
  if (!(magnitude < static_cast<A>(INFINITY))) return scale;
  const A step = PowerBelow<A>::of(scale) * static_cast<A>(0x1p-10);
  return Round<A>::half_even(scale / step) * step;
}

// The width that the codes must span; the range always includes zero. Symmetric codes from 0 up span the positive part.
template <class A>
QT_FN A width_of(A lo, A hi, const CodeRange& codes) {
  if (!codes.symmetric) return hi - lo;
  if (codes.qmin >= 0) return hi;
  return hi > -lo || hi != hi ? hi : -lo;
}

// The range with zero in it. The comparisons keep NaN: a range with NaN never gives a usable grid.
template <class A>
QT_FN Range<A> with_zero(Range<A> range) {
  return {range.lo > 0 ? A(0) : range.lo, range.hi < 0 ? A(0) : range.hi};
}

// The scale whose codes span a positive width.
template <class A>
QT_FN A spanning_scale(A width, const CodeRange& codes) {
  const A smallest = static_cast<A>(0x1p-126);  // the smallest normal float32
  const A step = width / static_cast<A>(codes.symmetric ? codes.qmax : codes.qmax - codes.qmin);
  const A scale = step < smallest ? smallest : step;
  return codes.pow2_scale ? power_above(scale) : scale;
}

// The scale of ranges of zero width, which any scale covers: the largest of the tensor's other channels, or 1 without
// any. A runtime adds a bias in steps of the weight's scale, so that of a channel of zeros has the precision of the
// others.
template <class A, class RangeAt>
QT_FN A scale_of_zeros(const RangeAt& range_at, int64_t count, const CodeRange& codes) {
  A widest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Range<A> range = with_zero(range_at(i));
    const A width = width_of(range.lo, range.hi, codes);
    if (width > widest && width < static_cast<A>(INFINITY)) widest = width;
  }
  return widest > 0 ? spanning_scale(widest, codes) : A(1);
}

// The grid of channel i of a tensor. `of_zeros` is its scale_of_zeros where that is known, or 0.
template <class A, class RangeAt>
QT_FN RangeGrid<A> covering_grid(const RangeAt& range_at, int64_t i, int64_t count, const CodeRange& codes,
                                 A of_zeros = 0) {
  const A qmin = static_cast<A>(codes.qmin), qmax = static_cast<A>(codes.qmax);
  const Range<A> range = with_zero(range_at(i));
  const A width = width_of(range.lo, range.hi, codes);
  if (width == 0 && of_zeros == 0) of_zeros = scale_of_zeros<A>(range_at, count, codes);
  const A scale = width == 0 ? of_zeros : spanning_scale(width, codes);
  return {scale, clamp(qmin - Round<A>::half_even(range.lo / scale), qmin, qmax)};
}

// The ranges of channels, by their ends.
template <class A>
struct Ends {
  const A *lo, *hi;
  QT_METHOD Range<A> operator()(int64_t i) const { return {lo[i], hi[i]}; }
};

// The steps of a training that a grid has seen: what the clock showed at its last forward, and how many there were.
// In the first `most` of them, the grid takes the range.
struct StepsSeen {
  int64_t *taken = nullptr, *steps = nullptr;
  const int64_t* clock = nullptr;
  int64_t most = 0;

  // Whether a step begins, and the grid takes the range.
  QT_METHOD bool takes() const { return *clock != *taken && *steps < most; }
  QT_METHOD void note() const {
    *steps += *clock != *taken;
    *taken = *clock;
  }
};

// Writes the grid of channel i of a tensor; zero_point may be null, and `of_zeros` is covering_grid's.
template <class A>
QT_FN void write_covering_grid(const Ends<A>& ranges, int64_t i, int64_t count, const CodeRange& codes, A* scale,
                               A* zero_point, A of_zeros = 0) {
  const RangeGrid<A> grid = covering_grid<A>(ranges, i, count, codes, of_zeros);
  scale[i] = grid.scale;
  if (zero_point != nullptr) zero_point[i] = grid.zero_point;
}

// Whether channel i has a range: initial ones have none, and ranges with NaN.
template <class A>
QT_FN bool has_range(const Ends<A>& ranges, int64_t i) {
  return ranges.lo[i] <= ranges.hi[i];
}

}  // namespace qtoolkit
