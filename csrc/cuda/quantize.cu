// Values to integer codes and back, on CUDA.
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// Codes have no NaN: it becomes the lowest code, as in onnxruntime.
template <class A, bool kDense>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const KernelArgs args) {
  const A lo = static_cast<A>(args.bounds.lo), hi = static_cast<A>(args.bounds.hi);
  const Grids<DivisorOf<A>, A> grids(args);
  for_vectors(args.numel, [&](const Contiguous& at) {
    A v[kVectorSize];
    load<kDense>(args.x, at, v);
    grids.apply(at, v, [&](int k, auto scale, A zero_point) {
      const A code = snap(v[k], scale, zero_point, lo, hi).code;
      v[k] = code == code ? code : lo;
    });
    store<Kind::codes>(args, at, v);
  });
}

template <class A, bool kDense>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const KernelArgs args) {
  const Grids<A, A> grids(args);
  for_vectors(args.numel, [&](const Contiguous& at) {
    A v[kVectorSize];
    load<kDense, Kind::codes>(args.x, at, v);
    grids.apply(at, v, [&](int k, A scale, A zero_point) { v[k] = value_of(v[k], scale, zero_point); });
    store(args, at, v);
  });
}

}  // namespace

void quantize(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(pick(args.x.dtype, args.x.dense, quantize_kernel<float, true>, quantize_kernel<float, false>,
                          quantize_kernel<double, false>),
                     args, stream);
}

void dequantize(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(pick(args.y_dtype, args.x.dense, dequantize_kernel<float, true>, dequantize_kernel<float, false>,
                          dequantize_kernel<double, false>),
                     args, stream);
}

}  // namespace cuda
}  // namespace qtoolkit
