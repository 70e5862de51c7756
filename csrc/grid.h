// The only rounding and clamping rules of the integer grid.
//
// Each formula is written once, for any V: a scalar (float, double) on host and device, or a vector of
// them on the host, where cpu/simd.h overloads the few names that the compiler has no operator for.
// Nothing here may be contracted into a fused multiply-add (the build passes -ffp-contract=off and
// --fmad=false): that is what makes every back end agree bit for bit.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define QT_FN static __host__ __device__ __forceinline__
#else
#define QT_FN static inline __attribute__((always_inline))
#endif

namespace qtoolkit {

// A class, not overloads: its specialisations for vectors (cpu/simd.h) are found wherever they stand.
template <class V>
struct Round;
template <>
struct Round<float> {
  QT_FN float half_even(float v) { return ::rintf(v); }
};
template <>
struct Round<double> {
  QT_FN double half_even(double v) { return ::rint(v); }
};

// NaN fails both comparisons and stays NaN.
template <class V>
QT_FN V clamp(V v, V lo, V hi) {
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}

// A scale counts by its magnitude and never reaches zero: a learned scale cannot turn the grid around,
// and a zero scale maps everything to (almost) zero instead of NaN. NaN stays visible.
template <class A>
QT_FN A usable_scale(A scale) {
  const A smallest = static_cast<A>(0x1p-126);  // the smallest normal float32
  const A magnitude = scale < 0 ? -scale : scale;
  return magnitude < smallest ? smallest : magnitude;
}

// A zero point is a code, hence a whole number; a learned one is rounded where it is used.
template <class A>
QT_FN A usable_zero_point(A zero_point) {
  return Round<A>::half_even(zero_point);
}

template <class V>
struct GridPoint {
  V quotient;  // x / scale
  V level;     // the code before clamping
  V code;      // the code
};

// ONNX QuantizeLinear: divide (never multiply by the reciprocal), round half to even, add the zero point, clamp.
template <class V>
QT_FN GridPoint<V> snap(V x, V scale, V zero_point, V lo, V hi) {
  const V quotient = x / scale;
  const V level = Round<V>::half_even(quotient) + zero_point;
  return {quotient, level, clamp(level, lo, hi)};
}

template <class V>
QT_FN V value_of(V code, V scale, V zero_point) {
  return (code - zero_point) * scale;
}

}  // namespace qtoolkit
