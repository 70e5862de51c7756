// The launch of CUDA kernels on the current stream of a device.
#include "../launch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../layout.h"
#include "kernels.h"

namespace qtoolkit {
namespace cuda {

namespace {

#define QT_ADDRESS(name, ...) name,
constexpr void (*kKernels[])(const KernelArgs&, double*, cudaStream_t) = {
    QT_ELEMENTWISE_KERNELS(QT_ADDRESS) QT_LEARNED_KERNELS(QT_ADDRESS) QT_OTHER_KERNELS(QT_ADDRESS)};
#undef QT_ADDRESS

// Calls f(stream).
template <class F>
void on_stream(c10::Device device, F f) {
  const c10::cuda::CUDAGuard guard(device);
  f(c10::cuda::getCurrentCUDAStream(device.index()).stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor empty_workspace(int64_t size, c10::Device device) {
  return at::empty({size}, at::TensorOptions().dtype(at::kDouble).device(device));
}

// Points arguments to a scale and a zero point in the type of the arithmetic, which live as long as this.
struct GridOnDevice {
  at::Tensor scale, zero_point;

  template <class Args>
  GridOnDevice(const GridTensors& grid, bool f64, Args& args) {
    if (grid.scale != nullptr) {
      scale = in_arithmetic(*grid.scale, f64);
      args.scale = scale.const_data_ptr();
    }
    if (grid.zero_point != nullptr) {
      zero_point = in_arithmetic(*grid.zero_point, f64);
      args.zero_point = zero_point.const_data_ptr();
    }
  }
};

// A type of the same size, of which copies keep all bits.
at::ScalarType bits_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: return at::kLong;
    case Dtype::f32:
    case Dtype::i32: return at::kInt;
    case Dtype::bf16:
    case Dtype::f16:
    case Dtype::i16:
    case Dtype::u16: return at::kShort;
    default: return at::kByte;
  }
}

// Makes an operand dense, by a copy that lives as long as this. Kernels that read strides, which few steps need, were
// nearly half of what the CUDA sources take to compile.
struct DenseOperand {
  at::Tensor copy;

  DenseOperand(Operand& operand, c10::Device device) {
    if (operand.dense) return;
    const at::IntArrayRef size(operand.size, operand.dims), stride(operand.stride, operand.dims);
    const auto options = at::TensorOptions().dtype(bits_of(operand.dtype)).device(device);
    copy = at::for_blob(const_cast<void*>(operand.data), size)
               .strides(stride)
               .options(options)
               .target_device(device)
               .make_tensor()
               .contiguous();
    operand.data = copy.const_data_ptr();
    operand.dense = true;
  }
};

void launch(KernelId kernel, KernelArgs& args, const GridTensors& grid, c10::Device device) {
  on_stream(device, [&](cudaStream_t stream) {
    const DenseOperand x(args.x, device), grad(args.grad, device);
    const GridOnDevice values(grid, args.is_f64(), args);
    at::Tensor workspace;
    const int64_t size = workspace_size(kernel, args);
    if (size > 0) workspace = empty_workspace(size, device);
    kKernels[static_cast<int>(kernel)](args, size > 0 ? workspace.mutable_data_ptr<double>() : nullptr, stream);
  });
}

template <class A>
void blend(const at::Tensor& lo, const at::Tensor& hi, const double* batch, std::optional<double> momentum,
           int64_t* skipped, cudaStream_t stream) {
  blend_ranges<A>(lo.mutable_data_ptr<A>(), hi.mutable_data_ptr<A>(), batch, batch + lo.numel(), lo.numel(),
                  momentum.has_value(), static_cast<A>(momentum.value_or(0)), skipped, stream);
}

template <class A>
void grids(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes,
           cudaStream_t stream) {
  A* zero_point = grid.zero_point == nullptr ? nullptr : grid.zero_point->mutable_data_ptr<A>();
  grid_of_ranges<A>(lo.const_data_ptr<A>(), hi.const_data_ptr<A>(), lo.numel(), codes,
                    grid.scale->mutable_data_ptr<A>(), zero_point, stream);
}

template <class A>
void take_ranges_of_step(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes,
                         const StepsSeen& seen, cudaStream_t stream) {
  A* zero_point = grid.zero_point == nullptr ? nullptr : grid.zero_point->mutable_data_ptr<A>();
  take_ranges<A>(lo.const_data_ptr<A>(), hi.const_data_ptr<A>(), lo.numel(), codes, grid.scale->mutable_data_ptr<A>(),
                 zero_point, seen, stream);
}

void with_workspace(void (*kernels)(const BatchNormArgs&, double*, cudaStream_t), const BatchNormArgs& args,
                    c10::Device device) {
  on_stream(device, [&](cudaStream_t stream) {
    const at::Tensor workspace = empty_workspace(batch_norm_workspace(args), device);
    kernels(args, workspace.mutable_data_ptr<double>(), stream);
  });
}

void weights_of_attention(AttentionWeights& args, const GridTensors& grid, c10::Device device) {
  on_stream(device, [&](cudaStream_t stream) {
    const GridOnDevice values(grid, /*f64=*/false, args);
    const at::Tensor workspace = empty_workspace(attention_workspace(args), device);
    attention_weights(args, workspace.mutable_data_ptr<double>(), stream);
  });
}

// As kernels take them. The scales are copied where they are not contiguous.
struct GradientsOnDevice {
  AllGradients all;
  std::vector<at::Tensor> scales;

