// The small tensors of a unit; see unit_scales.h.
#include "gradients.cuh"
#include "kernels.h"
#include "loops.cuh"
#include "unit_scales.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

template <class A>
__global__ void __launch_bounds__(kThreads) unit_scales_kernel(UnitScales u) {
  small_tensors_at<A>(u, int64_t{kThreads} * blockIdx.x + threadIdx.x);
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    unit_gradients_kernel(const __grid_constant__ UnitGradients u, const __grid_constant__ AllGradients before) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  write_gradients(before, i);  // a place of a gradient is computed of the same place of others
  unit_gradients_at<A>(u, i);
}

// The magnitude of the factor of all channels together.
template <class A>
QT_DEVICE A magnitude_of_all(const FactorChange& u) {
  static_assert(kSquares == kThreads);
  __shared__ double squares[kSquares];
  squares[threadIdx.x] = squares_of<A>(u, threadIdx.x);
  for (int half = kSquares / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) squares[threadIdx.x] += squares[threadIdx.x + half];
  }
  __syncthreads();
  const A magnitude = shared_magnitude<A>(u, squares[0]);
  __syncthreads();  // before the next call writes
  return magnitude;
}

// In one block, whose threads have all read what one of them writes at the end. The factor is that of the variance of
// the step, which the block has just held.
template <class A>
__global__ void __launch_bounds__(kThreads) rescale_kernel(HeldVariance h, FactorChange u) {
  if (h.taken != nullptr) {
    const bool moved = *h.taken != *h.clock;
    for (int64_t i = threadIdx.x; i < h.channels; i += kThreads) hold_variance(h, moved, i);
    __syncthreads();
    if (threadIdx.x == 0) *h.taken = *h.clock;
  }
  if (u.scales == u.channels) {
    for (int64_t i = threadIdx.x; i < u.scales; i += kThreads) take_own_factor<A>(u, i);
    return;
  }
  const A before = is_first<A>(u, 0) ? magnitude_of_all<A>(as_set(u)) : A(0);
  const A now = magnitude_of_all<A>(u);
  if (threadIdx.x == 0) take_factor(u, 0, now, before);
}

}  // namespace

void unit_scales(const UnitScales& u, cudaStream_t stream) {
  launch_each(u.f64 ? unit_scales_kernel<double> : unit_scales_kernel<float>, largest_count(u), stream, u);
}

void unit_gradients(const UnitGradients& u, const AllGradients& before, cudaStream_t stream) {
  const int64_t own = largest_count(u), others = longest_of(before);
  const auto kernel = u.f64 ? unit_gradients_kernel<double> : unit_gradients_kernel<float>;
  launch_each(kernel, own < others ? others : own, stream, u, before);
}

void rescale(const HeldVariance& h, const FactorChange& u, cudaStream_t stream) {
  const auto kernel = u.f64 ? rescale_kernel<double> : rescale_kernel<float>;
  kernel<<<1, kThreads, 0, stream>>>(h, u);
}

}  // namespace cuda
}  // namespace qtoolkit
