// The rounding and clamping rules of the integer grids: ONNX's, and that of pytorch-quantization by amax. They are
// defined here only.
//
// Each formula is written once, for any V: a scalar (float or double) on host and device, or a vector of them on the
// host, where cpu/simd-inl.h defines the few functions that the compiler has no operator for. No formula may be
// contracted into a fused multiply-add (the build passes -ffp-contract=off and --fmad=false): so all devices compute
// the same bits.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define QT_FN static __host__ __device__ __forceinline__
#define QT_METHOD __host__ __device__
#else
#define QT_FN static inline __attribute__((always_inline))
#define QT_METHOD
#endif

namespace qtoolkit {

// A class rather than overloads, so that the specializations for vectors (cpu/simd-inl.h) are found although they are
// defined later.
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

// A vector with all lanes equal to a value; for a scalar V, the value.
template <class V, class A>
QT_FN V broadcast(A value) {
  return value - V{};  // value - 0 keeps -0 and NaN
}

// NaN fails both comparisons and stays NaN.
template <class V>
QT_FN V clamp(V v, V lo, V hi) {
#if __CUDA_ARCH__ >= 800
  // Two instructions, which keep NaN, instead of four. They clamp -0 to a bound of +0, which no caller can tell: only
  // codes have such bounds, and subtracting the zero point from a code gives +0 for either.
  if constexpr (sizeof(V) == sizeof(float)) {
    asm("max.NaN.f32 %0, %0, %1;\n\tmin.NaN.f32 %0, %0, %2;" : "+f"(v) : "f"(lo), "f"(hi));
    return v;
  }
#endif
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}

// The magnitude of a scale, at least the smallest normal float32: a negative learned scale does not invert the grid,
// and a zero scale maps everything to (almost) zero instead of NaN. NaN stays NaN.
template <class A>
QT_FN A usable_scale(A scale) {
  const A smallest = static_cast<A>(0x1p-126);  // the smallest normal float32
  const A magnitude = scale < 0 ? -scale : scale;
  return magnitude < smallest ? smallest : magnitude;
}

// A zero point is a code, hence an integer; a learned one is rounded where it is used.
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

// ONNX QuantizeLinear: divide (never multiply by the reciprocal), round half to even, add the zero point, clamp. S is
// V, or a type that divides a V with the same result.
template <class V, class S>
QT_FN GridPoint<V> snap(V x, S scale, V zero_point, V lo, V hi) {
  const V quotient = x / scale;
  const V level = Round<V>::half_even(quotient) + zero_point;
  return {quotient, level, clamp(level, lo, hi)};
}

template <class V>
QT_FN V value_of(V code, V scale, V zero_point) {
  return (code - zero_point) * scale;
}

// The grid of pytorch-quantization 2.x: the largest magnitude is given, and x is multiplied by codes per unit.
template <class V>
struct LegacyPoint {
  V code;
  V value;
};

// An amax of 2^-24 or less (which float16 cannot represent) gives zeros. A code of -0 becomes 0, as on the other grid.
template <class V>
QT_FN LegacyPoint<V> snap_legacy(V x, V amax, V lo, V hi) {
  const auto vanishes = amax <= 0x1p-24f;
  const V multiplier = hi / amax;
  const V level = Round<V>::half_even(x * (vanishes ? V{} : multiplier)) + V{};
  const V code = clamp(level, lo, hi);
  return {code, code / (vanishes ? V{} + 1 : multiplier)};
}

// Its affine grid of signed codes [lowest, highest] over a range from `low` on: the zero point is rounded, and not
// clamped.
template <class V, class S>
QT_FN V fake_quant_legacy_affine(V x, S step, V low, V lowest, V highest) {
  const V zero = Round<V>::half_even(low / V(step)) - lowest;
  const V code = clamp(Round<V>::half_even(x / step) - zero, lowest, highest);
  return (code + zero) * V(step);
}

}  // namespace qtoolkit
