// Division of many float32 values by one scale, bit for bit as the processor divides: three instructions a value
// instead of ten.
#pragma once

#include "memory.cuh"

namespace qtoolkit {
namespace cuda {

// With y = 1 / scale and q = x y, both rounded, q + (x - q scale) y in fused operations is x / scale rounded to nearest
// (Markstein, IBM J. Res. Dev. 34, 1990, for a q within one unit in the last place): q is within 1.5 units, and within
// one where the quotient is near the middle of two numbers. That needs normal numbers throughout. A quotient below
// 2^-40 may differ in its last bits; every grid rounds it to a zero with the sign of x. The remainder is computed with
// the opposite sign, so that -0 stays -0.
struct Divisor {
  static constexpr float kMost = 0x1p60f;
  float value, inverse;
  float most;  // the largest magnitude that it divides; negative if it divides none

  Divisor() = default;
  __device__ explicit Divisor(float scale)
      : value(scale), inverse(1 / scale), most(scale >= 1 / kMost && scale <= kMost ? scale * kMost : -1) {}
  __host__ __device__ operator float() const { return value; }
};

QT_FN float operator/(float x, const Divisor& by) {
  const float near = x * by.inverse;
  return ::fmaf(-::fmaf(by.value, near, -x), by.inverse, near);
}

// What divides by a scale where A is the type of the arithmetic.
template <class A>
using DivisorOf = std::conditional_t<std::is_same_v<A, float>, Divisor, A>;

// Whether the divisor divides all elements. NaN counts as divisible: it stays NaN.
QT_DEVICE bool divides(const Divisor& by, const float (&v)[kVectorSize]) {
  float largest = 0;
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) largest = ::fmaxf(largest, ::fabsf(v[k]));
  return largest <= by.most;
}

template <class A>
QT_DEVICE bool divides(A, const A (&)[kVectorSize]) {
  return true;
}

// Calls f with what divides all elements: the divisor, or the scale.
template <class S, class A, class F>
QT_DEVICE void with_divisor(const S& by, const A (&v)[kVectorSize], F f) {
  if (divides(by, v)) return f(by);
  f(static_cast<A>(by));
}

}  // namespace cuda
}  // namespace qtoolkit
