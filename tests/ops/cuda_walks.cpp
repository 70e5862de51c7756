// The index arithmetic of the CUDA kernels, executed for every thread of every block and compared with channel_of.
// Prints the number of shapes, or the first difference; see test_cuda_walks.py.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../csrc/cuda/channel_iterator.h"
#include "../../csrc/cuda/reduction_tiling.h"

using namespace qtoolkit;
using namespace qtoolkit::cuda;

static void require(bool right, const char* rule, const KernelArgs& args, int64_t at) {
  if (right) return;
  const Channels& c = args.channels;
  std::printf("%s: numel %ld, size %ld, inner %ld, group_span %ld, count %ld, at %ld\n", rule, args.numel, c.size,
              c.inner, c.group_span, c.count, at);
  std::exit(1);
}

// Elementwise kernels: vectors of consecutive elements.
static void check_iterator(const KernelArgs& args) {
  for (int64_t first = 0; first < args.numel; first += 8) {
    ChannelIterator it = channel_iterator(args.channels, args.numel, first);
    for (int64_t i = first; i < first + 8 && i < args.numel; ++i) {
      require(it.group_start + it.within == channel_of(args.channels, i), "channel of an iterator", args, i);
      const bool last = it.run_left == 1 || it.group_left == 1;
      if (!last && i + 1 < args.numel) {
        require(channel_of(args.channels, i) == channel_of(args.channels, i + 1), "end of a run", args, i);
      }
      advance(args.channels, it);
    }
  }
}

// Reductions: each element is visited once, by a thread that stays in its channel, in a block that reduces its tile;
// and each channel has one result in each slice, written once.
static void check_tiling(const KernelArgs& args) {
  const ReductionTiling s = tiling_of(args);
  std::vector<char> visited(args.numel), written(args.channels.count * s.count);
  for (int64_t block = 0; block < s.groups * s.tiles * s.count; ++block) {
    const Tile tile = tile_of(s, block);
    for (int channel = 0; channel < tile.channels; ++channel) {
      const int64_t slot = (tile.first_channel + channel) * s.count + tile.slice;
      require(slot < static_cast<int64_t>(written.size()) && !written[slot]++, "results", args, slot);
    }
    for (int thread = 0; thread < kThreads; ++thread) {
      ReductionIterator it = reduction_iterator(s, block, thread);
      const bool works = it.left > 0;
      require(!works || s.tile_channels == 1 ||
                  it.channel == tile.first_channel + thread % s.width / s.inner,  // join_channel reads by thread
              "a thread's channel", args, thread);
      require(!works || it.channel - tile.first_channel < tile.channels, "a tile's channel", args, thread);
      for (; it.left > 0; advance(s, it), --it.left) {
        for (int64_t i = it.unit * s.unit; i < (it.unit + 1) * s.unit && i < args.numel; ++i) {
          require(i >= 0 && !visited[i]++, "elements visited once", args, i);
          require(channel_of(args.channels, i) == it.channel, "an element's channel", args, i);
        }
      }
    }
  }
  for (int64_t i = 0; i < args.numel; ++i) require(visited[i], "elements visited", args, i);
  for (size_t slot = 0; slot < written.size(); ++slot) require(written[slot], "results written", args, slot);
}

int main() {
  int shapes = 0;
  for (const int64_t groups : {1, 2, 3}) {
    for (const int64_t rows : {1, 2, 5, 700}) {
      for (const int64_t size : {1, 2, 3, 31, 64, 70, 257, 1025}) {
        for (const int64_t inner : {1, 3, 8, 9, 49, 64, 129, 1023, 2048, 4104}) {
          KernelArgs args;
          args.numel = groups * rows * size * inner;
          if (args.numel > 3'000'000) continue;
          args.channels = {size, size == 1 ? rows * inner : inner, rows * size * inner, groups * size};
          check_iterator(args), check_tiling(args), ++shapes;
        }
      }
    }
  }
  for (const int64_t numel : {1, 7, 8, 9, 2047, 2048, 4096, 100'003, 5'000'001}) {  // per tensor
    KernelArgs args;
    args.numel = args.channels.group_span = numel;
    check_iterator(args), check_tiling(args), ++shapes;
  }
  std::printf("%d shapes\n", shapes);
}
