// Values to integer codes and back, on CUDA.
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// Codes have no NaN: it becomes the lowest code, as in onnxruntime.
template <class A, bool kDense>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const Job job) {
  const A lo = static_cast<A>(job.ends.lo), hi = static_cast<A>(job.ends.hi);
  for_octets(job.numel, [&](const Row& at) {
    A v[kOctet];
    load<kDense>(job.x, at, v);
    for_grids<A>(job, at, [&](int k, Grid<A> grid) {
      const A code = snap(v[k], grid.scale, grid.zero_point, lo, hi).code;
      v[k] = code == code ? code : lo;
    });
    store<Kind::codes>(job, at, v);
  });
}

template <class A, bool kDense>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const Job job) {
  for_octets(job.numel, [&](const Row& at) {
    A v[kOctet];
    load<kDense, Kind::codes>(job.x, at, v);
    for_grids<A>(job, at, [&](int k, Grid<A> grid) { v[k] = value_of(v[k], grid.scale, grid.zero_point); });
    store(job, at, v);
  });
}

}  // namespace

void quantize(const Job& job, cudaStream_t stream) {
  launch_map(pick(job.x.dtype, job.x.dense, quantize_kernel<float, true>, quantize_kernel<float, false>,
                  quantize_kernel<double, false>),
             job, stream);
}

void dequantize(const Job& job, cudaStream_t stream) {
  launch_map(pick(job.y_dtype, job.x.dense, dequantize_kernel<float, true>, dequantize_kernel<float, false>,
                  dequantize_kernel<double, false>),
             job, stream);
}

}  // namespace cuda
}  // namespace qtoolkit
