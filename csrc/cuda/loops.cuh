// The two loops of the CUDA kernels: one writes a result for each vector, the other also reduces each channel. They
// move data; the arithmetic is in csrc/*.h.
#pragma once

#include "channel_iterator.h"
#include "divisor.cuh"
#include "memory.cuh"
#include "reduction_tiling.h"

namespace qtoolkit {
namespace cuda {

// ---- elementwise -------------------------------------------------------------------------------------------------

// Calls f with every vector of the tensor, divided between the threads of all blocks.
template <class F>
QT_DEVICE void for_vectors(int64_t numel, F f) {
  const int64_t step = int64_t{kVectorSize} * kThreads * gridDim.x;
  const int64_t thread = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  for (int64_t i = thread * kVectorSize; i < numel; i += step) {
    f(vector_at(i, numel));
  }
}

// Loads each vector of an operand, calls f(at, v), and stores v to args.y. With kTyped, the operand is of the result's
// dtype, and each dtype has a loop of its own.
template <class A, bool kTyped, class F>
QT_DEVICE void map_vectors(const KernelArgs& args, const Operand& from, F f) {
  if constexpr (kTyped) {
    with_type<A, Kind::values>(args.y_dtype, [&](auto* type) {
      auto* y = static_cast<decltype(type)>(args.y);
      const auto* x = static_cast<const std::remove_pointer_t<decltype(type)>*>(from.data);
      const bool aligned = is_aligned(x) && is_aligned(y);
      for_vectors(args.numel, [&](const Contiguous& at) {
        A v[kVectorSize];
        load_dense(x, at, aligned, v);
        f(at, v);
        store_dense(y, at, aligned, v);
      });
    });
  } else {
    for_vectors(args.numel, [&](const Contiguous& at) {
      A v[kVectorSize];
      load(from, at, v);
      f(at, v);
      store(args, at, v);
    });
  }
}

// The channel that the elements of a vector share; -1 if they do not.
QT_DEVICE int64_t one_channel(const ChannelIterator& it, const Contiguous& at) {
  return it.run_left >= at.n && it.group_left >= at.n ? it.group_start + it.within : -1;
}

// Calls f(k, channel number) for the elements of a vector.
template <class F>
QT_DEVICE void each_channel(const Channels& channels, int64_t numel, const Contiguous& at, F f) {
  ChannelIterator it = channel_iterator(channels, numel, at.first);
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) {
    if (k < at.n) {
      f(k, it.group_start + it.within);
      advance(channels, it);
    }
  }
}

// What divides by a scale. Functors with long arithmetic do not wait for the division.
template <class F, class A>
using ScaleOf = std::conditional_t<F::kMemoryBound, DivisorOf<A>, A>;

// The grids of a thread's vectors; that of a whole tensor is loaded once. S is A or what divides by it.
template <class S, class A>
class Grids {
 public:
  __device__ explicit Grids(const KernelArgs& args) : args_(args) {
    if (args.channels.count == 1) whole_ = grid_of<A, S>(args, 0);
  }

  // Calls f(k, scale, zero_point) for the elements of a vector.
  template <class F>
  __device__ __forceinline__ void apply(const Contiguous& at, const A (&v)[kVectorSize], F f) const {
    Grid<A, S> grid = whole_;
    int64_t channel = 0;
    if constexpr (std::is_same_v<A, double>) {
      channel = -1;  // float64 is rare: one copy of f does
    } else if (args_.channels.count != 1) {
      channel = one_channel(channel_iterator(args_.channels, args_.numel, at.first), at);
      if (channel >= 0) grid = grid_of<A, S>(args_, channel);
    }
    if (channel >= 0 && divides(grid.scale, v)) {
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) f(k, grid.scale, grid.zero_point);
    } else {
      each_channel(args_.channels, args_.numel, at, [&](int k, int64_t own) {
        const Grid<A> of = grid_of<A>(args_, own);
        f(k, of.scale, of.zero_point);
      });
    }
  }

 private:
  const KernelArgs& args_;
  Grid<A, S> whole_;
};

// Runs a kernel with a thread for each of `count` elements.
template <class... Parameters, class... Args>
void launch_each(void (*kernel)(Parameters...), int64_t count, cudaStream_t stream, const Args&... args) {
  if (count == 0) return;
  kernel<<<static_cast<unsigned>(divide_up(count, kThreads)), kThreads, 0, stream>>>(args...);
}

