// Kernels with a result for each element: fake quantization, its straight-through backward, and the scales of blocks.
// Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "chunk-inl.h"
#include "scales-inl.h"

// The loop of all elementwise kernels; Functor is one of fake_quant.h.
template <class A, bool kMasked, bool kStream, bool kCodes, class T, class Functor, class Grid>
QT_FN void map_chunks(const T* x, T* y, CodesAt codes, uint64_t* mask, int chunks, Grid grid, Functor functor) {
  for (int chunk = 0; chunk < chunks; ++chunk, x += kChunk, y += kChunk) {
    Vector<A> values[kVectors<A>];
    uint64_t inside = 0;
    for (int i = 0; i < kVectors<A>; ++i) {
      const int k = i * kLanes<A>, at = chunk * kChunk + k;
      const auto mapped =
          Functor::apply(functor, load_as<A>(x + k), Grid::scales(grid, at), Grid::zero_points(grid, at));
      values[i] = mapped.value;
      if constexpr (kCodes) store_codes<A>(codes_at(codes, at), mapped.code);
      if (kMasked) inside |= static_cast<uint64_t>(mapped.inside) << k;
    }
    store_chunk<kStream, A>(y, values);
    if (kMasked) mask[chunk] = inside;
  }
}

template <class A, bool kMasked, bool kStream, class Functor, bool kCodes = false>
void elementwise_typed(const KernelArgs& args, int64_t begin, int64_t end) {
  Block<A> in, out;
  uint8_t bytes[kBlock];
  const CodesAt codes = {bytes, args.packed}, all = {args.codes, args.packed};
  uint64_t mask[kBlock / kChunk];
  const Functor functor = Functor::from(args);
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t at, int n) {
    with_pointers<Functor::kMemoryBound>(args, args.x, at, n, in, out, [&](const auto* x, auto* y) {
      for_grids<A>(args, position, n, [&](int from, int chunks, auto grid) {
        map_chunks<A, kMasked, kStream, kCodes>(x + from, y + from, codes_at(codes, from), mask + from / kChunk, chunks,
                                                grid, functor);
      });
    });
    if (kCodes) __builtin_memcpy(codes_at(all, at).data, bytes, bytes_of_codes(codes, n));
    if (kMasked) write_mask(args.mask, at, n, mask);
  });
}

template <class A, class Functor>
void elementwise(const KernelArgs& args, int64_t begin, int64_t end) {
  with_stream<Functor::kMemoryBound>(args.stream, [&](auto stream) {
    if constexpr (std::is_same<Functor, IntegerFunctor<A, Vector<A>>>::value) {
      if (args.codes != nullptr) {
        return args.mask == nullptr ? elementwise_typed<A, false, stream.value, Functor, true>(args, begin, end)
                                    : elementwise_typed<A, true, stream.value, Functor, true>(args, begin, end);
      }
    }
    return args.mask == nullptr ? elementwise_typed<A, false, stream.value, Functor>(args, begin, end)
                                : elementwise_typed<A, true, stream.value, Functor>(args, begin, end);
  });
}

template <class A, bool kStream>
void backward_typed(const KernelArgs& args, int64_t begin, int64_t end) {
  Block<A> in, out;
  for_blocks(begin, end, [&](int64_t at, int n) {
    uint64_t mask[kBlock / kChunk] = {};
    __builtin_memcpy(mask, args.mask + at / 8, (n + 7) / 8);
    with_pointers<true>(args, args.grad, at, n, in, out, [&](const auto* grad, auto* dx) {
      for (int chunk = 0; chunk < round_up(n) / kChunk; ++chunk, grad += kChunk, dx += kChunk) {
        for (size_t line = 0; line < kChunk * sizeof(*grad); line += 64) {
          __builtin_prefetch(reinterpret_cast<const char*>(grad + kAhead) + line);
        }
        pass_chunk<kStream>(grad, dx, mask[chunk]);
      }
    });
  });
}

template <class A>
void fake_quant_backward(const KernelArgs& args, int64_t begin, int64_t end) {
  with_stream<true>(args.stream, [&](auto stream) { backward_typed<A, stream.value>(args, begin, end); });
}

// The sum of x and of the other tensor, which is read as grad.
template <class A>
void add_codes(const KernelArgs& args, int64_t begin, int64_t end) {
  Block<A> in, other, out;
  with_sum<A>(args, [&](auto sum) {
    for_blocks(begin, end, [&](int64_t at, int n) {
      const A *a = fetch(args.x, at, n, in), *b = fetch(args.grad, at, n, other);
      A* y = result_buffer(args, at, n, out);
      for (int i = 0; i < round_up(n); ++i) y[i] = decltype(sum)::of(sum, a[i], b[i]);
      commit(args, at, n, y);
    });
  });
}

// The largest magnitude of whole vectors; NaN is ignored.
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

// begin and end count blocks; several are read at once.
template <class A>
void block_scale(const KernelArgs& args, int64_t begin, int64_t end) {
  Block<A> in;
  const int64_t size = args.channels.inner, step = kBlock / size;
  const A tensor_scale = args.scale == nullptr ? A(1) : *static_cast<const A*>(args.scale);
  A* scales = static_cast<A*>(args.y);
  for (; begin < end; begin += step) {
    const int64_t blocks = smaller(step, end - begin);
    const A* x = fetch(args.x, begin * size, static_cast<int>(blocks * size), in);
    for (int64_t b = 0; b < blocks; ++b) {
      const A amax = largest_of(x + b * size, size);
      scales[begin + b] = qtoolkit::block_scale(amax, args.format, args.scale_format, tensor_scale);
    }
  }
}
