// How a reduction is divided between blocks of threads: index arithmetic only. It depends on the shape alone, not on
// the device, the strides or the timing, so that every GPU sums in the same order.
//
// A tensor is groups x rows x channels x inner. Rows are divided into tiles of whole channels, at most as wide as a
// block has threads (or of one wider channel), and each tile into slices of rows. A block reduces one slice of one tile
// in memory order and writes one result for each channel of the tile. A thread stays in one channel.
#pragma once

#include "../kernel_args.h"

namespace qtoolkit {
namespace cuda {

constexpr int kThreads = 256;

// All lengths are in units: what a thread loads at once, 8 elements if channels consist of whole vectors, else one.
struct ReductionTiling {
  int unit = 1;
  int64_t groups = 1, rows = 0, size = 1, inner = 1;
  int64_t pattern = 1;    // length of a row: size * inner
  int tile_channels = 1;  // channels of a tile; the last tile of a row may have fewer
  int64_t width = 1;      // of a tile: tile_channels * inner
  int64_t tiles = 1;      // in a row
  int lanes = kThreads;   // threads with work; whole rows of the tile, if it is not wider than a block
  int64_t step = 0;       // from a thread's unit to its next, unless that crosses the end of a tile's row
  int64_t step_columns = 0;
  bool is_near = true;  // whether the distances between 8 units of a thread fit into 32 bits
  int64_t length = 0;   // of a slice, a multiple of lanes
  int64_t count = 0;    // of slices in a tile
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Joins groups and rows where the memory layout allows it.
static inline ReductionTiling shape_of(const KernelArgs& args) {
  const Channels& c = args.channels;
  ReductionTiling s;
  s.rows = 1;
  if (c.count == 1) {
    s.inner = args.numel;
  } else if (c.size == 1) {  // each group is one channel
    s.size = c.count, s.inner = c.group_span;
  } else {
    const int64_t groups = c.count / c.size;
    const int64_t rows = args.numel / (groups * c.size * c.inner);
    s.inner = c.inner;
    if (rows == 1) {
      s.size = c.count;
    } else {
      s.groups = groups, s.rows = rows, s.size = c.size;
    }
  }
  return s;
}

// Divides a shape whose lengths are units of `elements` each, with `results` channels in all, into tiles of up to
// `widest` units.
static inline ReductionTiling divided(ReductionTiling s, int64_t elements, int64_t results, int64_t widest) {
  constexpr int64_t kWork = 4096;    // elements per block, at the least
  constexpr int64_t kBlocks = 2048;  // blocks at the most: enough to fill the largest GPU
  constexpr int64_t kResults =
      131072;  // partial results at the most: a workspace of 2 MB, unless there are more channels
  constexpr int64_t kFarthest = UINT32_MAX;
  s.pattern = s.size * s.inner;
  s.tile_channels = s.inner > widest / 2 ? 1 : static_cast<int>(least(s.size, widest / s.inner));
  s.width = s.tile_channels * s.inner;
  s.tiles = divide_up(s.size, s.tile_channels);
  s.lanes = s.width > kThreads ? kThreads : static_cast<int>(kThreads / s.width * s.width);
  const int64_t all = s.rows * s.width;
  const int64_t most = least(kBlocks / (s.groups * s.tiles), kResults / results);
  const int64_t wanted = least(all * elements / kWork, most);
  s.step_columns = s.lanes % s.width;
  s.step = s.lanes / s.width * s.pattern + s.step_columns;
  s.is_near = s.step + s.pattern <= kFarthest / 8;
  s.length = divide_up(divide_up(all, wanted < 1 ? 1 : wanted), s.lanes) * s.lanes;
  s.count = divide_up(all, s.length);
  return s;
}

static inline ReductionTiling tiling_of(const KernelArgs& args) {
  if (args.numel == 0) return {};
  ReductionTiling s = shape_of(args);
  s.unit = s.inner % 8 == 0 || args.channels.count == 1 ? 8 : 1;
  s.inner = divide_up(s.inner, s.unit);
  return divided(s, s.unit, args.channels.count, kThreads);
}

// Of `rows` rows of channels, a multiple of 8: a unit is an element of each of 8 channels, which the thread keeps.
// Narrow tiles: a wide row would leave few blocks, and 32 units are 512 bytes in a row.
static inline ReductionTiling tiling_of_rows(int64_t rows, int64_t channels) {
  ReductionTiling s;
  s.unit = 8;
  s.rows = rows;
  s.size = channels / 8;
  return divided(s, s.unit, channels, 32);
}

// The part of the tensor that a block reduces.
struct Tile {
  int64_t slice;
  int64_t first_unit;     // of the tile, in its first row
  int64_t first_channel;  // of the tile
  int channels;
};

QT_FN Tile tile_of(const ReductionTiling& s, int64_t block) {
  const int64_t column = block / s.count, group = column / s.tiles, tile = column % s.tiles;
  const int64_t left = s.size - tile * s.tile_channels;
  return {block % s.count, group * s.rows * s.pattern + tile * s.width, group * s.size + tile * s.tile_channels,
          static_cast<int>(left < s.tile_channels ? left : s.tile_channels)};
}

// Iterates over the units of one thread.
struct ReductionIterator {
  int64_t channel;
  int64_t unit;
  int64_t column;  // within the tile
  int64_t left;    // units left, including this one
};

QT_FN ReductionIterator reduction_iterator(const ReductionTiling& s, int64_t block, int thread) {
  const Tile tile = tile_of(s, block);
  const int64_t begin = tile.slice * s.length + thread, all = s.rows * s.width;
  const int64_t end = (tile.slice + 1) * s.length < all ? (tile.slice + 1) * s.length : all;
  const int64_t row = begin / s.width, column = begin % s.width;
  const bool works = thread < s.lanes && column < tile.channels * s.inner && begin < end;
  return {tile.first_channel + column / s.inner, tile.first_unit + row * s.pattern + column, column,
          works ? (end - begin + s.lanes - 1) / s.lanes : 0};
}

// Moves on, without counting in `left`.
QT_FN void advance(const ReductionTiling& s, ReductionIterator& it) {
  it.unit += s.step;
  it.column += s.step_columns;
  if (it.column >= s.width) {
    it.column -= s.width;
    it.unit += s.pattern - s.width;
  }
}

}  // namespace cuda
}  // namespace qtoolkit
