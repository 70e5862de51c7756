// Values to integer codes and back, on CUDA.
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// Codes have no NaN: it becomes the lowest code, as in onnxruntime.
template <class A>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const KernelArgs args) {
  const A lo = static_cast<A>(args.bounds.lo), hi = static_cast<A>(args.bounds.hi);
  const Grids<DivisorOf<A>, A> grids(args);
  for_vectors(args.numel, [&](const Contiguous& at) {
    A v[kVectorSize];
    load(args.x, at, v);
    grids.apply(at, v, [&](int k, auto scale, A zero_point) {
      const A code = snap(v[k], scale, zero_point, lo, hi).code;
      v[k] = code == code ? code : lo;
    });
    store<Kind::codes>(args, at, v);
  });
}

template <class A>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const KernelArgs args) {
  const Grids<A, A> grids(args);
  for_vectors(args.numel, [&](const Contiguous& at) {
    A v[kVectorSize];
    load<Kind::codes>(args.x, at, v);
    grids.apply(at, v, [&](int k, A scale, A zero_point) { v[k] = value_of(v[k], scale, zero_point); });
    store(args, at, v);
  });
}

}  // namespace

void quantize(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(args.x.dtype == Dtype::f64 ? quantize_kernel<double> : quantize_kernel<float>, args, stream);
}

void dequantize(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(args.y_dtype == Dtype::f64 ? dequantize_kernel<double> : dequantize_kernel<float>, args, stream);
}

}  // namespace cuda
}  // namespace qtoolkit
