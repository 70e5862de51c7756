// Ranges and the grids that cover them, on CUDA.
#include "../observe.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

struct Unite {
  __device__ Pair operator()(Pair a, Pair b) const {
    const Range<double> range = unite(Range<double>{a.first, a.second}, Range<double>{b.first, b.second});
    return {range.lo, range.hi};
  }
};

template <class A, class At>
__global__ void __launch_bounds__(kThreads, std::is_same_v<A, double> ? 1 : 5)
    minmax_kernel(const __grid_constant__ KernelArgs args, const __grid_constant__ ReductionTiling tiling,
                  Pairs ranges) {
  Range<A> range = {static_cast<A>(INFINITY), static_cast<A>(-INFINITY)};
  bool nan = false;
  ReductionIterator it = reduction_iterator(tiling, blockIdx.x, threadIdx.x);
  At at;
  while (next(tiling, args.numel, it, at)) {
    A x[kVectorSize];
    load(args.x, at, x);
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      if (k < at.n) {
        range = widen(range, x[k]);
        nan |= x[k] != x[k];
      }
    }
  }
  const double lo = nan ? NAN : range.lo, hi = nan ? NAN : range.hi;
  // United with the empty range, since a channel of one thread passes through no other join: -0 becomes +0.
  join_block(tiling, Unite()({INFINITY, -INFINITY}, {lo, hi}), ranges, Unite());
}

template <class A>
__global__ void __launch_bounds__(kThreads) blend_kernel(A* lo, A* hi, const double* batch_lo, const double* batch_hi,
                                                         int64_t count, bool average, A momentum, int64_t* skipped) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i >= count) return;
  const Range<A> old = {lo[i], hi[i]};
  const Range<A> batch = {static_cast<A>(batch_lo[i]), static_cast<A>(batch_hi[i])};
  const Range<A> range = next_range(old, batch, average, momentum, skipped == nullptr ? nullptr : skipped + i);
  lo[i] = range.lo;
  hi[i] = range.hi;
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    grid_kernel(const A* lo, const A* hi, int64_t count, CodeRange codes, A* scale, A* zero_point) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i >= count) return;
  write_covering_grid(Ends<A>{lo, hi}, i, count, codes, scale, zero_point);
}

// In one block, whose threads all see whether the clock has moved before one of them notes it.
template <class A>
__global__ void __launch_bounds__(kThreads)
    take_ranges_kernel(Ends<A> ranges, int64_t count, CodeRange codes, A* scale, A* zero_point, StepsSeen seen) {
  if (seen.takes()) {
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      if (has_range(ranges, i)) write_covering_grid(ranges, i, count, codes, scale, zero_point);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) seen.note();
}

}  // namespace

void minmax(const KernelArgs& args, double* workspace, cudaStream_t stream) {
  const bool f64 = args.x.dtype == Dtype::f64;
  const auto contiguous = f64 ? minmax_kernel<double, Contiguous> : minmax_kernel<float, Contiguous>;
  const auto scattered = f64 ? minmax_kernel<double, Scattered> : minmax_kernel<float, Scattered>;
  launch_reduction(contiguous, scattered, Pair{INFINITY, -INFINITY}, Unite(), args, workspace, stream);
}

template <class A>
void blend_ranges(A* lo, A* hi, const double* batch_lo, const double* batch_hi, int64_t count, bool average, A momentum,
                  int64_t* skipped, cudaStream_t stream) {
  launch_each(blend_kernel<A>, count, stream, lo, hi, batch_lo, batch_hi, count, average, momentum, skipped);
}

template <class A>
void grid_of_ranges(const A* lo, const A* hi, int64_t count, const CodeRange& codes, A* scale, A* zero_point,
                    cudaStream_t stream) {
  launch_each(grid_kernel<A>, count, stream, lo, hi, count, codes, scale, zero_point);
}

template <class A>
void take_ranges(const A* lo, const A* hi, int64_t count, const CodeRange& codes, A* scale, A* zero_point,
                 const StepsSeen& seen, cudaStream_t stream) {
  take_ranges_kernel<A><<<1, kThreads, 0, stream>>>(Ends<A>{lo, hi}, count, codes, scale, zero_point, seen);
}

template void take_ranges(const float*, const float*, int64_t, const CodeRange&, float*, float*, const StepsSeen&,
                          cudaStream_t);
template void take_ranges(const double*, const double*, int64_t, const CodeRange&, double*, double*, const StepsSeen&,
                          cudaStream_t);
template void grid_of_ranges(const float*, const float*, int64_t, const CodeRange&, float*, float*, cudaStream_t);
template void grid_of_ranges(const double*, const double*, int64_t, const CodeRange&, double*, double*, cudaStream_t);
template void blend_ranges(float*, float*, const double*, const double*, int64_t, bool, float, int64_t*, cudaStream_t);
template void blend_ranges(double*, double*, const double*, const double*, int64_t, bool, double, int64_t*,
                           cudaStream_t);

}  // namespace cuda
}  // namespace qtoolkit
