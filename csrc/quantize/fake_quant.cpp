// The bodies of the fake quantization ops: checks, results, kernel arguments.
#include "../fake_quant.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>

#include <cmath>
#include <tuple>

#include "../autograd/float16_scale.h"
#include "../checks.h"
#include "../launch.h"
#include "../layout.h"
#include "../observe/observer_checks.h"
#include "../registration.h"
#include "elementwise.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

// The results of an elementwise op: values like x, and the packed mask (empty if it is not wanted).
std::tuple<Tensor, Tensor> empty_results(const Tensor& x, int64_t group, bool with_mask) {
  return {empty_result(x, x.options(), group), empty_mask(x, with_mask)};
}

void fake_quant_onto(const Tensor& y, const Tensor& mask, const Tensor& x, const Tensor& scale,
                     const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax, const Axis& axis,
                     const Tensor& codes = {}) {
  KernelArgs args;
  if (codes.defined() && !codes.is_meta() && codes.numel() > 0) {
    args.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
    args.packed = fit_4_bits(qmin, qmax);
  }
  args.bounds = representable(qmin, qmax, x);
  run_elementwise(KernelId::fake_quant, args, y, mask, x, scale, zero_point, axis);
}

std::tuple<Tensor, Tensor> fake_quant(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                      int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                      int64_t block_size, double /*grad_factor*/, bool with_mask) {
  check_float("fake_quant", "x", x);
  check_code_range("fake_quant", qmin, qmax);
  const Axis a = check_grid("fake_quant", x, scale, zero_point, axis, group, block_size);
  auto [y, mask] = empty_results(x, group, with_mask);
  fake_quant_onto(y, mask, x, scale, zero_point, qmin, qmax, a);
  return {y, mask};
}

// If the layout of x is not that of a result (x has gaps, for example), the result is computed separately and copied.
Tensor fake_quant_(Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                   optional<int64_t> axis, int64_t group, int64_t block_size, bool with_mask) {
  const Axis a = check_fake_quant_(x, scale, zero_point, qmin, qmax, axis, group, block_size);
  const Tensor mask = empty_mask(x, with_mask);
  if (mask.is_meta()) return mask;
  const bool in_place = layout_of_result(x, group).is_same(x);
  const Tensor y = in_place ? x : empty_result(x, x.options(), group);
  fake_quant_onto(y, mask, x, scale, zero_point, qmin, qmax, a);
  if (!in_place) x.copy_(y);
  return mask;
}

std::tuple<Tensor, Tensor> observe_fake_quant(const Tensor& x, Tensor& lo, Tensor& hi, Tensor& scale,
                                              const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                              optional<double> momentum, bool pow2_scale, bool float16_scale,
                                              optional<int64_t> axis, int64_t group, int64_t block_size,
                                              const optional<Tensor>& skipped, bool with_mask) {
  const Axis a =
      check_observe_fake_quant(x, lo, hi, scale, zero_point, qmin, qmax, momentum, axis, group, block_size, skipped);
  auto [y, mask] = empty_results(x, group, with_mask);
  if (y.is_meta()) return {y, mask};
  const CodeRange codes = {static_cast<double>(qmin), static_cast<double>(qmax), !zero_point.has_value(), pow2_scale};
  on(x.device()).blend_ranges(lo, hi, ranges_of(x, a), momentum, pointer(skipped));
  on(x.device()).grid_of_ranges(lo, hi, {&scale, pointer(zero_point)}, codes);
  fake_quant_onto(y, mask, x, float16_scale ? float16_scales(scale) : scale, zero_point, qmin, qmax, a);
  return {y, mask};
}

std::tuple<Tensor, Tensor> fake_quant_float(const Tensor& x, const Tensor& scale, std::string_view format,
                                            optional<int64_t> axis, int64_t group, int64_t block_size, bool with_mask) {
  constexpr const char* kOp = "fake_quant_float";
  check_float(kOp, "x", x);
  KernelArgs args;
  const optional<FloatFormat> small = check_format(kOp, format);
  args.format = small.value_or(FloatFormat{});
  const Axis a = check_grid(kOp, x, scale, std::nullopt, axis, group, block_size);
  auto [y, mask] = empty_results(x, group, with_mask);
  run_elementwise(small ? KernelId::fake_quant_float : KernelId::fake_quant_log, args, y, mask, x, scale, std::nullopt,
                  a);
  return {y, mask};
}

// Writes the scales of blocks. y, a row-major tensor of x's shape, gives the memory order.
void write_block_scales(KernelArgs args, const Tensor& scales, const Tensor& x, const Tensor& y, int64_t block_size,
                        const optional<Tensor>& tensor_scale) {
  Tensor in = x;
  args.numel = scales.numel();
  args.channels.inner = block_size;
  args.x = operand_of(in, y);
  args.y = scales.mutable_data_ptr();
  args.y_dtype = dtype_of(scales);
  on(x.device()).launch(KernelId::block_scale, args, {pointer(tensor_scale), nullptr}, x.device());
}

