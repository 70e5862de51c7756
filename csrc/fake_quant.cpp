// Fake quantization for CPU and CUDA: checks, result, Job.
#include "fake_quant.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "bodies.h"
#include "checks.h"
#include "launch.h"
#include "layout.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

// An op that maps x element by element; `job` brings what its rule needs beside the grid's tensors.
std::tuple<Tensor, Tensor> map_onto(Tensor y, Op op, Job& job, const Tensor& x, const GridTensors& grid,
                                    const Channels& channels, bool with_mask) {
  Tensor in = x;
  Tensor mask = at::empty({with_mask ? (x.numel() + 7) / 8 : 0}, x.options().dtype(at::kByte));
  job.numel = x.numel();
  job.channels = channels;
  job.y = y.mutable_data_ptr();
  job.x = operand_of(in, y);
  job.y_dtype = job.x.dtype;
  job.mask = with_mask ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  launch(op, job, grid, x.device());
  return {y, mask};
}

std::tuple<Tensor, Tensor> map(Op op, Job& job, const Tensor& x, const Tensor& scale,
                               const optional<Tensor>& zero_point, const Axis& axis, bool with_mask) {
  const Tensor y = empty_result(x, x.options(), axis.group);
  const OrderedGrid grid(scale, zero_point, y, axis);
  return map_onto(y, op, job, x, grid.tensors(), channels_of(y, axis, scale.numel()), with_mask);
}

std::tuple<Tensor, Tensor> fake_quant(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                      int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                      int64_t block_size, double /*grad_factor*/, bool with_mask) {
  check_storage("fake_quant", "x", x);
  check_range("fake_quant", qmin, qmax);
  const Axis a = check_grid("fake_quant", x, scale, zero_point, axis, group, block_size);
  const Tensor y = empty_result(x, x.options(), group);
  return fake_quant_onto(y, x, scale, zero_point, qmin, qmax, a, with_mask);
}

// Where x is not laid out as a result is (it has gaps, say), the result is made beside it and copied.
Tensor fake_quant_(Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                   optional<int64_t> axis, int64_t group, int64_t block_size, bool with_mask) {
  const Axis a = check_fake_quant_(x, scale, zero_point, qmin, qmax, axis, group, block_size);
  if (layout_of_result(x, group).is_same(x)) {
    return std::get<1>(fake_quant_onto(x, x, scale, zero_point, qmin, qmax, a, with_mask));
  }
  const Tensor beside = empty_result(x, x.options(), group);
  auto [y, mask] = fake_quant_onto(beside, x, scale, zero_point, qmin, qmax, a, with_mask);
  x.copy_(y);
  return mask;
}

std::tuple<Tensor, Tensor> fake_quant_float(const Tensor& x, const Tensor& scale, std::string_view format,
                                            optional<int64_t> axis, int64_t group, int64_t block_size, bool with_mask) {
  constexpr const char* kOp = "fake_quant_float";
  check_storage(kOp, "x", x);
  Job job;
  const optional<FloatFormat> small = check_format(kOp, format);
  job.format = small.value_or(FloatFormat{});
  const Axis a = check_grid(kOp, x, scale, std::nullopt, axis, group, block_size);
  const Op which = small.has_value() ? Op::fake_quant_float : Op::fake_quant_log;
  return map(which, job, x, scale, std::nullopt, a, with_mask);
}

// y, a row-major tensor, is only asked for its order.
Tensor scales_of_blocks(Job job, const Tensor& x, const Tensor& y, int64_t block_size,
                        const optional<Tensor>& tensor_scale) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() /= block_size;
  Tensor in = x;
  Tensor scales = at::empty(sizes, x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  job.numel = scales.numel();
  job.channels.inner = block_size;
  job.x = operand_of(in, y);
  job.y = scales.mutable_data_ptr();
  job.y_dtype = dtype_of(scales);
  launch(Op::block_scale, job, {tensor_scale.has_value() ? &*tensor_scale : nullptr, nullptr}, x.device());
  return scales;
}

