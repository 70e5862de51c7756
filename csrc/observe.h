// The range rules of the observers: how an element, or a vector of elements, widens a range.
#pragma once

#include "grid.h"

namespace qtoolkit {

// Comparisons ignore NaN: the kernels track it separately and make the whole range NaN, so that calibration can name
// the quantizer that observed it.
template <class V>
struct Range {
  V lo, hi;
};

template <class V>
QT_FN Range<V> widen(Range<V> range, V x) {
  return {x < range.lo ? x : range.lo, x > range.hi ? x : range.hi};
}

// The union of two ranges, NaN if either has NaN (only b needs a test: a NaN in a stays by itself). Adding zero turns
// -0 into +0, since which of them comes first depends on how the work is divided.
template <class A>
QT_FN A lower(A a, A b) {
  return (b < a || b != b ? b : a) + A(0);
}

template <class A>
QT_FN A higher(A a, A b) {
  return (b > a || b != b ? b : a) + A(0);
}

template <class A>
QT_FN Range<A> unite(Range<A> a, Range<A> b) {
  return {lower(a.lo, b.lo), higher(a.hi, b.hi)};
}

// Exponential moving average, in the convention of batch norm: momentum is the weight of the new range. The first range
// replaces the initial one ([+inf, -inf]), and the first that is not all zeros replaces that of zeros, which no grid
// follows; with momentum 1, exactly, each one does.
template <class A>
QT_FN Range<A> blend(Range<A> old, Range<A> batch, A momentum) {
  if (batch.lo > batch.hi) return old;  // an empty batch
  const bool unset = old.lo > old.hi || (old.lo == 0 && old.hi == 0);
  if (unset || momentum == A(1)) return batch;
  return {old.lo + momentum * (batch.lo - old.lo), old.hi + momentum * (batch.hi - old.hi)};
}

// The range after one more batch, by a moving average or as a union. With `skipped`, a batch with NaN or infinities
// counts there and leaves the range as it is.
template <class A>
QT_FN Range<A> next_range(Range<A> old, Range<A> batch, bool average, A momentum, int64_t* skipped) {
  const bool empty = batch.lo > batch.hi, finite = batch.lo - batch.lo == 0 && batch.hi - batch.hi == 0;
  if (skipped != nullptr && !empty && !finite) {
    ++*skipped;
    return old;
  }
  return average ? blend(old, batch, momentum) : unite(old, batch);
}

}  // namespace qtoolkit
