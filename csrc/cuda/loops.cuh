// The two loops of the CUDA kernels: one writes a result for each octet, the other also reduces each channel. They
// know memory, not arithmetic.
#pragma once

#include "channel_iterator.h"
#include "memory.cuh"
#include "reduction_tiling.h"

namespace qtoolkit {
namespace cuda {

// Of the kernels of an op the one for this job. Float64 is rare: one serves dense and strided operands.
template <class Kernel>
Kernel pick(Dtype dtype, bool dense, Kernel f32_dense, Kernel f32, Kernel f64) {
  if (dtype == Dtype::f64) return f64;
  return dense ? f32_dense : f32;
}

// ---- map --------------------------------------------------------------------------------------------------------

// Calls f with every octet of the tensor; the threads of all blocks share them out.
template <class F>
QT_DEVICE void for_octets(int64_t numel, F f) {
  const int64_t step = int64_t{kOctet} * kThreads * gridDim.x;
  const int64_t thread = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  for (int64_t i = thread * kOctet; i < numel; i += step) {
    f(Row{i, numel - i < kOctet ? static_cast<int>(numel - i) : kOctet});
  }
}

// Calls f(k, grid) for the elements of a row: with one grid for all where they share a channel.
template <class A, class F>
QT_DEVICE void for_grids(const Job& job, const Row& at, F f) {
  ChannelWalk walk = {0, 0, kOctet, kOctet};
  if (job.channels.count != 1) walk = channel_walk(job.channels, job.numel, at.first);
  if (walk.run_left >= at.n && walk.group_left >= at.n) {
    const Grid<A> grid = grid_of<A>(job, walk.group_start + walk.within);
#pragma unroll
    for (int k = 0; k < kOctet; ++k) f(k, grid);
    return;
  }
#pragma unroll
  for (int k = 0; k < kOctet; ++k) {
    if (k < at.n) {
      f(k, grid_of<A>(job, walk.group_start + walk.within));
      advance(job.channels, walk);
    }
  }
}

static inline void launch_map(void (*kernel)(Job), const Job& job, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 1 << 14;  // several for each place on the largest GPU
  if (job.numel == 0) return;
  const int64_t blocks = least(divide_up(job.numel, kOctet * kThreads), kMostBlocks);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(job);
}

// ---- reduce -----------------------------------------------------------------------------------------------------

// What a reduction keeps of a channel: two sums, or the two ends of a range.
struct Pair {
  double first, second;
};

// Results for each channel and slice; `second` is null where it is not wanted.
struct Pairs {
  double* first;
  double* second;
};

QT_DEVICE void write(const Pairs& to, int64_t slot, Pair pair) {
  to.first[slot] = pair.first;
  if (to.second != nullptr) to.second[slot] = pair.second;
}

// The elements that a thread takes next, all of one channel; false when there are none left.
QT_DEVICE bool next(const Slices& s, int64_t numel, Walk& walk, Row& at) {
  if (walk.left == 0) return false;
  at.first = walk.unit * kOctet;
  at.n = numel - at.first < kOctet ? static_cast<int>(numel - at.first) : kOctet;
  advance(s, walk);
  return true;
}

QT_DEVICE bool next(const Slices& s, int64_t, Walk& walk, Spread& at) {
  at.n = 0;
#pragma unroll
  for (int k = 0; k < kOctet; ++k) {
    at.index[k] = walk.unit;
    if (walk.left > 0) {
      ++at.n;
      advance(s, walk);
    }
  }
  return at.n > 0;
}

// Joins the first `count` pairs (a power of two) into the first, as a tree.
template <class Join>
QT_DEVICE void join_tree(Pair* pairs, int count, Join join) {
  const int thread = threadIdx.x;
  for (int half = count / 2; half > 0; half /= 2) {
    if (thread < half) pairs[thread] = join(pairs[thread], pairs[thread + half]);
    __syncthreads();
  }
}

// Joins what the threads of a block found for one channel of its tile.
template <class Join>
QT_DEVICE Pair join_channel(const Slices& s, const Pair* pairs, int channel, Join join) {
  const int inner = static_cast<int>(s.inner), width = static_cast<int>(s.width);
  Pair result = pairs[channel * inner];
  for (int row = 0; row < s.lanes; row += width) {
    for (int k = row == 0 ? 1 : 0; k < inner; ++k) result = join(result, pairs[row + channel * inner + k]);
  }
  return result;
}

template <class Join>
QT_DEVICE void join_block(const Slices& s, Pair mine, const Pairs& to, Join join) {
  __shared__ Pair pairs[kThreads];
  pairs[threadIdx.x] = mine;
  __syncthreads();
  const Tile tile = tile_of(s, blockIdx.x);
  if (s.tile_channels == 1) join_tree(pairs, kThreads, join);
  const int channel = threadIdx.x;
  if (channel < tile.channels) {
    const Pair result = s.tile_channels == 1 ? pairs[0] : join_channel(s, pairs, channel, join);
    write(to, (tile.first_channel + channel) * s.count + tile.slice, result);
  }
}

// Joins the slices of one channel a block; of an empty tensor there are none.
template <class Join>
__global__ void join_slices(Pairs from, int64_t count, Pairs to, Pair empty, Join join) {
  __shared__ Pair pairs[kThreads];
  const int64_t begin = blockIdx.x * count;
  Pair mine = empty;
  for (int64_t slice = threadIdx.x; slice < count; slice += blockDim.x) {
    const int64_t slot = begin + slice;
    mine = join(mine, {from.first[slot], from.second != nullptr ? from.second[slot] : 0.0});
  }
  pairs[threadIdx.x] = mine;
  __syncthreads();
  join_tree(pairs, blockDim.x, join);
  if (threadIdx.x == 0) write(to, blockIdx.x, pairs[0]);
}

static inline int64_t slots_of(const Slices& s, const Job& job) {
  return s.count > 1 ? s.count * job.channels.count : 0;
}

// Runs `rows` or `spread` (which take their arguments as __grid_constant__: a dozen registers less), the same reduction
// over octets of either kind. Where there is one slice, its result is the result.
template <class Join>
void launch_reduction(void (*rows)(Job, Slices, Pairs), void (*spread)(Job, Slices, Pairs), Pair empty, Join join,
                      const Job& job, double* workspace, cudaStream_t stream) {
  const Slices s = slices_of(job);
  const int64_t channels = job.channels.count;
  const Pairs results = {job.sum_scale, job.sum_zero_point};
  const bool both = job.sum_zero_point != nullptr;
  const Pairs parts = s.count == 1 ? results : Pairs{workspace, both ? workspace + slots_of(s, job) : nullptr};
  if (s.count > 0) {
    const int64_t blocks = s.groups * s.tiles * s.count;
    (s.unit == kOctet ? rows : spread)<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(job, s, parts);
  }
  if (s.count != 1 && channels > 0) {
    const int threads = s.count > 32 ? kThreads : 32;
    join_slices<Join><<<static_cast<unsigned>(channels), threads, 0, stream>>>(parts, s.count, results, empty, join);
  }
}

}  // namespace cuda
}  // namespace qtoolkit
