// The scales and zero points of the chunks of a block. Included once per instruction set, inside namespace
// qtoolkit::QT_ISA.
#pragma once

#include "channels-inl.h"

// A grid has functions for the scales and zero points of the vector at k. UniformGrid: one channel for all elements.
template <class A>
struct UniformGrid {
  A scale, zero_point;
  QT_FN Vector<A> scales(const UniformGrid& g, int) { return broadcast<Vector<A>>(g.scale); }
  QT_FN Vector<A> zero_points(const UniformGrid& g, int) { return broadcast<Vector<A>>(g.zero_point); }
};

// A channel for each element.
template <class A>
struct ElementwiseGrid {
  const A* scale;
  const A* zero_point;
  QT_FN Vector<A> scales(const ElementwiseGrid& g, int k) { return load(g.scale + k); }
  QT_FN Vector<A> zero_points(const ElementwiseGrid& g, int k) { return load(g.zero_point + k); }
};

// The same where all zero points are 0, which saves a read.
template <class A>
struct ElementwiseScale {
  const A* scale;
  QT_FN Vector<A> scales(const ElementwiseScale& g, int k) { return load(g.scale + k); }
  QT_FN Vector<A> zero_points(const ElementwiseScale&, int) { return Vector<A>{}; }
};

// Lane k has the value k.
template <class A>
QT_FN Vector<A> lane_numbers() {
  Vector<A> numbers;
  for (int k = 0; k < kLanes<A>; ++k) numbers[k] = static_cast<A>(k);
  return numbers;
}

// One channel before an element of the chunk, and another from it on.
template <class A>
struct SplitGrid {
  UniformGrid<A> first, second;
  int split;
  QT_FN Vector<A> choose(const SplitGrid& g, int k, A first, A second) {
    const auto before = lane_numbers<A>() < static_cast<A>(g.split - k);
    return before ? broadcast<Vector<A>>(first) : broadcast<Vector<A>>(second);
  }
  QT_FN Vector<A> scales(const SplitGrid& g, int k) { return choose(g, k, g.first.scale, g.second.scale); }
  QT_FN Vector<A> zero_points(const SplitGrid& g, int k) {
    return choose(g, k, g.first.zero_point, g.second.zero_point);
  }
};

// The loops of a functor, one for each kind of grid. The walks over channels call them by pointers, so that each walk
// is compiled once for all functors.
template <class Grid, class... Args>
struct LoopOf {
  void (*run)(const Grid& grid, const void* functor, Args... args);
};

template <class A, class... Args>
struct Loops : LoopOf<UniformGrid<A>, Args...>,
               LoopOf<ElementwiseGrid<A>, Args...>,
               LoopOf<ElementwiseScale<A>, Args...>,
               LoopOf<SplitGrid<A>, Args...> {
  const void* functor;

  template <class Grid>
  void operator()(const Grid& grid, Args... args) const {
    LoopOf<Grid, Args...>::run(grid, functor, args...);
  }
};

template <class A>
QT_FN UniformGrid<A> grid_of(const KernelArgs& args, int64_t c) {
  return {static_cast<const A*>(args.scale)[c], static_cast<const A*>(args.zero_point)[c]};
}

// With space for a vector past the end: a run is written in whole vectors up to the end of the chunk, and the next run
// overwrites the excess.
template <class A>
struct ChunkGrid {
  A scale[kChunk + kLanes<A>], zero_point[kChunk + kLanes<A>];
};

template <class A>
QT_FN void fill_from(A* to, int k, A value) {
  const Vector<A> values = broadcast<Vector<A>>(value);
  for (; k < kChunk; k += kLanes<A>) store(to + k, values);
}

template <class A>
ElementwiseGrid<A> grid_of_chunk(const KernelArgs& args, Cursor& cursor, ChunkGrid<A>& buffer) {
  const A* scale = static_cast<const A*>(args.scale);
  const A* zero_point = static_cast<const A*>(args.zero_point);
  const int valid = static_cast<int>(smaller(kChunk, args.numel - cursor.i));
  for_runs(args.channels, cursor, valid, [&](int k, int, int64_t c) {
    fill_from(buffer.scale, k, scale[c]);
    fill_from(buffer.zero_point, k, zero_point[c]);
  });
  return {buffer.scale, buffer.zero_point};
}

// The same where channels form rows: each part of a row is copied in whole vectors, and the next part overwrites the
// excess.
template <class A>
ElementwiseGrid<A> grid_of_rows(const KernelArgs& args, int n, RowCursor& cursor, ChunkGrid<A>& buffer) {
  const A* scale = static_cast<const A*>(args.scale);
  const A* zero_point = static_cast<const A*>(args.zero_point);
  for_rows(args.channels, cursor, n, [&](int k, int length, int64_t c) {
    for (int j = 0; j < length; j += kLanes<A>) {
      store(buffer.scale + k + j, load(scale + c + j));
      store(buffer.zero_point + k + j, load(zero_point + c + j));
    }
  });
  return {buffer.scale, buffer.zero_point};
}

// Calls f(grid) for a chunk of several channels that begins at the cursor, and advances past it.
template <class A, class F>
QT_FN void with_mixed_grid(const KernelArgs& args, Cursor& cursor, F f) {
  if (args.channels.inner < kChunk) {
    ChunkGrid<A> buffer;
    return f(grid_of_chunk(args, cursor, buffer));
  }
  const UniformGrid<A> first = grid_of<A>(args, cursor.channel);
  const int split = static_cast<int>(cursor.left);
  advance(args.channels, cursor, split);
  const bool ends = cursor.i >= args.numel;
  f(SplitGrid<A>{first, ends ? first : grid_of<A>(args, cursor.channel), split});
  if (!ends) advance(args.channels, cursor, kChunk - split);
}

// Calls f(grid) for elements whose channels form a row, from a position in it.
template <class A, class F>
QT_FN void with_row_grid(const KernelArgs& args, int64_t position, F f) {
  const A* scale = static_cast<const A*>(args.scale) + position;
  if (args.zero_point == nullptr) return f(ElementwiseScale<A>{scale});
  f(ElementwiseGrid<A>{scale, static_cast<const A*>(args.zero_point) + position});
}

// Calls f(at, chunks, grid) over a block, with one of the grids above, and advances past it.
template <class A, class F>
QT_FN void for_grids(const KernelArgs& args, Position& position, int n, F f) {
  const auto in_row = [&](int at, int chunks, int64_t first) {
    with_row_grid<A>(args, first, [&](auto grid) { f(at, chunks, grid); });
  };
  if (in_a_row(args.channels)) return walk_row(args.channels, position.row, n, in_row);
  if (in_rows(args.channels)) {
    ChunkGrid<A> buffer;
    return walk_rows(args.channels, position.rows, n, in_row, [&](int at, RowCursor& cursor) {
      f(at, 1, grid_of_rows(args, static_cast<int>(smaller(kChunk, n - at)), cursor, buffer));
    });
  }
  walk_channels(
      args.channels, position.channel, n, [&](int at, int chunks, int64_t c) { f(at, chunks, grid_of<A>(args, c)); },
      [&](int at, Cursor& cursor) { with_mixed_grid<A>(args, cursor, [&](auto grid) { f(at, 1, grid); }); });
}
