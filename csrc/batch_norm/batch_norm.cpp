// The bodies of batch norm in training and its gradients: checks, results, kernel arguments. Statistics of several
// ranks take two launches for each direction, around an all-reduce of totals.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "../launch.h"
#include "../layout.h"
#include "../reader.h"
#include "../registration.h"
#include "batch_norm_ops.h"
#include "norm_checks.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using ProcessGroup = optional<std::string_view>;

// Adds up totals over the ranks of a process group, by its name as torch.distributed has it.
Tensor added_up(const Tensor& totals, ProcessGroup process_group) {
  if (!process_group.has_value()) return totals;
  auto& ops = c10::Dispatcher::singleton();
  static const auto all_reduce = ops.findSchemaOrThrow("_c10d_functional::all_reduce", "");
  static const auto wait = ops.findSchemaOrThrow("_c10d_functional::wait_tensor", "");
  torch::jit::Stack stack = {totals, "sum", std::string(*process_group)};  // its type differs between versions of torch
  all_reduce.callBoxed(&stack);
  wait.callBoxed(&stack);
  return stack.back().toTensor();
}

// The totals of values that are larger by `offset`, one for each channel.
Tensor shifted(const Tensor& totals, const Tensor& offset) {
  const int64_t channels = offset.size(0);
  const Tensor sums = totals.narrow(0, 0, channels), squares = totals.narrow(0, channels, channels);
  const Tensor count = totals.narrow(0, 2 * channels, 1), moved = at::add(sums, at::mul(offset, count));
  return at::cat({moved, at::add(squares, at::mul(offset, at::add(sums, moved))), count});
}

// x as outer x channels x inner; one channel is a row of its own. `dense` has the layout of the results.
void set_shape(BatchNormArgs& args, const Tensor& dense) {
  args.channels = dense.size(1);
  args.inner = args.channels == 1 ? 1 : dense.stride(1);
  args.outer = dense.numel() / (args.channels * args.inner);
  args.dtype = dtype_of(dense);
}

// Keeps copies of tensors for as long as their pointers are in use.
class Pointers {
 public:
  explicit Pointers(const Tensor& dense) : dense_(dense) {}
  // In the layout of the results.
  const void* elements(const optional<Tensor>& t) {
    return t.has_value() ? keep(in_order_of(*t, dense_)).const_data_ptr() : nullptr;
  }
  // In the type of the arithmetic.
  const void* values(const optional<Tensor>& t) {
    return t.has_value() ? keep(in_arithmetic(*t, dense_.scalar_type() == at::kDouble)).const_data_ptr() : nullptr;
  }

 private:
  const Tensor& keep(Tensor t) { return kept_.emplace_back(std::move(t)); }

  const Tensor& dense_;
  std::vector<Tensor> kept_;
};

// qtoolkit.ops.batch_norm makes the lists.
Reader& operator>>(Reader& reader, BatchNorm& n) {
  std::vector<double> activation;
  std::vector<int64_t> range;
  reader >> n.weight >> n.bias >> n.divisor;
  reader >> n.residual >> n.residual_codes >> n.residual_scale >> n.residual_zero_point >> n.eps >> activation;
  reader >> n.scale >> n.zero_point >> range >> n.grad_factor >> n.totals >> n.process_group;
  TORCH_CHECK_VALUE(activation.size() == 3, reader.op(), ": activation must have low, high and slope, got ",
                    at::ArrayRef<double>(activation), ".");
  TORCH_CHECK_VALUE(range.size() == 2, reader.op(), ": range must have qmin and qmax, got ", at::IntArrayRef(range),
                    ".");
  n.low = activation[0];
  n.high = activation[1];
  n.slope = activation[2];
  n.qmin = range[0];
  n.qmax = range[1];
  return reader;
}

void check(const char* op, const Tensor& x, const BatchNorm& n, bool with_totals) {
  check_norm_input(op, x, with_totals);
  const c10::SymInt channels = x.sym_size(1);
  check_of_channels(op, "weight", n.weight, channels, x);
  check_of_channels(op, "bias", n.bias, channels, x);
  check_of_channels(op, "divisor", n.divisor, channels, x);
  check_residual(op, n.residual, n.residual_codes, n.residual_scale, n.residual_zero_point, x);
  check_activation(op, n.eps, n.low, n.high);
  check_one_grid(op, "", n.scale, n.zero_point, x);
  if (n.scale.has_value()) check_code_range(op, n.qmin, n.qmax);
}

