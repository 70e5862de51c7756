// Kernels that only read: ranges and histograms. Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "channels-inl.h"

template <class A>
QT_FN void widen_sums(const KernelArgs& args, int64_t c, A lo, A hi, bool nan) {
  double& lowest = args.sum_scale[c];
  double& highest = args.sum_zero_point[c];
  lowest = nan ? __builtin_nan("") : (lo < lowest ? lo : lowest);
  highest = nan ? __builtin_nan("") : (hi > highest ? hi : highest);
}

// The range of n elements in whole vectors; both bounds are NaN if any element is.
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
void minmax_of_channel(const KernelArgs& args, const A* x, int n, int64_t c) {
  const Range<A> range = range_of(x, n);
  widen_sums(args, c, range.lo, range.hi, range.lo != range.lo);
}

// Consecutive elements belong to consecutive channels. NaN is stored rather than compared.
template <class A>
void minmax_of_row(const KernelArgs& args, const A* x, int n, int64_t position) {
  for (int k = 0; k < n; ++k) {
    const double v = x[k];
    double& lowest = args.sum_scale[position + k];
    double& highest = args.sum_zero_point[position + k];
    lowest = v != v || v < lowest ? v : lowest;
    highest = v != v || v > highest ? v : highest;
  }
}

template <class A>
void minmax(const KernelArgs& args, int64_t begin, int64_t end) {
  Block<A> in;
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t at, int n) {
    const A* x = fetch(args.x, at, n, in);
    if (args.channels.inner == 1 && args.channels.count > 1) {
      return for_rows(args.channels, position.rows, n,
                      [&](int k, int length, int64_t c) { minmax_of_row(args, x + k, length, c); });
    }
    walk_channels(
        args.channels, position.channel, n,
        [&](int from, int chunks, int64_t c) { minmax_of_channel(args, x + from, chunks * kChunk, c); },
        [&](int from, Cursor& cursor) {
          const int valid = static_cast<int>(smaller(kChunk, n - from));
          for_runs(args.channels, cursor, valid, [&](int k, int run, int64_t c) {
            const int whole = run / kLanes<A> * kLanes<A>, end = from + k + run;
            if (whole > 0) minmax_of_channel(args, x + from + k, whole, c);
            for (int j = from + k + whole; j < end; ++j) widen_sums(args, c, x[j], x[j], x[j] != x[j]);
          });
        });
  });
}

QT_FN void grow(cpu::ThreadHistogram& local, Bins bins) {
  int32_t* scratch = local.tables + cpu::kTables * local.n;
  for (int t = 0; t < cpu::kTables; ++t) {
    add_counts(scratch, bins, local.tables + t * local.n, local.bins, local.n);
  }
  __builtin_memcpy(local.tables, scratch, local.n * sizeof(int32_t));
  __builtin_memset(local.tables + local.n, 0, cpu::kTables * local.n * sizeof(int32_t));
  local.bins = bins;
}

// Moves the indices other than `often` to the front and returns their number. n is a multiple of kChunk.
QT_FN int leave_out(int32_t* index, int n, int32_t often) {
  int kept = 0;
#if QT_BYTES == 64
  for (int i = 0; i < n; i += 16) {
    const __m512i indices = _mm512_loadu_si512(index + i);
    const __mmask16 other = _mm512_cmpneq_epi32_mask(indices, _mm512_set1_epi32(often));
    _mm512_storeu_si512(index + kept, _mm512_maskz_compress_epi32(other, indices));
    kept += __builtin_popcount(other);
  }
#else
  for (int i = 0; i < n; ++i) {
    const int32_t p = index[i];
    index[kept] = p;
    kept += p != often;
  }
#endif
  return kept;
}

QT_FN void count_indices(const int32_t* index, int n, cpu::ThreadHistogram& local) {
  static_assert(cpu::kTables == 4, "the loop below");
  int32_t *a = local.tables, *b = a + local.n, *c = b + local.n, *d = c + local.n;
  int i = 0;
  for (; i + 4 <= n; i += 4) ++a[index[i]], ++b[index[i + 1]], ++c[index[i + 2]], ++d[index[i + 3]];
  for (; i < n; ++i) ++a[index[i]];
}

// After ReLU half of all values are in one bin, where each increment waits for the one before: they are counted
// together.
template <class A>
QT_FN void count(const A* x, int n, cpu::ThreadHistogram& local) {
  alignas(64) int32_t index[kBlock];
  const A reciprocal = static_cast<A>(power_of_two(-local.bins.exponent));
  const int32_t first = static_cast<int32_t>(first_bin(local.bins, local.n)), often = -first;
  int32_t together = 0;
  for (int i = 0; i < n; ++i) {
    index[i] = bin_index(x[i], reciprocal, first);
    together += index[i] == often;
  }
  if (together < n / 8) return count_indices(index, n, local);
  for (int i = n; i < round_up(n); ++i) index[i] = often;
  local.tables[often] += together;
  count_indices(index, leave_out(index, round_up(n), often), local);
}

// The second read of a block finds it in the L1 cache.
template <class A>
void histogram(const KernelArgs& args, int64_t begin, int64_t end) {
  cpu::ThreadHistogram& local = *args.thread_histogram;
  Block<A> in;
  for_blocks(begin, end, [&](int64_t at, int n) {
    if (local.bins.exponent == kBroken) return;
    const A* x = fetch(args.x, at, n, in);
    const Range<A> range = range_of(x, round_up(n));
    const Bins bins = join(local.bins, bins_for(range.lo, range.hi, local.n));
    if (bins.exponent == kBroken) {
      local.bins = bins;
      return;
    }
    if (bins != local.bins) grow(local, bins);
    count(x, n, local);
  });
}
