#include "unit_parts.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>

#include "../call_op.h"
#include "../checks.h"
#include "../launch.h"
#include "../layer/layer_checks.h"
#include "../layer/layer_ops.h"
#include "../quantize/elementwise.h"
#include "../quantize/positive_scale.h"

namespace qtoolkit {

using at::Tensor;
using std::optional;

optional<Tensor> Trained::scale() const {
  if (!start.has_value()) return std::nullopt;
  return ratio.has_value() ? positive_scale(*start, *ratio, rate) : start->clone();
}

Tensor or_empty(const Tensor& t, const at::TensorOptions& options) { return t.defined() ? t : at::empty({0}, options); }

void note_change(const Tensor& t) { t.unsafeGetTensorImpl()->bump_version(); }

namespace {

// The factor by which folding scales each channel, and what is beside it. Zeros are replaced by 1 where the layer's
// output is divided by it: not if the batch norm is frozen.
struct Factor {
  Tensor inverse, is_zero, factor;  // 1 / sqrt(variance + eps)

  explicit Factor(const Norm& n) : inverse(at::rsqrt(at::add(n.variance, n.eps))) {
    factor = n.gamma.has_value() ? at::mul(*n.gamma, inverse) : inverse;
    if (n.is_frozen()) return;
    is_zero = at::eq(factor, 0);
    factor = at::masked_fill(factor, is_zero, 1.0);
  }
};

optional<Tensor> given(const Tensor& t) { return t.defined() ? optional<Tensor>(t) : std::nullopt; }

// The tensors of a part that a launch reads; none of a frozen batch norm.
struct Small {
  optional<Tensor> variance, gamma;
  Trained weight, output;
};

Small small_of(const UnitParts& p) {
  Small s;
  if (p.norm != nullptr && !p.norm->is_frozen()) {
    s.variance = p.norm->variance;
    s.gamma = p.norm->gamma;
  }
  if (p.weight != nullptr) s.weight = *p.weight;
  if (p.output != nullptr) s.output = *p.output;
  return s;
}

// Whether one launch computes small tensors: they have memory, and lie in one order in a type of the arithmetic.
bool is_one_launch(std::initializer_list<const optional<Tensor>*> tensors) {
  const Tensor* first = nullptr;
  for (const optional<Tensor>* t : tensors) {
    if (!t->has_value()) continue;
    const Tensor& each = **t;
    if (first == nullptr) first = &each;
    const bool has_type = each.scalar_type() == at::kFloat || each.scalar_type() == at::kDouble;
    if (!has_type || each.scalar_type() != first->scalar_type() || each.device() != first->device() ||
        !each.is_contiguous() || each.is_meta()) {
      return false;
    }
  }
  return first != nullptr;
}

const void* data(const optional<Tensor>& t) { return t.has_value() ? t->const_data_ptr() : nullptr; }

// Of the scale of `name`, where backward has it: a start, which it keeps with a ratio alone.
void check_trained(const char* op, const char* name, const Trained& t, const c10::SymInt& scales) {
  TORCH_CHECK_VALUE(t.start.has_value() || !t.ratio.has_value(), op, ": the ratio of ", name,
                    " requires its start, got None; pass both.");
  for (const optional<Tensor>* each : {&t.start, &t.ratio, &t.rate}) {
    TORCH_CHECK_VALUE(!each->has_value() || (*each)->sym_numel() == scales, op,
                      ": start, ratio and rate must have as many elements as the scale of ", name, ", ", scales,
                      ", got ", (*each)->sym_numel(), ".");
  }
}

void check_norm(const char* op, const Norm& n, const c10::SymInt& channels) {
  if (n.is_frozen()) {
    check_per_output(op, "frozen_mean", n.frozen_mean, channels, n.variance);
    check_per_output(op, "beta", n.beta, channels, n.variance);
  }
  TORCH_CHECK_VALUE(n.variance.dim() == 1 && n.variance.sym_numel() == channels, op,
                    ": variance must have one dimension of ", channels, " elements, one for each output channel, got ",
                    n.variance.sym_sizes(), ".");
  TORCH_CHECK_VALUE(!n.gamma.has_value() || n.gamma->sym_sizes() == n.variance.sym_sizes(), op,
                    ": gamma must have the shape of variance, ", n.variance.sym_sizes(), ", got ", n.gamma->sym_sizes(),
                    ".");
}

// The range of each output channel of a weight, in float64, if its grid follows it; make_scales() sets the scale. The
// launch multiplies it by the factor of a batch norm, but for that of a frozen one, which is `folded`.
Tensor followed_range(const UnitParts& p, const Followed& f, const Tensor& folded) {
  if (!f.lo.has_value()) return {};
  const Layer& l = *p.layer;
  const Tensor& start = *p.weight->start;
  const Tensor& like = p.norm == nullptr ? start : p.norm->variance;
  TORCH_CHECK_VALUE(f.hi.has_value() && !p.weight->ratio.has_value() && !l.zero_point.has_value(), p.op,
                    ": lo requires hi, and a symmetric grid without a ratio.");
  const int64_t channels = l.weight.sym_size(0).expect_int();
  TORCH_CHECK_VALUE(l.axis == 0 && l.block_size == 0 && !l.geometry.transposed, p.op,
                    ": lo requires axis=0, the output channels of the weight, without blocks.");
  for (const Tensor& t : {*f.lo, *f.hi, start}) {
    TORCH_CHECK_VALUE(t.sym_numel() == channels && t.scalar_type() == like.scalar_type() && t.is_contiguous() &&
                          t.device() == like.device() && t.device() == l.weight.device(),
                      p.op, ": lo, hi and start must be contiguous, with one element per output channel, ", channels,
                      ", in the type and on the device of ", p.norm == nullptr ? "start" : "variance", ", got shape ",
                      t.sym_sizes(), " and ", t.scalar_type(), ".");
  }
  const Tensor range = ranges_of(l.weight, check_axis(p.op, l.weight, l.axis, 1, 0));
  if (!folded.defined()) return range;
  const Tensor ends = at::mul(range.view({2, channels}), folded.to(at::kDouble));
  return at::stack({at::minimum(ends[0], ends[1]), at::maximum(ends[0], ends[1])});
}

Scales scales_by_ops(const UnitParts& p) {
  Scales result;
  if (p.norm != nullptr) result.factor = Factor(*p.norm).factor;
  if (p.weight != nullptr) result.scale = *p.weight->scale();
  if (p.output != nullptr) result.y_scale = p.output->scale();
  return result;
}

}  // namespace

void check_parts(const UnitParts& p, const c10::SymInt& scales) {
  if (p.norm != nullptr) check_norm(p.op, *p.norm, output_channels(p.layer->weight, p.layer->geometry));
  if (p.weight != nullptr) check_trained(p.op, "the weight", *p.weight, scales);
  if (p.output != nullptr) check_trained(p.op, "y", *p.output, 1);
}

Scales make_scales(const UnitParts& p, const Followed& followed) {
  check_parts(p, p.weight == nullptr ? c10::SymInt(0) : p.weight->start->sym_numel());
  const Small s = small_of(p);
  const bool is_meta = p.layer != nullptr && p.layer->weight.is_meta();
  const Tensor folded = p.norm != nullptr && p.norm->is_frozen() ? Factor(*p.norm).factor : Tensor();
  const Tensor range = is_meta ? Tensor() : followed_range(p, followed, folded);
  const bool one =
      is_one_launch({&s.variance, &s.gamma, &s.weight.start, &s.weight.ratio, &s.output.start, &s.output.ratio});
  TORCH_CHECK_VALUE(!range.defined() || one, p.op, ": lo requires gamma and the grid of y in the type of ",
                    p.norm == nullptr ? "start" : "variance", ", float32 or float64.");
  if (!one) return scales_by_ops(p);
  Scales result = {folded};
  UnitScales u;
  const auto set = [&](TrainedScale& scale, const Trained& from) {
    const Tensor to = at::empty_like(*from.start);
    scale = {to.numel(), from.start->const_data_ptr(), data(from.ratio), to.mutable_data_ptr()};
    u.f64 = to.scalar_type() == at::kDouble;
    return to;
  };
  if (s.weight.start.has_value()) result.scale = set(u.weight, s.weight);
  if (s.output.start.has_value()) result.y_scale = set(u.output, s.output);
  if (s.variance.has_value()) {
    result.factor = at::empty_like(*s.variance);
    u.f64 = s.variance->scalar_type() == at::kDouble;
    u.channels = s.variance->numel();
    u.eps = p.norm->eps;
    u.variance = s.variance->const_data_ptr();
    u.gamma = data(s.gamma);
    u.factor = result.factor.mutable_data_ptr();
  }
  if (range.defined()) {
    const Tensor& start = *s.weight.start;
    u.channels = start.numel();
    const double* low = range.const_data_ptr<double>();
    const CodeRange codes = {double(p.layer->qmin), double(p.layer->qmax), true, followed.pow2_scale};
    u.followed = {low,
                  low + u.channels,
                  start.mutable_data_ptr(),
                  followed.lo->mutable_data_ptr(),
                  followed.hi->mutable_data_ptr(),
                  codes};
    for (const Tensor& t : {start, *followed.lo, *followed.hi}) note_change(t);
  }
  const c10::Device device = (s.variance.has_value()   ? *s.variance
                              : result.scale.defined() ? result.scale
                                                       : *result.y_scale)
                                 .device();
  on(device).unit_scales(u, device);
  return result;
}

PartGradients gradients_of_parts(const UnitParts& p, const ScaleGradients& in, const WantedOfScales& wanted) {
  const Small s = small_of(p);
  PartGradients result;
  const bool in_weight = in.scale.defined() && s.weight.ratio.has_value() && wanted.ratio;
  const bool in_output = in.y_scale.defined() && s.output.ratio.has_value() && wanted.y_ratio;
  if (wanted.start) result.start = in.scale;
  if (wanted.y_start) result.y_start = in.y_scale;
  const optional<Tensor> tensors[] = {given(in.scale), given(in.y_scale), given(in.of_gamma), given(in.of_divisor),
                                      given(in.of_factor)};
  const bool one = is_one_launch({&s.variance, &s.gamma, &s.weight.ratio, &s.weight.rate, &s.output.ratio,
                                  &s.output.rate, &tensors[0], &tensors[1], &tensors[2], &tensors[3], &tensors[4]});
  if (!one) {
    if (in_weight) result.ratio = positive_scale_backward(in.scale, *s.weight.start, *s.weight.ratio, s.weight.rate);
    if (in_output)
      result.y_ratio = positive_scale_backward(in.y_scale, *s.output.start, *s.output.ratio, s.output.rate);
    if (!in.of_factor.defined()) return result;
    const Factor factor(*p.norm);
    const Tensor of_factor = at::masked_fill(at::add(in.of_divisor, in.of_factor), factor.is_zero, 0);
    result.gamma = at::add(in.of_gamma, at::mul(of_factor, factor.inverse)).to(s.gamma->scalar_type());
    return result;
  }
  UnitGradients u;
  const auto set = [&](RatioGradient& r, const Tensor& grad, const Trained& from, Tensor& to) {
    to = at::empty_like(*from.ratio);
    u.f64 = to.scalar_type() == at::kDouble;
    r = {to.numel(),      grad.const_data_ptr(), from.start->const_data_ptr(), from.ratio->const_data_ptr(),
         data(from.rate), to.mutable_data_ptr()};
  };
  if (in_weight) set(u.weight, in.scale, s.weight, result.ratio);
  if (in_output) set(u.output, in.y_scale, s.output, result.y_ratio);
  if (in.of_factor.defined()) {
    result.gamma = at::empty_like(*s.gamma);
    u.f64 = result.gamma.scalar_type() == at::kDouble;
    u.eps = p.norm->eps;
    u.channels = s.variance->numel();
    u.variance = s.variance->const_data_ptr();
    u.gamma = data(s.gamma);
    u.of_gamma = in.of_gamma.const_data_ptr();
    u.of_divisor = in.of_divisor.const_data_ptr();
    u.of_factor = in.of_factor.const_data_ptr();
    u.result = result.gamma.mutable_data_ptr();
  }
  if (largest_count(u) == 0) return result;
  const c10::Device device = (in_weight ? result.ratio : in_output ? result.y_ratio : result.gamma).device();
  on(device).unit_gradients(u, device);
  return result;
}

// ---- the bias

namespace {

// quantizers/bias.py has the rule and its source.
constexpr int64_t kLargestBias = int64_t{1} << 30;

Tensor centred(const Norm& n, const optional<Tensor>& bias) {
  return bias.has_value() ? at::sub(*bias, *n.frozen_mean) : at::neg(*n.frozen_mean);
}

}  // namespace

Tensor bias_on_grid(const char* op, const Tensor& bias, const Layer& l) {
  TORCH_CHECK_VALUE(l.x_scale.sym_numel() == 1, op, ": x_scale must have 1 element, got ", l.x_scale.sym_numel(), ".");
  const Tensor one = l.x_scale.dim() == 0 ? l.x_scale : l.x_scale.reshape({});
  const Tensor least = at::div(at::abs(bias.to(at::kFloat)), static_cast<double>(kLargestBias));
  const Tensor steps = at::maximum(at::mul(one, l.scale), least);
  const auto axis = steps.sym_numel() > 1 ? optional<int64_t>(0) : std::nullopt;
  return std::get<0>(fake_quant_op(bias, steps, std::nullopt, -kLargestBias, kLargestBias, axis, 1, 0, 1.0, false));
}

Tensor folded_bias(const Norm& n, const optional<Tensor>& bias, const Tensor& factor) {
  const Tensor folded = at::mul(centred(n, bias), factor);
  return n.beta.has_value() ? at::add(folded, *n.beta) : folded;
}

FoldedGradients folded_gradients(const Norm& n, const optional<Tensor>& bias, const Tensor& factor,
                                 const Tensor& of_factor, const Tensor& of_bias) {
  FoldedGradients result;
  if (of_factor.defined()) {
    const Tensor of_both = at::add(of_factor, at::mul(of_bias, centred(n, bias)));
    result.gamma = at::mul(of_both, Factor(n).inverse).to(n.gamma->scalar_type());
  }
  if (of_bias.defined() && n.beta.has_value()) result.beta = of_bias.to(n.beta->scalar_type());
  if (of_bias.defined() && bias.has_value()) result.bias = at::mul(of_bias, factor).to(bias->scalar_type());
  return result;
}

// ---- the quantizer behind an op

QuantizedTensor quantize_output(const Tensor& z, const Quantized& q, const optional<Tensor>& y_scale) {
  if (!y_scale.has_value()) return {z, {}, {}};
  const FakeQuantized found = fake_quantized(z, *y_scale, q.zero_point, q.qmin, q.qmax, !q.learned, q.with_codes);
  return {found.y, found.codes, found.mask};
}

QuantizedGradients quantize_output_backward(const Tensor& grad, const optional<Tensor>& z, const Tensor& mask,
                                            at::IntArrayRef order, const Quantized& q, const Tensor& y_scale) {
  if (!q.learned) return {backward_op(grad, mask, order), {}, {}};
  TORCH_CHECK_VALUE(z.has_value(), "a learned grid requires the values before they were quantized, got None.");
  static const auto op =
      find_op<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&,
                                                 int64_t, int64_t, optional<int64_t>, int64_t, int64_t, double)>(
          "qtoolkit::fake_quant_learned_backward");
  const auto [dz, dscale, dzero_point] =
      op.call(grad, *z, y_scale, q.zero_point, q.qmin, q.qmax, std::nullopt, 1, 0, q.grad_factor);
  return {dz, dscale, q.zero_point.has_value() ? dzero_point : Tensor()};
}

}  // namespace qtoolkit