BatchNormArgs arguments(const Tensor& x, const BatchNorm& n, const Tensor& dense, Pointers& pointers) {
  BatchNormArgs args;
  set_shape(args, dense);
  args.x = pointers.elements(x);
  if (n.residual.has_value()) {  // codes are for backward: NaN has none
    args.residual = pointers.elements(n.residual);
  } else if (n.residual_codes.has_value()) {
    args.residual_codes = static_cast<const uint8_t*>(pointers.elements(n.residual_codes));
    args.residual_signed = n.residual_codes->scalar_type() == at::kChar;
    args.residual_scale = pointers.values(n.residual_scale);
    args.residual_zero_point = pointers.values(n.residual_zero_point);
  }
  args.weight = pointers.values(n.weight);
  args.bias = pointers.values(n.bias);
  args.divisor = pointers.values(n.divisor);
  args.eps = n.eps;
  args.low = n.low;
  args.high = n.high;
  args.slope = n.slope;
  args.scale = pointers.values(n.scale);
  args.zero_point = pointers.values(n.zero_point);
  args.bounds = representable(n.qmin, n.qmax, x);
  return args;
}

c10::ScalarType arithmetic_of(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// Not where they are packed and planes of an odd size would share bytes.
Tensor codes_for(const Tensor& y, bool quantized, int64_t qmin, int64_t qmax, bool packed) {
  const bool shares = packed && y.sym_size(1) > 1 && y.sym_stride(1) > 1 && y.sym_stride(1) % 2 != 0;
  if (quantized && fit_a_byte(qmin, qmax) && !shares) return empty_codes(y, qmin < 0, packed);
  return at::empty({0}, y.options().dtype(qmin < 0 ? at::kChar : at::kByte));
}

// The gradient of a tensor that may be absent, of its dtype and shape; empty if it is not wanted.
Tensor gradient_like(const optional<Tensor>& t, bool wanted, const Tensor& x) {
  return t.has_value() && wanted ? at::empty_symint(t->sym_sizes(), t->options()) : at::empty({0}, x.options());
}

at::TensorOptions float64_like(const Tensor& x) { return x.options().dtype(at::kDouble); }

// What a launch is told of running statistics, and the tensors that it points to. Batches that it cannot count are
// counted at once. Without channels, or memory, it tracks nothing.
struct Tracked {
  TrackedStatistics args;
  std::array<Tensor, 4> values;

  Tracked(const char* op, const Tracking& t, const Tensor& mean, const Tensor& variance) {
    check_track(op, t.running_mean, t.running_var, mean, variance, t.divisor, t.offset, t.momentum, t.count, t.totals);
    const bool is_empty = t.running_mean.is_meta() || t.running_mean.numel() == 0;
    const bool counts = t.batches.has_value() && !is_empty && t.batches->scalar_type() == at::kLong &&
                        t.batches->device() == t.running_mean.device();
    if (t.batches.has_value() && !counts) t.batches->add_(1);
    if (is_empty) return;
    args.channels = t.running_mean.numel();
    args.dtype = dtype_of(t.running_mean);
    args.f64 = mean.scalar_type() == at::kDouble;
    args.running_mean = t.running_mean.mutable_data_ptr();
    args.running_variance = t.running_var.mutable_data_ptr();
    args.mean = pointer(0, mean);
    args.variance = pointer(1, variance);
    args.divisor = pointer(2, t.divisor);
    args.offset = pointer(3, t.offset);
    args.momentum = t.momentum;
    args.count = static_cast<double>(t.count.expect_int());
    if (t.totals.has_value()) args.counted = t.totals->const_data_ptr<double>() + t.totals->size(1) - 1;
    if (counts) args.batches = t.batches->mutable_data_ptr<int64_t>();
  }

  void launch(c10::Device device) const {
    if (args.channels > 0) on(device).batch_norm_track(args, device);
  }

 private:
  const void* pointer(size_t i, const optional<Tensor>& t) {
    if (!t.has_value()) return nullptr;
    return (values[i] = in_arithmetic(*t, args.f64)).const_data_ptr();
  }
};

// Zeros in which a GPU counts the blocks that have come to the channels of x.
Tensor counters(const Tensor& x) { return at::zeros({x.size(1)}, x.options().dtype(at::kInt)); }

}  // namespace

