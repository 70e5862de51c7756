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

template <class A, bool kZeroPoint>
struct Sums {
  Lanes<A> ds, dz;
};

// Where the operands of consecutive chunks lie. The gradients and dx are of one storage type.
struct LearnedChunks {
  Source x, grad;
  Target dx;
  bool stream;
};

template <class A>
QT_FN LearnedChunks at(const LearnedChunks& chunks, int64_t i) {
  return {at<A>(chunks.x, i), at<A>(chunks.grad, i), at<A>(chunks.dx, i), chunks.stream};
}

// Calls f with the operands of elements [begin, begin + n). Padding is zero, which adds nothing to sums (with an
// infinite scale it adds NaN to sums that are infinite or NaN already).
template <class A, class F>
QT_FN void with_learned_chunks(const KernelArgs& args, int64_t begin, int n, Block<A>& x, Block<A>& grad, Block<A>& out,
                               F f) {
  const bool of_one_type = args.x.dtype == args.grad.dtype && args.x.dtype == args.y_dtype;
  if (of_one_type && args.x.dense && args.grad.dense && n % kChunk == 0) {
    return f(LearnedChunks{at<A>(Source{args.x.data, args.x.dtype}, begin),
                           at<A>(Source{args.grad.data, args.grad.dtype}, begin),
                           at<A>(Target{args.y, args.y_dtype}, begin), args.stream});
  }
  A* result = result_buffer(args, begin, n, out);
  f(LearnedChunks{{fetch(args.x, begin, n, x, Pad::zero), kNative<A>},
                  {fetch(args.grad, begin, n, grad, Pad::zero), kNative<A>},
                  {result, kNative<A>},
                  args.stream});
  commit(args, begin, n, result);
}

// Writes dx of whole chunks and adds the gradients of their elements to the sums.
template <class A, bool kZeroPoint, class Functor, class Grid>
void learned_chunks(const Grid& shared_grid, const void* shared_functor, const LearnedChunks& given, int chunks,
                    Sums<A, kZeroPoint>& sums) {
  // Copies, since the stores below could change the originals.
  const Grid grid = shared_grid;
  const Functor functor = *static_cast<const Functor*>(shared_functor);
  const LearnedChunks operands = given;
  Sums<A, kZeroPoint> local = sums;  // in registers
  Padded<A> x_buffer, grad_buffer;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int first = chunk * kChunk;
    const LearnedChunks of = at<A>(operands, first);
    const A *x = values_of(of.x, x_buffer), *grad = values_of(of.grad, grad_buffer);
    uint64_t inside = 0;
    Vector<A> results[kVectors<A>];
    for (int i = 0; i < kVectors<A>; ++i) {
      const int k = i * kLanes<A>;
      const auto gradient = Functor::apply(functor, load(x + k), load(grad + k), Grid::scales(grid, first + k),
                                           Grid::zero_points(grid, first + k));
      local.ds.sum[i] += gradient.scale;
      if (kZeroPoint) local.dz.sum[i] += gradient.zero_point;
      if (Functor::kMasks) inside |= static_cast<uint64_t>(gradient.inside) << k;
      if (!Functor::kMasks) results[i] = gradient.dx;
    }
    if constexpr (Functor::kMasks) {
      pass_chunk<A>(of.grad, of.dx, inside, of.stream);
    } else {
      store_chunk<A>(of.dx, results, of.stream);
    }
  }
  sums = local;
}

template <class A, bool kZeroPoint>
using LearnedLoops = Loops<A, const LearnedChunks&, int, Sums<A, kZeroPoint>&>;

// Adds the sums of consecutive lanes to the sums of consecutive channels.
template <class A, bool kZeroPoint>
QT_FN void add_to_row(const KernelArgs& args, int64_t channel, const Sums<A, kZeroPoint>& sums, int k = 0,
                      int length = kChunk) {
  alignas(64) A lanes[kChunk];
  store_lanes(sums.ds, lanes);
  for (int j = 0; j < length; ++j) args.sum_scale[channel + j] += lanes[k + j];
  if (!kZeroPoint) return;
  store_lanes(sums.dz, lanes);
  for (int j = 0; j < length; ++j) args.sum_zero_point[channel + j] += lanes[k + j];
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
    Sums<A, kZeroPoint> sums;
    if (places_ == 0) {
      f(sums);
      return add_to_row(args_, position, sums);
    }
    load_lanes(sums.ds, ds_ + position);
    if (kZeroPoint) load_lanes(sums.dz, dz_ + position);
    f(sums);
    store_lanes(sums.ds, ds_ + position);
    if (kZeroPoint) store_lanes(sums.dz, dz_ + position);
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

template <class A, bool kZeroPoint>
void learned_of_row(const KernelArgs& args, int64_t begin, int64_t end, const LearnedLoops<A, kZeroPoint>& loops) {
  Block<A> in, grad_in, out;
  RowSums<A, kZeroPoint> row(args);
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t first, int n) {
    with_learned_chunks(args, first, n, in, grad_in, out, [&](const LearnedChunks& operands) {
      walk_row(args.channels, position.row, n, [&](int from, int chunks, int64_t place) {
        for (int i = from; i < from + chunks * kChunk; i += kChunk, place += kChunk) {
          with_row_grid<A>(args, place, [&](auto grid) {
            row.add_chunk(place, [&](auto& sums) { loops(grid, at<A>(operands, i), 1, sums); });
          });
        }
      });
    });
    row.end_block(n);
  });
  row.flush();
}

