// One way to a device's kernels for the op bodies: the same Job, filled in from tensors, goes to either back end.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernel_args.h"
#include "layout.h"
#include "range_grid.h"

namespace qtoolkit {

enum class Op {
  fake_quant,
  fake_quant_float,
  fake_quant_log,
  block_scale,
  tensor_quant,
  fake_tensor_quant,
  fake_quant_backward,
  fake_quant_learned_backward,
  quantize,
  dequantize,
  minmax,
  histogram
};

// The tensors that a job's scale and zero point come from, as the user gave them.
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

// Runs an op on the device of its result. For the reductions, job.sum_* point to memory of that device.
void launch(Op op, Job& job, const GridTensors& grid, c10::Device device);

// lo and hi widen to, or (with a momentum) move towards, the ranges of a batch.
void blend_ranges(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum);

// Writes the grids that cover ranges to scale and (where there is one) zero point; all contiguous and of one type.
void grid_of_ranges(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes);

// The gradient of a learned scale, or (where it is null) of a zero point, by the sums of the learned backward.
void learned_gradient(const double* sums, double factor, const at::Tensor* scale, const at::Tensor& gradient);

}  // namespace qtoolkit