Tensor batch_norm_totals(const Tensor& x, const optional<Tensor>& divisor, const optional<Tensor>& offset,
                         ProcessGroup process_group) {
  constexpr const char* kOp = "batch_norm_totals";
  check_norm_input(kOp, x, /*with_totals=*/true);
  check_of_channels(kOp, "divisor", divisor, x.sym_size(1), x);
  check_of_channels(kOp, "offset", offset, x.sym_size(1), x);
  const c10::SymInt count = 2 * x.sym_size(1) + 1;
  if (x.is_meta()) return at::empty_symint({2, count}, float64_like(x));
  const Tensor own = at::zeros_symint({count}, float64_like(x));
  if (x.numel() > 0) {
    const Tensor layout = layout_of_result(x, 1);
    Pointers pointers(layout);
    BatchNormArgs args;
    set_shape(args, layout);
    args.x = pointers.elements(x);
    args.divisor = pointers.values(divisor);
    args.stage = NormStage::totals;
    args.totals = own.mutable_data_ptr<double>();
    const Tensor arrived = on(x.device()).on_gpu ? counters(x) : Tensor();
    if (arrived.defined()) args.arrived = reinterpret_cast<unsigned*>(arrived.mutable_data_ptr<int32_t>());
    on(x.device()).batch_norm_forward(args, x.device());
  }
  if (!process_group.has_value() || !offset.has_value()) return at::stack({added_up(own, process_group), own});
  const Tensor by = as_type(*offset, at::kDouble);
  return at::stack({shifted(added_up(shifted(own, by), process_group), at::neg(by)), own});
}

BatchNormResult batch_norm_fake_quant(const Tensor& x, const BatchNorm& norm, bool packs_codes,
                                      const optional<Tracking>& tracking, Tensor arrived) {
  constexpr const char* kOp = "batch_norm_fake_quant";
  const optional<Tensor>& totals = norm.totals;
  check(kOp, x, norm, totals.has_value());
  check_totals(kOp, totals, x.sym_size(1), x, norm.process_group.has_value());
  TORCH_CHECK_VALUE(norm.residual.has_value() || !norm.residual_codes.has_value(), kOp,
                    ": residual_codes require residual, got None, since the gradient goes to the residual; pass "
                    "both, or neither.");
  const bool packed = packs_codes && fit_4_bits(norm.qmin, norm.qmax);
  const Tensor y = empty_result(x, x.options(), 1);
  const Tensor codes = codes_for(y, norm.scale.has_value(), norm.qmin, norm.qmax, packed);
  const auto statistic = [&] { return at::empty_symint({x.sym_size(1)}, x.options().dtype(arithmetic_of(x))); };
  const Tensor mean = statistic(), variance = statistic();
  const DeviceKernels& kernels = on(x.device());
  optional<Tracked> tracked;
  if (tracking.has_value()) tracked.emplace("batch_norm_track_", *tracking, mean, variance);
  if (y.is_meta() || mean.numel() == 0 || (y.numel() == 0 && !totals.has_value())) {
    if (tracked.has_value()) tracked->launch(x.device());
    return {y, codes, mean, variance};
  }
  Pointers pointers(y);
  BatchNormArgs args = arguments(x, norm, y, pointers);
  args.y = y.mutable_data_ptr();
  args.codes = codes.numel() > 0 ? static_cast<uint8_t*>(codes.mutable_data_ptr()) : nullptr;
  args.packed = packed;
  args.mean = mean.mutable_data_ptr();
  args.variance = variance.mutable_data_ptr();
  if (totals.has_value()) {
    args.stage = NormStage::rest;
    args.totals = const_cast<double*>(totals->const_data_ptr<double>());  // only read
  }
  if (kernels.on_gpu) {
    if (tracked.has_value()) args.tracked = tracked->args;
    if (!arrived.defined() && !totals.has_value()) arrived = counters(x);
    if (arrived.defined()) args.arrived = reinterpret_cast<unsigned*>(arrived.mutable_data_ptr<int32_t>());
  }
  kernels.batch_norm_forward(args, x.device());
  if (!kernels.on_gpu && tracked.has_value()) tracked->launch(x.device());
  return {y, codes, mean, variance};
}

