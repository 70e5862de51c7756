// The backward of learned grids: a result for each element, and a sum for each channel or two. Functor is one of
// kernel_list.h. Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "elementwise-inl.h"

// Sums of the elements of chunks: 64 lanes of the arithmetic type, added to a float64 sum before they have many terms.
template <class A>
struct Lanes {
  Vector<A> sum[kVectors<A>] = {};
};

template <class A>
QT_FN void load_lanes(Lanes<A>& lanes, const A* from) {
  for (int i = 0; i < kVectors<A>; ++i) lanes.sum[i] = load(from + i * kLanes<A>);
}

template <class A>
QT_FN void store_lanes(const Lanes<A>& lanes, A* to) {
  for (int i = 0; i < kVectors<A>; ++i) store(to + i * kLanes<A>, lanes.sum[i]);
}

// Sums the lanes as a fixed tree, so that the result does not depend on the width of a vector.
template <class A>
QT_FN double total_of(const Lanes<A>& lanes) {
  Lanes<A> tree = lanes;
  for (int half = kVectors<A> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) tree.sum[i] += tree.sum[i + half];
  }
  alignas(64) A sum[kLanes<A>];
  store(sum, tree.sum[0]);
  for (int half = kLanes<A> / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) sum[k] += sum[k + half];
  }
  return sum[0];
}

// Sums lanes [begin, end) only.
template <class A>
QT_FN double total_of(const Lanes<A>& lanes, int begin, int end) {
  Lanes<A> part;
  for (int i = 0; i < kVectors<A>; ++i) {
    const Vector<A> lane = lane_numbers<A>() + static_cast<A>(i * kLanes<A>);
    part.sum[i] = (lane >= static_cast<A>(begin)) & (lane < static_cast<A>(end)) ? lanes.sum[i] : Vector<A>{};
  }
  return total_of(part);
}

// The sums of 64 lanes for the gradients of scale and zero point, in memory.
template <class A>
struct Sums {
  alignas(64) A ds[kChunk] = {}, dz[kChunk] = {};
};

template <class A>
QT_FN double total_of(const A* sums, int begin = 0, int end = kChunk) {
  Lanes<A> lanes;
  load_lanes(lanes, sums);
  return begin == 0 && end == kChunk ? total_of(lanes) : total_of(lanes, begin, end);
}

// Writes dx of whole chunks and adds the gradients of their elements to the sums.
template <class A, bool kZeroPoint, class Functor, class Grid, class X, class Y>
QT_FN void learned_chunks(Y dx, X x, X grad, int chunks, bool stream, Grid grid, Functor functor, A* ds, A* dz) {
  Lanes<A> scale, zero_point;  // in registers
  load_lanes(scale, ds);
  if (kZeroPoint) load_lanes(zero_point, dz);
  Padded<A> x_buffer, grad_buffer;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int first = chunk * kChunk;
    const auto* values = values_of<A>(at<A>(x, first), x_buffer);
    const auto* grads = values_of<A>(at<A>(grad, first), grad_buffer);
    uint64_t inside = 0;
    Vector<A> results[kVectors<A>];
    for (int i = 0; i < kVectors<A>; ++i) {
      const int k = i * kLanes<A>;
      const auto gradient = Functor::apply(functor, load_as<A>(values + k), load_as<A>(grads + k),
                                           Grid::scales(grid, first + k), Grid::zero_points(grid, first + k));
      scale.sum[i] += gradient.scale;
      if (kZeroPoint) zero_point.sum[i] += gradient.zero_point;
      if (Functor::kMasks) inside |= static_cast<uint64_t>(gradient.inside) << k;
      if (!Functor::kMasks) results[i] = gradient.dx;
    }
    if constexpr (Functor::kMasks) {
      pass_chunk<A>(at<A>(grad, first), at<A>(dx, first), inside, stream);
    } else {
      store_chunk<A>(at<A>(dx, first), results, stream);
    }
  }
  store_lanes(scale, ds);
  if (kZeroPoint) store_lanes(zero_point, dz);
}

template <class A, bool kZeroPoint, class F, class Grid>
void learned_shared(const Grid& grid, const void* functor, Target dx, Source x, Source grad, int chunks, bool stream,
                    A* ds, A* dz) {
  const F& f = *static_cast<const F*>(functor);
  learned_chunks<A, kZeroPoint>(dx, x, grad, chunks, stream, grid, f, ds, dz);
}

