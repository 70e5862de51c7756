// Division of indices by a number that a whole launch shares: a multiplication and a shift (Granlund and Montgomery,
// Division by invariant integers using multiplication, PLDI 1994).
#pragma once

#include <cstdint>
#include <type_traits>

#include "../grid.h"

namespace qtoolkit {
namespace cuda {

constexpr int64_t kMostDivisible = INT32_MAX;

// Divides indices up to kMostDivisible by a number from 1 to kMostDivisible.
struct IndexDivisor {
  uint32_t number = 1, multiplier = 0, shift = 0;

  IndexDivisor() = default;
  explicit IndexDivisor(int64_t by) : number(static_cast<uint32_t>(by)) {
    if (by == 1) return;
    uint32_t bits = 1;  // of the numbers below `by`
    while (int64_t{1} << bits < by) ++bits;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + number - 1) / number);
    shift = bits - 1;
  }
};

QT_FN uint32_t operator/(uint32_t index, const IndexDivisor& by) {
  const uint32_t high = static_cast<uint32_t>(uint64_t{index} * by.multiplier >> 32);
  return by.number == 1 ? index : high >> by.shift;
}

QT_FN uint32_t operator%(uint32_t index, const IndexDivisor& by) { return index - index / by * by.number; }

// Divides longer indices.
struct LongDivisor {
  int64_t number = 1;
  LongDivisor() = default;
  explicit LongDivisor(int64_t by) : number(by) {}
};

QT_FN int64_t operator/(int64_t index, const LongDivisor& by) { return index / by.number; }

template <class I>
using DivisorOfIndex = std::conditional_t<std::is_same_v<I, uint32_t>, IndexDivisor, LongDivisor>;

// Calls f with an index of the shortest type for `numel` elements.
template <class F>
void with_index(int64_t numel, F f) {
  if (numel <= kMostDivisible) return f(uint32_t{0});
  f(uint64_t{0});
}

}  // namespace cuda
}  // namespace qtoolkit
