#include "launch.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../layout.h"
#include "kernels.h"

namespace qtoolkit {
namespace cuda {
namespace {

void observe_histogram(Job& job, c10::Device device, cudaStream_t stream) {
  if (job.numel == 0) return;
  const auto memory = [&](int64_t size, at::ScalarType type) {
    return at::empty({size}, at::TensorOptions().dtype(type).device(device));
  };
  const at::Tensor range = memory(2, at::kDouble), workspace = memory(workspace_size(job), at::kDouble);
  const at::Tensor room = memory(job.histogram.bins, at::kLong);
  job.sum_scale = range.mutable_data_ptr<double>();
  job.sum_zero_point = job.sum_scale + 1;
  minmax(job, workspace.mutable_data_ptr<double>(), stream);
  histogram(job, job.sum_scale, room.mutable_data_ptr<int64_t>(), stream);
}

}  // namespace

void launch(Op op, Job& job, const GridTensors& grid, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  const bool f64 = op == Op::dequantize ? job.y_dtype == Dtype::f64 : job.x.dtype == Dtype::f64;
  at::Tensor scale, zero_point;
  if (grid.scale != nullptr) {
    scale = in_arithmetic(*grid.scale, f64);
    job.scale = scale.const_data_ptr();
  }
  if (grid.zero_point != nullptr) {
    zero_point = in_arithmetic(*grid.zero_point, f64);
    job.zero_point = zero_point.const_data_ptr();
  }
  const auto workspace = [&] {
    return at::empty({workspace_size(job)}, at::TensorOptions().dtype(at::kDouble).device(device));
  };
  switch (op) {
    case Op::fake_quant: fake_quant(job, stream); break;
    case Op::fake_quant_float: fake_quant_float(job, stream); break;
    case Op::fake_quant_log: fake_quant_log(job, stream); break;
    case Op::block_scale: block_scale(job, stream); break;
    case Op::tensor_quant: tensor_quant(job, stream); break;
    case Op::fake_tensor_quant: fake_tensor_quant(job, stream); break;
    case Op::fake_quant_backward: fake_quant_backward(job, stream); break;
    case Op::fake_quant_learned_backward:
      fake_quant_learned_backward(job, workspace().mutable_data_ptr<double>(), stream);
      break;
    case Op::quantize: quantize(job, stream); break;
    case Op::dequantize: dequantize(job, stream); break;
    case Op::minmax: minmax(job, workspace().mutable_data_ptr<double>(), stream); break;
    case Op::histogram: observe_histogram(job, device, stream); break;
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void blend_ranges(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum) {
  const c10::cuda::CUDAGuard guard(lo.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(lo.device().index()).stream();
  const double* news = batch.const_data_ptr<double>();
  const int64_t count = lo.numel();
  const double m = momentum.value_or(0);
  if (lo.scalar_type() == at::kDouble) {
    blend_ranges<double>(lo.mutable_data_ptr<double>(), hi.mutable_data_ptr<double>(), news, news + count, count,
                         momentum.has_value(), m, stream);
  } else {
    blend_ranges<float>(lo.mutable_data_ptr<float>(), hi.mutable_data_ptr<float>(), news, news + count, count,
                        momentum.has_value(), static_cast<float>(m), stream);
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

}  // namespace cuda
}  // namespace qtoolkit
