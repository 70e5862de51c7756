// Running histograms on CUDA: the range of the batch, then a small kernel that widens the histogram, then the counts.
// The device decides whether to widen, so the host does not wait for it.
#include "../histogram.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

constexpr int kGrowThreads = 1024;
constexpr int64_t kMostShared = 8192;  // bins, up to which blocks count in shared memory

using Count = unsigned long long;

// Launched with one block. `scratch` has an element for each bin.
__global__ void grow_kernel(const __grid_constant__ RunningHistogram running, const double* range, int64_t* scratch) {
  const int64_t n = running.bins;
  const Bins old = bins_of(*running.lo, *running.hi, n);
  const Bins bins = join(old, bins_for(range[0], range[1], n));
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

// Counts the values in the bin at zero in a register: after ReLU they are half of all values.
template <class A, class F>
QT_DEVICE unsigned count_vectors(const KernelArgs& args, Bins bins, F add) {
  const int32_t first = static_cast<int32_t>(first_bin(bins, args.histogram.bins));
  const A reciprocal = static_cast<A>(power_of_two(-bins.exponent));
  unsigned zeros = 0;
  for_vectors(args.numel, [&](const Contiguous& at) {
    A x[kVectorSize];
    load<false>(args.x, at, x);
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
  });
  return zeros;
}

template <class A>
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ unsigned shared[];
  const int64_t n = args.histogram.bins;
  const Bins bins = bins_of(*args.histogram.lo, *args.histogram.hi, n);
  if (!is_counting(bins)) return;
  Count* counts = reinterpret_cast<Count*>(args.histogram.counts);
  Count* zero = counts - first_bin(bins, n);
  if (n > kMostShared) {
    const unsigned zeros = count_vectors<A>(args, bins, [&](int32_t index) { atomicAdd(counts + index, Count{1}); });
    if (zeros != 0) atomicAdd(zero, static_cast<Count>(zeros));
    return;
  }
  for (int64_t i = threadIdx.x; i < n; i += kThreads) shared[i] = 0;
  __syncthreads();
  const unsigned zeros = count_vectors<A>(args, bins, [&](int32_t index) { atomicAdd(shared + index, 1u); });
  if (zeros != 0) atomicAdd(shared - first_bin(bins, n), zeros);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    if (shared[i] != 0) atomicAdd(counts + i, static_cast<Count>(shared[i]));
  }
}

}  // namespace

// The workspace: the range of x, a copy of the counts, and the workspace of minmax.
void histogram(const KernelArgs& args, double* workspace, cudaStream_t stream) {
  constexpr int64_t kFewBlocks = 1024;        // since each adds its bins to the result
  constexpr int64_t kVectorsOfABlock = 1024;  // fewer do not pay for that addition
  if (args.numel == 0) return;
  const int64_t n = args.histogram.bins;
  KernelArgs range = args;
  range.sum_scale = workspace;
  range.sum_zero_point = workspace + 1;
  minmax(range, workspace + 2 + n, stream);
  grow_kernel<<<1, kGrowThreads, 0, stream>>>(args.histogram, workspace, reinterpret_cast<int64_t*>(workspace + 2));
  // The counts of a block are 32-bit.
  const int64_t needed = divide_up(args.numel, int64_t{1} << 31);
  int64_t blocks = least(divide_up(args.numel, kVectorSize * kVectorsOfABlock), kFewBlocks);
  if (blocks < needed) blocks = needed;
  const size_t bytes = n <= kMostShared ? n * sizeof(unsigned) : 0;
  const auto kernel = args.x.dtype == Dtype::f64 ? count_kernel<double> : count_kernel<float>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(args);
}

}  // namespace cuda
}  // namespace qtoolkit
