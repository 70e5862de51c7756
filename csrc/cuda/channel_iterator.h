// The channels of consecutive elements, as channel_of gives them, without a division for each element.
#pragma once

#include "../kernel_args.h"

namespace qtoolkit {
namespace cuda {

struct ChannelIterator {
  int64_t group_start;  // first channel of the group
  int64_t within;       // channel within the group
  int64_t run_left;     // elements until the channel may change, including this one
  int64_t group_left;   // the same for the group
};

QT_FN ChannelIterator channel_iterator(const Channels& c, int64_t numel, int64_t i) {
  const int64_t run = i / c.inner;
  ChannelIterator it = {0, run % c.size, (run + 1) * c.inner - i, numel - i};
  if (c.count != c.size) {
    const int64_t group = i / c.group_span;
    it.group_start = group * c.size;
    it.group_left = (group + 1) * c.group_span - i;
  }
  return it;
}

QT_FN void advance(const Channels& c, ChannelIterator& it) {
  if (--it.run_left == 0) {
    it.run_left = c.inner;
    it.within = it.within + 1 == c.size ? 0 : it.within + 1;
  }
  if (--it.group_left == 0) {
    it.group_left = c.group_span;
    it.group_start += c.size;
  }
}

}  // namespace cuda
}  // namespace qtoolkit
