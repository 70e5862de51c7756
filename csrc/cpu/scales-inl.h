// The scales and zero points of a block's chunks.
// Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "channels-inl.h"

// A grid gives the scales and zero points of the vector at k. One channel for all elements:
template <class A>
struct Same {
  A scale, zero_point;
  QT_FN Vector<A> scales(const Same& g, int) { return same<Vector<A>>(g.scale); }
  QT_FN Vector<A> zero_points(const Same& g, int) { return same<Vector<A>>(g.zero_point); }
};

// One for each element:
template <class A>
struct Each {
  const A* scale;
  const A* zero_point;
  QT_FN Vector<A> scales(const Each& g, int k) { return load(g.scale + k); }
  QT_FN Vector<A> zero_points(const Each& g, int k) { return load(g.zero_point + k); }
};

// The same where no zero point is other than 0: a row less to read.
template <class A>
struct EachScale {
  const A* scale;
  QT_FN Vector<A> scales(const EachScale& g, int k) { return load(g.scale + k); }
  QT_FN Vector<A> zero_points(const EachScale&, int) { return Vector<A>{}; }
};

// The number of each lane.
template <class A>
QT_FN Vector<A> lane_numbers() {
  Vector<A> numbers;
  for (int k = 0; k < kLanes<A>; ++k) numbers[k] = static_cast<A>(k);
  return numbers;
}

// One channel up to an element of the chunk, and another from it on.
template <class A>
struct Two {
  Same<A> first, second;
  int split;
  QT_FN Vector<A> choose(const Two& g, int k, A first, A second) {
    const auto before = lane_numbers<A>() < static_cast<A>(g.split - k);
    return before ? same<Vector<A>>(first) : same<Vector<A>>(second);
  }
  QT_FN Vector<A> scales(const Two& g, int k) { return choose(g, k, g.first.scale, g.second.scale); }
  QT_FN Vector<A> zero_points(const Two& g, int k) { return choose(g, k, g.first.zero_point, g.second.zero_point); }
};

template <class A>
QT_FN Same<A> grid_of(const Job& job, int64_t c) {
  return {static_cast<const A*>(job.scale)[c], static_cast<const A*>(job.zero_point)[c]};
}

// With room for a vector past the end: a run is filled in whole vectors up to the chunk's end, and the next run fills
// over what is its own.
template <class A>
struct ChunkGrid {
  A scale[kChunk + kLanes<A>], zero_point[kChunk + kLanes<A>];
};

template <class A>
QT_FN void fill_from(A* to, int k, A value) {
  const Vector<A> values = same<Vector<A>>(value);
  for (; k < kChunk; k += kLanes<A>) store(to + k, values);
}

template <class A>
Each<A> grid_of_chunk(const Job& job, Cursor& cursor, ChunkGrid<A>& buffer) {
  const A* scale = static_cast<const A*>(job.scale);
  const A* zero_point = static_cast<const A*>(job.zero_point);
  const int valid = static_cast<int>(smaller(kChunk, job.numel - cursor.i));
  for_runs(job.channels, cursor, valid, [&](int k, int, int64_t c) {
    fill_from(buffer.scale, k, scale[c]);
    fill_from(buffer.zero_point, k, zero_point[c]);
  });
  return {buffer.scale, buffer.zero_point};
}

// The same where channels are in rows: a piece is copied in whole vectors, and the next one over what is its own.
template <class A>
Each<A> grid_of_rows(const Job& job, int n, RowCursor& cursor, ChunkGrid<A>& buffer) {
  const A* scale = static_cast<const A*>(job.scale);
  const A* zero_point = static_cast<const A*>(job.zero_point);
  for_rows(job.channels, cursor, n, [&](int k, int length, int64_t c) {
    for (int j = 0; j < length; j += kLanes<A>) {
      store(buffer.scale + k + j, load(scale + c + j));
      store(buffer.zero_point + k + j, load(zero_point + c + j));
    }
  });
  return {buffer.scale, buffer.zero_point};
}

// Calls f(grid) for a chunk of several channels, which begins at the cursor, and moves the cursor past it.
template <class A, class F>
QT_FN void with_mixed_grid(const Job& job, Cursor& cursor, F f) {
  if (job.channels.inner < kChunk) {
    ChunkGrid<A> buffer;
    return f(grid_of_chunk(job, cursor, buffer));
  }
  const Same<A> first = grid_of<A>(job, cursor.channel);
  const int split = static_cast<int>(cursor.left);
  advance(job.channels, cursor, split);
  const bool ends = cursor.i >= job.numel;
  f(Two<A>{first, ends ? first : grid_of<A>(job, cursor.channel), split});
  if (!ends) advance(job.channels, cursor, kChunk - split);
}

// Calls f(grid) for elements whose channels lie in a row, from a place in it on.
template <class A, class F>
QT_FN void with_row_grid(const Job& job, int64_t place, F f) {
  const A* scale = static_cast<const A*>(job.scale) + place;
  if (job.zero_point == nullptr) return f(EachScale<A>{scale});
  f(Each<A>{scale, static_cast<const A*>(job.zero_point) + place});
}

// Calls f(at, chunks, grid) over a block, with one of the grids above, and moves on past it.
template <class A, class F>
QT_FN void for_grids(const Job& job, Place& place, int n, F f) {
  const auto in_row = [&](int at, int chunks, int64_t first) {
    with_row_grid<A>(job, first, [&](auto grid) { f(at, chunks, grid); });
  };
  if (in_a_row(job.channels)) return walk_row(job.channels, place.row, n, in_row);
  if (in_rows(job.channels)) {
    ChunkGrid<A> buffer;
    return walk_rows(job.channels, place.rows, n, in_row, [&](int at, RowCursor& cursor) {
      f(at, 1, grid_of_rows(job, static_cast<int>(smaller(kChunk, n - at)), cursor, buffer));
    });
  }
  walk_channels(
      job.channels, place.channel, n, [&](int at, int chunks, int64_t c) { f(at, chunks, grid_of<A>(job, c)); },
      [&](int at, Cursor& cursor) { with_mixed_grid<A>(job, cursor, [&](auto grid) { f(at, 1, grid); }); });
}