std::tuple<Tensor, Tensor, Tensor> fake_quant_block(const Tensor& x, std::string_view format, int64_t block_size,
                                                    std::string_view scale_format, const optional<Tensor>& tensor_scale,
                                                    bool with_mask) {
  constexpr const char* kOp = "fake_quant_block";
  check_float(kOp, "x", x);
  KernelArgs args;
  args.format = check_small_float(kOp, format);
  args.scale_format = check_blocks(kOp, x, block_size, scale_format, tensor_scale);
  auto sizes = x.sym_sizes().vec();
  sizes.back() = sizes.back() / block_size;
  const auto arithmetic = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor y = at::empty_symint(x.sym_sizes(), x.options()), mask = empty_mask(x, with_mask);
  const Tensor scales = at::empty_symint(sizes, x.options().dtype(arithmetic));
  if (y.is_meta()) return {y, scales, mask};
  write_block_scales(args, scales, x, y, block_size, tensor_scale);
  const Channels blocks = channels_of(y, {x.dim() - 1, 1, block_size}, scales.numel());
  run_elementwise(KernelId::fake_quant_float, args, y, mask, x, {&scales, nullptr}, blocks);
  return {y, scales, mask};
}

Tensor fake_quant_backward(const Tensor& grad, const Tensor& mask, at::IntArrayRef order) {
  check_float("fake_quant_backward", "grad", grad);
  check_mask("fake_quant_backward", mask, grad, order);
  Tensor in = grad, dx = empty_in_order(grad, order);
  if (dx.is_meta()) return dx;
  KernelArgs args;
  args.numel = grad.numel();
  args.grad = operand_of(in, dx);
  args.x.dtype = args.y_dtype = args.grad.dtype;
  args.y = dx.mutable_data_ptr();
  args.mask = const_cast<uint8_t*>(mask.const_data_ptr<uint8_t>());  // only read
  on(grad.device()).launch(KernelId::fake_quant_backward, args, {}, grad.device());
  return dx;
}

LearnedGradients learned_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                  const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                  optional<int64_t> axis, int64_t group, int64_t block_size, double grad_factor,
                                  LaterGradients* later) {
  constexpr const char* kOp = "fake_quant_learned_backward";
  check_float(kOp, "x", x);
  check_float(kOp, "grad", grad);
  check_code_range(kOp, qmin, qmax);
  check_same_shape(kOp, "grad", grad, x);
  const Axis a = check_grid(kOp, x, scale, zero_point, axis, group, block_size);
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  const Tensor dx = empty_result(x, x.options(), group), ds = like(scale);
  const Tensor dz = zero_point.has_value() ? like(*zero_point) : at::empty({0}, scale.options());
  if (dx.is_meta()) return {dx, ds, dz};
  KernelArgs args;
  args.bounds = representable(qmin, qmax, x);
  const LearnedSums sums(KernelId::fake_quant_learned_backward, args, dx, grad, x, scale, zero_point, a);
  sums.write_gradients(grad_factor, scale, ds, dz, later);
  return {dx, ds, dz};
}

LearnedGradients fake_quant_learned_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                             const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                             optional<int64_t> axis, int64_t group, int64_t block_size,
                                             double grad_factor) {
  return learned_backward(grad, x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, nullptr);
}

// ---- pytorch-quantization ---------------------------------------------------------------------------------------

CodeBounds legacy_bounds(int64_t num_bits, bool is_unsigned, bool narrow_range) {
  const double most = std::ldexp(1.0, static_cast<int>(num_bits - 1 + is_unsigned)) - 1;
  return {is_unsigned ? 0 : narrow_range ? -most : -most - 1, most};
}

std::tuple<Tensor, Tensor> by_amax(KernelId kernel, const KernelArgs& args, const char* op, const Tensor& x,
                                   const Tensor& amax, bool with_mask) {
  const Broadcast along = check_broadcast(op, "amax", x, amax);
  auto [y, mask] = empty_results(x, 1, with_mask);
  run_elementwise(kernel, args, y, mask, x, along.values, std::nullopt, along.axis);
  return {y, mask};
}

std::tuple<Tensor, Tensor> legacy(KernelId kernel, const char* op, const Tensor& x, const Tensor& amax,
                                  int64_t num_bits, bool is_unsigned, bool narrow_range, bool with_mask) {
  check_float(op, "x", x);
  check_bits(op, num_bits);
  KernelArgs args;
  args.bounds = legacy_bounds(num_bits, is_unsigned, narrow_range);
  return by_amax(kernel, args, op, x, amax, with_mask);
}

