// The gradients of learned grids on CUDA: those of the input and the sums of those of scale and zero point in one pass.
#include <type_traits>

#include "../fake_quant.h"
#include "../prelu.h"
#include "../shaped.h"
#include "gradients.cuh"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// How many blocks a multiprocessor holds at the least: as many as fit without spilling registers.
template <template <class, class> class Functor>
constexpr int kLearnedBlocks = 4;
template <>
constexpr int kLearnedBlocks<PreluGradient> = 3;

// T is the type of the elements of operands that consist of whole vectors, aligned where they follow each other; or
// void for other operands. kZeroPoint: whether its gradient is summed.
template <class A, class T, class At, bool kZeroPoint, template <class, class> class Functor>
__global__ void __launch_bounds__(kThreads, std::is_same_v<A, double> ? 1 : kLearnedBlocks<Functor>)
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
      load(args.x, at, x);
      load(args.grad, at, grad);
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

__global__ void __launch_bounds__(kThreads) learned_gradients_kernel(const __grid_constant__ AllGradients all) {
  write_gradients(all, int64_t{kThreads} * blockIdx.x + threadIdx.x);
}

using LearnedKernel = void (*)(KernelArgs, ReductionTiling, Pairs);

template <class At, bool kZeroPoint, template <class, class> class Functor>
LearnedKernel learned_kernel(const KernelArgs& args) {
  if (args.x.dtype == Dtype::f64) return learned_backward_kernel<double, void, At, true, Functor>;
  if constexpr (!Functor<float, float>::kMemoryBound) {  // what asks for the dtype does not count beside the arithmetic
    return learned_backward_kernel<float, void, At, true, Functor>;
  } else {
    if constexpr (std::is_same_v<At, Contiguous>) {
      const auto aligned = [](const void* data) { return is_aligned(static_cast<const float*>(data)); };
      const bool whole =
          args.numel % kVectorSize == 0 && aligned(args.x.data) && aligned(args.grad.data) && aligned(args.y);
      if (!whole) return learned_backward_kernel<float, void, At, true, Functor>;
    }
    switch (args.x.dtype) {
      case Dtype::bf16: return learned_backward_kernel<float, __nv_bfloat16, At, kZeroPoint, Functor>;
      case Dtype::f16: return learned_backward_kernel<float, __half, At, kZeroPoint, Functor>;
      default: return learned_backward_kernel<float, float, At, kZeroPoint, Functor>;
    }
  }
}

template <bool kZeroPoint, template <class, class> class Functor>
void learned_backward(const KernelArgs& args, double* workspace, cudaStream_t stream) {
  launch_reduction(learned_kernel<Contiguous, kZeroPoint, Functor>(args),
                   learned_kernel<Scattered, kZeroPoint, Functor>(args), Pair{0, 0}, Add(), args, workspace, stream);
}

}  // namespace

// Few steps learn zero points of the usual grid, and those of other grids have a kernel for both.
#define QT_DEFINE(name, Functor)                                                                            \
  void name(const KernelArgs& args, double* workspace, cudaStream_t stream) {                               \
    if constexpr (std::is_same_v<Functor<float, float>, LearnedGradient<float, float>>) {                   \
      if (args.sum_zero_point == nullptr) return learned_backward<false, Functor>(args, workspace, stream); \
    }                                                                                                       \
    learned_backward<true, Functor>(args, workspace, stream);                                               \
  }
QT_LEARNED_KERNELS(QT_DEFINE)
#undef QT_DEFINE

void learned_gradients(const AllGradients& all, cudaStream_t stream) {
  launch_each(learned_gradients_kernel, longest_of(all), stream, all);
}

int64_t workspace_size(KernelId kernel, const KernelArgs& args) {
  const bool is_histogram = kernel == KernelId::histogram;
  if (!is_reduction(kernel) && !is_histogram) return 0;
  const int64_t of_histograms = is_histogram ? args.channels.count * (2 + args.histogram.bins) : 0;
  return 2 * slots_of(tiling_of(args), args) + of_histograms;
}

}  // namespace cuda
}  // namespace qtoolkit
