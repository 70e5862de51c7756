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
struct Channels {
  int64_t size = 1;        // channels within a group
  int64_t inner = 1;       // neighbouring elements that share a channel
  int64_t group_span = 1;  // elements of one group
  int64_t count = 1;       // scales in all: groups * size
};

QT_FN int64_t channel_of(const Channels& c, int64_t i) {
  return c.count == 1 ? 0 : (i / c.group_span) * c.size + (i / c.inner) % c.size;
}

// Whether neighbouring elements have neighbouring channels: then a chunk reads its scales as one row, without copying.
QT_FN bool in_a_row(const Channels& c) { return c.inner == 1 && c.count == c.size && c.count > 1; }

}  // namespace qtoolkit
