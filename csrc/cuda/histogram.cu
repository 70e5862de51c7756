// Running histograms, on CUDA: the batch's range, then a small kernel that lets the range grow, then the counting. The
// decision to grow is made on the device, so nothing waits for it.
#include "../histogram.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

constexpr int kGrowThreads = 1024;
constexpr int64_t kMostShared = 8192;  // bins that are counted in shared memory first

using Count = unsigned long long;

// One block. `room` has as many places as there are bins.
__global__ void grow_kernel(const __grid_constant__ RunningHistogram running, const double* range, int64_t* room) {
  const int64_t n = running.bins;
  const Bins old = bins_of(*running.lo, *running.hi, n);
  const Bins bins = join(old, bins_for(range[0], range[1], n));
  __syncthreads();  // all have read lo and hi
  if (bins.exponent == kBroken) {
    if (threadIdx.x == 0) *running.lo = *running.hi = NAN;
    return;
  }
  if (bins == old) return;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    room[i] = running.counts[i];
    running.counts[i] = 0;
  }
  __syncthreads();
  Count* counts = reinterpret_cast<Count*>(running.counts);
  for (int64_t i = threadIdx.x; i < n && is_counting(old); i += blockDim.x) {
    if (room[i] != 0) atomicAdd(counts + place_after(i, old, bins, n), static_cast<Count>(room[i]));
  }
  if (threadIdx.x == 0) {
    *running.lo = static_cast<float>(low_edge(bins, n));
    *running.hi = static_cast<float>(high_edge(bins, n));
  }
}

// Values of the bin at zero are counted in a register: after ReLU they are half of all.
template <class A, class F>
QT_DEVICE unsigned count_octets(const Job& job, Bins bins, F add) {
  const int32_t first = static_cast<int32_t>(first_bin(bins, job.histogram.bins));
  const A reciprocal = static_cast<A>(power_of_two(-bins.exponent));
  unsigned zeros = 0;
  for_octets(job.numel, [&](const Row& at) {
    A x[kOctet];
    load<false>(job.x, at, x);
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      if (k >= at.n) continue;
      const int32_t place = place_of(x[k], reciprocal, first);
      if (place == -first) {
        ++zeros;
      } else {
        add(place);
      }
    }
  });
  return zeros;
}

template <class A>
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ Job job) {
  extern __shared__ unsigned shared[];
  const int64_t n = job.histogram.bins;
  const Bins bins = bins_of(*job.histogram.lo, *job.histogram.hi, n);
  if (!is_counting(bins)) return;
  Count* counts = reinterpret_cast<Count*>(job.histogram.counts);
  Count* zero = counts - first_bin(bins, n);
  if (n > kMostShared) {
    const unsigned zeros = count_octets<A>(job, bins, [&](int32_t place) { atomicAdd(counts + place, Count{1}); });
    if (zeros != 0) atomicAdd(zero, static_cast<Count>(zeros));
    return;
  }
  for (int64_t i = threadIdx.x; i < n; i += kThreads) shared[i] = 0;
  __syncthreads();
  const unsigned zeros = count_octets<A>(job, bins, [&](int32_t place) { atomicAdd(shared + place, 1u); });
  if (zeros != 0) atomicAdd(shared - first_bin(bins, n), zeros);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    if (shared[i] != 0) atomicAdd(counts + i, static_cast<Count>(shared[i]));
  }
}

}  // namespace

void histogram(const Job& job, const double* range, int64_t* room, cudaStream_t stream) {
  constexpr int64_t kFewBlocks = 1024;       // each adds its bins to the result
  constexpr int64_t kOctetsOfABlock = 1024;  // worth the adding
  const int64_t n = job.histogram.bins;
  grow_kernel<<<1, kGrowThreads, 0, stream>>>(job.histogram, range, room);
  // A block counts in 32 bits.
  const int64_t needed = divide_up(job.numel, int64_t{1} << 31);
  int64_t blocks = least(divide_up(job.numel, kOctet * kOctetsOfABlock), kFewBlocks);
  if (blocks < needed) blocks = needed;
  const size_t bytes = n <= kMostShared ? n * sizeof(unsigned) : 0;
  const auto kernel = job.x.dtype == Dtype::f64 ? count_kernel<double> : count_kernel<float>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(job);
}

}  // namespace cuda
}  // namespace qtoolkit