namespace {

// With constant statistics, which are none of x, nobody else has a part in the sums.
GradientsOfBatchNorm gradients_of(const char* op, const Tensor& grad, const Tensor& x, const Tensor& mean,
                                  const Tensor& variance, const WantedOfBatchNorm& wanted, const BatchNorm& norm,
                                  bool constant, LaterGradients* later) {
  const bool in_halves = norm.process_group.has_value() || constant;
  check(op, x, norm, in_halves);
  check_totals(op, norm.totals, x.sym_size(1), x, in_halves);
  check_float(op, "grad", grad);
  check_same_shape(op, "grad", grad, x);
  check_of_channels(op, "mean", mean, x.sym_size(1), x);
  check_of_channels(op, "variance", variance, x.sym_size(1), x);
  const Tensor dx = empty_result(x, x.options(), 1);
  const GradientsOfBatchNorm gradients = {dx,
                                          gradient_like(norm.weight, wanted[1], x),
                                          gradient_like(norm.bias, wanted[2], x),
                                          gradient_like(norm.divisor, wanted[3], x),
                                          wanted[4] ? empty_result(x, x.options(), 1) : at::empty({0}, x.options()),
                                          gradient_like(norm.scale, wanted[5], x),
                                          gradient_like(norm.zero_point, wanted[6], x)};
  const auto& [_, of_weight, of_bias, of_divisor, of_residual, ds, dz] = gradients;
  if (dx.is_meta()) return gradients;
  if (dx.numel() == 0) {
    for (const Tensor& t : {of_weight, of_bias, of_divisor, ds, dz}) t.zero_();
    added_up(at::zeros({2 * x.size(1) + 1}, float64_like(x)), norm.process_group);  // other ranks wait for this one
    return gradients;
  }

  Pointers pointers(dx);
  BatchNormArgs args = arguments(x, norm, dx, pointers);
  args.grad = pointers.elements(as_type(grad, x.scalar_type()));
  args.mean = const_cast<void*>(pointers.values(mean));  // only read
  args.variance = const_cast<void*>(pointers.values(variance));
  args.y = dx.mutable_data_ptr();
  args.residual_grad = wanted[4] ? of_residual.mutable_data_ptr() : nullptr;
  const Tensor sums = at::empty({3 * args.channels + 2}, float64_like(x));
  args.learned = ds.numel() > 0 || dz.numel() > 0;
  args.gradients = sums.mutable_data_ptr<double>();
  Tensor of_gradients;
  if (in_halves) {
    of_gradients = at::empty({2 * args.channels + 1}, float64_like(x));
    if (!constant || args.learned || of_bias.numel() > 0) {
      args.stage = NormStage::totals;
      args.totals = of_gradients.mutable_data_ptr<double>();
      on(x.device()).batch_norm_backward(args, x.device());
    }
    of_gradients = constant ? norm.totals->select(0, 0) : added_up(of_gradients, norm.process_group);
    args.stage = NormStage::rest;
    args.totals = of_gradients.mutable_data_ptr<double>();
    args.own = norm.totals->const_data_ptr<double>() + norm.totals->size(1);
  }
  on(x.device()).batch_norm_backward(args, x.device());

  const double *per_row = args.gradients, *of_scale = per_row + 3 * args.channels;
  write_gradients({{per_row, 1, {}, of_weight},
                   {per_row + args.channels, 1, {}, of_bias},
                   {per_row + 2 * args.channels, 1, {}, of_divisor},
                   {of_scale, norm.grad_factor, norm.scale.value_or(Tensor()), ds},
                   {of_scale + 1, norm.grad_factor, {}, dz}},
                  sums, later);
  return gradients;
}

}  // namespace