  explicit GradientsOnDevice(at::ArrayRef<GradientOfSums> gradients) {
    for (const GradientOfSums& g : gradients) {
      if (g.gradient.numel() == 0) continue;
      TORCH_INTERNAL_ASSERT(all.count < kMostGradients);
      scales.push_back(g.scale.defined() ? g.scale.contiguous() : at::Tensor());
      all.of[all.count++] = {g.sums,
                             g.factor,
                             g.scale.defined() ? scales.back().const_data_ptr() : nullptr,
                             g.gradient.numel(),
                             dtype_of(g.gradient),
                             g.gradient.mutable_data_ptr()};
    }
  }
};

void rows_of_function(FunctionRows& args, const GridTensors& grid, const UnitGradients& unit,
                      at::ArrayRef<GradientOfSums> before, c10::Device device) {
  const GradientsOnDevice given(before);
  const AllGradients& all = given.all;
  on_stream(device, [&](cudaStream_t stream) {
    const GridOnDevice values(grid, /*f64=*/false, args);
    const at::Tensor workspace = empty_workspace(function_rows_workspace(args), device);
    function_rows(args, unit, all, workspace.mutable_data_ptr<double>(), stream);
  });
}

// Whether a GPU has the instructions of mma.cuh.
bool multiplies_matrices(c10::Device device) {
  int generation = 0;
  return cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device.index()) == cudaSuccess &&
         generation >= 8;
}

void whole_attention(FlashAttention& args, const GridTensors& grid, const UnitGradients& unit,
                     at::ArrayRef<GradientOfSums> before, c10::Device device) {
  const GradientsOnDevice given(before);
  const AllGradients& all = given.all;
  on_stream(device, [&](cudaStream_t stream) {
    const GridOnDevice values(grid, /*f64=*/false, args);
    const at::Tensor workspace = empty_workspace(flash_attention_workspace(args), device);
    flash_attention(args, unit, all, workspace.mutable_data_ptr<double>(), stream);
  });
}

void gradients_of_sums(at::ArrayRef<GradientOfSums> gradients) {
  const GradientsOnDevice given(gradients);
  if (given.all.count == 0) return;
  on_stream(gradients[0].gradient.device(), [&](cudaStream_t stream) { learned_gradients(given.all, stream); });
}

}  // namespace

const DeviceKernels kDeviceKernels = {
    /*on_gpu=*/true,
    launch,
    [](const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum,
       const at::Tensor* skipped) {
      int64_t* skips = skipped == nullptr ? nullptr : skipped->mutable_data_ptr<int64_t>();
      const auto blends = lo.scalar_type() == at::kDouble ? blend<double> : blend<float>;
      on_stream(lo.device(),
                [&](cudaStream_t stream) { blends(lo, hi, batch.const_data_ptr<double>(), momentum, skips, stream); });
    },
    [](const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes) {
      const auto covers = lo.scalar_type() == at::kDouble ? grids<double> : grids<float>;
      on_stream(lo.device(), [&](cudaStream_t stream) { covers(lo, hi, grid, codes, stream); });
    },
    [](const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes,
       const StepsSeen& seen) {
      const auto takes = lo.scalar_type() == at::kDouble ? take_ranges_of_step<double> : take_ranges_of_step<float>;
      on_stream(lo.device(), [&](cudaStream_t stream) { takes(lo, hi, grid, codes, seen, stream); });
    },
    gradients_of_sums,
    [](BatchNormArgs& args, c10::Device device) { with_workspace(batch_norm_forward, args, device); },
    [](BatchNormArgs& args, c10::Device device) { with_workspace(batch_norm_backward, args, device); },
    [](const TrackedStatistics& statistics, c10::Device device) {
      on_stream(device, [&](cudaStream_t stream) { batch_norm_track(statistics, stream); });
    },
    [](const PoolArgs& args, c10::Device device) {
      on_stream(device, [&](cudaStream_t stream) { max_pool_forward(args, stream); });
    },
    [](const PoolArgs& args, c10::Device device) {
      on_stream(device, [&](cudaStream_t stream) { max_pool_backward(args, stream); });
    },
    [](const WeightRows& args, const UnitScales* unit, c10::Device device) {
      on_stream(device, [&](cudaStream_t stream) { weight_forward(args, unit, stream); });
    },
    [](const WeightRows& args, const UnitGradients& u, at::ArrayRef<GradientOfSums> before, c10::Device device) {
      const GradientsOnDevice given(before);
      const AllGradients& all = given.all;
      on_stream(device, [&](cudaStream_t stream) { weight_backward(args, u, all, stream); });
    },
    [](const UnitScales& u, c10::Device device) {
      on_stream(device, [&](cudaStream_t stream) { unit_scales(u, stream); });
    },
    [](const UnitGradients& u, at::ArrayRef<GradientOfSums> before, c10::Device device) {
      const GradientsOnDevice given(before);
      const AllGradients& all = given.all;
      on_stream(device, [&](cudaStream_t stream) { unit_gradients(u, all, stream); });
    },
    [](const HeldVariance& h, const FactorChange& u, c10::Device device) {
      on_stream(device, [&](cudaStream_t stream) { rescale(h, u, stream); });
    },
    weights_of_attention,
    rows_of_function,
    multiplies_matrices,
    whole_attention};

}  // namespace cuda
}  // namespace qtoolkit
