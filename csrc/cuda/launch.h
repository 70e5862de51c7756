#pragma once

#include "../launch.h"

namespace qtoolkit {
namespace cuda {

// On the current stream of the device; nothing waits for it.
void launch(Op op, Job& job, const GridTensors& grid, c10::Device device);
void blend_ranges(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum);
void grid_of_ranges(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes);
void learned_gradient(const double* sums, double factor, const at::Tensor* scale, const at::Tensor& gradient);

}  // namespace cuda
}  // namespace qtoolkit
