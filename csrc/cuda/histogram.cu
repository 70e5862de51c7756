// Running histograms on CUDA: the ranges of the batch, then a small kernel that widens the histograms, then the counts.
// The device decides whether to widen, so the host does not wait for it. All channels are counted at once.
#include "../histogram.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

constexpr int kGrowThreads = 1024;
constexpr int64_t kMostShared = 8192;  // bins, up to which blocks count in shared memory

using Count = unsigned long long;

// Launched with a block for each channel. `scratch` has an element for each bin.
__global__ void grow_kernel(const __grid_constant__ RunningHistogram first, const double* lows, const double* highs,
                            int64_t* scratch) {
  const int64_t channel = blockIdx.x, n = first.bins;
  const RunningHistogram running = channel_of(first, channel);
  const Bins old = bins_of(*running.lo, *running.hi, n);
  const Bins bins = join(old, bins_for(lows[channel], highs[channel], n));
  scratch += channel * n;
  __syncthreads();  // after all threads have read lo and hi
  if (bins.exponent == kBroken) {
    if (threadIdx.x == 0) *running.lo = *running.hi = NAN;
    return;
  }
  if (bins == old) return;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    scratch[i] = running.counts[i];
    running.counts[i] = 0;
  }
  __syncthreads();
  Count* counts = reinterpret_cast<Count*>(running.counts);
  for (int64_t i = threadIdx.x; i < n && is_counting(old); i += blockDim.x) {
    if (scratch[i] != 0) atomicAdd(counts + merged_index(i, old, bins, n), static_cast<Count>(scratch[i]));
  }
  if (threadIdx.x == 0) {
    *running.lo = static_cast<float>(low_edge(bins, n));
    *running.hi = static_cast<float>(high_edge(bins, n));
  }
}

// Calls f with the elements of a channel, divided between the threads of `slices` blocks.
template <class F>
QT_DEVICE void for_channel(const KernelArgs& args, int64_t channel, int64_t slice, int64_t slices, F f) {
  const Channels& c = args.channels;
  const int64_t elements = args.numel / c.count, step = kThreads * slices;
  const int64_t first = channel / c.size * c.group_span, within = channel % c.size;
  Scattered at;
  for (int64_t i = slice * kThreads + threadIdx.x; i < elements; i += step * at.n) {
    at.n = 0;
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      const int64_t element = i + k * step, run = element / c.inner;
      const int64_t position = first + (run * c.size + within) * c.inner + element % c.inner;
      if (k == 0) at.first = position;
      at.offset[k] = static_cast<uint32_t>(position - at.first);
      if (at.n == k && element < elements && position - at.first == at.offset[k]) at.n = k + 1;
    }
    f(at);
  }
}

// Counts the values in the bin at zero in a register: after ReLU they are half of all values. Of several channels,
// those of a block's own.
template <class A, bool kChannels, class F>
QT_DEVICE unsigned count_values(const KernelArgs& args, int64_t slices, Bins bins, F add) {
  const int32_t first = static_cast<int32_t>(first_bin(bins, args.histogram.bins));
  const A reciprocal = static_cast<A>(power_of_two(-bins.exponent));
  unsigned zeros = 0;
  const auto count = [&](const auto& at) {
    A x[kVectorSize];
    load(args.x, at, x);
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      if (k >= at.n) continue;
      const int32_t index = bin_index(x[k], reciprocal, first);
      if (index == -first) {
        ++zeros;
      } else {
        add(index);
      }
    }
  };
  if constexpr (kChannels) {
    for_channel(args, blockIdx.x / slices, blockIdx.x % slices, slices, count);
  } else {
    for_vectors(args.numel, count);
  }
  return zeros;
}

// Launched with `slices` blocks for each channel.
template <class A, bool kChannels>
__global__ void __launch_bounds__(kThreads, 4) count_kernel(const __grid_constant__ KernelArgs args, int64_t slices) {
  extern __shared__ unsigned shared[];
  const RunningHistogram running = channel_of(args.histogram, blockIdx.x / slices);
  const int64_t n = running.bins;
  const Bins bins = bins_of(*running.lo, *running.hi, n);
  if (!is_counting(bins)) return;
  Count* counts = reinterpret_cast<Count*>(running.counts);
  Count* zero = counts - first_bin(bins, n);
  if (n > kMostShared) {
    const auto add = [&](int32_t index) { atomicAdd(counts + index, Count{1}); };
    const unsigned zeros = count_values<A, kChannels>(args, slices, bins, add);
    if (zeros != 0) atomicAdd(zero, static_cast<Count>(zeros));
    return;
  }
  for (int64_t i = threadIdx.x; i < n; i += kThreads) shared[i] = 0;
  __syncthreads();
  const auto add = [&](int32_t index) { atomicAdd(shared + index, 1u); };
  const unsigned zeros = count_values<A, kChannels>(args, slices, bins, add);
  if (zeros != 0) atomicAdd(shared - first_bin(bins, n), zeros);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    if (shared[i] != 0) atomicAdd(counts + i, static_cast<Count>(shared[i]));
  }
}

}  // namespace

// The workspace: the ranges of x, a copy of the counts, and the workspace of minmax.
void histogram(const KernelArgs& args, double* workspace, cudaStream_t stream) {
  constexpr int64_t kFewBlocks = 1024;        // since each adds its bins to the result
  constexpr int64_t kVectorsOfABlock = 1024;  // fewer do not pay for that addition
  if (args.numel == 0) return;
  const int64_t n = args.histogram.bins, channels = args.channels.count, elements = args.numel / channels;
  KernelArgs ranges = args;
  ranges.sum_scale = workspace;
  ranges.sum_zero_point = workspace + channels;
  double* rest = workspace + 2 * channels;
  minmax(ranges, rest + channels * n, stream);
  grow_kernel<<<static_cast<unsigned>(channels), kGrowThreads, 0, stream>>>(
      args.histogram, ranges.sum_scale, ranges.sum_zero_point, reinterpret_cast<int64_t*>(rest));
  const int64_t needed = divide_up(elements, int64_t{1} << 31);  // the counts of a block are 32-bit
  int64_t slices = least(divide_up(elements, kVectorSize * kVectorsOfABlock), kFewBlocks / channels);
  if (slices < needed) slices = needed;
  const size_t bytes = n <= kMostShared ? n * sizeof(unsigned) : 0;
  const auto of_tensor = args.x.dtype == Dtype::f64 ? count_kernel<double, false> : count_kernel<float, false>;
  const auto of_channels = args.x.dtype == Dtype::f64 ? count_kernel<double, true> : count_kernel<float, true>;
  const auto kernel = channels == 1 ? of_tensor : of_channels;
  kernel<<<static_cast<unsigned>(channels * slices), kThreads, bytes, stream>>>(args, slices);
}

}  // namespace cuda
}  // namespace qtoolkit