template <class A, bool kZeroPoint>
void learned_of_rows(const KernelArgs& args, int64_t begin, int64_t end, const LearnedLoops<A, kZeroPoint>& loops) {
  Block<A> in, grad_in, out;
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t first, int n) {
    with_learned_chunks(args, first, n, in, grad_in, out, [&](const LearnedChunks& operands) {
      const auto sums_of = [&](int i, auto grid) {
        Sums<A, kZeroPoint> sums;
        loops(grid, at<A>(operands, i), 1, sums);
        return sums;
      };
      walk_rows(
          args.channels, position.rows, n,
          [&](int from, int chunks, int64_t c) {
            for (int i = from; i < from + chunks * kChunk; i += kChunk, c += kChunk) {
              with_row_grid<A>(args, c, [&](auto grid) { add_to_row(args, c, sums_of(i, grid)); });
            }
          },
          [&](int from, RowCursor& cursor) {
            RowCursor start = cursor;
            const int valid = static_cast<int>(smaller(kChunk, n - from));
            ChunkGrid<A> buffer;
            const auto sums = sums_of(from, grid_of_rows(args, valid, cursor, buffer));
            for_rows(args.channels, start, valid,
                     [&](int k, int length, int64_t c) { add_to_row(args, c, sums, k, length); });
          });
    });
  });
}

template <class A, bool kZeroPoint>
void learned_of_channels(const KernelArgs& args, int64_t begin, int64_t end, const LearnedLoops<A, kZeroPoint>& loops) {
  Block<A> in, grad_in, out;
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t first, int n) {
    with_learned_chunks(args, first, n, in, grad_in, out, [&](const LearnedChunks& operands) {
      const auto sums_of = [&](int i, int chunks, auto grid) {
        Sums<A, kZeroPoint> sums;
        loops(grid, at<A>(operands, i), chunks, sums);
        return sums;
      };
      walk_channels(
          args.channels, position.channel, n,
          [&](int from, int chunks, int64_t c) {
            const auto sums = sums_of(from, chunks, grid_of<A>(args, c));
            args.sum_scale[c] += total_of(sums.ds);
            if (kZeroPoint) args.sum_zero_point[c] += total_of(sums.dz);
          },
          [&](int from, Cursor& cursor) {
            Cursor start = cursor;
            Sums<A, kZeroPoint> sums;
            with_mixed_grid<A>(args, cursor, [&](auto grid) { sums = sums_of(from, 1, grid); });
            const int valid = static_cast<int>(smaller(kChunk, args.numel - start.i));
            for_runs(args.channels, start, valid, [&](int k, int run, int64_t c) {
              args.sum_scale[c] += total_of(sums.ds, k, k + run);
              if (kZeroPoint) args.sum_zero_point[c] += total_of(sums.dz, k, k + run);
            });
          });
    });
  });
}

template <class A, bool kZeroPoint, class F>
void learned_backward_typed(const KernelArgs& args, int64_t begin, int64_t end) {
  const F functor = F::from(args);
  const LearnedLoops<A, kZeroPoint> loops = {{learned_chunks<A, kZeroPoint, F, UniformGrid<A>>},
                                             {learned_chunks<A, kZeroPoint, F, ElementwiseGrid<A>>},
                                             {learned_chunks<A, kZeroPoint, F, ElementwiseScale<A>>},
                                             {learned_chunks<A, kZeroPoint, F, SplitGrid<A>>},
                                             &functor};
  if (in_a_row(args.channels)) {
    learned_of_row(args, begin, end, loops);
  } else if (in_rows(args.channels)) {
    learned_of_rows(args, begin, end, loops);
  } else {
    learned_of_channels(args, begin, end, loops);
  }
  end_stores(args.stream);
}

template <class A, class F>
void learned_backward(const KernelArgs& args, int64_t begin, int64_t end) {
  if constexpr ((F::kSums & kBothSums) != 0) {
    if (args.sum_zero_point != nullptr) return learned_backward_typed<A, true, F>(args, begin, end);
  }
  if constexpr ((F::kSums & kScaleSum) != 0) learned_backward_typed<A, false, F>(args, begin, end);
}