// Blocks for a kernel that calls for_vectors. `results`: how many a block of threads computes at once.
static inline int64_t blocks_for_vectors(int64_t numel, int64_t results = kVectorSize * kThreads) {
  constexpr int64_t kFewBlocks = 1 << 11, kMostBlocks = 1 << 14;  // two and several waves on the largest GPU
  constexpr int64_t kVectors = 4;                                 // of a thread, which pay for its start
  const int64_t all = divide_up(numel, results), several = divide_up(all, kVectors);
  return least(several < kFewBlocks ? least(all, kFewBlocks) : several, kMostBlocks);
}

static inline void launch_elementwise(void (*kernel)(KernelArgs), const KernelArgs& args, cudaStream_t stream,
                                      int64_t results = kVectorSize * kThreads) {
  if (args.numel == 0) return;
  kernel<<<static_cast<unsigned>(blocks_for_vectors(args.numel, results)), kThreads, 0, stream>>>(args);
}

// ---- reduce -----------------------------------------------------------------------------------------------------

// The result of a reduction for one channel: two sums, or the two bounds of a range.
struct Pair {
  double first, second;
};

struct Add {
  __device__ Pair operator()(Pair a, Pair b) const { return {a.first + b.first, a.second + b.second}; }
};

// The sum of a vector as a tree, in the type of the arithmetic, of which no more than a branch is in registers: element
// place(i) is added as the i-th. Larger sums are float64.
template <class A>
class TreeSum {
 public:
  __device__ static constexpr int place(int i) { return (i & 1) << 2 | (i & 2) | i >> 2; }

  __device__ __forceinline__ void add(int i, A v) {
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      if ((i >> level & 1) == 0) {
        branch_[level] = v;
        return;
      }
      v = branch_[level] + v;
    }
    branch_[3] = v;
  }

  __device__ double total() const { return branch_[3]; }

 private:
  A branch_[4];
};

// Results for each channel and slice; `second` is null if it is not needed.
struct Pairs {
  double* first;
  double* second;
};

QT_DEVICE void write(const Pairs& to, int64_t slot, Pair pair) {
  to.first[slot] = pair.first;
  if (to.second != nullptr) to.second[slot] = pair.second;
}

// The next elements of a thread, all of one channel; false if none are left. kWhole: all vectors have 8 elements.
template <bool kWhole = false>
QT_DEVICE bool next(const ReductionTiling& s, int64_t numel, ReductionIterator& it, Contiguous& at) {
  if (it.left == 0) return false;
  at = kWhole ? whole_at(it.unit * kVectorSize) : vector_at(it.unit * kVectorSize, numel);
  advance(s, it);
  --it.left;
  return true;
}

template <bool kWhole = false>
QT_DEVICE bool next(const ReductionTiling& s, int64_t, ReductionIterator& it, Scattered& at) {
  at.first = it.unit;
  if (!s.is_near) {
    at.n = it.left > 0 ? 1 : 0;
    at.offset[0] = 0;
    advance(s, it);
  } else if (s.step_columns == 0) {  // whole rows of a tile
    const uint32_t step = s.step;
    at.n = it.left < kVectorSize ? static_cast<int>(it.left) : kVectorSize;
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) at.offset[k] = k * step;
    it.unit += kVectorSize * s.step;
  } else {
    const uint32_t step = s.step, step_columns = s.step_columns, width = s.width, gap = s.pattern - s.width;
    uint32_t offset = 0, column = it.column;
    at.n = it.left < kVectorSize ? static_cast<int>(it.left) : kVectorSize;
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      at.offset[k] = offset;
      offset += step;
      column += step_columns;
      if (column >= width) {
        column -= width;
        offset += gap;
      }
    }
    it.unit += offset;
    it.column = column;
  }
  it.left -= at.n;
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

// The sum over a block's threads, of whole warps; thread 0 has it. A block that needs its memory no more gives it.
QT_DEVICE Pair sum_of_block(Pair mine, Pair* of_warps) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    mine = Add()(mine, {__shfl_xor_sync(~0u, mine.first, lanes), __shfl_xor_sync(~0u, mine.second, lanes)});
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < blockDim.x / 32; ++warp) mine = Add()(mine, of_warps[warp]);
  }
  return mine;
}

QT_DEVICE Pair sum_of_block(Pair mine) {
  __shared__ Pair of_warps[kThreads / 32];
  return sum_of_block(mine, of_warps);
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
QT_DEVICE void join_block(const ReductionTiling& s, Pair mine, const Pairs& to, Join join, Pair* pairs) {
  __syncthreads();
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

template <class Join>
QT_DEVICE void join_block(const ReductionTiling& s, Pair mine, const Pairs& to, Join join) {
  __shared__ Pair pairs[kThreads];
  join_block(s, mine, to, join, pairs);
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
