// Elementwise kernels and the backward of learned grids, on tensors. Not for meta tensors, which have no data.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "../launch.h"

namespace qtoolkit {

// A packed mask for the elements of x; empty if it is not wanted.
at::Tensor empty_mask(const at::Tensor& x, bool wanted);

// Runs an elementwise kernel; `args` has what its functor needs besides the grid's tensors. An empty mask is not
// written.
void run_elementwise(KernelId kernel, KernelArgs args, const at::Tensor& y, const at::Tensor& mask, const at::Tensor& x,
                     const GridTensors& grid, const Channels& channels);

// The same with a grid as the user gave it. Does nothing for meta tensors.
void run_elementwise(KernelId kernel, const KernelArgs& args, const at::Tensor& y, const at::Tensor& mask,
                     const at::Tensor& x, const at::Tensor& scale, const std::optional<at::Tensor>& zero_point,
                     const Axis& axis);

// Values on a grid, their packed mask and their codes (empty_codes of layout.h, packed if they fit in 4 bits), of a
// grid of a byte; empty and undefined where they are not wanted.
struct FakeQuantized {
  at::Tensor y, mask, codes;
};

// Codes of a grid of a byte for y, of which nothing is written.
at::Tensor codes_of_grid(const char* op, const at::Tensor& y, int64_t qmin, int64_t qmax);

FakeQuantized fake_quantized(const at::Tensor& x, const at::Tensor& scale, const std::optional<at::Tensor>& zero_point,
                             int64_t qmin, int64_t qmax, bool with_mask, bool with_codes);

// The gradients of x, of a learned scale and of its zero point, which is empty without one. Those of the grid are
// written now, or later if somebody collects them.
using LearnedGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
LearnedGradients fake_quantized_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& scale,
                                         const std::optional<at::Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                         double grad_factor, LaterGradients* later);

// Writes dx by a kernel of QT_LEARNED_KERNELS, and keeps the sums of each channel. grad may be dx itself.
class LearnedSums {
 public:
  LearnedSums(KernelId kernel, KernelArgs args, const at::Tensor& dx, const at::Tensor& grad, const at::Tensor& x,
              const at::Tensor& scale, const std::optional<at::Tensor>& zero_point, const Axis& axis);

  // Writes the gradient of the scale (row 0) or of the zero point (row 1); `sign` is as in learned_gradient().
  void write_gradient(int64_t row, double factor, const at::Tensor* sign, const at::Tensor& result) const;

  // Writes the gradients of a scale and, unless it is empty, of a zero point of an integer grid, now or later.
  void write_gradients(double factor, const at::Tensor& scale, const at::Tensor& of_scale,
                       const at::Tensor& of_zero_point, LaterGradients* later) const;

  // Writes the gradient of one element that all channels share.
  void write_total(int64_t row, double factor, const at::Tensor* sign, const at::Tensor& result) const;

 private:
  at::Tensor dx_, sums_;
  Axis axis_;
};

}  // namespace qtoolkit
