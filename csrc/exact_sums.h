// Exact sums of products of integers in float arithmetic.
#pragma once

#include <cstdint>

namespace qtoolkit {

// Integers up to here, and their sums in any order, are exact in float32.
constexpr double kExactInFloat32 = 1 << 24;

// How to compute sums exactly: 0 for in float32; or the largest number of bits of digits into which to split the
// input's codes, so that the sums of each digit are exact in float32; -1 for in float64, where no digits are small
// enough.
//   sums      the largest magnitude of a sum, and of any part of one
//   weights   the largest sum of the magnitudes of the weights of one output
constexpr int64_t digit_bits(double sums, double weights) {
  if (sums <= kExactInFloat32) return 0;
  for (const int64_t bits : {4, 2, 1}) {
    if (static_cast<double>(1 << bits) * weights <= kExactInFloat32) return bits;
  }
  return -1;
}

}  // namespace qtoolkit
