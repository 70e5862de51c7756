// The kernels that give a result for each element: fake quantization and its backward; and the scales of blocks.
// Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "scales-inl.h"

// Every op that maps element by element and tells where its gradient passes; Rule is one of fake_quant.h.
template <class A, bool kMasked, bool kStream, class T, class Rule, class Grid>
QT_FN void map_chunks(const T* x, T* y, uint64_t* mask, int chunks, Grid grid, Rule rule) {
  for (int chunk = 0; chunk < chunks; ++chunk, x += kChunk, y += kChunk) {
    Vector<A> values[kVectors<A>];
    uint64_t inside = 0;
    for (int i = 0; i < kVectors<A>; ++i) {
      const int k = i * kLanes<A>, at = chunk * kChunk + k;
      const auto mapped = Rule::map(rule, load_as<A>(x + k), Grid::scales(grid, at), Grid::zero_points(grid, at));
      values[i] = mapped.value;
      if (kMasked) inside |= static_cast<uint64_t>(mapped.inside) << k;
    }
    store_chunk<kStream, A>(y, values);
    if (kMasked) mask[chunk] = inside;
  }
}

template <class A, bool kMasked, bool kStream, class Rule>
void map(const Job& job, int64_t begin, int64_t end) {
  Block<A> in, out;
  uint64_t mask[kBlock / kChunk];
  const Rule rule = Rule::of(job);
  Place place = place_at(job.channels, begin);
  for_blocks(begin, end, [&](int64_t at, int n) {
    through(job, job.x, at, n, in, out, [&](const auto* x, auto* y) {
      for_grids<A>(job, place, n, [&](int from, int chunks, auto grid) {
        map_chunks<A, kMasked, kStream>(x + from, y + from, mask + from / kChunk, chunks, grid, rule);
      });
    });
    if (kMasked) write_mask(job.mask, at, n, mask);
  });
  if (kStream) stream_fence();
}

template <class A, bool kStream>
void fake_quant_backward(const Job& job, int64_t begin, int64_t end) {
  Block<A> in, out;
  for_blocks(begin, end, [&](int64_t at, int n) {
    uint64_t mask[kBlock / kChunk] = {};
    __builtin_memcpy(mask, job.mask + at / 8, (n + 7) / 8);
    through(job, job.grad, at, n, in, out, [&](const auto* grad, auto* dx) {
      for (int chunk = 0; chunk < round_up(n) / kChunk; ++chunk, grad += kChunk, dx += kChunk) {
        for (size_t line = 0; line < kChunk * sizeof(*grad); line += 64) {
          __builtin_prefetch(reinterpret_cast<const char*>(grad + kAhead) + line);
        }
        pass_chunk<kStream>(grad, dx, mask[chunk]);
      }
    });
  });
  if (kStream) stream_fence();
}

// The largest magnitude of whole vectors; NaN is passed over.
template <class A>
QT_FN A largest_of(const A* x, int64_t n) {
  Vector<A> lanes = {};
  for (int64_t i = 0; i < n; i += kLanes<A>) {
    const Vector<A> v = load(x + i), magnitude = v < 0 ? -v : v;
    lanes = magnitude > lanes ? magnitude : lanes;
  }
  A largest = lanes[0];
  for (int k = 1; k < kLanes<A>; ++k) largest = lanes[k] > largest ? lanes[k] : largest;
  return largest;
}

// Here begin and end count blocks, of which several are read at once.
template <class A>
void block_scale(const Job& job, int64_t begin, int64_t end) {
  Block<A> in;
  const int64_t size = job.channels.inner, step = kBlock / size;
  const A tensor_scale = job.scale == nullptr ? A(1) : *static_cast<const A*>(job.scale);
  A* scales = static_cast<A*>(job.y);
  for (; begin < end; begin += step) {
    const int64_t blocks = smaller(step, end - begin);
    const A* x = fetch(job.x, begin * size, static_cast<int>(blocks * size), in);
    for (int64_t b = 0; b < blocks; ++b) {
      const A amax = largest_of(x + b * size, size);
      scales[begin + b] = qtoolkit::block_scale(amax, job.format, job.scale_format, tensor_scale);
    }
  }
}
