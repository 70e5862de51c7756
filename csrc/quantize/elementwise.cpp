#include "elementwise.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include "../layout.h"

namespace qtoolkit {

using at::Tensor;

Tensor empty_mask(const Tensor& x, bool wanted) {
  return at::empty_symint({wanted ? (x.sym_numel() + 7) / 8 : 0}, x.options().dtype(at::kByte));
}

void run_elementwise(KernelId kernel, KernelArgs args, const Tensor& y, const Tensor& mask, const Tensor& x,
                     const GridTensors& grid, const Channels& channels) {
  Tensor in = x;
  args.numel = x.numel();
  args.channels = channels;
  args.y = y.mutable_data_ptr();
  args.x = operand_of(in, y);
  args.y_dtype = args.x.dtype;
  args.mask = mask.numel() > 0 ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  on(x.device()).launch(kernel, args, grid, x.device());
}

void run_elementwise(KernelId kernel, const KernelArgs& args, const Tensor& y, const Tensor& mask, const Tensor& x,
                     const Tensor& scale, const std::optional<Tensor>& zero_point, const Axis& axis) {
  if (y.is_meta()) return;
  const OrderedGrid grid(scale, zero_point, y, axis);
  run_elementwise(kernel, args, y, mask, x, grid.tensors(), channels_of(y, axis, scale.numel()));
}

// The soft staircase's zero point, a steepness, has no sum of its own: its gradient is row 0.
LearnedSums::LearnedSums(KernelId kernel, KernelArgs args, const Tensor& dx, const Tensor& grad, const Tensor& x,
                         const Tensor& scale, const std::optional<Tensor>& zero_point, const Axis& axis)
    : dx_(dx), sums_(at::empty({2, scale.numel()}, x.options().dtype(at::kDouble))), axis_(axis) {
  Tensor in = x, grad_in = as_type(grad, x.scalar_type());
  const bool both = zero_point.has_value() && kernel != KernelId::soft_backward;
  args.numel = x.numel();
  args.channels = channels_of(dx, axis, scale.numel());
  args.x = operand_of(in, dx);
  args.grad = operand_of(grad_in, dx);
  args.y = dx.mutable_data_ptr();
  args.y_dtype = args.x.dtype;
  args.sum_scale = sums_.mutable_data_ptr<double>();
  args.sum_zero_point = both ? args.sum_scale + scale.numel() : nullptr;
  const OrderedGrid grid(scale, zero_point, dx, axis);
  on(x.device()).launch(kernel, args, grid.tensors(), x.device());
}

void LearnedSums::write_gradient(int64_t row, double factor, const Tensor* sign, const Tensor& result) const {
  const Tensor sum = from_memory_order(sums_.select(0, row), dx_, axis_);
  on(sum.device())
      .learned_gradients(
          GradientOfSums{sum.const_data_ptr<double>(), factor, sign == nullptr ? Tensor() : *sign, result});
}

void LearnedSums::write_gradients(double factor, const Tensor& scale, const Tensor& of_scale,
                                  const Tensor& of_zero_point, LaterGradients* later) const {
  std::array<Tensor, 2> rows;
  for (int64_t row = 0; row < 2; ++row) rows[row] = from_memory_order(sums_.select(0, row), dx_, axis_);
  c10::SmallVector<GradientOfSums, 2> all = {{rows[0].const_data_ptr<double>(), factor, scale, of_scale}};
  if (of_zero_point.numel() > 0) all.push_back({rows[1].const_data_ptr<double>(), factor, {}, of_zero_point});
  qtoolkit::write_gradients(all, rows[0], later);
  if (later != nullptr) later->kept.push_back(rows[1]);
}

void LearnedSums::write_total(int64_t row, double factor, const Tensor* sign, const Tensor& result) const {
  const Tensor sum = sums_.select(0, row).sum();
  on(sum.device())
      .learned_gradients(
          GradientOfSums{sum.const_data_ptr<double>(), factor, sign == nullptr ? Tensor() : *sign, result});
}

}  // namespace qtoolkit
