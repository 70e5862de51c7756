// The only rounding rule of the small float formats: e4m3, e5m2 and e2m1 (OCP 8-bit floating point and MX v1.0).
//
// A format is three numbers, so one formula serves them all; like grid.h, it is written once for any V.
#pragma once

#include "grid.h"
#include "kernel_args.h"

namespace qtoolkit {

// The power of two at or below |v|: v's exponent alone (0 for zero and denormals, inf for inf and NaN). A class, for
// the same reason as Round.
template <class V>
struct PowerBelow;
template <>
struct PowerBelow<float> {
  QT_FN float of(float v) { return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, v) & 0x7f800000u); }
};
template <>
struct PowerBelow<double> {
  QT_FN double of(double v) {
    return __builtin_bit_cast(double, __builtin_bit_cast(uint64_t, v) & 0x7ff0000000000000u);
  }
};

template <class V>
struct FloatGrid {
  V smallest_normal;  // below it the steps stay as they are at it: the format's denormals
  V shift;            // 1.5 * 2^(mantissa bits of the arithmetic - those of the format)
  V largest;
};

// A is V's scalar.
template <class A, class V>
QT_FN FloatGrid<V> float_grid(const FloatFormat& format) {
  constexpr int kMantissa = sizeof(A) == 8 ? 52 : 23;
  const A shift = static_cast<A>(1.5) * static_cast<A>(int64_t{1} << (kMantissa - format.mantissa));
  return {same<V>(static_cast<A>(format.smallest_normal)), same<V>(shift), same<V>(static_cast<A>(format.largest))};
}

// v to the nearest number of the format, ties to even, as if its exponents went on without end; anything beyond twice
// the largest number is as good as twice that number. Adding 1.5 * 2^k, with k such that the last bit of the sum is the
// format's last bit for numbers of v's size, rounds; taking it away again is exact. Zero keeps v's sign; NaN stays.
template <class V>
QT_FN V round_to(const FloatGrid<V>& grid, V v) {
  const V ceiling = grid.largest + grid.largest;
  const V near = clamp(v, -ceiling, ceiling);
  const V power = PowerBelow<V>::of(near);
  const V offset = (power < grid.smallest_normal ? grid.smallest_normal : power) * grid.shift;
  const V rounded = (near + offset) - offset;
  return rounded == 0 ? near * 0 : rounded;
}

// As on the integer grid: divide, round, then clamp; what saturates is told by `level`, the number before clamping.
template <class V>
QT_FN GridPoint<V> snap(const FloatGrid<V>& grid, V x, V scale) {
  const V quotient = x / scale;
  const V level = round_to(grid, quotient);
  return {quotient, level, clamp(level, -grid.largest, grid.largest)};
}

// The scale of a block of elements by their largest magnitude. e8m0 (OCP MX v1.0): 2^(floor(log2 amax) - the format's
// highest exponent), within the normal numbers of float32. Else (NVFP4): amax / largest, as a number of the scales' own
// format, times tensor_scale.
template <class A>
QT_FN A block_scale(A amax, const FloatFormat& format, const FloatFormat& scale_format, A tensor_scale) {
  const A largest = static_cast<A>(format.largest);
  if (scale_format.largest == 0) {
    const A power = PowerBelow<A>::of(amax) / PowerBelow<A>::of(largest);
    return clamp(power, static_cast<A>(0x1p-126), static_cast<A>(0x1p127));
  }
  return snap(float_grid<A, A>(scale_format), amax / largest, tensor_scale).code * tensor_scale;
}

}  // namespace qtoolkit
