// The index arithmetic of the CUDA kernels, walked by every thread of every block, against channel_of. Prints the
// number of shapes, or what is wrong and where; see test_cuda_walks.py.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../csrc/cuda/channel_iterator.h"
#include "../../csrc/cuda/reduction_tiling.h"

using namespace qtoolkit;
using namespace qtoolkit::cuda;

static void require(bool right, const char* rule, const Job& job, int64_t at) {
  if (right) return;
  const Channels& c = job.channels;
  std::printf("%s: numel %ld, size %ld, inner %ld, group_span %ld, count %ld, at %ld\n", rule, job.numel, c.size,
              c.inner, c.group_span, c.count, at);
  std::exit(1);
}

// A map: octets of neighbours, from anywhere.
static void check_walk(const Job& job) {
  for (int64_t first = 0; first < job.numel; first += 8) {
    ChannelWalk walk = channel_walk(job.channels, job.numel, first);
    for (int64_t i = first; i < first + 8 && i < job.numel; ++i) {
      require(walk.group_start + walk.within == channel_of(job.channels, i), "channel of a walk", job, i);
      const bool last = walk.run_left == 1 || walk.group_left == 1;
      if (!last && i + 1 < job.numel) {
        require(channel_of(job.channels, i) == channel_of(job.channels, i + 1), "end of a run", job, i);
      }
      advance(job.channels, walk);
    }
  }
}

// A reduction: each element is met once, by a thread that keeps its channel, in a block whose results are that tile's;
// and each channel has a result in each slice, written once.
static void check_slices(const Job& job) {
  const Slices s = slices_of(job);
  std::vector<char> met(job.numel), written(job.channels.count * s.count);
  for (int64_t block = 0; block < s.groups * s.tiles * s.count; ++block) {
    const Tile tile = tile_of(s, block);
    for (int channel = 0; channel < tile.channels; ++channel) {
      const int64_t slot = (tile.first_channel + channel) * s.count + tile.slice;
      require(slot < static_cast<int64_t>(written.size()) && !written[slot]++, "results", job, slot);
    }
    for (int thread = 0; thread < kThreads; ++thread) {
      Walk walk = walk_of(s, block, thread);
      const bool works = walk.left > 0;
      require(!works || s.tile_channels == 1 ||
                  walk.channel == tile.first_channel + thread % s.width / s.inner,  // join_channel reads by thread
              "a thread's channel", job, thread);
      require(!works || walk.channel - tile.first_channel < tile.channels, "a tile's channel", job, thread);
      for (; walk.left > 0; advance(s, walk)) {
        for (int64_t i = walk.unit * s.unit; i < (walk.unit + 1) * s.unit && i < job.numel; ++i) {
          require(i >= 0 && !met[i]++, "elements met once", job, i);
          require(channel_of(job.channels, i) == walk.channel, "an element's channel", job, i);
        }
      }
    }
  }
  for (int64_t i = 0; i < job.numel; ++i) require(met[i], "elements met", job, i);
  for (size_t slot = 0; slot < written.size(); ++slot) require(written[slot], "results written", job, slot);
}

int main() {
  int shapes = 0;
  for (const int64_t groups : {1, 2, 3}) {
    for (const int64_t rows : {1, 2, 5, 700}) {
      for (const int64_t size : {1, 2, 3, 31, 64, 70, 257, 1025}) {
        for (const int64_t inner : {1, 3, 8, 9, 49, 64, 129, 1023, 2048, 4104}) {
          Job job;
          job.numel = groups * rows * size * inner;
          if (job.numel > 3'000'000) continue;
          job.channels = {size, size == 1 ? rows * inner : inner, rows * size * inner, groups * size};
          check_walk(job), check_slices(job), ++shapes;
        }
      }
    }
  }
  for (const int64_t numel : {1, 7, 8, 9, 2047, 2048, 4096, 100'003, 5'000'001}) {  // per tensor
    Job job;
    job.numel = job.channels.group_span = numel;
    check_walk(job), check_slices(job), ++shapes;
  }
  std::printf("%d shapes\n", shapes);
}