std::tuple<Tensor, Tensor, Tensor> tensor_quant(const Tensor& x, const Tensor& amax, int64_t num_bits, bool is_unsigned,
                                                bool narrow_range, bool with_mask) {
  auto [codes, mask] =
      legacy(KernelId::tensor_quant, "tensor_quant", x, amax, num_bits, is_unsigned, narrow_range, with_mask);
  if (codes.is_meta()) return {codes, at::empty_like(amax, x.options()), mask};
  const Tensor wide = amax.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).abs();
  const Tensor most = at::full_like(wide, legacy_bounds(num_bits, is_unsigned, narrow_range).hi);
  const Tensor multiplier = most.div(wide).masked_fill_(wide.le(0x1p-24), 1);
  return {codes, multiplier.to(x.scalar_type()), mask};
}

std::tuple<Tensor, Tensor> fake_tensor_quant(const Tensor& x, const Tensor& amax, int64_t num_bits, bool is_unsigned,
                                             bool narrow_range, bool with_mask) {
  return legacy(KernelId::fake_tensor_quant, "fake_tensor_quant", x, amax, num_bits, is_unsigned, narrow_range,
                with_mask);
}

std::tuple<Tensor, Tensor> fake_affine_tensor_quant(const Tensor& x, const Tensor& min_range, const Tensor& max_range,
                                                    int64_t num_bits, bool with_mask) {
  constexpr const char* kOp = "fake_affine_tensor_quant";
  check_float(kOp, "x", x);
  check_bits(kOp, num_bits);
  check_one_element(kOp, "min_range", min_range, x);
  check_one_element(kOp, "max_range", max_range, x);
  auto [y, mask] = empty_results(x, 1, with_mask);
  if (y.is_meta()) return {y, mask};
  const bool f64 = x.scalar_type() == at::kDouble;
  const Tensor low = in_arithmetic(min_range, f64).reshape({}), high = in_arithmetic(max_range, f64).reshape({});
  KernelArgs args;
  args.bounds = legacy_bounds(num_bits, false, false);
  args.shared = high.const_data_ptr();
  args.fractional = true;
  // On CUDA, torch multiplies by the reciprocal of a number, whose quotient is another one; it divides by a tensor.
  const Tensor step = high.sub(low).div(at::full_like(low, std::ldexp(1.0, static_cast<int>(num_bits)) - 1));
  run_elementwise(KernelId::fake_affine_tensor_quant, args, y, mask, x, step, low, {});
  return {y, mask};
}

std::tuple<Tensor, Tensor> scaled_e4m3(const Tensor& x, const Tensor& amax, bool with_mask) {
  constexpr const char* kOp = "scaled_e4m3";
  check_float(kOp, "x", x);
  KernelArgs args;
  args.format = check_small_float(kOp, "e4m3");
  return by_amax(KernelId::scaled_e4m3, args, kOp, x, amax, with_mask);
}

}  // namespace

Tensor codes_of_grid(const char* op, const Tensor& y, int64_t qmin, int64_t qmax) {
  check_codes(op, qmin < 0 ? at::kChar : at::kByte, qmin, qmax);
  return empty_codes(y, qmin < 0, fit_4_bits(qmin, qmax));
}

FakeQuantized fake_quantized(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin,
                             int64_t qmax, bool with_mask, bool with_codes) {
  constexpr const char* kOp = "fake_quant";
  check_float(kOp, "x", x);
  check_code_range(kOp, qmin, qmax);
  const Axis a = check_grid(kOp, x, scale, zero_point, std::nullopt, 1, 0);
  auto [y, mask] = empty_results(x, 1, with_mask);
  Tensor codes;
  if (with_codes) codes = codes_of_grid(kOp, y, qmin, qmax);
  fake_quant_onto(y, mask, x, scale, zero_point, qmin, qmax, a, codes);
  return {y, mask, codes};
}

LearnedGradients fake_quantized_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                         const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                         double grad_factor, LaterGradients* later) {
  return learned_backward(grad, x, scale, zero_point, qmin, qmax, std::nullopt, 1, 0, grad_factor, later);
}

QT_REGISTER_BODIES(m) {
  m.impl("fake_quant", fake_quant);
  m.impl("fake_quant_", fake_quant_);
  m.impl("observe_fake_quant", observe_fake_quant);
  m.impl("fake_quant_float", fake_quant_float);
  m.impl("fake_quant_block", fake_quant_block);
  m.impl("tensor_quant", tensor_quant);
  m.impl("fake_tensor_quant", fake_tensor_quant);
  m.impl("fake_affine_tensor_quant", fake_affine_tensor_quant);
  m.impl("scaled_e4m3", scaled_e4m3);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("fake_quant_learned_backward", fake_quant_learned_backward);
}

}  // namespace qtoolkit