GradientsOfBatchNorm batch_norm_fake_quant_backward(const Tensor& grad, const Tensor& x, const Tensor& mean,
                                                    const Tensor& variance, const WantedOfBatchNorm& wanted,
                                                    const BatchNorm& norm, LaterGradients* later) {
  return gradients_of("batch_norm_fake_quant_backward", grad, x, mean, variance, wanted, norm, /*constant=*/false,
                      later);
}

// ---- without a batch norm: one of constant statistics, mean 0 and variance 0 with an eps of 1, which changes no value

namespace {

constexpr double kEpsOfNone = 1;

// The totals of one value, 0; of the gradients of constants too.
Tensor totals_of_none(const Tensor& x) {
  const c10::SymInt count = 2 * x.sym_size(1) + 1;
  const Tensor totals = at::zeros_symint({2, count}, float64_like(x));
  totals.narrow_symint(1, count - 1, 1).fill_(1);
  return totals;
}

}  // namespace

std::tuple<Tensor, Tensor> epilogue_fake_quant(const Tensor& x, const Epilogue& e) {
  const BatchNorm none = {e, {}, {}, {}, kEpsOfNone, totals_of_none(x), {}};
  const BatchNormResult result = batch_norm_fake_quant(x, none, /*packs_codes=*/true);
  return {result.y, result.codes};
}

EpilogueGradients epilogue_fake_quant_backward(const Tensor& grad, const Tensor& x, const Epilogue& e,
                                               const WantedOfEpilogue& wanted) {
  const Tensor totals = totals_of_none(x);
  // The first totals are zeros, in any type.
  const Tensor zeros = totals.select(0, 0).view(arithmetic_of(x)).narrow_symint(0, 0, x.sym_size(1));
  const optional<Tensor> bias = wanted.channels ? optional<Tensor>(zeros) : std::nullopt;
  const BatchNorm none = {e, {}, bias, {}, kEpsOfNone, totals, {}};
  const WantedOfBatchNorm of_norm = {true, false, wanted.channels, false, wanted.residual, wanted.scale, wanted.scale};
  const auto [dx, dweight, dbias, ddivisor, dresidual, dscale, dzero_point] =
      gradients_of("unit_backward", grad, x, zeros, zeros, of_norm, none, /*constant=*/true, /*later=*/nullptr);
  return {dx, dbias, dresidual, dscale, dzero_point};
}

namespace {

using torch::jit::Stack;

void batch_norm_track_(Tensor& running_mean, Tensor& running_var, const Tensor& mean, const Tensor& variance,
                       const optional<Tensor>& divisor, const optional<Tensor>& offset, double momentum,
                       c10::SymInt count, const optional<Tensor>& totals) {
  const Tracking tracking = {running_mean, running_var, divisor, offset, momentum, count, totals, std::nullopt};
  Tracked("batch_norm_track_", tracking, mean, variance).launch(running_mean.device());
}

void batch_norm_fake_quant_boxed(const c10::OperatorHandle& op, Stack* stack) {
  Tensor x;
  BatchNorm norm;
  bool packs_codes;
  Reader(op, stack) >> x >> norm >> packs_codes;
  const auto [y, codes, mean, variance] = batch_norm_fake_quant(x, norm, packs_codes);
  torch::jit::push(*stack, y, codes, mean, variance);
}

void batch_norm_fake_quant_backward_boxed(const c10::OperatorHandle& op, Stack* stack) {
  Tensor grad, x, mean, variance;
  WantedOfBatchNorm wanted;
  BatchNorm norm;
  Reader(op, stack) >> grad >> x >> mean >> variance >> wanted >> norm;
  for (const Tensor& gradient : batch_norm_fake_quant_backward(grad, x, mean, variance, wanted, norm)) {
    stack->emplace_back(gradient);
  }
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("batch_norm_totals", batch_norm_totals);
  using torch::CppFunction;
  m.impl("batch_norm_fake_quant", CppFunction::makeFromBoxedFunction<&batch_norm_fake_quant_boxed>());
  m.impl("batch_norm_fake_quant_backward", CppFunction::makeFromBoxedFunction<&batch_norm_fake_quant_backward_boxed>());
  m.impl("batch_norm_track_", batch_norm_track_);
}

}  // namespace qtoolkit
