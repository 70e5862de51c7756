// The range rules of the observers: how one element, or one vector of them, widens a range.
#pragma once

#include "grid.h"

namespace qtoolkit {

// NaN is no larger and no smaller than anything: it is counted apart, and makes the whole range NaN,
// so that calibration can name the quantizer that met it.
template <class V>
struct Range {
  V lo, hi;
};

template <class V>
QT_FN Range<V> widen(Range<V> range, V x) {
  return {x < range.lo ? x : range.lo, x > range.hi ? x : range.hi};
}

// The range over two, NaN if either holds NaN (only the second is asked: a NaN in the first stays by itself). Adding
// zero makes -0 +0: which of them is met first depends on how the work was split.
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

// Exponential moving average, in the convention of batch norm: momentum is the weight of the new range.
// The first range is taken as it is (an unobserved range is [+inf, -inf]).
template <class A>
QT_FN Range<A> blend(Range<A> old, Range<A> batch, A momentum) {
  if (batch.lo > batch.hi) return old;  // an empty batch
  if (old.lo > old.hi) return batch;
  return {old.lo + momentum * (batch.lo - old.lo), old.hi + momentum * (batch.hi - old.hi)};
}

}  // namespace qtoolkit
