// Kernels with a result for each element: fake quantization, its straight-through backward, and the scales of blocks.
// Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "chunk-inl.h"
#include "scales-inl.h"

// Consecutive chunks of an elementwise kernel.
struct Chunks {
  int count;
  Source x;
  Target y;
  bool stream;
  CodesAt codes;
  uint64_t* mask;  // a word for each chunk, or null
};

// The loop of all elementwise kernels; Functor is one of fake_quant.h.
template <class A, class Functor, class Grid>
void map_chunks(const Grid& shared_grid, const void* shared_functor, const Chunks& given) {
  // Copies, since the stores below could change the originals.
  const Grid grid = shared_grid;
  const Functor functor = *static_cast<const Functor*>(shared_functor);
  const Chunks chunks = given;
  Padded<A> buffer;
  for (int chunk = 0; chunk < chunks.count; ++chunk) {
    const int first = chunk * kChunk;
    const A* x = values_of(at<A>(chunks.x, first), buffer);
    Vector<A> values[kVectors<A>];
    uint64_t inside = 0;
    for (int i = 0; i < kVectors<A>; ++i) {
      const int k = i * kLanes<A>;
      const auto mapped =
          Functor::apply(functor, load(x + k), Grid::scales(grid, first + k), Grid::zero_points(grid, first + k));
      values[i] = mapped.value;
      if constexpr (std::is_same<Functor, IntegerFunctor<A, Vector<A>>>::value) {
        if (chunks.codes.data != nullptr) store_codes<A>(codes_at(chunks.codes, first + k), mapped.code);
      }
      inside |= static_cast<uint64_t>(mapped.inside) << k;
    }
    store_chunk<A>(at<A>(chunks.y, first), values, chunks.stream);
    if (chunks.mask != nullptr) chunks.mask[chunk] = inside;
  }
}

template <class A>
void map_elements(const KernelArgs& args, int64_t begin, int64_t end, const Loops<A, const Chunks&>& map) {
  Block<A> in, out;
  uint8_t bytes[kBlock];
  uint64_t mask[kBlock / kChunk];
  const CodesAt all = {args.codes, args.packed}, codes = {args.codes == nullptr ? nullptr : bytes, args.packed};
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t first, int n) {
    const Source x = chunks_of(args.x, first, n, in);
    with_results<A>(args, first, n, out, [&](Target y) {
      for_grids<A>(args, position, n, [&](int from, int count, auto grid) {
        uint64_t* words = args.mask == nullptr ? nullptr : mask + from / kChunk;
        map(grid, {count, at<A>(x, from), at<A>(y, from), args.stream, codes_at(codes, from), words});
      });
    });
    if (args.codes != nullptr) __builtin_memcpy(codes_at(all, first).data, bytes, bytes_of_codes(codes, n));
    if (args.mask != nullptr) write_mask(args.mask, first, n, mask);
  });
  end_stores(args.stream);
}

template <class A, class F>
void elementwise(const KernelArgs& args, int64_t begin, int64_t end) {
  const F functor = F::from(args);
  map_elements<A>(args, begin, end,
                  {{map_chunks<A, F, UniformGrid<A>>},
                   {map_chunks<A, F, ElementwiseGrid<A>>},
                   {map_chunks<A, F, ElementwiseScale<A>>},
                   {map_chunks<A, F, SplitGrid<A>>},
                   &functor});
}

template <class A>
void fake_quant_backward(const KernelArgs& args, int64_t begin, int64_t end) {
  Block<A> in, out;
  for_blocks(begin, end, [&](int64_t first, int n) {
    uint64_t mask[kBlock / kChunk] = {};
    __builtin_memcpy(mask, args.mask + first / 8, (n + 7) / 8);
    const Source grad = chunks_of(args.grad, first, n, in);
    const bool direct = n % kChunk == 0 && grad.dtype == args.y_dtype;  // the gradient passes without conversion
    const Target dx = direct ? at<A>(Target{args.y, args.y_dtype}, first) : Target{out.values, kNative<A>};
    for (int i = 0; i < n; i += kChunk) {
      const char* ahead = static_cast<const char*>(at<A>(grad, i + kAhead).data);
      for (int64_t line = 0; line < bytes_of<A>(grad.dtype, kChunk); line += 64) __builtin_prefetch(ahead + line);
      pass_chunk<A>(at<A>(grad, i), at<A>(dx, i), mask[i / kChunk], args.stream);
    }
    if (!direct) commit(args, first, n, out.values);
  });
  end_stores(args.stream);
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
