// Fake quantization onto every grid, and its gradients, on CUDA.
#include "../fake_quant.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// Rule is one of fake_quant.h.
template <class A, bool kDense, template <class, class> class Rule>
__global__ void __launch_bounds__(kThreads) map_kernel(const Job job) {
  const auto rule = Rule<A, A>::of(job);
  for_octets(job.numel, [&](const Row& at) {
    A v[kOctet];
    load<kDense>(job.x, at, v);
    unsigned inside = 0;
    for_grids<A>(job, at, [&](int k, Grid<A> grid) {
      const auto mapped = Rule<A, A>::map(rule, v[k], grid.scale, grid.zero_point);
      v[k] = mapped.value;
      inside |= mapped.inside << k;
    });
    store(job, at, v);
    if (job.mask != nullptr) job.mask[at.first / 8] = static_cast<uint8_t>(inside & ((1u << at.n) - 1));
  });
}

// A thread takes eight blocks, one after the other; block sizes are whole octets.
template <class A, bool kDense>
__global__ void __launch_bounds__(kThreads) block_scale_kernel(const Job job) {
  const A tensor_scale = job.scale == nullptr ? A(1) : grid_of<A>(job, 0).scale;
  const int64_t size = job.channels.inner;
  for_octets(job.numel, [&](const Row& at) {
    A scales[kOctet] = {};
    for (int b = 0; b < at.n; ++b) {
      A amax = 0;
      for (int64_t i = 0; i < size; i += kOctet) {
        A v[kOctet];
        load<kDense>(job.x, Row{(at.first + b) * size + i, kOctet}, v);
#pragma unroll
        for (int k = 0; k < kOctet; ++k) {
          const A magnitude = v[k] < 0 ? -v[k] : v[k];
          amax = magnitude > amax ? magnitude : amax;
        }
      }
      scales[b] = qtoolkit::block_scale(amax, job.format, job.scale_format, tensor_scale);
    }
    store(job, at, scales);
  });
}

template <class A, bool kDense>
__global__ void __launch_bounds__(kThreads) backward_kernel(const Job job) {
  for_octets(job.numel, [&](const Row& at) {
    A grad[kOctet];
    load<kDense>(job.grad, at, grad);
    const unsigned inside = job.mask[at.first / 8];
#pragma unroll
    for (int k = 0; k < kOctet; ++k) grad[k] = inside >> k & 1u ? grad[k] : A(0);
    store(job, at, grad);
  });
}

struct Add {
  __device__ Pair operator()(Pair a, Pair b) const { return {a.first + b.first, a.second + b.second}; }
};

// An octet is summed in the arithmetic's type, as a tree; all beyond it in float64.
template <class A>
QT_DEVICE double sum_of(const A (&v)[kOctet]) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

template <class A, class At, bool kDense>
__global__ void __launch_bounds__(kThreads)
    learned_backward_kernel(const __grid_constant__ Job job, const __grid_constant__ Slices slices, Pairs sums) {
  const A lo = static_cast<A>(job.ends.lo), hi = static_cast<A>(job.ends.hi);
  Pair sum = {0, 0};
  Walk walk = walk_of(slices, blockIdx.x, threadIdx.x);
  const Grid<A> grid = walk.left > 0 ? grid_of<A>(job, walk.channel) : Grid<A>{};
  At at;
  while (next(slices, job.numel, walk, at)) {
    A x[kOctet], grad[kOctet], ds[kOctet], dz[kOctet];
    load<kDense>(job.x, at, x);
    load<kDense>(job.grad, at, grad);
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      const auto point = snap(x[k], grid.scale, grid.zero_point, lo, hi);
      ds[k] = scale_gradient(point, grad[k], grid.zero_point);
      dz[k] = zero_point_gradient(point, grad[k], grid.scale);
      grad[k] = is_inside(point) ? grad[k] : A(0);
    }
    store(job, at, grad);
    sum.first += sum_of(ds);
    sum.second += sum_of(dz);
  }
  join_block(slices, sum, sums, Add());
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    learned_gradient_kernel(const double* sums, double factor, const void* scale, int64_t count, Dtype dtype,
                            void* gradient) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i >= count) return;
  with_type<A, Kind::values>(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const A of = scale == nullptr ? A(1) : to_arithmetic<A>(static_cast<const T*>(scale)[i]);
    static_cast<T*>(gradient)[i] = from_arithmetic<T>(qtoolkit::learned_gradient(sums[i], factor, of));
  });
}

template <template <class, class> class Rule>
void map(const Job& job, cudaStream_t stream) {
  launch_map(pick(job.x.dtype, job.x.dense, map_kernel<float, true, Rule>, map_kernel<float, false, Rule>,
                  map_kernel<double, false, Rule>),
             job, stream);
}

}  // namespace

void fake_quant(const Job& job, cudaStream_t stream) { map<IntegerRule>(job, stream); }
void fake_quant_float(const Job& job, cudaStream_t stream) { map<FloatRule>(job, stream); }
void fake_quant_log(const Job& job, cudaStream_t stream) { map<LogRule>(job, stream); }
void tensor_quant(const Job& job, cudaStream_t stream) { map<LegacyCodeRule>(job, stream); }
void fake_tensor_quant(const Job& job, cudaStream_t stream) { map<LegacyValueRule>(job, stream); }

void block_scale(const Job& job, cudaStream_t stream) {
  launch_map(pick(job.x.dtype, job.x.dense, block_scale_kernel<float, true>, block_scale_kernel<float, false>,
                  block_scale_kernel<double, false>),
             job, stream);
}

void fake_quant_backward(const Job& job, cudaStream_t stream) {
  launch_map(pick(job.grad.dtype, job.grad.dense, backward_kernel<float, true>, backward_kernel<float, false>,
                  backward_kernel<double, false>),
             job, stream);
}

void fake_quant_learned_backward(const Job& job, double* workspace, cudaStream_t stream) {
  const bool dense = job.x.dense && job.grad.dense;
  const auto rows = pick(job.x.dtype, dense, learned_backward_kernel<float, Row, true>,
                         learned_backward_kernel<float, Row, false>, learned_backward_kernel<double, Row, false>);
  const auto spread =
      pick(job.x.dtype, dense, learned_backward_kernel<float, Spread, true>,
           learned_backward_kernel<float, Spread, false>, learned_backward_kernel<double, Spread, false>);
  launch_reduction(rows, spread, Pair{0, 0}, Add(), job, workspace, stream);
}

void learned_gradient(const double* sums, double factor, const void* scale, int64_t count, Dtype dtype, void* gradient,
                      cudaStream_t stream) {
  if (count == 0) return;
  const auto kernel = dtype == Dtype::f64 ? learned_gradient_kernel<double> : learned_gradient_kernel<float>;
  const unsigned blocks = static_cast<unsigned>(divide_up(count, kThreads));
  kernel<<<blocks, kThreads, 0, stream>>>(sums, factor, scale, count, dtype, gradient);
}

int64_t workspace_size(const Job& job) { return 2 * slots_of(slices_of(job), job); }

}  // namespace cuda
}  // namespace qtoolkit
