// The launch of kernels on the device of their tensors, with the same KernelArgs for each device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <optional>

#include "batch_norm/batch_norm_args.h"
#include "kernel_args.h"
#include "kernel_list.h"
#include "layer/weight_rows.h"
#include "layout.h"
#include "pool/max_pool.h"
#include "range_grid.h"
#include "unit/attention_weights.h"
#include "unit/flash_attention.h"
#include "unit/function_rows.h"
#include "unit/unit_scales.h"

namespace qtoolkit {

inline const at::Tensor* pointer(const std::optional<at::Tensor>& t) { return t.has_value() ? &*t : nullptr; }

// The tensors that KernelArgs' scale and zero point are read from, as the user gave them.
struct GridTensors {
  const at::Tensor* scale = nullptr;
  const at::Tensor* zero_point = nullptr;
};

// A scale and zero point in the order in which channels_of numbers the channels of a dense result.
class OrderedGrid {
 public:
  OrderedGrid(const at::Tensor& scale, const std::optional<at::Tensor>& zero_point, const at::Tensor& dense,
              const Axis& axis)
      : scale_(to_memory_order(scale, dense, axis)) {
    if (zero_point.has_value()) zero_point_ = to_memory_order(*zero_point, dense, axis);
  }
  GridTensors tensors() const { return {&scale_, zero_point_.defined() ? &zero_point_ : nullptr}; }

 private:
  at::Tensor scale_, zero_point_;
};

// The lowest (row 0) and highest (row 1) values of each channel of x, in float64: exact for every input dtype.
at::Tensor ranges_of(const at::Tensor& x, const Axis& axis);

// The gradient of a learned scale, or (if scale is undefined) of something else, from sums: learned_gradient of
// fake_quant.h.
struct GradientOfSums {
  const double* sums;
  double factor;
  at::Tensor scale;
  at::Tensor gradient;  // nothing is written to an empty one
};

// Gradients that are not written yet: one launch writes them, and what is computed from them. Until then their tensors
// hold nothing. On a GPU this is the launch of the gradients of a weight, a function or an attention, if there is one,
// whose sums are among theirs.
struct LaterGradients {
  c10::SmallVector<GradientOfSums, 8> all;
  std::optional<WeightRows> weight;
  std::optional<FunctionRows> function;
  std::optional<FlashAttention> attention;
  std::optional<at::Tensor> scale, zero_point;  // of the function or the attention
  c10::SmallVector<at::Tensor, 8> kept;         // that hold what these point to
};

// What is computed on the device of its tensors. CUDA's use the current stream of the device and do not wait for it.
struct DeviceKernels {
  // Whether these are a GPU's kernels. Bodies of ops ask this, and not for the device of a tensor, so that they take
  // the same branches in a test that replaces the kernels.
  bool on_gpu;

  // Runs a kernel. For the reductions, args.sum_* point to memory of the device.
  void (*launch)(KernelId kernel, KernelArgs& args, const GridTensors& grid, c10::Device device);

  // Widens lo and hi to hold the ranges of a batch; with a momentum, moves them towards those ranges. `skipped` may be
  // null; see next_range() in observe.h.
  void (*blend_ranges)(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch,
                       std::optional<double> momentum, const at::Tensor* skipped);

  // Writes the grids that cover ranges to scale and (if not null) zero point; all are contiguous and of one dtype.
  void (*grid_of_ranges)(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes);

  // Counts a step if the clock has moved, and gives the grid the ranges then if it is among the first ones.
  void (*take_ranges)(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes,
                      const StepsSeen& seen);

  // Writes up to eight gradients, all on one device.
  void (*learned_gradients)(at::ArrayRef<GradientOfSums> gradients);

  // Batch norm of x, and its gradients.
  void (*batch_norm_forward)(BatchNormArgs& args, c10::Device device);
  void (*batch_norm_backward)(BatchNormArgs& args, c10::Device device);
  void (*batch_norm_track)(const TrackedStatistics& statistics, c10::Device device);

