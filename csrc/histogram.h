// The bins of a running histogram: which one a value falls into, and how the range grows. The only place of these
// formulas, for CPU and CUDA alike.
//
// The rule. A histogram has n bins (even, fixed). Bin k holds the values with trunc(|x| / width) = k where x >= 0, and
// -1 - k of them where x < 0: so bins close towards zero, zero of either sign lies in bin 0, and the histogram of -x is
// the mirror image (but for zero itself). width is a power of two. There are two layouts: bins [0, n) while nothing
// negative was seen, bins [-n/2, n/2) from then on. width is the smallest, in the layout, that holds all that was seen
// (2^-126 and 2^-125 at the least). lo and hi are the outer edges, so they say layout and width.
//
// Why merging is exact. Edges of a width are edges of half of it too: to double the width is to add bins in pairs, and
// counts move whole. Where the layout changes, width at least doubles: the largest value filled more than half of the
// bins, by the rule. So layout and width follow from the set of values alone, and join() of two histograms is that of
// their union: batches, threads and processes may come in any split and order, and every count comes out the same.
#pragma once

#include <cstdint>

#include "grid.h"

namespace qtoolkit {

struct Bins {
  int exponent;  // of the width, or one of the two below
  bool two_sided;
};

constexpr int kEmpty = -10000;         // nothing seen
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

// floor(log2(v)) of a normal v > 0; below every exponent that is used for smaller ones.
QT_FN int exponent_of(double v) { return static_cast<int>(bits_of_double(v) >> 52 & 0x7ff) - 1023; }

QT_FN double power_of_two(int exponent) {
  const int64_t bits = static_cast<int64_t>(exponent + 1023) << 52;
  double v;
  __builtin_memcpy(&v, &bits, sizeof(v));
  return v;
}

// Bins on either side of zero, and the number of the first one.
QT_FN int64_t capacity_of(Bins bins, int64_t n) { return bins.two_sided ? n / 2 : n; }
QT_FN int64_t first_bin(Bins bins, int64_t n) { return bins.two_sided ? -(n / 2) : 0; }

QT_FN double high_edge(Bins bins, int64_t n) {
  return static_cast<double>(capacity_of(bins, n)) * power_of_two(bins.exponent);
}
QT_FN double low_edge(Bins bins, int64_t n) { return bins.two_sided ? -high_edge(bins, n) : 0.0; }

// The bins that values from lo to hi ask for; lo > hi is none, NaN spreads.
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

// The bins that lo and hi stand for: hi <= lo is none. Ends that are not of the rule count as broken.
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

// Where in memory the counts of place i go when `from` grows to `to`.
QT_FN int64_t place_after(int64_t i, Bins from, Bins to, int64_t n) {
  const int shift = to.exponent - from.exponent;
  return ((i + first_bin(from, n)) >> (shift > 62 ? 62 : shift)) - first_bin(to, n);
}

// The place of a value that lies within the range. The product is exact: reciprocal is 1 / width, a power of two (what
// underflows is nearer to zero than any edge).
template <class A>
QT_FN int32_t place_of(A x, A reciprocal, int32_t first) {
  return static_cast<int32_t>(x * reciprocal) - (x < 0 ? 1 : 0) - first;
}

// Adds the counts of one histogram to another whose bins are as wide or wider.
template <class To, class From>
static inline void add_counts(To* to, Bins to_bins, const From* from, Bins from_bins, int64_t n) {
  if (!is_counting(from_bins)) return;
  for (int64_t i = 0; i < n; ++i) to[place_after(i, from_bins, to_bins, n)] += from[i];
}

}  // namespace qtoolkit
