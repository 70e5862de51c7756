// The bins of a running histogram: the bin of a value, and how the range grows. CPU and CUDA share these formulas.
//
// The rule. A histogram has n bins (n is even and fixed). Bin k holds the values with trunc(|x| / width) = k if x >= 0,
// and with -1 - k equal to it if x < 0: bins include their edge nearer to zero, zero of either sign is in bin 0, and
// the histogram of -x is the mirror image (except for zero itself). width is a power of two. There are two layouts:
// bins [0, n) while all values were non-negative, and bins [-n/2, n/2) after that. width is the smallest one, in the
// layout, that holds all values (at least 2^-126 and 2^-125). lo and hi are the outer edges, which determine layout and
// width.
//
// Why merging is exact. The edges for a width are edges for half of it too: to double the width, adjacent bins are
// added in pairs, and no count is divided. A change of layout at least doubles the width, since the largest value
// filled more than half of the bins, by the rule. So layout and width depend only on the set of values, and join() of
// two histograms gives that of the union: batches, threads and processes may be divided and ordered in any way, and
// every count is the same.
#pragma once

#include <cstdint>

#include "grid.h"

namespace qtoolkit {

struct Bins {
  int exponent;  // of the width, or kEmpty or kBroken
  bool two_sided;
};

constexpr int kEmpty = -10000;         // no value was seen
constexpr int kBroken = 10000;         // NaN, an infinity or a magnitude of 2^126 or more was seen
constexpr double kTooLarge = 0x1p126;  // so that hi is finite in float32
constexpr int kSmallestExponent = -126;

QT_FN bool operator==(Bins a, Bins b) { return a.exponent == b.exponent && a.two_sided == b.two_sided; }
QT_FN bool operator!=(Bins a, Bins b) { return !(a == b); }

QT_FN bool is_counting(Bins bins) { return bins.exponent != kEmpty && bins.exponent != kBroken; }

QT_FN int64_t bits_of_double(double v) {
  int64_t bits;
  __builtin_memcpy(&bits, &v, sizeof(bits));
  return bits;
}

// floor(log2(v)) of a normal v > 0; for smaller v, less than every exponent in use.
QT_FN int exponent_of(double v) { return static_cast<int>(bits_of_double(v) >> 52 & 0x7ff) - 1023; }

QT_FN double power_of_two(int exponent) {
  const int64_t bits = static_cast<int64_t>(exponent + 1023) << 52;
  double v;
  __builtin_memcpy(&v, &bits, sizeof(v));
  return v;
}

// The bins on one side of zero, and the number of the first bin.
QT_FN int64_t capacity_of(Bins bins, int64_t n) { return bins.two_sided ? n / 2 : n; }
QT_FN int64_t first_bin(Bins bins, int64_t n) { return bins.two_sided ? -(n / 2) : 0; }

QT_FN double high_edge(Bins bins, int64_t n) {
  return static_cast<double>(capacity_of(bins, n)) * power_of_two(bins.exponent);
}
QT_FN double low_edge(Bins bins, int64_t n) { return bins.two_sided ? -high_edge(bins, n) : 0.0; }

// The bins for values from lo to hi; kEmpty if lo > hi, kBroken for NaN.
QT_FN Bins bins_for(double lo, double hi, int64_t n) {
  if (lo > hi) return {kEmpty, false};
  Bins bins = {kSmallestExponent, lo < 0};
  const double top = -lo > hi ? -lo : hi;
  if (!(top < kTooLarge)) return {kBroken, false};
  const double capacity = static_cast<double>(capacity_of(bins, n));
  int exponent = exponent_of(top) - exponent_of(capacity);
  const int smallest = kSmallestExponent + (bins.two_sided ? 1 : 0);
  if (exponent < smallest) exponent = smallest;
  bins.exponent = top < capacity * power_of_two(exponent) ? exponent : exponent + 1;
  return bins;
}

// The bins whose outer edges are lo and hi; kEmpty if hi <= lo, kBroken for edges that the rule does not produce.
QT_FN Bins bins_of(float lo, float hi, int64_t n) {
  if (hi <= lo) return {kEmpty, false};
  if (!(hi > 0 && hi <= 2 * kTooLarge && (lo == 0 || lo == -hi))) return {kBroken, false};
  const Bins side = {0, lo < 0};
  const double width = hi / static_cast<double>(capacity_of(side, n));
  const Bins bins = {exponent_of(width), side.two_sided};
  const bool legal = bins.exponent >= kSmallestExponent + (bins.two_sided ? 1 : 0);
  return legal && power_of_two(bins.exponent) == width ? bins : Bins{kBroken, false};
}

// The bins of two histograms together.
QT_FN Bins join(Bins a, Bins b) {
  if (a.exponent == kBroken || b.exponent == kBroken) return {kBroken, false};
  if (a.exponent == kEmpty) return b;
  if (b.exponent == kEmpty) return a;
  const bool two_sided = a.two_sided || b.two_sided;
  const int mine = a.exponent + (two_sided && !a.two_sided ? 1 : 0);
  const int theirs = b.exponent + (two_sided && !b.two_sided ? 1 : 0);
  return {mine > theirs ? mine : theirs, two_sided};
}

// The index of bin i in memory after `from` grows to `to`.
QT_FN int64_t merged_index(int64_t i, Bins from, Bins to, int64_t n) {
  const int shift = to.exponent - from.exponent;
  return ((i + first_bin(from, n)) >> (shift > 62 ? 62 : shift)) - first_bin(to, n);
}

// The index in memory of the bin of a value within the range. The product is exact: reciprocal is 1 / width, a power of
// two (a product that underflows is nearer to zero than any edge).
template <class A>
QT_FN int32_t bin_index(A x, A reciprocal, int32_t first) {
  return static_cast<int32_t>(x * reciprocal) - (x < 0 ? 1 : 0) - first;
}

// Adds the counts of one histogram to another with the same or a larger width.
template <class To, class From>
static inline void add_counts(To* to, Bins to_bins, const From* from, Bins from_bins, int64_t n) {
  if (!is_counting(from_bins)) return;
  for (int64_t i = 0; i < n; ++i) to[merged_index(i, from_bins, to_bins, n)] += from[i];
}

}  // namespace qtoolkit
