// The rounding rule of the small float formats e4m3, e5m2 and e2m1 (OCP 8-bit floating point and MX v1.0).
//
// A format is three numbers, so that one formula serves all formats. Like grid.h, it is written once for any V.
#pragma once

#include "grid.h"
#include "kernel_args.h"

namespace qtoolkit {

// The power of two at or below |v|, from the exponent of v (0 for zero and denormals, inf for inf and NaN). A class for
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
  V smallest_normal;  // below it, in the format's denormals, the step is constant
  V shift;            // 1.5 * 2^(mantissa bits of the arithmetic - those of the format)
  V largest;
};

// A is V's scalar.
template <class A, class V>
QT_FN FloatGrid<V> float_grid(const FloatFormat& format) {
  constexpr int kMantissa = sizeof(A) == 8 ? 52 : 23;
  const A shift = static_cast<A>(1.5) * static_cast<A>(int64_t{1} << (kMantissa - format.mantissa));
  return {broadcast<V>(static_cast<A>(format.smallest_normal)), broadcast<V>(shift),
          broadcast<V>(static_cast<A>(format.largest))};
}

// Rounds v to the nearest number of the format, ties to even, with unlimited exponents; beyond twice the largest
// number, v counts as twice that number. The rounding adds and subtracts 1.5 * 2^k, where k makes the last bit of the
// sum the format's last bit for numbers as large as v; the subtraction is exact. Zero keeps its sign; NaN stays NaN.
template <class V>
QT_FN V round_to(const FloatGrid<V>& grid, V v) {
  const V ceiling = grid.largest + grid.largest;
  const V near = clamp(v, -ceiling, ceiling);
  const V power = PowerBelow<V>::of(near);
  const V offset = (power < grid.smallest_normal ? grid.smallest_normal : power) * grid.shift;
  const V rounded = (near + offset) - offset;
  return rounded == 0 ? near * 0 : rounded;
}

// Divides, rounds, then clamps, as on the integer grid. `level`, the number before clamping, shows what saturates.
template <class V, class S>
QT_FN GridPoint<V> snap(const FloatGrid<V>& grid, V x, S scale) {
  const V quotient = x / scale;
  const V level = round_to(grid, quotient);
  return {quotient, level, clamp(level, -grid.largest, grid.largest)};
}

// The numbers of a format as pytorch-quantization 2.x scales them: by `largest` codes per amax, as 1 / amax times it.
// Of an amax, or for an x, of less than float16 represents, they are zero.
template <class V>
QT_FN V fake_quant_legacy(const FloatGrid<V>& grid, V x, V amax) {
  const V one = V{} + 1, magnitude = x < 0 ? -x : x;
  const auto vanishes = amax <= 0x1p-24f, is_tiny = magnitude < 0x1p-24f;
  const V multiplier = vanishes ? one : one / amax * grid.largest;
  const V value = snap(grid, x * multiplier, one).code / multiplier;
  return (vanishes | is_tiny) ? V{} : value;
}

// The scale of a block of elements, from their largest magnitude. e8m0 (OCP MX v1.0): 2^(floor(log2 amax) - the highest
// exponent of the format), within the normal numbers of float32; NaN where amax is not finite, as in Microsoft's
// reference of the format (microxcaling), so that all numbers of the block are NaN. Else (NVFP4): amax / largest,
// rounded to the format of the scales, times tensor_scale.
template <class A>
QT_FN A block_scale(A amax, const FloatFormat& format, const FloatFormat& scale_format, A tensor_scale) {
  const A largest = static_cast<A>(format.largest);
  if (scale_format.largest == 0) {
    const A power = PowerBelow<A>::of(amax) / PowerBelow<A>::of(largest);
    return clamp(power, static_cast<A>(0x1p-126), static_cast<A>(0x1p127)) + (amax - amax);
  }
  return snap(float_grid<A, A>(scale_format), amax / largest, tensor_scale).code * tensor_scale;
}

}  // namespace qtoolkit
