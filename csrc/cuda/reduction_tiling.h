// How a reduction is cut into blocks of threads and put together again: index arithmetic only. It depends on the
// shape alone, never on the device, the strides or the timing, so that every GPU sums in the same order.
//
// A tensor is groups x rows x channels x inner. Rows are cut across into tiles of whole channels, as wide as a block
// has threads (or of one channel that is wider), and down into slices; a block takes one slice of one tile, walks it
// in the order of memory, and leaves one result for each channel of the tile. A thread never changes its channel.
#pragma once

#include "../kernel_args.h"

namespace qtoolkit {
namespace cuda {

constexpr int kThreads = 256;

// All lengths in units: what a thread takes at once, 8 elements where channels have whole octets, else one.
struct Slices {
  int unit = 1;
  int64_t groups = 1, rows = 0, size = 1, inner = 1;
  int64_t pattern = 1;    // of a row: size * inner
  int tile_channels = 1;  // the last tile of a row may have fewer
  int64_t width = 1;      // of a tile: tile_channels * inner
  int64_t tiles = 1;      // of a row
  int lanes = kThreads;   // threads with work; whole rows of a tile that has several channels
  int64_t step = 0;       // from a thread's unit to its next, unless that crosses the end of the tile's row
  int64_t step_columns = 0;
  int64_t length = 0;  // of a slice, a multiple of lanes
  int64_t count = 0;   // of slices in a tile
};

static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Groups and rows only where they are needed: what lies in a row in memory becomes one row.
static inline Slices shape_of(const Job& job) {
  const Channels& c = job.channels;
  Slices s;
  s.rows = 1;
  if (c.count == 1) {
    s.inner = job.numel;
  } else if (c.size == 1) {  // each group is one channel
    s.size = c.count, s.inner = c.group_span;
  } else {
    const int64_t groups = c.count / c.size;
    const int64_t rows = job.numel / (groups * c.size * c.inner);
    s.inner = c.inner;
    if (rows == 1) {
      s.size = c.count;
    } else {
      s.groups = groups, s.rows = rows, s.size = c.size;
    }
  }
  return s;
}

static inline Slices slices_of(const Job& job) {
  constexpr int64_t kWork = 4096;       // elements that are worth a block of their own
  constexpr int64_t kBlocks = 2048;     // enough to fill the largest GPU
  constexpr int64_t kResults = 131072;  // bounds the workspace: 2 MB, unless there are more channels
  if (job.numel == 0) return {};
  Slices s = shape_of(job);
  s.unit = s.inner % 8 == 0 || job.channels.count == 1 ? 8 : 1;
  s.inner = divide_up(s.inner, s.unit);
  s.pattern = s.size * s.inner;
  s.tile_channels = s.inner > kThreads / 2 ? 1 : static_cast<int>(least(s.size, kThreads / s.inner));
  s.width = s.tile_channels * s.inner;
  s.tiles = divide_up(s.size, s.tile_channels);
  s.lanes = s.tile_channels == 1 ? kThreads : static_cast<int>(kThreads / s.width * s.width);
  const int64_t all = s.rows * s.width;
  const int64_t most = least(kBlocks / (s.groups * s.tiles), kResults / job.channels.count);
  const int64_t wanted = least(all * s.unit / kWork, most);
  s.step_columns = s.lanes % s.width;
  s.step = s.lanes / s.width * s.pattern + s.step_columns;
  s.length = divide_up(divide_up(all, wanted < 1 ? 1 : wanted), s.lanes) * s.lanes;
  s.count = divide_up(all, s.length);
  return s;
}

// What block number `block` works on.
struct Tile {
  int64_t slice;
  int64_t first_unit;     // of the tile, in its first row
  int64_t first_channel;  // of the tile
  int channels;
};

QT_FN Tile tile_of(const Slices& s, int64_t block) {
  const int64_t column = block / s.count, group = column / s.tiles, tile = column % s.tiles;
  const int64_t left = s.size - tile * s.tile_channels;
  return {block % s.count, group * s.rows * s.pattern + tile * s.width, group * s.size + tile * s.tile_channels,
          static_cast<int>(left < s.tile_channels ? left : s.tile_channels)};
}

// The units of one thread, one after the other.
struct Walk {
  int64_t channel;
  int64_t unit;
  int64_t column;  // within the tile
  int64_t left;    // how many are to come, this one among them
};

QT_FN Walk walk_of(const Slices& s, int64_t block, int thread) {
  const Tile tile = tile_of(s, block);
  const int64_t begin = tile.slice * s.length + thread, all = s.rows * s.width;
  const int64_t end = (tile.slice + 1) * s.length < all ? (tile.slice + 1) * s.length : all;
  const int64_t row = begin / s.width, column = begin % s.width;
  const bool works = thread < s.lanes && column < tile.channels * s.inner && begin < end;
  return {tile.first_channel + column / s.inner, tile.first_unit + row * s.pattern + column, column,
          works ? (end - begin + s.lanes - 1) / s.lanes : 0};
}

QT_FN void advance(const Slices& s, Walk& walk) {
  walk.unit += s.step;
  walk.column += s.step_columns;
  if (walk.column >= s.width) {
    walk.column -= s.width;
    walk.unit += s.pattern - s.width;
  }
  --walk.left;
}

}  // namespace cuda
}  // namespace qtoolkit
