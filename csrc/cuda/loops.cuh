// The two loops of the CUDA kernels: one writes a result for each vector, the other also reduces each channel. They
// move data; the arithmetic is in csrc/*.h.
#pragma once

#include "channel_iterator.h"
#include "memory.cuh"
#include "reduction_tiling.h"

namespace qtoolkit {
namespace cuda {

// Selects the instantiation of a kernel. Float64 is rare: its instantiation serves dense and strided operands.
template <class Kernel>
Kernel pick(Dtype dtype, bool dense, Kernel f32_dense, Kernel f32, Kernel f64) {
  if (dtype == Dtype::f64) return f64;
  return dense ? f32_dense : f32;
}

// ---- elementwise -------------------------------------------------------------------------------------------------

// Calls f with every vector of the tensor, divided between the threads of all blocks.
template <class F>
QT_DEVICE void for_vectors(int64_t numel, F f) {
  const int64_t step = int64_t{kVectorSize} * kThreads * gridDim.x;
  const int64_t thread = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  for (int64_t i = thread * kVectorSize; i < numel; i += step) {
    f(Contiguous{i, numel - i < kVectorSize ? static_cast<int>(numel - i) : kVectorSize});
  }
}

// Calls f(k, grid) for the elements of a vector; if they share a channel, the grid is loaded once.
template <class A, class F>
QT_DEVICE void for_grids(const KernelArgs& args, const Contiguous& at, F f) {
  ChannelIterator it = {0, 0, kVectorSize, kVectorSize};
  if (args.channels.count != 1) it = channel_iterator(args.channels, args.numel, at.first);
  if (it.run_left >= at.n && it.group_left >= at.n) {
    const Grid<A> grid = grid_of<A>(args, it.group_start + it.within);
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) f(k, grid);
    return;
  }
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) {
    if (k < at.n) {
      f(k, grid_of<A>(args, it.group_start + it.within));
      advance(args.channels, it);
    }
  }
}

// `results`: how many a block of threads computes at once.
static inline void launch_elementwise(void (*kernel)(KernelArgs), const KernelArgs& args, cudaStream_t stream,
                                      int64_t results = kVectorSize * kThreads) {
  constexpr int64_t kMostBlocks = 1 << 14;  // several waves on the largest GPU
  if (args.numel == 0) return;
  const int64_t blocks = least(divide_up(args.numel, results), kMostBlocks);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
}

// ---- reduce -----------------------------------------------------------------------------------------------------

// The result of a reduction for one channel: two sums, or the two ends of a range.
struct Pair {
  double first, second;
};

struct Add {
  __device__ Pair operator()(Pair a, Pair b) const { return {a.first + b.first, a.second + b.second}; }
};

// Sums a vector as a tree, in the type of the arithmetic; larger sums are float64.
template <class A>
QT_DEVICE double sum_of(const A (&v)[kVectorSize]) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Results for each channel and slice; `second` is null if it is not needed.
struct Pairs {
  double* first;
  double* second;
};

QT_DEVICE void write(const Pairs& to, int64_t slot, Pair pair) {
  to.first[slot] = pair.first;
  if (to.second != nullptr) to.second[slot] = pair.second;
}

// The next elements of a thread, all of one channel; false if none are left.
QT_DEVICE bool next(const ReductionTiling& s, int64_t numel, ReductionIterator& it, Contiguous& at) {
  if (it.left == 0) return false;
  at.first = it.unit * kVectorSize;
  at.n = numel - at.first < kVectorSize ? static_cast<int>(numel - at.first) : kVectorSize;
  advance(s, it);
  return true;
}

QT_DEVICE bool next(const ReductionTiling& s, int64_t, ReductionIterator& it, Scattered& at) {
  at.n = 0;
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) {
    at.index[k] = it.unit;
    if (it.left > 0) {
      ++at.n;
      advance(s, it);
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

// Joins the results of a block's threads for one channel of its tile.
template <class Join>
QT_DEVICE Pair join_channel(const ReductionTiling& s, const Pair* pairs, int channel, Join join) {
  const int inner = static_cast<int>(s.inner), width = static_cast<int>(s.width);
  Pair result = pairs[channel * inner];
  for (int row = 0; row < s.lanes; row += width) {
    for (int k = row == 0 ? 1 : 0; k < inner; ++k) result = join(result, pairs[row + channel * inner + k]);
  }
  return result;
}

template <class Join>
QT_DEVICE void join_block(const ReductionTiling& s, Pair mine, const Pairs& to, Join join) {
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

// Joins the slices of one channel per block; an empty tensor has no slices.
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

static inline int64_t slots_of(const ReductionTiling& s, const KernelArgs& args) {
  return s.count > 1 ? s.count * args.channels.count : 0;
}

// Runs `contiguous` or `scattered`: the same reduction for either kind of vector. They take their arguments as
// __grid_constant__, which saves a dozen registers.
template <class Args>
void launch_parts(void (*contiguous)(Args, ReductionTiling, Pairs), void (*scattered)(Args, ReductionTiling, Pairs),
                  const Args& args, const ReductionTiling& s, const Pairs& parts, cudaStream_t stream) {
  if (s.count == 0) return;
  const int64_t blocks = s.groups * s.tiles * s.count;
  const auto kernel = s.unit == kVectorSize ? contiguous : scattered;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args, s, parts);
}

// Joins the slices of each channel. With one slice, the parts are the results.
template <class Join>
void launch_join(const ReductionTiling& s, int64_t channels, const Pairs& parts, const Pairs& results, Pair empty,
                 Join join, cudaStream_t stream) {
  if (s.count == 1 || channels == 0) return;
  const int threads = s.count > 32 ? kThreads : 32;
  join_slices<Join><<<static_cast<unsigned>(channels), threads, 0, stream>>>(parts, s.count, results, empty, join);
}

template <class Join>
void launch_reduction(void (*contiguous)(KernelArgs, ReductionTiling, Pairs),
                      void (*scattered)(KernelArgs, ReductionTiling, Pairs), Pair empty, Join join,
                      const KernelArgs& args, double* workspace, cudaStream_t stream) {
  const ReductionTiling s = tiling_of(args);
  const Pairs results = {args.sum_scale, args.sum_zero_point};
  const bool both = args.sum_zero_point != nullptr;
  const Pairs parts = s.count == 1 ? results : Pairs{workspace, both ? workspace + slots_of(s, args) : nullptr};
  launch_parts(contiguous, scattered, args, s, parts, stream);
  launch_join(s, args.channels.count, parts, results, empty, join, stream);
}

}  // namespace cuda
}  // namespace qtoolkit