  // Max pooling of x, and its gradient.
  void (*max_pool_forward)(const PoolArgs& args, c10::Device device);
  void (*max_pool_backward)(const PoolArgs& args, c10::Device device);

  // The rows of a weight. The same launch makes the small tensors of its unit, the factor and the scale among them,
  // unless they are made before: `unit` is null then.
  void (*weight_forward)(const WeightRows& args, const UnitScales* unit, c10::Device device);
  // The same launch writes, behind the sums of a row, the gradients at the place of that row: first `before`, and then
  // those of the unit.
  void (*weight_backward)(const WeightRows& args, const UnitGradients& unit, at::ArrayRef<GradientOfSums> before,
                          c10::Device device);

  // The small tensors of a unit, and their gradients.
  void (*unit_scales)(const UnitScales& u, c10::Device device);
  // The same launch writes the gradients `before` first: the others may be computed from them.
  void (*unit_gradients)(const UnitGradients& u, at::ArrayRef<GradientOfSums> before, c10::Device device);
  void (*rescale)(const HeldVariance& h, const FactorChange& u, c10::Device device);

  // Weights of an attention from scores, and the gradient of the scores; null where torch's ops compute them.
  void (*attention_weights)(AttentionWeights& args, const GridTensors& grid, c10::Device device);

  // A function with its quantizer, and its gradients; null likewise. Behind the sums the launch writes gradients of one
  // element: first `before`, and then those of the unit.
  void (*function_rows)(FunctionRows& args, const GridTensors& grid, const UnitGradients& unit,
                        at::ArrayRef<GradientOfSums> before, c10::Device device);
  // A whole attention, and its gradients, likewise, on a device that multiplies matrices of 16 bits.
  bool (*has_flash_attention)(c10::Device device);
  void (*flash_attention)(FlashAttention& args, const GridTensors& grid, const UnitGradients& unit,
                          at::ArrayRef<GradientOfSums> before, c10::Device device);
};

namespace cpu {
extern const DeviceKernels kDeviceKernels;
}
namespace cuda {
extern const DeviceKernels kDeviceKernels;
}

inline const DeviceKernels& on([[maybe_unused]] c10::Device device) {
#ifdef QTOOLKIT_CUDA
  if (device.is_cuda()) return cuda::kDeviceKernels;
#endif
  return cpu::kDeviceKernels;
}

// Writes gradients now, or later if somebody collects them.
inline void write_gradients(at::ArrayRef<GradientOfSums> gradients, const at::Tensor& sums, LaterGradients* later) {
  if (later == nullptr) return on(sums.device()).learned_gradients(gradients);
  later->all.append(gradients.begin(), gradients.end());
  later->kept.push_back(sums);
}

// Writes what has been collected, and the gradients of a unit that are computed from it.
inline void write_now(LaterGradients& later, const UnitGradients& unit = {}) {
  if (later.kept.empty()) return;
  const c10::Device device = later.kept[0].device();
  const DeviceKernels& kernels = on(device);
  const std::optional<WeightRows>& weight = later.weight;
  const int64_t own = largest_count(unit), places = weight ? weight->rows : later.function || later.attention ? 1 : 0;
  int64_t longest = own;
  for (const GradientOfSums& g : later.all) longest = std::max(longest, g.gradient.numel());
  const bool together = longest <= places && (own == 0 || unit.f64 == (weight && weight->f64));
  const UnitGradients of_launch = together ? unit : UnitGradients{};
  const at::ArrayRef<GradientOfSums> before = together ? later.all : at::ArrayRef<GradientOfSums>();
  const GridTensors grid = {pointer(later.scale), pointer(later.zero_point)};
  if (weight) {
    kernels.weight_backward(*weight, of_launch, before, device);
  } else if (later.function) {
    kernels.function_rows(*later.function, grid, of_launch, before, device);
  } else if (later.attention) {
    kernels.flash_attention(*later.attention, grid, of_launch, before, device);
  }
  if (!together && own > 0) {
    kernels.unit_gradients(unit, later.all, device);
  } else if (!together && !later.all.empty()) {
    kernels.learned_gradients(later.all);
  }
  later = {};
}

}  // namespace qtoolkit
