// The kernels that only read: ranges and histograms.
// Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "channels-inl.h"

template <class A>
QT_FN void widen_sums(const Job& job, int64_t c, A lo, A hi, bool nan) {
  double& lowest = job.sum_scale[c];
  double& highest = job.sum_zero_point[c];
  lowest = nan ? __builtin_nan("") : (lo < lowest ? lo : lowest);
  highest = nan ? __builtin_nan("") : (hi > highest ? hi : highest);
}

// The range of n elements in whole vectors, both ends NaN if there is one.
template <class A>
QT_FN Range<A> range_of(const A* x, int n) {
  Range<Vector<A>> lanes = {load(x), load(x)};
  auto nan = lanes.lo != lanes.lo;
  for (int i = 0; i < n; i += kLanes<A>) {
    const Vector<A> v = load(x + i);
    lanes = widen(lanes, v);
    nan |= v != v;
  }
  A lo = lanes.lo[0], hi = lanes.hi[0];
  for (int k = 1; k < kLanes<A>; ++k) {
    lo = lanes.lo[k] < lo ? lanes.lo[k] : lo;
    hi = lanes.hi[k] > hi ? lanes.hi[k] : hi;
  }
  const A none = static_cast<A>(__builtin_nan(""));
  return bits_of(nan) != 0 ? Range<A>{none, none} : Range<A>{lo, hi};
}

template <class A>
void minmax_of_channel(const Job& job, const A* x, int n, int64_t c) {
  const Range<A> range = range_of(x, n);
  widen_sums(job, c, range.lo, range.hi, range.lo != range.lo);
}

// Each element to the next channel in the row. NaN is not compared with, but put in.
template <class A>
void minmax_of_row(const Job& job, const A* x, int n, int64_t position) {
  for (int k = 0; k < n; ++k) {
    const double v = x[k];
    double& lowest = job.sum_scale[position + k];
    double& highest = job.sum_zero_point[position + k];
    lowest = v != v || v < lowest ? v : lowest;
    highest = v != v || v > highest ? v : highest;
  }
}

template <class A>
void minmax(const Job& job, int64_t begin, int64_t end) {
  Block<A> in;
  Place place = place_at(job.channels, begin);
  for_blocks(begin, end, [&](int64_t at, int n) {
    const A* x = fetch(job.x, at, n, in);
    if (job.channels.inner == 1 && job.channels.count > 1) {
      return for_rows(job.channels, place.rows, n,
                      [&](int k, int length, int64_t c) { minmax_of_row(job, x + k, length, c); });
    }
    walk_channels(
        job.channels, place.channel, n,
        [&](int from, int chunks, int64_t c) { minmax_of_channel(job, x + from, chunks * kChunk, c); },
        [&](int from, Cursor& cursor) {
          const int valid = static_cast<int>(smaller(kChunk, n - from));
          for_runs(job.channels, cursor, valid, [&](int k, int run, int64_t c) {
            const int whole = run / kLanes<A> * kLanes<A>, end = from + k + run;
            if (whole > 0) minmax_of_channel(job, x + from + k, whole, c);
            for (int j = from + k + whole; j < end; ++j) widen_sums(job, c, x[j], x[j], x[j] != x[j]);
          });
        });
  });
}

QT_FN void grow(cpu::Tally& tally, Bins bins) {
  int32_t* room = tally.tables + cpu::kTables * tally.n;
  for (int t = 0; t < cpu::kTables; ++t) {
    add_counts(room, bins, tally.tables + t * tally.n, tally.bins, tally.n);
  }
  __builtin_memcpy(tally.tables, room, tally.n * sizeof(int32_t));
  __builtin_memset(tally.tables + tally.n, 0, cpu::kTables * tally.n * sizeof(int32_t));
  tally.bins = bins;
}

// Moves the places that are not `often` to the front, and returns how many those are. Whole chunks of them.
QT_FN int leave_out(int32_t* place, int n, int32_t often) {
  int kept = 0;
#if QT_BYTES == 64
  for (int i = 0; i < n; i += 16) {
    const __m512i places = _mm512_loadu_si512(place + i);
    const __mmask16 other = _mm512_cmpneq_epi32_mask(places, _mm512_set1_epi32(often));
    _mm512_storeu_si512(place + kept, _mm512_maskz_compress_epi32(other, places));
    kept += __builtin_popcount(other);
  }
#else
  for (int i = 0; i < n; ++i) {
    const int32_t p = place[i];
    place[kept] = p;
    kept += p != often;
  }
#endif
  return kept;
}

QT_FN void add_places(const int32_t* place, int n, cpu::Tally& tally) {
  static_assert(cpu::kTables == 4, "the loop below");
  int32_t *a = tally.tables, *b = a + tally.n, *c = b + tally.n, *d = c + tally.n;
  int i = 0;
  for (; i + 4 <= n; i += 4) ++a[place[i]], ++b[place[i + 1]], ++c[place[i + 2]], ++d[place[i + 3]];
  for (; i < n; ++i) ++a[place[i]];
}

// After ReLU half of all values lie in one bin, and each would wait for the one before: they are counted together.
template <class A>
QT_FN void count(const A* x, int n, cpu::Tally& tally) {
  alignas(64) int32_t place[kBlock];
  const A reciprocal = static_cast<A>(power_of_two(-tally.bins.exponent));
  const int32_t first = static_cast<int32_t>(first_bin(tally.bins, tally.n)), often = -first;
  int32_t together = 0;
  for (int i = 0; i < n; ++i) {
    place[i] = place_of(x[i], reciprocal, first);
    together += place[i] == often;
  }
  if (together < n / 8) return add_places(place, n, tally);
  for (int i = n; i < round_up(n); ++i) place[i] = often;
  tally.tables[often] += together;
  add_places(place, leave_out(place, round_up(n), often), tally);
}

// A block is in the first cache when it is read for the second time.
template <class A>
void histogram(const Job& job, int64_t begin, int64_t end, cpu::Tally& tally) {
  Block<A> in;
  for_blocks(begin, end, [&](int64_t at, int n) {
    if (tally.bins.exponent == kBroken) return;
    const A* x = fetch(job.x, at, n, in);
    const Range<A> range = range_of(x, round_up(n));
    const Bins bins = join(tally.bins, bins_for(range.lo, range.hi, tally.n));
    if (bins.exponent == kBroken) {
      tally.bins = bins;
      return;
    }
    if (bins != tally.bins) grow(tally, bins);
    count(x, n, tally);
  });
}
