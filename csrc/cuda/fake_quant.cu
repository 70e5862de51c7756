// Fake quantization onto every grid, and its gradients, on CUDA.
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

// What divides by a scale. Functors with long arithmetic do not wait for the division.
template <class F, class A>
using ScaleOf = std::conditional_t<F::kMemoryBound, DivisorOf<A>, A>;

// How many blocks a multiprocessor holds at the least: as many as fit without spilling registers.
template <template <class, class> class Functor>
constexpr int kMapBlocks = 6;
template <>
constexpr int kMapBlocks<FloatFunctor> = 5;
template <template <class, class> class Functor>
constexpr int kLearnedBlocks = 4;
template <>
constexpr int kLearnedBlocks<PreluGradient> = 3;

// Functor is one of kernel_list.h. kCodes: its codes are written too, which takes more registers.
template <class A, bool kDense, template <class, class> class Functor, bool kCodes = false>
__global__ void __launch_bounds__(kThreads, !kDense  ? 1
                                            : kCodes ? 4
                                                     : kMapBlocks<Functor>)
    elementwise_kernel(const __grid_constant__ KernelArgs args) {
  using F = Functor<A, A>;
  const auto functor = F::from(args);
  const Grids<ScaleOf<F, A>, A> grids(args);
  map_vectors<A, kDense, F::kMemoryBound>(args, args.x, [&](const Contiguous& at, A(&v)[kVectorSize]) {
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
// has 2 to 128 whole vectors. NaN fails the comparisons.
template <class A, bool kDense>
__global__ void __launch_bounds__(kThreads) block_scale_kernel(const KernelArgs args) {
  __shared__ A largest[kThreads];
  const A tensor_scale = args.scale == nullptr ? A(1) : grid_of<A>(args, 0).scale;
  const int vectors = static_cast<int>(args.channels.inner) / kVectorSize, tile = kThreads / vectors;
  const int thread = threadIdx.x;
  for (int64_t first = int64_t{tile} * blockIdx.x; first < args.numel; first += int64_t{tile} * gridDim.x) {
    const int blocks = static_cast<int>(args.numel - first < tile ? args.numel - first : tile);
    A amax = 0;
    if (thread < blocks * vectors) {
      A v[kVectorSize];
      load<kDense>(args.x, Contiguous{(first * vectors + thread) * kVectorSize, kVectorSize, true}, v);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) {
        const A magnitude = v[k] < 0 ? -v[k] : v[k];
        amax = magnitude > amax ? magnitude : amax;
      }
    }
    largest[thread] = amax;
    __syncthreads();
    if (thread < blocks) {
      A whole = 0;
      for (int i = 0; i < vectors; ++i) {
        const A part = largest[thread * vectors + i];
        whole = part > whole ? part : whole;
      }
      static_cast<A*>(args.y)[first + thread] =
          qtoolkit::block_scale(whole, args.format, args.scale_format, tensor_scale);
    }
    __syncthreads();
  }
}

template <class A, bool kDense>
__global__ void __launch_bounds__(kThreads) backward_kernel(const KernelArgs args) {
  map_vectors<A, kDense, true>(args, args.grad, [&](const Contiguous& at, A(&grad)[kVectorSize]) {
    const unsigned inside = args.mask[at.first / 8];
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) grad[k] = inside >> k & 1u ? grad[k] : A(0);
  });
}

// The other tensor is read as grad.
template <class A, bool kDense>
__global__ void __launch_bounds__(kThreads) add_codes_kernel(const KernelArgs args) {
  with_sum<A>(args, [&](auto sum) {
    for_vectors(args.numel, [&](const Contiguous& at) {
      A x[kVectorSize], other[kVectorSize];
      load<kDense>(args.x, at, x);
      load<kDense>(args.grad, at, other);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) x[k] = decltype(sum)::of(sum, x[k], other[k]);
      store(args, at, x);
    });
  });
}

// T is the type of the elements of dense operands that consist of whole vectors, aligned where they follow each other;
// or void for other operands. kZeroPoint: whether its gradient is wanted.
template <class A, class T, class At, bool kZeroPoint, template <class, class> class Functor>
__global__ void __launch_bounds__(kThreads, std::is_void_v<T> ? 1 : kLearnedBlocks<Functor>)
    learned_backward_kernel(const __grid_constant__ KernelArgs args, const __grid_constant__ ReductionTiling tiling,
                            Pairs sums) {
  using F = Functor<A, A>;
  const auto functor = F::from(args);
  Pair sum = {0, 0};
  ReductionIterator it = reduction_iterator(tiling, blockIdx.x, threadIdx.x);
  Grid<A, ScaleOf<F, A>> grid;
  if (it.left > 0) grid = grid_of<A, ScaleOf<F, A>>(args, it.channel);
  const auto differentiate = [&](const A(&x)[kVectorSize], A(&grad)[kVectorSize]) {
    TreeSum<A> ds, dz;
    with_divisor(grid.scale, x, [&](auto scale) {
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        const int k = TreeSum<A>::place(i);
        const auto gradient = F::apply(functor, x[k], grad[k], scale, grid.zero_point);
        ds.add(i, gradient.scale);
        if constexpr (kZeroPoint) dz.add(i, gradient.zero_point);
        grad[k] = gradient.dx;
      }
    });
    sum.first += ds.total();
    if constexpr (kZeroPoint) sum.second += dz.total();
  };
  if constexpr (std::is_void_v<T>) {
    At at;
    while (next(tiling, args.numel, it, at)) {
      A x[kVectorSize], grad[kVectorSize];
      load<false>(args.x, at, x);
      load<false>(args.grad, at, grad);
      differentiate(x, grad);
      store(args, at, grad);
    }
  } else {
    At at;
    while (next<true>(tiling, args.numel, it, at)) {
      A x[kVectorSize], grad[kVectorSize];
      load_dense(static_cast<const T*>(args.x.data), at, true, x);
      load_dense(static_cast<const T*>(args.grad.data), at, true, grad);
      differentiate(x, grad);
      store_dense(static_cast<T*>(args.y), at, true, grad);
    }
  }
  join_block(tiling, sum, sums, Add());
}

