// A unit of a network in training: a layer on grids, its batch norm, a residual add, an activation and a quantizer,
// with everything of which its grids are made. The steps are those of the single ops, with their bits; what a training
// step saves is their calls, and a node of autograd for each.
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>

#include "batch_norm_ops.h"
#include "checks.h"
#include "launch.h"
#include "layer_ops.h"
#include "positive_scale.h"
#include "registration.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

// The running variance with which a weight is folded, and the parameters of the batch norm.
struct Norm {
  Tensor variance;
  optional<Tensor> gamma, beta;
  double eps;
};

Reader& operator>>(Reader& reader, Norm& n) { return reader >> n.variance >> n.gamma >> n.beta >> n.eps; }

// A residual, its codes if it has some, and an activation.
struct Following {
  optional<Tensor> residual, codes, scale, zero_point;
  double low, high, slope;
};

Reader& operator>>(Reader& reader, Following& f) {
  reader >> f.residual >> f.codes >> f.scale >> f.zero_point;
  return reader >> f.low >> f.high >> f.slope;
}

// What a scale is made of: a start alone, or with the ratio that is trained.
struct Trained {
  optional<Tensor> start, ratio, rate;

  // A tensor of its own: an observer may change the start before backward.
  optional<Tensor> scale() const {
    if (!start.has_value()) return std::nullopt;
    return ratio.has_value() ? positive_scale(*start, *ratio, rate) : start->clone();
  }
};

Reader& operator>>(Reader& reader, Trained& t) { return reader >> t.start >> t.ratio >> t.rate; }

// The range of the weight that start follows, or neither.
struct Followed {
  optional<Tensor> lo, hi;
  bool pow2_scale;
};

Reader& operator>>(Reader& reader, Followed& f) { return reader >> f.lo >> f.hi >> f.pow2_scale; }

struct Output {
  Trained trained;
  optional<Tensor> zero_point;
  int64_t qmin, qmax;
  double grad_factor;
};

// The input of the layer, and the layer without its weight's scale.
Reader& read_layer(Reader& reader, Layer& l, Trained& weight) {
  reader >> l.codes >> l.x_scale >> l.x_zero_point >> l.x_qmin >> l.x_qmax >> l.weight >> weight >> l.zero_point;
  reader >> l.qmin >> l.qmax >> l.axis >> l.group >> l.block_size >> l.grad_factor;
  return reader >> l.geometry >> l.integer;
}

Reader& read_output(Reader& reader, Output& o) {
  return reader >> o.trained >> o.zero_point >> o.qmin >> o.qmax >> o.grad_factor;
}

// ---- the factor of the batch norm and the scales

// The factor by which folding scales each channel, with zeros replaced by 1, and what is beside it.
struct Factor {
  Tensor inverse, is_zero, factor;  // 1 / sqrt(variance + eps)

  explicit Factor(const Norm& n) : inverse(at::rsqrt(at::add(n.variance, n.eps))) {
    const Tensor folded = n.gamma.has_value() ? at::mul(*n.gamma, inverse) : inverse;
    is_zero = at::eq(folded, 0);
    factor = at::masked_fill(folded, is_zero, 1.0);
  }
};

// Counts a change of a tensor: below autograd nobody else does.
void note_change(const Tensor& t) { t.unsafeGetTensorImpl()->bump_version(); }

// Whether one launch computes small tensors: they have memory, and lie in one order in a type of the arithmetic.
bool is_one_launch(const Tensor& like, std::initializer_list<const optional<Tensor>*> tensors) {
  const auto type = like.scalar_type();
  if (type != at::kFloat && type != at::kDouble) return false;
  for (const optional<Tensor>* t : tensors) {
    if (!t->has_value()) continue;
    const Tensor& each = **t;
    if (each.scalar_type() != type || each.device() != like.device() || !each.is_contiguous() || each.is_meta()) {
      return false;
    }
  }
  return like.is_contiguous() && !like.is_meta();
}

const void* data(const optional<Tensor>& t) { return t.has_value() ? t->const_data_ptr() : nullptr; }

struct Made {
  Tensor factor, scale;
  optional<Tensor> y_scale;
};

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
  TORCH_CHECK_VALUE(n.variance.dim() == 1 && n.variance.sym_numel() == channels, op,
                    ": variance must have one dimension of ", channels, " elements, one for each output channel, got ",
                    n.variance.sym_sizes(), ".");
  TORCH_CHECK_VALUE(!n.gamma.has_value() || n.gamma->sym_sizes() == n.variance.sym_sizes(), op,
                    ": gamma must have the shape of variance, ", n.variance.sym_sizes(), ", got ", n.gamma->sym_sizes(),
                    ".");
}

