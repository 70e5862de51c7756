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

}  // namespace cuda
}  // namespace qtoolkit