template <class A>
QT_DEVICE void write_gradient(const GradientsOfSums& g, int64_t i) {
  with_type<A, Kind::values>(g.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const A of = g.scale == nullptr ? A(1) : to_arithmetic<A>(static_cast<const T*>(g.scale)[i]);
    static_cast<T*>(g.gradient)[i] = from_arithmetic<T>(learned_gradient(g.sums[i], g.factor, of));
  });
}

struct AllGradients {
  GradientsOfSums of[kMostGradients];
  int count;
};

__global__ void __launch_bounds__(kThreads) learned_gradients_kernel(const __grid_constant__ AllGradients all) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kMostGradients; ++k) {
    if (k >= all.count || i >= all.of[k].count) continue;
    all.of[k].dtype == Dtype::f64 ? write_gradient<double>(all.of[k], i) : write_gradient<float>(all.of[k], i);
  }
}

template <template <class, class> class Functor, bool kCodes = false>
void elementwise(const KernelArgs& args, cudaStream_t stream) {
  launch_elementwise(
      pick(args.x.dtype, args.x.dense, elementwise_kernel<float, true, Functor, kCodes>,
           elementwise_kernel<float, false, Functor, kCodes>, elementwise_kernel<double, false, Functor, kCodes>),
      args, stream);
}

using LearnedKernel = void (*)(KernelArgs, ReductionTiling, Pairs);

template <class At, bool kZeroPoint, template <class, class> class Functor>
LearnedKernel learned_kernel(const KernelArgs& args) {
  const Dtype dtype = args.x.dtype;
  const bool dense = args.x.dense && args.grad.dense && args.grad.dtype == dtype && args.y_dtype == dtype;
  const auto aligned = [](const void* data) { return is_aligned(static_cast<const float*>(data)); };
  const bool whole =
      args.numel % kVectorSize == 0 && aligned(args.x.data) && aligned(args.grad.data) && aligned(args.y);
  if (dtype == Dtype::f64) return learned_backward_kernel<double, void, At, true, Functor>;
  if (!dense || !(whole || std::is_same_v<At, Scattered>)) {
    return learned_backward_kernel<float, void, At, true, Functor>;
  }
  if (dtype == Dtype::bf16) return learned_backward_kernel<float, __nv_bfloat16, At, kZeroPoint, Functor>;
  if (dtype == Dtype::f16) return learned_backward_kernel<float, __half, At, kZeroPoint, Functor>;
  return learned_backward_kernel<float, float, At, kZeroPoint, Functor>;
}

template <bool kZeroPoint, template <class, class> class Functor>
void learned_backward(const KernelArgs& args, double* workspace, cudaStream_t stream) {
  launch_reduction(learned_kernel<Contiguous, kZeroPoint, Functor>(args),
                   learned_kernel<Scattered, kZeroPoint, Functor>(args), Pair{0, 0}, Add(), args, workspace, stream);
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

#define QT_DEFINE(name, Functor)                                                               \
  void name(const KernelArgs& args, double* workspace, cudaStream_t stream) {                  \
    args.sum_zero_point == nullptr ? learned_backward<false, Functor>(args, workspace, stream) \
                                   : learned_backward<true, Functor>(args, workspace, stream); \
  }
QT_LEARNED_KERNELS(QT_DEFINE)
#undef QT_DEFINE

void block_scale(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(pick(args.x.dtype, args.x.dense, block_scale_kernel<float, true>, block_scale_kernel<float, false>,
                          block_scale_kernel<double, false>),
                     args, stream, kThreads * kVectorSize / args.channels.inner);
}

void add_codes(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(pick(args.x.dtype, args.x.dense && args.grad.dense, add_codes_kernel<float, true>,
                          add_codes_kernel<float, false>, add_codes_kernel<double, false>),
                     args, stream);
}

void fake_quant_backward(const KernelArgs& args, double*, cudaStream_t stream) {
  launch_elementwise(pick(args.grad.dtype, args.grad.dense, backward_kernel<float, true>, backward_kernel<float, false>,
                          backward_kernel<double, false>),
                     args, stream);
}

void learned_gradients(const GradientsOfSums* gradients, int count, cudaStream_t stream) {
  AllGradients all = {};
  int64_t longest = 0;
  for (int k = 0; k < count; ++k) {
    if (gradients[k].count == 0) continue;
    all.of[all.count++] = gradients[k];
    longest = longest < gradients[k].count ? gradients[k].count : longest;
  }
  launch_each(learned_gradients_kernel, longest, stream, all);
}

int64_t workspace_size(KernelId kernel, const KernelArgs& args) {
  const bool is_histogram = kernel == KernelId::histogram;
  if (!is_reduction(kernel) && !is_histogram) return 0;
  const int64_t of_histograms = is_histogram ? args.channels.count * (2 + args.histogram.bins) : 0;
  return 2 * slots_of(tiling_of(args), args) + of_histograms;
}

}  // namespace cuda
}  // namespace qtoolkit
