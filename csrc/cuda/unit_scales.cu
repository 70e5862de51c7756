// The small tensors of a unit; see unit_scales.h.
#include "../unit/unit_scales.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

template <class A>
__global__ void __launch_bounds__(kThreads) unit_scales_kernel(UnitScales u) {
  unit_scales_at<A>(u, int64_t{kThreads} * blockIdx.x + threadIdx.x);
}

template <class A>
__global__ void __launch_bounds__(kThreads) unit_gradients_kernel(UnitGradients u) {
  unit_gradients_at<A>(u, int64_t{kThreads} * blockIdx.x + threadIdx.x);
}

template <class A>
__global__ void __launch_bounds__(kThreads) take_factor_kernel(FactorChange u) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i < u.scales) take_factor_at<A>(u, i);
}

// In one block, whose threads have all read `taken` before one of them writes it.
template <class T>
__global__ void __launch_bounds__(kThreads) hold_variance_kernel(HeldVariance h) {
  const bool moved = *h.taken != *h.clock;
  for (int64_t i = threadIdx.x; i < h.channels; i += kThreads) hold_variance_at<T>(h, moved, i);
  __syncthreads();
  if (threadIdx.x == 0) *h.taken = *h.clock;
}

}  // namespace

void unit_scales(const UnitScales& u, cudaStream_t stream) {
  launch_each(u.f64 ? unit_scales_kernel<double> : unit_scales_kernel<float>, largest_count(u), stream, u);
}

void unit_gradients(const UnitGradients& u, cudaStream_t stream) {
  launch_each(u.f64 ? unit_gradients_kernel<double> : unit_gradients_kernel<float>, largest_count(u), stream, u);
}

void take_factor(const FactorChange& u, cudaStream_t stream) {
  launch_each(u.f64 ? take_factor_kernel<double> : take_factor_kernel<float>, u.scales, stream, u);
}

void hold_variance(const HeldVariance& h, cudaStream_t stream) {
  const auto kernel = h.size == 8   ? hold_variance_kernel<uint64_t>
                      : h.size == 4 ? hold_variance_kernel<uint32_t>
                                    : hold_variance_kernel<uint16_t>;
  kernel<<<1, kThreads, 0, stream>>>(h);
}

}  // namespace cuda
}  // namespace qtoolkit