// Adds the sums of consecutive lanes to the sums of consecutive channels.
template <bool kZeroPoint, class A>
QT_FN void add_to_row(const KernelArgs& args, int64_t channel, const Sums<A>& sums, int k = 0, int length = kChunk) {
  for (int j = 0; j < length; ++j) args.sum_scale[channel + j] += sums.ds[k + j];
  if (!kZeroPoint) return;
  for (int j = 0; j < length; ++j) args.sum_zero_point[channel + j] += sums.dz[k + j];
}

// Sums for each position of a row of channels, in the type of the arithmetic. They are flushed to float64 after kRows
// rows, so that each has few terms for any size of the tensor; if a row is too long for the buffer, after each chunk.
constexpr int kRows = 16;

template <class A, bool kZeroPoint>
class RowSums {
 public:
  explicit RowSums(const KernelArgs& args)
      : args_(args), places_(args.channels.size <= cpu::kLongestRow ? args.channels.size + kChunk : 0) {
    clear();
  }

  // Calls f with the sums at the positions of a chunk.
  template <class F>
  inline __attribute__((always_inline)) void add_chunk(int64_t position, F f) {
    if (places_ > 0) return f(ds_ + position, dz_ + (kZeroPoint ? position : 0));
    Sums<A> sums;
    f(sums.ds, sums.dz);
    add_to_row<kZeroPoint>(args_, position, sums);
  }

  // Called after n more elements.
  void end_block(int n) {
    elements_ += n;
    if (elements_ + kBlock > kRows * args_.channels.size) flush();
  }

  void flush() {
    for (int64_t i = 0; i < places_; ++i) args_.sum_scale[i] += ds_[i];
    for (int64_t i = 0; kZeroPoint && i < places_; ++i) args_.sum_zero_point[i] += dz_[i];
    clear();
  }

 private:
  void clear() {
    __builtin_memset(ds_, 0, places_ * sizeof(A));
    if (kZeroPoint) __builtin_memset(dz_, 0, places_ * sizeof(A));
    elements_ = 0;
  }

  const KernelArgs& args_;
  alignas(64) A ds_[cpu::kLongestRow + kChunk], dz_[kZeroPoint ? cpu::kLongestRow + kChunk : 1];
  int64_t places_, elements_;
};

// The walks call loop(grid, dx, x, grad, chunks, stream, ds, dz). Padding is zero, which adds nothing to sums (with an
// infinite scale it adds NaN to sums that are infinite or NaN already).
template <bool kTyped, class A, bool kZeroPoint, class Loop>
void learned_of_row(const KernelArgs& args, int64_t begin, int64_t end, const Loop& loop) {
  Block<A> buffers[3];
  RowSums<A, kZeroPoint> row(args);
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t first, int n) {
    const auto of_block = [&](auto dx, auto x, auto grad) {
      walk_row(args.channels, position.row, n, [&](int from, int chunks, int64_t place) {
        for (int i = from; i < from + chunks * kChunk; i += kChunk, place += kChunk) {
          with_row_grid<A>(args, place, [&](const auto& grid) {
            row.add_chunk(place, [&](A* ds, A* dz) {
              loop(grid, at<A>(dx, i), at<A>(x, i), at<A>(grad, i), 1, args.stream, ds, dz);
            });
          });
        }
      });
    };
    with_elements<kTyped>(args, first, n, Pad::zero, buffers, of_block, args.x, args.grad);
    row.end_block(n);
  });
  row.flush();
}

template <bool kTyped, class A, bool kZeroPoint, class Loop>
void learned_of_rows(const KernelArgs& args, int64_t begin, int64_t end, const Loop& loop) {
  Block<A> buffers[3];
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t first, int n) {
    const auto of_block = [&](auto dx, auto x, auto grad) {
      const auto with_sums = [&](int i, const auto& grid, auto f) {
        Sums<A> sums;
        loop(grid, at<A>(dx, i), at<A>(x, i), at<A>(grad, i), 1, args.stream, sums.ds, sums.dz);
        f(sums);
      };
      walk_rows(
          args.channels, position.rows, n,
          [&](int from, int chunks, int64_t c) {
            for (int i = from; i < from + chunks * kChunk; i += kChunk, c += kChunk) {
              with_row_grid<A>(args, c, [&](const auto& grid) {
                with_sums(i, grid, [&](const Sums<A>& sums) { add_to_row<kZeroPoint>(args, c, sums); });
              });
            }
          },
          [&](int from, RowCursor& cursor) {
            RowCursor start = cursor;
            const int valid = static_cast<int>(smaller(kChunk, n - from));
            ChunkGrid<A> buffer;
            with_sums(from, grid_of_rows(args, valid, cursor, buffer), [&](const Sums<A>& sums) {
              for_rows(args.channels, start, valid,
                       [&](int k, int length, int64_t c) { add_to_row<kZeroPoint>(args, c, sums, k, length); });
            });
          });
    };
    with_elements<kTyped>(args, first, n, Pad::zero, buffers, of_block, args.x, args.grad);
  });
}