// The ends of each output channel of a weight, in float64, if its grid follows them; the scale does so in made().
Tensor followed_ends(const Layer& l, const Trained& weight, const Followed& f, const Norm& norm) {
  if (!f.lo.has_value()) return {};
  constexpr const char* kOp = "unit";
  TORCH_CHECK_VALUE(f.hi.has_value() && !weight.ratio.has_value() && !l.zero_point.has_value(), kOp,
                    ": lo requires hi, and a symmetric grid without a ratio.");
  const int64_t channels = l.weight.sym_size(0).expect_int();
  TORCH_CHECK_VALUE(l.axis == 0 && l.block_size == 0 && !l.geometry.transposed, kOp,
                    ": lo requires axis=0, the output channels of the weight, without blocks.");
  for (const optional<Tensor>* t : {&f.lo, &f.hi, &weight.start}) {
    TORCH_CHECK_VALUE((*t)->sym_numel() == channels && (*t)->scalar_type() == norm.variance.scalar_type() &&
                          (*t)->is_contiguous() && (*t)->device() == norm.variance.device(),
                      kOp, ": lo, hi and start must be contiguous, with one element per output channel, ", channels,
                      ", in the type and on the device of variance, got shape ", (*t)->sym_sizes(), " and ",
                      (*t)->scalar_type(), ".");
  }
  return ranges_of(l.weight, check_axis(kOp, l.weight, l.axis, 1, 0));
}

Made made(const Norm& norm, const Trained& weight, const Trained& output, const Layer& l, const Followed& followed) {
  const Tensor& variance = norm.variance;
  check_norm("unit", norm, output_channels(l.weight, l.geometry));
  check_trained("unit", "the weight", weight, weight.start->sym_numel());
  check_trained("unit", "y", output, 1);
  const Tensor ends = variance.is_meta() ? Tensor() : followed_ends(l, weight, followed, norm);
  TORCH_CHECK_VALUE(!ends.defined() || is_one_launch(variance, {&norm.gamma, &output.start, &output.ratio}),
                    "unit: lo requires gamma and the grid of y in the type of variance, float32 or float64.");
  if (!is_one_launch(variance, {&norm.gamma, &weight.start, &weight.ratio, &output.start, &output.ratio})) {
    return {Factor(norm).factor, *weight.scale(), output.scale()};
  }
  Made result = {at::empty_like(variance), at::empty_like(*weight.start), std::nullopt};
  if (output.start.has_value()) result.y_scale = at::empty_like(*output.start);
  UnitScales u;
  u.f64 = variance.scalar_type() == at::kDouble;
  u.channels = variance.numel();
  u.eps = norm.eps;
  u.variance = variance.const_data_ptr();
  u.gamma = data(norm.gamma);
  u.factor = result.factor.mutable_data_ptr();
  const auto set = [](TrainedScale& scale, const Trained& from, const Tensor& to) {
    scale = {to.numel(), from.start->const_data_ptr(), data(from.ratio), to.mutable_data_ptr()};
  };
  set(u.weight, weight, result.scale);
  if (result.y_scale.has_value()) set(u.output, output, *result.y_scale);
  if (ends.defined()) {
    const double* low = ends.const_data_ptr<double>();
    const CodeRange codes = {double(l.qmin), double(l.qmax), true, followed.pow2_scale};
    u.followed = {low,
                  low + u.channels,
                  weight.start->mutable_data_ptr(),
                  followed.lo->mutable_data_ptr(),
                  followed.hi->mutable_data_ptr(),
                  codes};
    for (const Tensor& t : {*weight.start, *followed.lo, *followed.hi}) note_change(t);
  }
  on(variance.device()).unit_scales(u, variance.device());
  return result;
}

