// The exponential function and the hyperbolic tangent from additions, multiplications and divisions alone, so that all
// devices compute the same bits. Like grid.h, written once for any V.
#pragma once

#include <cstdint>

#include "grid.h"

namespace qtoolkit {

// 2^n for a whole n from -126 to 127. Adding 1.5 * 2^(mantissa bits) moves n to the lowest bits, from where it is
// shifted to the exponent. A class for the same reason as Round.
template <class V>
struct PowerOfTwo;
template <>
struct PowerOfTwo<float> {
  QT_FN float of(float n) {
    return __builtin_bit_cast(float, (__builtin_bit_cast(uint32_t, n + 0x1.8p23f) << 23) + 0x3f800000u);
  }
};
template <>
struct PowerOfTwo<double> {
  QT_FN double of(double n) {
    return __builtin_bit_cast(double, (__builtin_bit_cast(uint64_t, n + 0x1.8p52) << 52) + 0x3ff0000000000000u);
  }
};

// ln 2 in two parts, of which the first has few bits: its product with a small whole number is exact.
template <class A>
struct Ln2;
template <>
struct Ln2<float> {
  static constexpr float high = 0x1.63p-1f, low = -0x1.bd0106p-13f;
  static constexpr int terms = 7;  // of the series: the next is below half of the last bit
};
template <>
struct Ln2<double> {
  static constexpr double high = 0x1.62e42feep-1, low = 0x1.a39ef35793c76p-33;
  static constexpr int terms = 13;
};

// 1 + v/n (1 + v/(n+1) (...)).
template <class A, int n, class V>
QT_FN V exp_series(V v) {
  constexpr A inverse = A(1) / n;
  if constexpr (n > Ln2<A>::terms) {
    return broadcast<V>(A(1));
  } else {
    return v * inverse * exp_series<A, n + 1>(v) + A(1);
  }
}

// e^v for v of at most 0; what is below e^-87 is e^-87. A is V's scalar.
template <class A, class V>
QT_FN V exp_of_negative(V v) {
  const V least = broadcast<V>(A(-87)), near = v < least ? least : v;
  const V whole = Round<V>::half_even(near * A(0x1.71547652b82fep0));
  const V rest = near - whole * Ln2<A>::high - whole * Ln2<A>::low;
  return exp_series<A, 1>(rest) * PowerOfTwo<V>::of(whole);
}

template <class V>
struct Tanh {
  V value, slope;  // the slope is 1 - value^2, without cancellation
};

// tanh v and its derivative for v of at least 0.
template <class A, class V>
QT_FN Tanh<V> tanh_of_positive(V v) {
  const V decay = exp_of_negative<A>(v * A(-2)), sum = decay + A(1);
  return {(broadcast<V>(A(1)) - decay) / sum, decay * A(4) / (sum * sum)};
}

}  // namespace qtoolkit