template <bool kTyped, class A, bool kZeroPoint, class Loop>
void learned_of_channels(const KernelArgs& args, int64_t begin, int64_t end, const Loop& loop) {
  Block<A> buffers[3];
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t first, int n) {
    const auto of_block = [&](auto dx, auto x, auto grad) {
      const auto add = [&](int i, int chunks, const auto& grid, Sums<A>& sums) {
        loop(grid, at<A>(dx, i), at<A>(x, i), at<A>(grad, i), chunks, args.stream, sums.ds, sums.dz);
      };
      const auto add_totals = [&](int64_t c, const Sums<A>& sums, int k, int last) {
        args.sum_scale[c] += total_of(sums.ds, k, last);
        if (kZeroPoint) args.sum_zero_point[c] += total_of(sums.dz, k, last);
      };
      walk_channels(
          args.channels, position.channel, n,
          [&](int from, int chunks, int64_t c) {
            Sums<A> sums;
            add(from, chunks, grid_of<A>(args, c), sums);
            add_totals(c, sums, 0, kChunk);
          },
          [&](int from, Cursor& cursor) {
            Cursor start = cursor;
            Sums<A> sums;
            with_mixed_grid<A>(args, cursor, [&](const auto& grid) { add(from, 1, grid, sums); });
            const int valid = static_cast<int>(smaller(kChunk, args.numel - start.i));
            for_runs(args.channels, start, valid, [&](int k, int run, int64_t c) { add_totals(c, sums, k, k + run); });
          });
    };
    with_elements<kTyped>(args, first, n, Pad::zero, buffers, of_block, args.x, args.grad);
  });
}

template <bool kTyped, class A, bool kZeroPoint, class Loop>
void walk_learned(const KernelArgs& args, int64_t begin, int64_t end, const Loop& loop) {
  if (in_a_row(args.channels)) {
    learned_of_row<kTyped, A, kZeroPoint>(args, begin, end, loop);
  } else if (in_rows(args.channels)) {
    learned_of_rows<kTyped, A, kZeroPoint>(args, begin, end, loop);
  } else {
    learned_of_channels<kTyped, A, kZeroPoint>(args, begin, end, loop);
  }
  end_stores(args.stream);
}

template <class A, bool kZeroPoint, class F>
void learned_backward_with(const KernelArgs& args, int64_t begin, int64_t end) {
  const F functor = F::from(args);
  if constexpr (kInEachStep<F>) {
    walk_learned<true, A, kZeroPoint>(
        args, begin, end, [&](const auto& grid, auto dx, auto x, auto grad, int chunks, bool stream, A* ds, A* dz) {
          using Grid = typename std::decay<decltype(grid)>::type;
          if constexpr (kFewChannels<A, Grid>) {
            learned_chunks<A, kZeroPoint>(dx, x, grad, chunks, stream, grid, functor, ds, dz);
          } else {
            learned_shared<A, kZeroPoint, F, Grid>(grid, &functor, target_of<A>(dx), source_of<A>(x),
                                                   source_of<A>(grad), chunks, stream, ds, dz);
          }
        });
  } else {
    const Loops<A, Target, Source, Source, int, bool, A*, A*> loops = {
        {learned_shared<A, kZeroPoint, F, UniformGrid<A>>},
        {learned_shared<A, kZeroPoint, F, ElementwiseGrid<A>>},
        {learned_shared<A, kZeroPoint, F, ElementwiseScale<A>>},
        {learned_shared<A, kZeroPoint, F, SplitGrid<A>>},
        &functor};
    walk_learned<false, A, kZeroPoint>(args, begin, end, loops);
  }
}

template <class A, class F>
void learned_backward(const KernelArgs& args, int64_t begin, int64_t end) {
  if constexpr ((F::kSums & kBothSums) != 0) {
    if (args.sum_zero_point != nullptr) return learned_backward_with<A, true, F>(args, begin, end);
  }
  if constexpr ((F::kSums & kScaleSum) != 0) learned_backward_with<A, false, F>(args, begin, end);
}
