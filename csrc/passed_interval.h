// The values whose gradient a quantizer passes, as an interval: without a division for each element.
#pragma once

#include <cstdint>
#include <type_traits>

#include "grid.h"

namespace qtoolkit {

// All numbers of a type in order, as integers: 0 is number 0, and -infinity and infinity are the first and the last.
template <class A>
struct Numbers {
  using Bits = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
  static constexpr Bits kSign = sizeof(A) == 4 ? Bits(INT32_MIN) : Bits(INT64_MIN);
  static constexpr int64_t kLast = sizeof(A) == 4 ? 0x7f800000 : 0x7ff0000000000000;

  QT_FN A at(int64_t place) { return __builtin_bit_cast(A, static_cast<Bits>(place < 0 ? kSign - place : place)); }
  QT_FN int64_t place_of(A number) {
    const Bits bits = __builtin_bit_cast(Bits, number);
    return bits < 0 ? int64_t{kSign} - bits : bits;
  }
};

// The place of the first number for which `before` is false: all numbers in front of it have it true, and those after
// it false. `near` is where to look first. -infinity counts as true, infinity as false.
template <class A, class F>
QT_FN int64_t first_not(A near, F before) {
  int64_t low = -Numbers<A>::kLast, high = Numbers<A>::kLast;
  int64_t at = Numbers<A>::place_of(near);
  at = at <= low ? low + 1 : at >= high ? high - 1 : at;
  for (int64_t step = 1; low < at && at < high; step *= 2) {  // away from `near`, until it is passed
    if (before(Numbers<A>::at(at))) {
      low = at;
      if (high != Numbers<A>::kLast) break;
      at = high - at > step ? at + step : high;
    } else {
      high = at;
      if (low != -Numbers<A>::kLast) break;
      at = at - low > step ? at - step : low;
    }
  }
  while (low + 1 < high) {
    const int64_t middle = (low & high) + ((low ^ high) >> 1);  // of both, without overflow
    (before(Numbers<A>::at(middle)) ? low : high) = middle;
  }
  return high;
}

// The values whose level is within the bounds are an open interval, since rounding keeps the order: its ends.
template <class A>
QT_FN A passed_above(A scale, A zero_point, A lo, A hi) {
  const auto level = [&](A v) { return snap(v, scale, zero_point, lo, hi).level; };
  return Numbers<A>::at(first_not<A>((lo - A(0.5) - zero_point) * scale, [&](A v) { return !(level(v) >= lo); }) - 1);
}

template <class A>
QT_FN A passed_below(A scale, A zero_point, A lo, A hi) {
  const auto level = [&](A v) { return snap(v, scale, zero_point, lo, hi).level; };
  const auto passed = [&](A v) { return level(v) <= hi || !(level(v) >= lo); };
  return Numbers<A>::at(first_not<A>((hi + A(0.5) - zero_point) * scale, passed));
}

}  // namespace qtoolkit