std::tuple<Tensor, Tensor, Tensor> fake_quant_block(const Tensor& x, std::string_view format, int64_t block_size,
                                                    std::string_view scale_format, const optional<Tensor>& tensor_scale,
                                                    bool with_mask) {
  constexpr const char* kOp = "fake_quant_block";
  check_storage(kOp, "x", x);
  Job job;
  job.format = check_small_float(kOp, format);
  job.scale_format = check_blocks(kOp, x, block_size, scale_format, tensor_scale);
  const Tensor y = at::empty(x.sizes(), x.options());
  const Tensor scales = scales_of_blocks(job, x, y, block_size, tensor_scale);
  const Channels blocks = channels_of(y, {x.dim() - 1, 1, block_size}, scales.numel());
  auto [values, mask] = map_onto(y, Op::fake_quant_float, job, x, {&scales, nullptr}, blocks, with_mask);
  return {values, scales, mask};
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
                                                               int64_t block_size, double grad_factor) {
  constexpr const char* kOp = "fake_quant_learned_backward";
  check_storage(kOp, "x", x);
  check_storage(kOp, "grad", grad);
  check_range(kOp, qmin, qmax);
  check_same_shape(kOp, "grad", grad, x);
  const Axis a = check_grid(kOp, x, scale, zero_point, axis, group, block_size);
  Tensor in = x, grad_in = as_type(grad, x.scalar_type()), dx = empty_result(x, x.options(), group);
  Tensor sums = at::empty({2, scale.numel()}, x.options().dtype(at::kDouble));
  Job job;
  job.numel = x.numel();
  job.channels = channels_of(dx, a, scale.numel());
  job.x = operand_of(in, dx);
  job.grad = operand_of(grad_in, dx);
  job.y = dx.mutable_data_ptr();
  job.y_dtype = job.x.dtype;
  job.ends = representable(qmin, qmax, x);
  job.sum_scale = sums.mutable_data_ptr<double>();
  job.sum_zero_point = zero_point.has_value() ? job.sum_scale + scale.numel() : nullptr;
  const OrderedGrid grid(scale, zero_point, dx, a);
  launch(Op::fake_quant_learned_backward, job, grid.tensors(), x.device());

  const auto gradient = [&](int64_t row, const Tensor& of, const Tensor* sign) {
    const Tensor sum = from_memory_order(sums.select(0, row), dx, a);
    const Tensor result = at::empty(of.sizes(), of.options());
    learned_gradient(sum.const_data_ptr<double>(), grad_factor, sign, result);
    return result;
  };
  const Tensor ds = gradient(0, scale, &scale);
  return {dx, ds, zero_point.has_value() ? gradient(1, *zero_point, nullptr) : at::empty({0}, scale.options())};
}

// ---- pytorch-quantization ---------------------------------------------------------------------------------------

Ends legacy_ends(int64_t num_bits, bool is_unsigned, bool narrow_range) {
  const double most = static_cast<double>((int64_t{1} << (num_bits - 1 + is_unsigned)) - 1);
  return {is_unsigned ? 0 : narrow_range ? -most : -most - 1, most};
}

std::tuple<Tensor, Tensor> legacy(Op which, const char* op, const Tensor& x, const Tensor& amax, int64_t num_bits,
                                  bool is_unsigned, bool narrow_range, bool with_mask) {
  check_storage(op, "x", x);
  check_bits(op, num_bits);
  const Axis axis = {check_amax(op, x, amax)};
  Job job;
  job.ends = legacy_ends(num_bits, is_unsigned, narrow_range);
  return map(which, job, x, amax, std::nullopt, axis, with_mask);
}

std::tuple<Tensor, Tensor, Tensor> tensor_quant(const Tensor& x, const Tensor& amax, int64_t num_bits, bool is_unsigned,
                                                bool narrow_range, bool with_mask) {
  auto [codes, mask] =
      legacy(Op::tensor_quant, "tensor_quant", x, amax, num_bits, is_unsigned, narrow_range, with_mask);
  const Tensor wide = amax.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).abs();
  const Tensor most = at::full_like(wide, legacy_ends(num_bits, is_unsigned, narrow_range).hi);
  const Tensor multiplier = most.div(wide).masked_fill_(wide.le(0x1p-24), 1);
  return {codes, multiplier.to(x.scalar_type()), mask};
}

std::tuple<Tensor, Tensor> fake_tensor_quant(const Tensor& x, const Tensor& amax, int64_t num_bits, bool is_unsigned,
                                             bool narrow_range, bool with_mask) {
  return legacy(Op::fake_tensor_quant, "fake_tensor_quant", x, amax, num_bits, is_unsigned, narrow_range, with_mask);
}

}  // namespace

std::tuple<Tensor, Tensor> fake_quant_onto(const Tensor& y, const Tensor& x, const Tensor& scale,
                                           const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                           const Axis& axis, bool with_mask) {
  Job job;
  job.ends = representable(qmin, qmax, x);
  const OrderedGrid grid(scale, zero_point, y, axis);
  return map_onto(y, Op::fake_quant, job, x, grid.tensors(), channels_of(y, axis, scale.numel()), with_mask);
}

TORCH_LIBRARY_IMPL(qtoolkit, CPU, m) {
  m.impl("fake_quant", fake_quant);
  m.impl("fake_quant_", fake_quant_);
  m.impl("fake_quant_float", fake_quant_float);
  m.impl("fake_quant_block", fake_quant_block);
  m.impl("tensor_quant", tensor_quant);
  m.impl("fake_tensor_quant", fake_tensor_quant);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("fake_quant_learned_backward", fake_quant_learned_backward);
}

#ifdef QTOOLKIT_CUDA
TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) {
  m.impl("fake_quant", fake_quant);
  m.impl("fake_quant_", fake_quant_);
  m.impl("fake_quant_float", fake_quant_float);
  m.impl("fake_quant_block", fake_quant_block);
  m.impl("tensor_quant", tensor_quant);
  m.impl("fake_tensor_quant", fake_tensor_quant);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("fake_quant_learned_backward", fake_quant_learned_backward);
}
#endif

}  // namespace qtoolkit
