#pragma once

#include "../batch_norm_args.h"
#include "../launch.h"

namespace qtoolkit {
namespace cpu {

// The instruction set in use: "avx512", "avx2" or "plain".
const char* instruction_set();

void launch(KernelId kernel, KernelArgs& args, const GridTensors& grid);
void blend_ranges(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum,
                  const at::Tensor* skipped);
void grid_of_ranges(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes);
void learned_gradient(const double* sums, double factor, const at::Tensor* scale, const at::Tensor& gradient);

// See launch.h.
void batch_norm_forward(BatchNormArgs& args);
void batch_norm_backward(BatchNormArgs& args);
void batch_norm_track(const TrackedStatistics& statistics);
void max_pool_forward(const PoolArgs& args);
void max_pool_backward(const PoolArgs& args);

}  // namespace cpu
}  // namespace qtoolkit
