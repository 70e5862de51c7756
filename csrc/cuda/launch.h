#pragma once

#include "../launch.h"

namespace qtoolkit {
namespace cuda {

// All functions use the current stream of the device and do not wait for it.
void launch(KernelId kernel, KernelArgs& args, const GridTensors& grid, c10::Device device);
void blend_ranges(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum,
                  const at::Tensor* skipped);
void grid_of_ranges(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes);
void learned_gradient(const double* sums, double factor, const at::Tensor* scale, const at::Tensor& gradient);
void batch_norm_forward(const BatchNormArgs& args, c10::Device device);
void batch_norm_backward(const BatchNormArgs& args, c10::Device device);
void batch_norm_track(const TrackedStatistics& statistics, c10::Device device);
void max_pool_forward(const PoolArgs& args, c10::Device device);
void max_pool_backward(const PoolArgs& args, c10::Device device);

}  // namespace cuda
}  // namespace qtoolkit
