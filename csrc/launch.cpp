#include "launch.h"

#include "cpu/launch.h"
#ifdef QTOOLKIT_CUDA
#include "cuda/launch.h"
#endif

namespace qtoolkit {

void launch(KernelId kernel, KernelArgs& args, const GridTensors& grid, c10::Device device) {
#ifdef QTOOLKIT_CUDA
  if (device.is_cuda()) return cuda::launch(kernel, args, grid, device);
#endif
  if (args.numel > 0 || is_reduction(kernel)) cpu::launch(kernel, args, grid);
}

void blend_ranges(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum,
                  const at::Tensor* skipped) {
#ifdef QTOOLKIT_CUDA
  if (lo.is_cuda()) return cuda::blend_ranges(lo, hi, batch, momentum, skipped);
#endif
  cpu::blend_ranges(lo, hi, batch, momentum, skipped);
}

void grid_of_ranges(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes) {
#ifdef QTOOLKIT_CUDA
  if (lo.is_cuda()) return cuda::grid_of_ranges(lo, hi, grid, codes);
#endif
  cpu::grid_of_ranges(lo, hi, grid, codes);
}

void learned_gradient(const double* sums, double factor, const at::Tensor* scale, const at::Tensor& gradient) {
#ifdef QTOOLKIT_CUDA
  if (gradient.is_cuda()) return cuda::learned_gradient(sums, factor, scale, gradient);
#endif
  cpu::learned_gradient(sums, factor, scale, gradient);
}

void batch_norm_forward(BatchNormArgs& args, c10::Device device) {
#ifdef QTOOLKIT_CUDA
  if (device.is_cuda()) return cuda::batch_norm_forward(args, device);
#endif
  cpu::batch_norm_forward(args);
}

void batch_norm_backward(BatchNormArgs& args, c10::Device device) {
#ifdef QTOOLKIT_CUDA
  if (device.is_cuda()) return cuda::batch_norm_backward(args, device);
#endif
  cpu::batch_norm_backward(args);
}

void batch_norm_track(const TrackedStatistics& statistics, c10::Device device) {
#ifdef QTOOLKIT_CUDA
  if (device.is_cuda()) return cuda::batch_norm_track(statistics, device);
#endif
  cpu::batch_norm_track(statistics);
}

void max_pool_forward(const PoolArgs& args, c10::Device device) {
#ifdef QTOOLKIT_CUDA
  if (device.is_cuda()) return cuda::max_pool_forward(args, device);
#endif
  cpu::max_pool_forward(args);
}

void max_pool_backward(const PoolArgs& args, c10::Device device) {
#ifdef QTOOLKIT_CUDA
  if (device.is_cuda()) return cuda::max_pool_backward(args, device);
#endif
  cpu::max_pool_backward(args);
}

}  // namespace qtoolkit
