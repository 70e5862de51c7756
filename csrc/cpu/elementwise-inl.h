// Kernels with a result for each element: fake quantization, its straight-through backward, and the scales of blocks.
// Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "chunk-inl.h"
#include "scales-inl.h"

// Whether a functor is one of almost every training step. Its loops over chunks of one or two channels are compiled for
// each storage type, and inlined into the walks over channels; all other loops are shared, as all are in the plain
// kernels.
template <class Functor>
constexpr bool kInEachStep = QT_BYTES > 16 && (std::is_same<Functor, IntegerFunctor<float, Vector<float>>>::value ||
                                               std::is_same<Functor, LearnedGradient<float, Vector<float>>>::value);

template <class A, class Grid>
constexpr bool kFewChannels = std::is_same<Grid, UniformGrid<A>>::value || std::is_same<Grid, SplitGrid<A>>::value;

// Consecutive chunks of an elementwise kernel. X and Y are pointers, or Source and Target.
template <class X, class Y>
struct Chunks {
  int count;
  X x;
  Y y;
  bool stream;
  CodesAt codes;
  uint64_t* mask;  // a word for each chunk, or null
};

// The loop of all elementwise kernels; Functor is one of fake_quant.h.
template <class A, bool kMasked, bool kCodes, class Functor, class Grid, class X, class Y>
QT_FN void map_chunks(Chunks<X, Y> chunks, Grid grid, Functor functor) {
  Padded<A> buffer;
  for (int chunk = 0; chunk < chunks.count; ++chunk) {
    const int first = chunk * kChunk;
    const auto* x = values_of<A>(at<A>(chunks.x, first), buffer);
    Vector<A> values[kVectors<A>];
    uint64_t inside = 0;
    for (int i = 0; i < kVectors<A>; ++i) {
      const int k = i * kLanes<A>;
      const auto mapped =
          Functor::apply(functor, load_as<A>(x + k), Grid::scales(grid, first + k), Grid::zero_points(grid, first + k));
      values[i] = mapped.value;
      if constexpr (kCodes) store_codes<A>(codes_at(chunks.codes, first + k), mapped.code);
      if (kMasked) inside |= static_cast<uint64_t>(mapped.inside) << k;
    }
    store_chunk<A>(at<A>(chunks.y, first), values, chunks.stream);
    if (kMasked && chunks.mask != nullptr) chunks.mask[chunk] = inside;
  }
}

// Calls map(grid, chunks).
template <bool kTyped, class A, class Map>
void map_elements(const KernelArgs& args, int64_t begin, int64_t end, const Map& map) {
  Block<A> buffers[2];
  uint8_t bytes[kBlock];
  uint64_t mask[kBlock / kChunk];
  const CodesAt all = {args.codes, args.packed}, codes = {args.codes == nullptr ? nullptr : bytes, args.packed};
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t first, int n) {
    const auto of_block = [&](auto y, auto x) {
      for_grids<A>(args, position, n, [&](int from, int count, const auto& grid) {
        uint64_t* words = args.mask == nullptr ? nullptr : mask + from / kChunk;
        map(grid, Chunks<decltype(x), decltype(y)>{count, at<A>(x, from), at<A>(y, from), args.stream,
                                                   codes_at(codes, from), words});
      });
    };
    with_elements<kTyped>(args, first, n, Pad::last, buffers, of_block, args.x);
    if (args.codes != nullptr) __builtin_memcpy(codes_at(all, first).data, bytes, bytes_of_codes(codes, n));
    if (args.mask != nullptr) write_mask(args.mask, first, n, mask);
  });
  end_stores(args.stream);
}

template <class A, class F, class Grid>
void map_shared(const Grid& grid, const void* functor, const Chunks<Source, Target>& chunks) {
  const F& f = *static_cast<const F*>(functor);
  if constexpr (std::is_same<F, IntegerFunctor<A, Vector<A>>>::value) {
    if (chunks.codes.data != nullptr) return map_chunks<A, true, true>(chunks, grid, f);
  }
  map_chunks<A, true, false>(chunks, grid, f);
}

template <class A, class F>
void elementwise(const KernelArgs& args, int64_t begin, int64_t end) {
  const F functor = F::from(args);
  if constexpr (kInEachStep<F>) {
    const auto run = [&](auto masked, auto codes) {
      map_elements<true, A>(args, begin, end, [&](const auto& grid, const auto& chunks) {
        using Grid = typename std::decay<decltype(grid)>::type;
        if constexpr (kFewChannels<A, Grid>) {
          map_chunks<A, masked.value, codes.value>(chunks, grid, functor);
        } else {
          map_shared<A, F, Grid>(
              grid, &functor,
              {chunks.count, source_of<A>(chunks.x), target_of<A>(chunks.y), chunks.stream, chunks.codes, chunks.mask});
        }
      });
    };
    if (args.codes != nullptr) return run(std::true_type{}, std::true_type{});
    args.mask == nullptr ? run(std::false_type{}, std::false_type{}) : run(std::true_type{}, std::false_type{});
  } else {
    const Loops<A, const Chunks<Source, Target>&> loops = {{map_shared<A, F, UniformGrid<A>>},
                                                           {map_shared<A, F, ElementwiseGrid<A>>},
                                                           {map_shared<A, F, ElementwiseScale<A>>},
                                                           {map_shared<A, F, SplitGrid<A>>},
                                                           &functor};
    map_elements<false, A>(args, begin, end, loops);
  }
}

template <class A>
void fake_quant_backward(const KernelArgs& args, int64_t begin, int64_t end) {
  Block<A> buffers[2];
  for_blocks(begin, end, [&](int64_t first, int n) {
    uint64_t mask[kBlock / kChunk] = {};
    __builtin_memcpy(mask, args.mask + first / 8, (n + 7) / 8);
    const auto of_block = [&](auto* dx, const auto* grad) {
      for (int chunk = 0; chunk < round_up(n) / kChunk; ++chunk, grad += kChunk, dx += kChunk) {
        for (size_t line = 0; line < kChunk * sizeof(*grad); line += 64) {
          __builtin_prefetch(reinterpret_cast<const char*>(grad + kAhead) + line);
        }
        pass_chunk<A>(grad, dx, mask[chunk], args.stream);
      }
    };
    with_elements<true>(args, first, n, Pad::last, buffers, of_block, args.grad);
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

// The largest magnitude of whole vectors. NaN is ignored, or (`all_finite`) the result is NaN where a number is not
// finite.
template <class A>
QT_FN A largest_of(const A* x, int64_t n, bool all_finite) {
  Vector<A> lanes = {}, rest = {};
  for (int64_t i = 0; i < n; i += kLanes<A>) {
    const Vector<A> v = load(x + i), magnitude = v < 0 ? -v : v;
    lanes = magnitude > lanes ? magnitude : lanes;
    rest += v - v;
  }
  A largest = lanes[0], sum = rest[0];
  for (int k = 1; k < kLanes<A>; ++k) {
    largest = lanes[k] > largest ? lanes[k] : largest;
    sum += rest[k];
  }
  return all_finite ? largest + sum : largest;
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
      const A amax = largest_of(x + b * size, size, args.scale_format.largest == 0);
      scales[begin + b] = qtoolkit::block_scale(amax, args.format, args.scale_format, tensor_scale);
    }
  }
}
