#include "unit_parts.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sub.h>

#include "../autograd/float16_scale.h"
#include "../autograd/positive_scale.h"
#include "../call_op.h"
#include "../checks.h"
#include "../launch.h"
#include "../layer/layer_checks.h"
#include "../layer/layer_ops.h"
#include "../quantize/elementwise.h"

namespace qtoolkit {

using at::Tensor;
using std::optional;

optional<Tensor> Trained::scale() const {
  if (!start.has_value()) return std::nullopt;
  const Tensor exact = ratio.has_value() ? positive_scale(*start, *ratio, rate) : start->clone();
  return float16 ? float16_scales(exact) : exact;
}

Tensor or_empty(const Tensor& t, const at::TensorOptions& options) { return t.defined() ? t : at::empty({0}, options); }

void push_wanted(std::vector<c10::IValue>* stack, at::ArrayRef<Tensor> gradients, at::ArrayRef<bool> wanted,
                 const at::TensorOptions& options) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    stack->emplace_back(or_empty(wanted[i] ? gradients[i] : Tensor(), options));
  }
}

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

// The tensors of a part that a launch reads.
struct Small {
  optional<Tensor> variance, gamma;
  Trained weight, output;
};

Small small_of(const UnitParts& p) {
  Small s;
  if (p.norm != nullptr) {
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

// The range of each output channel of a weight, in float64, if its grid follows it; make_scales() sets the scale.
Tensor followed_range(const UnitParts& p, const Followed& f) {
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
  return ranges_of(l.weight, check_axis(p.op, l.weight, l.axis, 1, 0));
}

Tensor centred(const Norm& n, const optional<Tensor>& bias) {
  return bias.has_value() ? at::sub(*bias, *n.frozen_mean) : at::neg(*n.frozen_mean);
}

// bias_on_grid of unit_scales.h, by the ops of quantizers/bias.py: in types that a launch does not take, they round.
Tensor on_grid(const Tensor& bias, const Tensor& x_scale, const Tensor& scale) {
  const Tensor least = at::div(at::abs(bias.to(at::kFloat)), static_cast<double>(kLargestBias));
  const Tensor steps = at::maximum(at::mul(x_scale.reshape({}), scale), least);
  const auto axis = steps.sym_numel() > 1 ? optional<int64_t>(0) : std::nullopt;
  return std::get<0>(fake_quant_op(bias, steps, std::nullopt, -kLargestBias, kLargestBias, axis, 1, 0, 1.0, false));
}

bool is_frozen(const UnitParts& p) { return p.norm != nullptr && p.norm->is_frozen(); }

// What the layer adds, from the factor and the scale of the weight.
optional<Tensor> bias_by_ops(const UnitParts& p, const GivenBias& given, const Scales& scales) {
  optional<Tensor> bias = given.bias;
  if (is_frozen(p)) {
    bias = at::mul(centred(*p.norm, bias), scales.factor);
    if (p.norm->beta.has_value()) bias = at::add(*bias, *p.norm->beta);
  }
  return bias.has_value() && given.on_grid ? on_grid(*bias, p.layer->x_scale, scales.scale) : bias;
}

// Whether that is the bias itself.
bool adds_as_given(const UnitParts& p, const GivenBias& given) {
  return !is_frozen(p) && !(given.bias.has_value() && given.on_grid);
}

// Lets a launch make what the layer adds, if there is something to make and it can.
bool add_bias(UnitScales& u, const UnitParts& p, const GivenBias& given, const Small& s, Scales& result) {
  const bool folds = is_frozen(p);
  const bool narrow = given.dtype == at::kBFloat16 || given.dtype == at::kHalf;
  const bool converts = narrow && given.bias.has_value();
  if (!folds && !converts && !(given.on_grid && given.bias.has_value())) return false;
  const Layer& l = *p.layer;
  const optional<Tensor> none, mean = folds ? p.norm->frozen_mean : none, beta = folds ? p.norm->beta : none;
  const optional<Tensor> x_scale = given.on_grid ? optional<Tensor>(l.x_scale) : none;
  const int64_t channels = output_channels(l.weight, l.geometry).expect_int(), scales = s.weight.start->numel();
  if (given.on_grid && scales != 1 && scales != channels) return false;
  if (!is_one_launch({&s.variance, &s.weight.start, &given.bias, &mean, &beta, &x_scale})) return false;
  const Tensor& like = folds ? *mean : *given.bias;
  result.bias = empty_as(like, narrow && !u.f64 ? like.options().dtype(*given.dtype) : like.options());
  u.channels = channels;
  u.bias = {data(given.bias),      data(mean), data(beta), data(x_scale), result.bias->mutable_data_ptr(),
            dtype_of(*result.bias)};
  return true;
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

Scales make_scales(const UnitParts& p, const Followed& followed, const GivenBias& bias, Made made) {
  TORCH_CHECK_VALUE(p.weight == nullptr || p.weight->start.has_value(), p.op, ": start must be given, got None.");
  check_parts(p, p.weight == nullptr ? c10::SymInt(0) : p.weight->start->sym_numel());
  if (bias.on_grid) check_one(p.op, "x_scale", p.layer->x_scale, p.layer->weight);
  const Small s = small_of(p);
  const bool is_meta = p.layer != nullptr && p.layer->weight.is_meta();
  const Tensor range = is_meta ? Tensor() : followed_range(p, followed);
  const bool one =
      is_one_launch({&s.variance, &s.gamma, &s.weight.start, &s.weight.ratio, &s.output.start, &s.output.ratio});
  TORCH_CHECK_VALUE(!range.defined() || one, p.op, ": lo requires gamma and the grid of y in the type of ",
                    p.norm == nullptr ? "start" : "variance", ", float32 or float64.");
  if (!one) {
    Scales result = scales_by_ops(p);
    result.bias = bias_by_ops(p, bias, result);
    return result;
  }
  Scales result;
  UnitScales u;
  const auto set = [&](TrainedScale& scale, const Trained& from) {
    const Tensor to = empty_as(*from.start);
    scale = {to.numel(), from.start->const_data_ptr(), data(from.ratio), to.mutable_data_ptr(), from.float16};
    u.f64 = to.scalar_type() == at::kDouble;
    return to;
  };
  if (s.weight.start.has_value()) result.scale = set(u.weight, s.weight);
  if (s.output.start.has_value()) result.y_scale = set(u.output, s.output);
  if (s.variance.has_value()) {
    result.factor = empty_as(*s.variance);
    u.f64 = s.variance->scalar_type() == at::kDouble;
    u.channels = s.variance->numel();
    u.eps = p.norm->eps;
    u.frozen = p.norm->is_frozen();
    u.variance = s.variance->const_data_ptr();
    u.gamma = data(s.gamma);
    u.factor = result.factor.mutable_data_ptr();
    if (!u.frozen && on(s.variance->device()).on_gpu) {
      result.arrived = at::empty({u.channels}, s.variance->options().dtype(at::kInt));
      u.arrived = reinterpret_cast<unsigned*>(result.arrived.mutable_data_ptr<int32_t>());
    }
  }
  const bool bias_in_launch = add_bias(u, p, bias, s, result);
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
  // A scale that follows the weight's range needs all channels; ops of torch read what they take at once.
  const bool alone = range.defined() || (!bias_in_launch && !adds_as_given(p, bias));
  if (made == Made::later && on(device).on_gpu && !alone) {
    result.unmade = u;
  } else {
    on(device).unit_scales(u, device);
  }
  if (!bias_in_launch) result.bias = bias_by_ops(p, bias, result);
  return result;
}

PartGradients gradients_of_parts(const UnitParts& p, const ScaleGradients& in, const WantedOfScales& wanted,
                                 const optional<Tensor>& bias, LaterGradients before) {
  const Small s = small_of(p);
  const bool frozen = is_frozen(p), of_bias = frozen && bias.has_value() && wanted.bias;
  PartGradients result;
  const bool in_weight = in.scale.defined() && s.weight.ratio.has_value() && wanted.ratio;
  const bool in_output = in.y_scale.defined() && s.output.ratio.has_value() && wanted.y_ratio;
  if (wanted.start) result.start = in.scale;
  if (wanted.y_start) result.y_start = in.y_scale;
  const optional<Tensor> none, mean = frozen ? p.norm->frozen_mean : none;
  const optional<Tensor> tensors[] = {given(in.scale),      given(in.y_scale),   given(in.of_gamma),
                                      given(in.of_divisor), given(in.of_factor), given(in.of_bias)};
  const bool one = is_one_launch({&s.variance, &s.gamma, &s.weight.ratio, &s.weight.rate, &s.output.ratio,
                                  &s.output.rate, &tensors[0], &tensors[1], &tensors[2], &tensors[3], &tensors[4],
                                  &tensors[5], frozen ? &bias : &none, &mean});
  if (!one) {
    write_now(before);
    if (in_weight) result.ratio = positive_scale_backward(in.scale, *s.weight.start, *s.weight.ratio, s.weight.rate);
    if (in_output)
      result.y_ratio = positive_scale_backward(in.y_scale, *s.output.start, *s.output.ratio, s.output.rate);
    if (!in.of_factor.defined() && !of_bias) return result;
    const Factor factor(*p.norm);
    if (frozen) {
      if (of_bias) result.bias = at::mul(in.of_bias, factor.factor).to(bias->scalar_type());
      if (!in.of_factor.defined()) return result;
      const Tensor of_both = at::add(in.of_factor, at::mul(in.of_bias, centred(*p.norm, bias)));
      result.gamma = at::mul(of_both, factor.inverse).to(s.gamma->scalar_type());
      return result;
    }
    const Tensor of_factor = at::masked_fill(at::add(in.of_divisor, in.of_factor), factor.is_zero, 0);
    result.gamma = at::add(in.of_gamma, at::mul(of_factor, factor.inverse)).to(s.gamma->scalar_type());
    return result;
  }
  UnitGradients u;
  const auto set = [&](RatioGradient& r, const Tensor& grad, const Trained& from, Tensor& to) {
    to = empty_as(*from.ratio);
    u.f64 = to.scalar_type() == at::kDouble;
    r = {to.numel(),      grad.const_data_ptr(), from.start->const_data_ptr(), from.ratio->const_data_ptr(),
         data(from.rate), to.mutable_data_ptr()};
  };
  if (in_weight) set(u.weight, in.scale, s.weight, result.ratio);
  if (in_output) set(u.output, in.y_scale, s.output, result.y_ratio);
  if (in.of_factor.defined() || of_bias) {
    u.f64 = s.variance->scalar_type() == at::kDouble;
    u.frozen = frozen;
    u.eps = p.norm->eps;
    u.channels = s.variance->numel();
    u.variance = s.variance->const_data_ptr();
    u.gamma = data(s.gamma);
    u.bias = frozen ? data(bias) : nullptr;
    u.mean = data(mean);
    u.of_gamma = data(tensors[2]);
    u.of_divisor = data(tensors[3]);
    u.of_factor = data(tensors[4]);
    u.of_bias = data(tensors[5]);
  }
  if (in.of_factor.defined()) {
    result.gamma = empty_as(*s.gamma);
    u.result = result.gamma.mutable_data_ptr();
  }
  if (of_bias) {
    result.bias = empty_as(*bias);
    u.bias_result = result.bias.mutable_data_ptr();
  }
  if (before.kept.empty() && largest_count(u) > 0) {
    before.kept.push_back(in_weight ? in.scale : in_output ? in.y_scale : of_bias ? in.of_bias : in.of_factor);
  }
  write_now(before, u);
  return result;
}

// ---- the quantizer after an op

QuantizedTensor quantize_output(const Tensor& z, const OutputQuantizer& q, const optional<Tensor>& y_scale) {
  if (!y_scale.has_value()) return {z, {}, {}};
  const FakeQuantized found = fake_quantized(z, *y_scale, q.zero_point, q.qmin, q.qmax, !q.learned, q.with_codes);
  return {found.y, found.codes, found.mask};
}

QuantizedGradients quantize_output_backward(const Tensor& grad, const optional<Tensor>& z, const Tensor& mask,
                                            at::IntArrayRef order, const OutputQuantizer& q, const Tensor& y_scale,
                                            LaterGradients& later) {
  if (!q.learned) return {backward_op(grad, mask, order), {}, {}};
  TORCH_CHECK_VALUE(z.has_value(), "a learned grid requires the values before they were quantized, got None.");
  const auto [dz, dscale, dzero_point] =
      fake_quantized_backward(grad, *z, y_scale, q.zero_point, q.qmin, q.qmax, q.grad_factor, &later);
  return {dz, dscale, q.zero_point.has_value() ? dzero_point : Tensor()};
}

}  // namespace qtoolkit
