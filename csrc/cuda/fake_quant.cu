// Fake quantization onto every grid, and its gradient where the grid is not learned, on CUDA.
#include <type_traits>

#include "../fake_quant.h"
#include "../prelu.h"
#include "../requantize.h"
#include "../shaped.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// How many blocks a multiprocessor holds at the least: as many as fit without spilling registers.
template <template <class, class> class Functor>
constexpr int kMapBlocks = 6;
template <>
constexpr int kMapBlocks<FloatFunctor> = 5;

// Whether each dtype has a loop of its own: the functors of a training step. The others ask for it at each vector.
template <template <class, class> class Functor>
constexpr bool kTyped = false;
template <>
constexpr bool kTyped<IntegerFunctor> = true;
template <>
constexpr bool kTyped<FloatFunctor> = true;
template <>
constexpr bool kTyped<PreluFunctor> = true;
template <>
constexpr bool kTyped<ScaleTermsFunctor> = true;

// Functor is one of kernel_list.h. kCodes: its codes are written too, which takes more registers.
template <class A, template <class, class> class Functor, bool kCodes = false>
__global__ void __launch_bounds__(kThreads, std::is_same_v<A, double> ? 1
                                            : kCodes                  ? 4
                                                                      : kMapBlocks<Functor>)
    elementwise_kernel(const __grid_constant__ KernelArgs args) {
  using F = Functor<A, A>;
  const auto functor = F::from(args);
  const Grids<ScaleOf<F, A>, A> grids(args);
  map_vectors<A, kTyped<Functor>>(args, args.x, [&](const Contiguous& at, A(&v)[kVectorSize]) {
    unsigned inside = 0;
    [[maybe_unused]] A codes[kVectorSize];
    grids.apply(at, v, [&](int k, auto scale, A zero_point) {
      const auto mapped = F::apply(functor, v[k], scale, zero_point);
      v[k] = mapped.value;
      inside |= mapped.inside << k;
      if constexpr (kCodes) codes[k] = mapped.code;
    });
    if constexpr (kCodes) store_codes(args.codes, args.packed, at, is_aligned(args.codes), codes);
    if (args.mask != nullptr)
      args.mask[at.first / 8] = static_cast<uint8_t>(at.is_whole ? inside : inside & ((1u << at.n) - 1));
  });
}

// Neighbouring threads read neighbouring vectors of `tile` blocks; then one thread joins the vectors of each. A block
// has 2 to 128 whole vectors. NaN fails the comparisons; scales that are powers of two become NaN for what is not
// finite.
template <class A>
__global__ void __launch_bounds__(kThreads) block_scale_kernel(const KernelArgs args) {
  __shared__ A largest[kThreads];
  const A tensor_scale = args.scale == nullptr ? A(1) : grid_of<A>(args, 0).scale;
  const int vectors = static_cast<int>(args.channels.inner) / kVectorSize, tile = kThreads / vectors;
  const int thread = threadIdx.x;
  for (int64_t first = int64_t{tile} * blockIdx.x; first < args.numel; first += int64_t{tile} * gridDim.x) {
    const int blocks = static_cast<int>(args.numel - first < tile ? args.numel - first : tile);
    A amax = 0, rest = 0;
    if (thread < blocks * vectors) {
      A v[kVectorSize];
      load(args.x, Contiguous{(first * vectors + thread) * kVectorSize, kVectorSize, true}, v);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) {
        const A magnitude = v[k] < 0 ? -v[k] : v[k];
        amax = magnitude > amax ? magnitude : amax;
        rest += v[k] - v[k];
      }
    }
    largest[thread] = args.scale_format.largest == 0 ? amax + rest : amax;
    __syncthreads();
    if (thread < blocks) {
      A whole = 0;
      for (int i = 0; i < vectors; ++i) {
        const A part = largest[thread * vectors + i];
        whole = part > whole || part != part ? part : whole;
      }
      static_cast<A*>(args.y)[first + thread] =
          qtoolkit::block_scale(whole, args.format, args.scale_format, tensor_scale);
    }
    __syncthreads();
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads) backward_kernel(const KernelArgs args) {
  map_vectors<A, true>(args, args.grad, [&](const Contiguous& at, A(&grad)[kVectorSize]) {
    const unsigned inside = args.mask[at.first / 8];
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) grad[k] = inside >> k & 1u ? grad[k] : A(0);
  });
}

// Of float32, an element at a time, since its arithmetic is long. The other tensor is read as grad.
__global__ void __launch_bounds__(kThreads) add_codes_kernel(const KernelArgs args) {
  const float *x = static_cast<const float*>(args.x.data), *other = static_cast<const float*>(args.grad.data);
  float* y = static_cast<float*>(args.y);
  const int64_t step = int64_t{kThreads} * gridDim.x;
  with_sum<float>(args, [&](auto sum) {
    for (int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x; i < args.numel; i += step) {
      y[i] = decltype(sum)::of(sum, x[i], other[i]);
    }
  });
}

template <template <class, class> class Functor, bool kCodes = false>
void elementwise(const KernelArgs& args, cudaStream_t stream) {
  auto kernel = elementwise_kernel<double, Functor, kCodes>;
  if constexpr (!std::is_same_v<Functor<float, float>, FixedPointFunctor<float, float>>) {  // of float64 alone
    if (args.x.dtype != Dtype::f64) kernel = elementwise_kernel<float, Functor, kCodes>;
  }
  launch_elementwise(kernel, args, stream);
}

}  // namespace

#define QT_DEFINE(name, Functor)                                                         \
  void name(const KernelArgs& args, double*, cudaStream_t stream) {                      \
    if constexpr (std::is_same_v<Functor<float, float>, IntegerFunctor<float, float>>) { \
      if (args.codes != nullptr) return elementwise<Functor, true>(args, stream);        \
    }                                                                                    \
    elementwise<Functor>(args, stream);                                                  \
  }
QT_ELEMENTWISE_KERNELS(QT_DEFINE)
#undef QT_DEFINE

void block_scale(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(args.x.dtype == Dtype::f64 ? block_scale_kernel<double> : block_scale_kernel<float>, args, stream,
                     kThreads * kVectorSize / args.channels.inner);
}

void add_codes(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(add_codes_kernel, args, stream, kThreads);
}

void fake_quant_backward(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(args.grad.dtype == Dtype::f64 ? backward_kernel<double> : backward_kernel<float>, args, stream);
}

}  // namespace cuda
}  // namespace qtoolkit