void unit(const c10::OperatorHandle& op, Stack* stack) {
  Tensor x;
  Layer layer;
  Trained weight;
  optional<at::ScalarType> dtype;
  optional<at::MemoryFormat> format;
  optional<Tensor> bias, running_mean, running_var, batches;
  Followed followed;
  Norm norm;
  double momentum;
  Following following;
  Output output;
  const size_t count = op.schema().arguments().size();
  Reader reader(torch::jit::last(*stack, count));
  reader >> x;
  read_layer(reader, layer, weight) >> followed >> dtype >> format >> bias >> norm;
  reader >> running_mean >> running_var >> batches >> momentum >> following;
  read_output(reader, output);
  torch::jit::drop(*stack, count);

  TORCH_CHECK_VALUE(running_mean.has_value() == running_var.has_value(),
                    "unit: running_mean and running_var belong together; pass both, or neither.");
  const WithoutAutocast guard;
  Made scales = made(norm, weight, output.trained, layer, followed);
  layer.factor = std::move(scales.factor);
  layer.scale = std::move(scales.scale);
  const optional<Tensor>& y_scale = scales.y_scale;
  const Tensor undivided = quant_layer(x, std::nullopt, layer, dtype, format, {});
  const Following& f = following;
  const auto [y, codes, mean, variance] = batch_norm_fake_quant(
      undivided, norm.gamma, norm.beta, layer.factor, f.residual, f.codes, f.scale, f.zero_point, norm.eps, f.low,
      f.high, f.slope, y_scale, output.zero_point, output.qmin, output.qmax, output.grad_factor);
  if (running_mean.has_value()) {
    if (batches.has_value()) {
      batches->add_(1);
      note_change(*batches);
    }
    batch_norm_track_(*running_mean, *running_var, mean, variance, layer.factor, bias, momentum,
                      undivided.sym_numel() / undivided.sym_size(1));
    note_change(*running_mean);
    note_change(*running_var);
  }
  for (const Tensor& t : {y, codes, y_scale.value_or(at::empty({0}, x.options())), *layer.factor, layer.scale,
                          undivided, mean, variance}) {
    stack->emplace_back(t);
  }
}

// The places of gradients in the results of unit_backward.
enum {
  kX,
  kWeight,
  kStart,
  kRatio,
  kZeroPoint,
  kBias,
  kGamma,
  kBeta,
  kResidual,
  kYStart,
  kYRatio,
  kYZeroPoint,
  kCount
};
using Wanted = std::array<bool, kCount>;

// The gradients of what the scales and the factor are made of, from those of the scales and of the factor.
struct Incoming {
  Tensor scale, y_scale;                   // undefined where they are not wanted
  Tensor of_gamma, of_divisor, of_factor;  // of_factor is undefined where the gradient of gamma is not wanted
};

void through_scales(const Incoming& in, const Norm& norm, const Trained& weight, const Trained& output,
                    const Wanted& wanted, std::array<Tensor, kCount>& gradients) {
  const bool in_weight = in.scale.defined() && weight.ratio.has_value() && wanted[kRatio];
  const bool in_output = in.y_scale.defined() && output.ratio.has_value() && wanted[kYRatio];
  if (in.scale.defined() && wanted[kStart]) gradients[kStart] = in.scale;
  if (in.y_scale.defined() && wanted[kYStart]) gradients[kYStart] = in.y_scale;
  const auto given = [](const Tensor& t) { return t.defined() ? optional<Tensor>(t) : std::nullopt; };
  const optional<Tensor> tensors[] = {given(in.scale), given(in.y_scale), given(in.of_gamma), given(in.of_divisor),
                                      given(in.of_factor)};
  const bool one = is_one_launch(norm.variance, {&norm.gamma, &weight.ratio, &weight.rate, &output.ratio, &output.rate,
                                                 &tensors[0], &tensors[1], &tensors[2], &tensors[3], &tensors[4]});
  if (!one) {
    if (in_weight) gradients[kRatio] = positive_scale_backward(in.scale, *weight.start, *weight.ratio, weight.rate);
    if (in_output) gradients[kYRatio] = positive_scale_backward(in.y_scale, *output.start, *output.ratio, output.rate);
    if (!in.of_factor.defined()) return;
    const Factor factor(norm);
    const Tensor of_factor = at::masked_fill(at::add(in.of_divisor, in.of_factor), factor.is_zero, 0);
    gradients[kGamma] = at::add(in.of_gamma, at::mul(of_factor, factor.inverse)).to(norm.gamma->scalar_type());
    return;
  }
  UnitGradients u;
  u.f64 = norm.variance.scalar_type() == at::kDouble;
  u.eps = norm.eps;
  const auto set = [](RatioGradient& r, const Tensor& grad, const Trained& from, Tensor& to) {
    to = at::empty_like(*from.ratio);
    r = {to.numel(),      grad.const_data_ptr(), from.start->const_data_ptr(), from.ratio->const_data_ptr(),
         data(from.rate), to.mutable_data_ptr()};
  };
  if (in_weight) set(u.weight, in.scale, weight, gradients[kRatio]);
  if (in_output) set(u.output, in.y_scale, output, gradients[kYRatio]);
  if (in.of_factor.defined()) {
    u.channels = norm.variance.numel();
    u.variance = norm.variance.const_data_ptr();
    u.gamma = data(norm.gamma);
    u.of_gamma = in.of_gamma.const_data_ptr();
    u.of_divisor = in.of_divisor.const_data_ptr();
    u.of_factor = in.of_factor.const_data_ptr();
    gradients[kGamma] = at::empty_like(*norm.gamma);
    u.result = gradients[kGamma].mutable_data_ptr();
  }
  if (largest_count(u) > 0) on(norm.variance.device()).unit_gradients(u, norm.variance.device());
}

