#include "launch.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../layout.h"
#include "kernels.h"

namespace qtoolkit {
namespace cuda {

#define QT_ADDRESS(name, ...) name,
static constexpr void (*kKernels[])(const KernelArgs&, double*, cudaStream_t) = {
    QT_ELEMENTWISE_KERNELS(QT_ADDRESS) QT_LEARNED_KERNELS(QT_ADDRESS) QT_OTHER_KERNELS(QT_ADDRESS)};
#undef QT_ADDRESS

void launch(KernelId kernel, KernelArgs& args, const GridTensors& grid, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  at::Tensor scale, zero_point, workspace;
  if (grid.scale != nullptr) {
    scale = in_arithmetic(*grid.scale, args.is_f64());
    args.scale = scale.const_data_ptr();
  }
  if (grid.zero_point != nullptr) {
    zero_point = in_arithmetic(*grid.zero_point, args.is_f64());
    args.zero_point = zero_point.const_data_ptr();
  }
  const int64_t size = workspace_size(kernel, args);
  if (size > 0) workspace = at::empty({size}, at::TensorOptions().dtype(at::kDouble).device(device));
  kKernels[static_cast<int>(kernel)](args, size > 0 ? workspace.mutable_data_ptr<double>() : nullptr, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void blend_ranges(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum,
                  const at::Tensor* skipped) {
  const c10::cuda::CUDAGuard guard(lo.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(lo.device().index()).stream();
  const double* news = batch.const_data_ptr<double>();
  const int64_t count = lo.numel();
  const double m = momentum.value_or(0);
  int64_t* skips = skipped == nullptr ? nullptr : skipped->mutable_data_ptr<int64_t>();
  if (lo.scalar_type() == at::kDouble) {
    blend_ranges<double>(lo.mutable_data_ptr<double>(), hi.mutable_data_ptr<double>(), news, news + count, count,
                         momentum.has_value(), m, skips, stream);
  } else {
    blend_ranges<float>(lo.mutable_data_ptr<float>(), hi.mutable_data_ptr<float>(), news, news + count, count,
                        momentum.has_value(), static_cast<float>(m), skips, stream);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

namespace {

template <class A>
void grids(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes,
           cudaStream_t stream) {
  A* zero_point = grid.zero_point == nullptr ? nullptr : grid.zero_point->mutable_data_ptr<A>();
  grid_of_ranges<A>(lo.const_data_ptr<A>(), hi.const_data_ptr<A>(), lo.numel(), codes,
                    grid.scale->mutable_data_ptr<A>(), zero_point, stream);
}

}  // namespace

void grid_of_ranges(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes) {
  const c10::cuda::CUDAGuard guard(lo.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(lo.device().index()).stream();
  lo.scalar_type() == at::kDouble ? grids<double>(lo, hi, grid, codes, stream)
                                  : grids<float>(lo, hi, grid, codes, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void learned_gradient(const double* sums, double factor, const at::Tensor* scale, const at::Tensor& gradient) {
  const c10::cuda::CUDAGuard guard(gradient.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(gradient.device().index()).stream();
  const at::Tensor values = scale == nullptr ? at::Tensor() : scale->contiguous();
  learned_gradient(sums, factor, scale == nullptr ? nullptr : values.const_data_ptr(), gradient.numel(),
                   dtype_of(gradient), gradient.mutable_data_ptr(), stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

namespace {

// Calls f(stream) on the current stream of a device.
template <class F>
void on_stream(c10::Device device, F f) {
  const c10::cuda::CUDAGuard guard(device);
  f(c10::cuda::getCurrentCUDAStream(device.index()).stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void with_workspace(void (*kernels)(const BatchNormArgs&, double*, cudaStream_t), const BatchNormArgs& args,
                    c10::Device device) {
  on_stream(device, [&](cudaStream_t stream) {
    const at::Tensor workspace =
        at::empty({batch_norm_workspace(args)}, at::TensorOptions().dtype(at::kDouble).device(device));
    kernels(args, workspace.mutable_data_ptr<double>(), stream);
  });
}

}  // namespace

void batch_norm_forward(const BatchNormArgs& args, c10::Device device) {
  with_workspace(batch_norm_forward, args, device);
}

void batch_norm_backward(const BatchNormArgs& args, c10::Device device) {
  with_workspace(batch_norm_backward, args, device);
}

void batch_norm_track(const TrackedStatistics& statistics, c10::Device device) {
  on_stream(device, [&](cudaStream_t stream) { batch_norm_track(statistics, stream); });
}

void max_pool_forward(const PoolArgs& args, c10::Device device) {
  on_stream(device, [&](cudaStream_t stream) { max_pool_forward(args, stream); });
}

void max_pool_backward(const PoolArgs& args, c10::Device device) {
  on_stream(device, [&](cudaStream_t stream) { max_pool_backward(args, stream); });
}

}  // namespace cuda
}  // namespace qtoolkit
