// channel_of for neighbouring elements, without dividing for each.
#pragma once

#include "../kernel_args.h"

namespace qtoolkit {
namespace cuda {

struct ChannelWalk {
  int64_t group_start;  // first channel of the group
  int64_t within;       // channel within the group
  int64_t run_left;     // elements until the channel may change, this one among them
  int64_t group_left;   // the same for the group
};

QT_FN ChannelWalk channel_walk(const Channels& c, int64_t numel, int64_t i) {
  const int64_t run = i / c.inner;
  ChannelWalk walk = {0, run % c.size, (run + 1) * c.inner - i, numel - i};
  if (c.count != c.size) {
    const int64_t group = i / c.group_span;
    walk.group_start = group * c.size;
    walk.group_left = (group + 1) * c.group_span - i;
  }
  return walk;
}

QT_FN void advance(const Channels& c, ChannelWalk& walk) {
  if (--walk.run_left == 0) {
    walk.run_left = c.inner;
    walk.within = walk.within + 1 == c.size ? 0 : walk.within + 1;
  }
  if (--walk.group_left == 0) {
    walk.group_left = c.group_span;
    walk.group_start += c.size;
  }
}

}  // namespace cuda
}  // namespace qtoolkit
