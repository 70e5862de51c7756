// Fake quantization for CPU and CUDA: checks, result, Job.
#include "fake_quant.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "checks.h"
#include "launch.h"
#include "layout.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

const Tensor* pointer(const optional<Tensor>& t) { return t.has_value() ? &*t : nullptr; }

std::tuple<Tensor, Tensor> fake_quant(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                      int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                      double /*grad_factor*/, bool with_mask) {
  check_storage("fake_quant", "x", x);
  check_range("fake_quant", qmin, qmax);
  const int64_t a = check_grid("fake_quant", x, scale, zero_point, axis, group);
  Tensor in = x, y = empty_result(x, x.options(), group);
  Tensor mask = at::empty({with_mask ? (x.numel() + 7) / 8 : 0}, x.options().dtype(at::kByte));
  Job job;
  job.numel = x.numel();
  job.channels = channels_of(y, a, group, scale.numel());
  job.x = operand_of(in, y);
  job.y = y.mutable_data_ptr();
  job.y_dtype = job.x.dtype;
  job.mask = with_mask ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  job.ends = representable(qmin, qmax, x);
  launch(Op::fake_quant, job, {&scale, pointer(zero_point)}, x.device());
  return {y, mask};
}

Tensor fake_quant_backward(const Tensor& grad, const Tensor& mask, at::IntArrayRef order) {
  check_storage("fake_quant_backward", "grad", grad);
  check_mask("fake_quant_backward", mask, grad, order);
  Tensor in = grad, dx = empty_in_order(grad, order);
  Job job;
  job.numel = grad.numel();
  job.grad = operand_of(in, dx);
  job.x.dtype = job.y_dtype = job.grad.dtype;
  job.y = dx.mutable_data_ptr();
  job.mask = const_cast<uint8_t*>(mask.const_data_ptr<uint8_t>());  // only read
  launch(Op::fake_quant_backward, job, {}, grad.device());
  return dx;
}

std::tuple<Tensor, Tensor, Tensor> fake_quant_learned_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                               const optional<Tensor>& zero_point, int64_t qmin,
                                                               int64_t qmax, optional<int64_t> axis, int64_t group,
                                                               double grad_factor) {
  constexpr const char* kOp = "fake_quant_learned_backward";
  check_storage(kOp, "x", x);
  check_storage(kOp, "grad", grad);
  check_range(kOp, qmin, qmax);
  check_same_shape(kOp, "grad", grad, x);
  const int64_t a = check_grid(kOp, x, scale, zero_point, axis, group);
  Tensor in = x, grad_in = grad.to(x.scalar_type()), dx = empty_result(x, x.options(), group);
  Tensor sums = at::empty({2, scale.numel()}, x.options().dtype(at::kDouble));
  Job job;
  job.numel = x.numel();
  job.channels = channels_of(dx, a, group, scale.numel());
  job.x = operand_of(in, dx);
  job.grad = operand_of(grad_in, dx);
  job.y = dx.mutable_data_ptr();
  job.y_dtype = job.x.dtype;
  job.ends = representable(qmin, qmax, x);
  job.sum_scale = sums.mutable_data_ptr<double>();
  job.sum_zero_point = zero_point.has_value() ? job.sum_scale + scale.numel() : nullptr;
  launch(Op::fake_quant_learned_backward, job, {&scale, pointer(zero_point)}, x.device());

  // The scale counts by its magnitude (usable_scale), so its gradient has its sign.
  const Tensor sign = scale.ge(0).to(scale.scalar_type()).mul_(2).sub_(1);
  const Tensor ds = sums.select(0, 0).mul(grad_factor).to(scale.scalar_type()).view(scale.sizes()).mul_(sign);
  Tensor dz;
  if (zero_point.has_value()) {
    dz = sums.select(0, 1).mul(grad_factor).to(zero_point->scalar_type()).view(zero_point->sizes());
  } else {
    dz = at::empty({0}, scale.options());
  }
  return {dx, ds, dz};
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, CPU, m) {
  m.impl("fake_quant", fake_quant);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("fake_quant_learned_backward", fake_quant_learned_backward);
}

#ifdef QTOOLKIT_CUDA
TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) {
  m.impl("fake_quant", fake_quant);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("fake_quant_learned_backward", fake_quant_learned_backward);
}
#endif

}  // namespace qtoolkit
