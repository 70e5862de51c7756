// The CUDA kernels, launched on the given stream; none of them waits for the device. See kernel_args.h.
#pragma once

#include <cuda_runtime_api.h>

#include "../batch_norm/batch_norm_args.h"
#include "../kernel_args.h"
#include "../kernel_list.h"
#include "../layer/weight_rows.h"
#include "../pool/max_pool.h"
#include "../range_grid.h"

namespace qtoolkit {

struct AttentionWeights;
struct FlashAttention;
struct UnitScales;
struct UnitGradients;
struct FactorChange;
struct HeldVariance;
struct FunctionRows;

namespace cuda {

// args.scale and args.zero_point are device pointers to the user's values in the type of the arithmetic: the kernels
// apply usable_scale and usable_zero_point to what they load.
//
// The reductions write (not add to) args.sum_scale and args.sum_zero_point: first partial results to `workspace`, then
// their sums in a fixed order, so that two runs give the same bits. minmax needs both results; the range of no elements
// is [+inf, -inf]. histogram takes the workspace for the range of x, which args.histogram grows to hold.
#define QT_DECLARE(name, ...) void name(const KernelArgs& args, double* workspace, cudaStream_t stream);
QT_ELEMENTWISE_KERNELS(QT_DECLARE)
QT_LEARNED_KERNELS(QT_DECLARE)
QT_OTHER_KERNELS(QT_DECLARE)
#undef QT_DECLARE

// The workspace of a kernel in float64 values; a kernel with 0 ignores it.
int64_t workspace_size(KernelId kernel, const KernelArgs& args);

// next_range() of observe.h for each of `count` ranges; skipped may be null.
template <class A>
void blend_ranges(A* lo, A* hi, const double* batch_lo, const double* batch_hi, int64_t count, bool average, A momentum,
                  int64_t* skipped, cudaStream_t stream);

// The grids that cover `count` ranges; zero_point may be null.
template <class A>
void grid_of_ranges(const A* lo, const A* hi, int64_t count, const CodeRange& codes, A* scale, A* zero_point,
                    cudaStream_t stream);

// As launch.h says; zero_point may be null.
template <class A>
void take_ranges(const A* lo, const A* hi, int64_t count, const CodeRange& codes, A* scale, A* zero_point,
                 const StepsSeen& seen, cudaStream_t stream);

// learned_gradient of fake_quant.h for `count` sums; scale (may be null) and gradient are of type `dtype`.
struct GradientsOfSums {
  const double* sums;
  double factor;
  const void* scale;
  int64_t count;
  Dtype dtype;
  void* gradient;
};
constexpr int kMostGradients = 8;
struct AllGradients {
  GradientsOfSums of[kMostGradients] = {};
  int count = 0;
};
void learned_gradients(const AllGradients& all, cudaStream_t stream);

// Batch norm and its gradients, as launch.h says. The workspace is of float64 values.
int64_t batch_norm_workspace(const BatchNormArgs& args);
void batch_norm_forward(const BatchNormArgs& args, double* workspace, cudaStream_t stream);
void batch_norm_backward(const BatchNormArgs& args, double* workspace, cudaStream_t stream);
void batch_norm_track(const TrackedStatistics& statistics, cudaStream_t stream);

void unit_scales(const UnitScales& u, cudaStream_t stream);
void unit_gradients(const UnitGradients& u, const AllGradients& before, cudaStream_t stream);
void rescale(const HeldVariance& h, const FactorChange& u, cudaStream_t stream);

// Weights of an attention, or their gradients too. The workspace is of float64 values.
int64_t attention_workspace(const AttentionWeights& args);
void attention_weights(const AttentionWeights& args, double* workspace, cudaStream_t stream);

// A whole attention, or its gradients. The workspace is of float64 values.
int64_t flash_attention_workspace(const FlashAttention& args);
void flash_attention(const FlashAttention& args, const UnitGradients& unit, const AllGradients& before,
                     double* workspace, cudaStream_t stream);

// A function with its quantizer, or its gradients. The workspace is of float64 values.
int64_t function_rows_workspace(const FunctionRows& args);
void function_rows(const FunctionRows& args, const UnitGradients& unit, const AllGradients& before, double* workspace,
                   cudaStream_t stream);

// With the small tensors of the weight's unit, unless they are made before: `unit` is null then.
void weight_forward(const WeightRows& args, const UnitScales* unit, cudaStream_t stream);
// With the gradients at the place of each row.
void weight_backward(const WeightRows& args, const UnitGradients& unit, const AllGradients& before,
                     cudaStream_t stream);

void max_pool_forward(const PoolArgs& args, cudaStream_t stream);
void max_pool_backward(const PoolArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace qtoolkit
