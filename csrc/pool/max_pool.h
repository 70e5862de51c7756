// Max pooling: the rule for an element of a window, where windows lie, and the arguments of the kernels.
#pragma once

#include "../kernel_args.h"

namespace qtoolkit {

// The largest value of a window so far, and its place: its number in the window, row by row.
template <class V>
struct Largest {
  V value, place;
};

// As in torch: the first of equal values stays, and the last NaN wins.
template <class V>
QT_FN Largest<V> larger(const Largest<V>& so_far, V value, V place) {
  const auto wins = (value > so_far.value) | (value != value);
  return {wins ? value : so_far.value, wins ? place : so_far.place};
}

struct PoolDimension {
  int64_t size = 0, results = 0, kernel = 0, stride = 0, padding = 0, dilation = 0;
};

// The window of one result along a dimension: its element k is at start + k * dilation, and those in [first, last) are
// not padding.
struct PoolWindow {
  int64_t start, first, last;
};

QT_FN PoolWindow window_of(const PoolDimension& d, int64_t result) {
  const int64_t start = result * d.stride - d.padding, left = d.size - start;
  const int64_t first = start < 0 ? (-start + d.dilation - 1) / d.dilation : 0;
  const int64_t last = left > 0 ? (left + d.dilation - 1) / d.dilation : 0;
  return {start, first, last < d.kernel ? last : d.kernel};
}

struct PoolArgs {
  int64_t images = 0, channels = 0;
  PoolDimension rows, columns;
  bool channels_last = false;  // of all tensors; else contiguous
  Dtype dtype = Dtype::f32;
  const void* x = nullptr;     // in backward: the gradient of the result
  void* y = nullptr;           // in backward: the gradient of x
  uint8_t* offsets = nullptr;  // the place of the largest value; backward reads it
};

}  // namespace qtoolkit
