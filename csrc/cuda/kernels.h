// The CUDA kernels, launched on the stream given; none of them waits for the device. See kernel_args.h.
#pragma once

#include <cuda_runtime_api.h>

#include "../kernel_args.h"
#include "../range_grid.h"

namespace qtoolkit {
namespace cuda {

// job.scale and job.zero_point are device pointers to values as the user gave them (in the arithmetic's type):
// the kernels apply usable_scale and usable_zero_point where they load them.
void fake_quant(const Job& job, cudaStream_t stream);
void fake_quant_float(const Job& job, cudaStream_t stream);
void fake_quant_log(const Job& job, cudaStream_t stream);
void block_scale(const Job& job, cudaStream_t stream);
void tensor_quant(const Job& job, cudaStream_t stream);
void fake_tensor_quant(const Job& job, cudaStream_t stream);
void fake_quant_backward(const Job& job, cudaStream_t stream);
void quantize(const Job& job, cudaStream_t stream);
void dequantize(const Job& job, cudaStream_t stream);

// The reductions write (not add to) job.sum_scale and job.sum_zero_point. They first fill `workspace`, of the size
// that workspace_size says, and sum it up in a fixed order: two runs give the same bits.
// Where the size is 0, `workspace` may be null. minmax wants both results; a range of nothing is [+inf, -inf].
int64_t workspace_size(const Job& job);  // in float64 values
void fake_quant_learned_backward(const Job& job, double* workspace, cudaStream_t stream);
void minmax(const Job& job, double* workspace, cudaStream_t stream);

// Adds x, at least one element with the given range (lowest, highest), to job.histogram, which grows before; `room` has
// as many places as there are bins.
void histogram(const Job& job, const double* range, int64_t* room, cudaStream_t stream);

// lo and hi, `count` of them: with `average` they move towards the ranges of a batch by blend() of observe.h, else
// they are widened to hold them.
template <class A>
void blend_ranges(A* lo, A* hi, const double* batch_lo, const double* batch_hi, int64_t count, bool average, A momentum,
                  cudaStream_t stream);

// The grids that cover `count` ranges; zero_point may be null.
template <class A>
void grid_of_ranges(const A* lo, const A* hi, int64_t count, const CodeRange& codes, A* scale, A* zero_point,
                    cudaStream_t stream);

// learned_gradient of fake_quant.h for `count` sums; scale (null for a zero point) and gradient are of that type.
void learned_gradient(const double* sums, double factor, const void* scale, int64_t count, Dtype dtype, void* gradient,
                      cudaStream_t stream);

}  // namespace cuda
}  // namespace qtoolkit
