#pragma once

#include "../launch.h"

namespace qtoolkit {
namespace cuda {

// On the current stream of the device; nothing waits for it.
void launch(Op op, Job& job, const GridTensors& grid, c10::Device device);
void blend_ranges(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum);

}  // namespace cuda
}  // namespace qtoolkit
