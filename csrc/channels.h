// A tensor as outer x channels x inner, in the memory order of its result.
#pragma once

#include <cstdint>

#include "grid.h"

namespace qtoolkit {

// The channel of each element of a result. `axis` of a dense tensor repeats every size(axis) * inner elements in any
// memory format, so one division and one remainder find the channel.
//
// With groups > 1 (a grouped transposed convolution, weight (in, out / groups, k...)), dimension 0 is divided into
// equal groups with separate channels: scale is (groups, out / groups), row-major.
//
// Blocks along an axis follow the same rule. If the axis is the fastest in memory, a block is a run of consecutive
// elements; else a block is a group, and each of the inner positions of the axis is a channel.
struct Channels {
  int64_t size = 1;        // channels within a group
  int64_t inner = 1;       // consecutive elements of one channel
  int64_t group_span = 1;  // elements of one group
  int64_t count = 1;       // number of scales: groups * size
};

// The axis of the scales, counted from the front; -1 is per tensor. Dimension 0 may be divided into groups, or the axis
// into blocks that share a scale (0: no blocks).
struct Axis {
  int64_t index = -1, group = 1, block = 0;
};

QT_FN int64_t channel_of(const Channels& c, int64_t i) {
  return c.count == 1 ? 0 : (i / c.group_span) * c.size + (i / c.inner) % c.size;
}

// Whether consecutive elements belong to consecutive channels: then a chunk reads its scales as one row, without a
// copy.
QT_FN bool in_a_row(const Channels& c) { return c.inner == 1 && c.count == c.size && c.count > 1; }

// The same within each of several groups: one row per group.
QT_FN bool in_rows(const Channels& c) { return c.inner == 1 && c.count != c.size; }

}  // namespace qtoolkit