void unit_backward(const c10::OperatorHandle& op, Stack* stack) {
  Tensor grad, undivided, mean, variance;
  std::vector<c10::SymInt> size;
  at::ScalarType x_dtype;
  Layer layer;
  Trained weight;
  optional<Tensor> bias, y_scale;
  Norm norm;
  Following f;
  Output output;
  Wanted wanted;
  const size_t count = op.schema().arguments().size();
  Reader reader(torch::jit::last(*stack, count));
  reader >> grad >> size >> x_dtype;
  read_layer(reader, layer, weight) >> bias >> norm >> f;
  read_output(reader, output) >> y_scale >> layer.factor >> layer.scale >> undivided >> mean >> variance >> wanted;
  torch::jit::drop(*stack, count);

  constexpr const char* kOp = "unit_backward";
  check_norm(kOp, norm, output_channels(layer.weight, layer.geometry));
  check_trained(kOp, "the weight", weight, layer.scale.sym_numel());
  check_trained(kOp, "y", output.trained, 1);
  const WithoutAutocast guard;
  std::array<Tensor, kCount> gradients;
  const bool is_quantized = y_scale.has_value() && y_scale->sym_numel() > 0;
  const bool of_y_scale = is_quantized && (wanted[kYStart] || wanted[kYRatio] || wanted[kYZeroPoint]);
  const auto [dz, dgamma, dbeta, ddivisor, dresidual, dy_scale, dy_zero_point] = batch_norm_fake_quant_backward(
      grad, undivided, norm.gamma, norm.beta, layer.factor, f.residual, f.codes, f.scale, f.zero_point, mean, variance,
      norm.eps, f.low, f.high, f.slope, is_quantized ? y_scale : std::nullopt, output.zero_point, output.qmin,
      output.qmax, output.grad_factor, wanted[kResidual], of_y_scale);

  const bool of_gamma = wanted[kGamma] && norm.gamma.has_value();
  const bool of_scale = wanted[kStart] || wanted[kRatio];
  const GradientsOfLayer in_layer = quant_layer_backward(
      dz, size, layer, x_dtype,
      {wanted[kX], wanted[kWeight], of_gamma, of_scale, wanted[kZeroPoint], /*bias=*/false, /*raw_scale=*/false}, {});
  if (wanted[kX]) gradients[kX] = in_layer[0];
  if (wanted[kWeight]) gradients[kWeight] = in_layer[1];
  if (wanted[kZeroPoint]) gradients[kZeroPoint] = in_layer[4];
  // The batch norm subtracts the bias: its gradient is zero, not absent.
  if (wanted[kBias] && bias.has_value()) gradients[kBias] = at::mul(ddivisor, 0).to(bias->scalar_type());
  if (wanted[kBeta]) gradients[kBeta] = dbeta;
  if (wanted[kResidual]) gradients[kResidual] = dresidual;
  if (wanted[kYZeroPoint]) gradients[kYZeroPoint] = dy_zero_point;
  const Incoming incoming = {of_scale ? in_layer[3] : Tensor(), of_y_scale ? dy_scale : Tensor(), dgamma, ddivisor,
                             of_gamma ? in_layer[2] : Tensor()};
  through_scales(incoming, norm, weight, output.trained, wanted, gradients);
  const Tensor empty = at::empty({0}, grad.options());
  for (Tensor& gradient : gradients) {
    stack->emplace_back(gradient.defined() ? std::move(gradient) : empty);
  }
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("unit", torch::CppFunction::makeFromBoxedFunction<&unit>());
  m.impl("unit_backward", torch::CppFunction::makeFromBoxedFunction<&unit_backward>());
}

}  // namespace qtoolkit
