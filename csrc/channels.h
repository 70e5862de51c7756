// A tensor seen as outer x channels x inner, in the order in which its result lies in memory.
#pragma once

#include <cstdint>

#include "grid.h"

namespace qtoolkit {

// Which scale element i of the result takes. `axis` of a dense tensor repeats every size(axis) * inner
// elements, whatever its memory format, so one division and one remainder find it.
//
// With groups > 1 (a grouped transposed convolution, weight (in, out / groups, k...)), dimension 0 is split
// into equal groups, each with channels of its own: scale is (groups, out / groups), row-major.
//
// Blocks along an axis are the same rule: where the axis is the fastest in memory, a block is a run of neighbours;
// else a block is a group, and each of the `stride of the axis` positions beside each other has a channel of its own.
struct Channels {
  int64_t size = 1;        // channels within a group
  int64_t inner = 1;       // neighbouring elements that share a channel
  int64_t group_span = 1;  // elements of one group
  int64_t count = 1;       // scales in all: groups * size
};

// The axis that scales run along, counted from the front; -1 is per tensor. Dimension 0 may be split into groups, or
// the axis into blocks that share a scale (0: no blocks).
struct Axis {
  int64_t index = -1, group = 1, block = 0;
};

QT_FN int64_t channel_of(const Channels& c, int64_t i) {
  return c.count == 1 ? 0 : (i / c.group_span) * c.size + (i / c.inner) % c.size;
}

// Whether neighbouring elements have neighbouring channels: then a chunk reads its scales as one row, without copying.
QT_FN bool in_a_row(const Channels& c) { return c.inner == 1 && c.count == c.size && c.count > 1; }

// The same in each of several groups: as many rows as there are groups.
QT_FN bool in_rows(const Channels& c) { return c.inner == 1 && c.count != c.size; }

}  // namespace qtoolkit
