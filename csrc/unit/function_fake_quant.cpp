// A function of one tensor with a quantizer after it. Backward keeps the function's input alone and computes the
// function again, where its result and its input would be two copies; without a function it keeps one bit an element.
// A norm may be of the sum of two tensors: a residual stream. On CUDA, GELU, SiLU and norms of float32 are one kernel
// each way with their quantizers, and with that sum.
#include <ATen/OpMathType.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <numeric>

#include "../checks.h"
#include "../launch.h"
#include "../layer/layer_ops.h"
#include "../quantize/elementwise.h"
#include "../registration.h"
#include "unit.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

Reader& operator>>(Reader& reader, Function& f) { return reader >> f.name >> f.shape >> f.weight >> f.bias >> f.eps; }

// `in_range` is whether qmin and qmax are one list.
void read_output(Reader& reader, Output& o, bool in_range) {
  if (!in_range) {
    reader >> o;
    return;
  }
  std::vector<int64_t> range;
  reader >> o.trained.start >> o.trained.ratio >> o.trained.rate >> o.zero_point >> range >> o.grad_factor;
  TORCH_CHECK_VALUE(range.size() == 2, reader.op(), ": y_range must be qmin and qmax, got ", range.size(), " values.");
  o.qmin = range[0];
  o.qmax = range[1];
}

void check_function(const char* op, const Function& f) {
  for (const char* known : {"none", "heads", "relu", "gelu", "gelu_tanh", "silu", "layer_norm", "rms_norm"}) {
    if (f.name == known) return;
  }
  TORCH_CHECK_VALUE(
      false, op,
      ": function must be 'none', 'heads', 'relu', 'gelu', 'gelu_tanh', 'silu', 'layer_norm' or 'rms_norm', got '",
      f.name, "'.");
}

void check_norm(const char* op, const Function& f) {
  TORCH_CHECK_VALUE(f.is_norm(), op, ": function must be 'layer_norm' or 'rms_norm', got '", f.name, "'.");
}

// The function's value; of a norm with the mean and the inverse deviation of each row. An RMS norm has no mean, and its
// deviation is the root of the mean square.
struct Value {
  Tensor result, mean, rstd;
};

// The last dimensions of x, which an RMS norm takes together.
std::vector<int64_t> normalized(const char* op, const Function& f, const Tensor& x) {
  const c10::SymIntArrayRef shape = f.shape;
  TORCH_CHECK_VALUE(!shape.empty() && x.dim() >= static_cast<int64_t>(shape.size()) &&
                        x.sym_sizes().slice(x.dim() - shape.size()) == shape,
                    op, ": shape must be the last dimensions of x, got ", shape, " and x of shape ", x.sym_sizes(),
                    ".");
  TORCH_CHECK_VALUE(!f.weight.has_value() || f.weight->sym_sizes() == shape, op,
                    ": weight must have the shape of the norm, ", shape, ", got ", f.weight->sym_sizes(), ".");
  std::vector<int64_t> dims(shape.size());
  std::iota(dims.begin(), dims.end(), x.dim() - static_cast<int64_t>(dims.size()));
  return dims;
}

// torch's rms_norm, op by op as its forward and its gradients are outside CUDA, with the same bits. Narrow types
// compute in float32.
Value rms_norm(const Function& f, const Tensor& x) {
  const std::vector<int64_t> dims = normalized("function_fake_quant", f, x);
  const Tensor wide = as_type(x, at::toOpMathType(x.scalar_type()));
  const Tensor rstd = at::rsqrt(at::pow(wide, 2).mean(dims, /*keepdim=*/true).add_(f.eps));
  const Tensor normal = wide.mul(rstd);
  return {as_type(f.weight.has_value() ? normal.mul(*f.weight) : normal, x.scalar_type()), {}, rstd};
}

struct RmsGradients {
  Tensor x, weight;
};

Tensor plus(const optional<Tensor>& other, const Tensor& t) { return other.has_value() ? at::add(*other, t) : t; }

// With another gradient of x, which is added where autograd adds it.
RmsGradients rms_norm_backward(const Function& f, const Tensor& grad, const Tensor& x, const Tensor& rstd,
                               bool of_weight, const optional<Tensor>& other) {
  const char* op = "function_fake_quant_backward";
  const std::vector<int64_t> dims = normalized(op, f, x);
  std::vector<c10::SymInt> of_rows = x.sym_sizes().vec();
  for (const int64_t dim : dims) of_rows[dim] = 1;
  TORCH_CHECK_VALUE(rstd.sym_sizes() == c10::SymIntArrayRef(of_rows), op,
                    ": rstd must be what function_fake_quant returned, one value for each row, got shape ",
                    rstd.sym_sizes(), ".");
  const at::ScalarType type = at::toOpMathType(x.scalar_type());
  const Tensor wide = as_type(x, type), of_y = as_type(grad, type);
  const Tensor of_normal = f.weight.has_value() ? of_y.mul(*f.weight) : of_y;
  const Tensor of_rstd = of_normal.mul(wide).sum(dims, /*keepdim=*/true);
  const Tensor of_mean = of_rstd.mul(-0.5).mul(rstd.pow(3)).div(at::Scalar(c10::multiply_integers(f.shape)));
  const Tensor of_wide = of_normal.mul(rstd), of_square = of_mean.mul(wide.mul(2));
  const bool is_wide = type == x.scalar_type();
  RmsGradients result = {
      is_wide ? plus(other, of_wide).add(of_square) : plus(other, as_type(of_wide.add(of_square), x.scalar_type())),
      {}};
  if (!of_weight || !f.weight.has_value()) return result;
  const Tensor of_each = of_y.mul(wide.mul(rstd));
  std::vector<int64_t> rows(static_cast<size_t>(dims.front()));
  std::iota(rows.begin(), rows.end(), 0);
  result.weight = as_type(rows.empty() ? of_each : of_each.sum(rows), f.weight->scalar_type());
  return result;
}

Value value_of(const Function& f, const Tensor& x) {
  if (f.is_layer_norm()) {
    const auto [y, mean, rstd] = at::native_layer_norm_symint(x, f.shape, f.weight, f.bias, f.eps);
    return {y, mean, rstd};
  }
  if (f.is_norm()) return rms_norm(f, x);
  if (f.name == "relu") return {at::relu(x), {}, {}};
  if (f.name == "silu") return {at::silu(x), {}, {}};
  if (f.is_heads()) return {f.eps == 1 ? x.contiguous() : at::mul(x.contiguous(), f.eps), {}, {}};
  return {f.is_none() ? x : at::gelu(x, f.approximate()), {}, {}};
}

// ---- by one kernel each way

optional<RowFunction> row_function(const Function& f) {
  if (f.is_norm()) return RowFunction::norm;
  if (f.is_none()) return RowFunction::none;
  if (f.is_heads()) return RowFunction::heads;
  if (f.name == "silu") return RowFunction::silu;
  if (f.name == "gelu") return RowFunction::gelu;
  return f.name == "gelu_tanh" ? optional(RowFunction::gelu_tanh) : std::nullopt;
}

bool is_row(const Tensor& t) {
  return t.is_contiguous() && !t.is_meta() && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

bool is_row_of_floats(const Tensor& t) { return t.scalar_type() == at::kFloat && is_row(t); }

bool has_norm_kernel(const Function& f, const Tensor& x) {
  const auto dims = static_cast<int64_t>(f.shape.size());
  const c10::SymIntArrayRef shape = f.shape;
  if (!is_row_of_floats(x) || x.dim() < dims || x.sym_sizes().slice(x.dim() - dims) != shape) return false;
  const int64_t length = c10::multiply_integers(x.sizes().slice(x.dim() - dims));
  const auto fits = [&](const optional<Tensor>& t) {
    return !t.has_value() || (is_row_of_floats(*t) && t->device() == x.device() && t->sym_sizes() == shape);
  };
  return length % 8 == 0 && length <= kLongestNormRow && fits(f.weight) && fits(f.bias);
}

bool has_heads_kernel(const Tensor& x) {
  constexpr int64_t kMost = int64_t{8} << 30;  // vectors are numbered in 32 bits
  if (x.scalar_type() == at::kDouble || x.dim() != 4 || x.size(3) % 8 != 0 || x.stride(3) != 1) return false;
  const auto in_vectors = [&](int64_t dim) { return x.stride(dim) % 8 == 0; };
  const bool is_aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return in_vectors(0) && in_vectors(1) && in_vectors(2) && is_aligned && x.numel() < kMost;
}

// What torch's ops or the kernel save is the same to either of them.
bool has_kernel(const Function& f, const Tensor& x) {
  const auto function = row_function(f);
  if (!function.has_value() || x.is_meta() || on(x.device()).function_rows == nullptr || x.numel() == 0) return false;
  if (*function == RowFunction::norm) return has_norm_kernel(f, x);
  if (*function == RowFunction::heads) return has_heads_kernel(x);
  return x.scalar_type() != at::kDouble && x.is_non_overlapping_and_dense();
}

int64_t rows_in(const Function& f, const Tensor& x) {
  if (!f.is_norm()) return 1;
  return c10::multiply_integers(x.sizes().slice(0, x.dim() - static_cast<int64_t>(f.shape.size())));
}

const float* floats(const optional<Tensor>& t) { return t.has_value() ? t->const_data_ptr<float>() : nullptr; }

FunctionRows rows_of(const Function& f, const Tensor& x, const Output& output, const Value& v) {
  FunctionRows args;
  args.function = *row_function(f);
  args.rows = rows_in(f, x);
  args.length = x.numel() / args.rows;
  args.x = x.const_data_ptr();
  args.dtype = dtype_of(x);
  args.bounds = representable(output.qmin, output.qmax, x);
  args.eps = f.eps;
  if (f.is_heads()) {
    args.heads = x.size(1);
    args.places = x.size(2);
    args.features = x.size(3);
    args.x_strides = {x.stride(0), x.stride(1), x.stride(2)};
  }
  if (!f.is_norm()) return args;
  args.weight = floats(f.weight);
  args.bias = floats(f.bias);
  if (f.is_layer_norm()) args.mean = v.mean.mutable_data_ptr<float>();
  args.rstd = v.rstd.mutable_data_ptr<float>();
  return args;
}

// What a norm adds to x, and their sum; neither is defined where it adds nothing.
struct Added {
  Tensor residual, sum;

  bool has_kernel(const Tensor& x) const {
    const at::ScalarType type = residual.scalar_type();
    return type != at::kDouble && is_row(residual) && residual.device() == x.device();
  }
};

QuantizedTensor by_kernel(const char* op, const Function& f, const Tensor& x, Added& added,
                          const OutputQuantizer& output, const Scales& scales, at::ScalarType dtype, Value& value) {
  const Tensor& y_scale = *scales.y_scale;
  check_code_range(op, output.qmin, output.qmax);
  check_grid(op, x, y_scale, output.zero_point, std::nullopt, 1, 0);
  if (f.is_norm()) {
    std::vector<int64_t> sizes = x.sizes().vec();
    std::fill(sizes.end() - static_cast<int64_t>(f.shape.size()), sizes.end(), 1);
    value.rstd = at::empty(sizes, x.options());
    if (f.is_layer_norm()) value.mean = at::empty_like(value.rstd);
  }
  const optional<at::MemoryFormat> format = f.is_heads() ? optional(at::MemoryFormat::Contiguous) : std::nullopt;
  QuantizedTensor q = {at::empty_like(x, x.options().dtype(dtype), format), {}, empty_mask(x, !output.learned)};
  FunctionRows args = rows_of(f, x, output, value);
  if (scales.unmade.has_value()) args.made = scales.unmade->output;
  if (added.residual.defined()) {
    args.residual = added.residual.const_data_ptr();
    args.residual_dtype = dtype_of(added.residual);
    args.sum = (added.sum = at::empty_like(x)).mutable_data_ptr<float>();
  }
  args.y = q.y.mutable_data_ptr();
  args.y_dtype = dtype_of(q.y);
  if (output.with_codes) {
    q.codes = codes_of_grid(op, q.y, output.qmin, output.qmax);
    args.codes = static_cast<uint8_t*>(q.codes.mutable_data_ptr());
    args.packed = fit_4_bits(output.qmin, output.qmax);
  }
  if (!output.learned) args.mask = q.mask.mutable_data_ptr<uint8_t>();
  on(x.device()).function_rows(args, {&y_scale, pointer(output.zero_point)}, {}, {}, x.device());
  return q;
}

template <bool kAdds>
void function_fake_quant(const c10::OperatorHandle& op, Stack* stack) {
  Tensor x;
  Added added;
  Function function;
  bool keeps_x = true;
  OutputQuantizer output;
  optional<at::ScalarType> dtype;
  {
    Reader reader(op, stack);
    reader >> x;
    if constexpr (kAdds) reader >> added.residual;
    reader >> function;
    if constexpr (!kAdds) reader >> keeps_x;
    read_output(reader, output, /*in_range=*/kAdds);
    reader >> output.trained.float16 >> output.learned >> output.with_codes >> dtype;
  }

  constexpr const char* kOp = kAdds ? "add_norm_fake_quant" : "function_fake_quant";
  check_float(kOp, "x", x);
  check_function(kOp, function);
  TORCH_CHECK_VALUE(output.trained.start.has_value(), kOp, ": y_start must be given, got None.");
  TORCH_CHECK_VALUE(keeps_x || (function.is_linear() && !output.learned), kOp,
                    ": keeps_x must be True where backward computes the function again or the grid is learned.");
  if constexpr (kAdds) {
    check_float(kOp, "residual", added.residual);
    check_same_shape(kOp, "residual", added.residual, x);
    check_norm(kOp, function);
    if (x.scalar_type() != at::kFloat) std::swap(x, added.residual);  // the kernel has a wide tensor first
  }
  const at::ScalarType type = dtype.value_or(kAdds ? at::result_type(x, added.residual) : x.scalar_type());
  check_float_dtype(kOp, type);
  const WithoutAutocast guard;
  Value value;
  QuantizedTensor q;
  // Packed codes are in the order of rows, and elements are rounded to the type of x.
  const bool packs = output.with_codes && fit_4_bits(output.qmin, output.qmax);
  const bool fits =
      function.is_norm() || (type == x.scalar_type() && (!packs || function.is_heads() || x.is_contiguous()));
  const bool in_one = fits && has_kernel(function, x) && (!kAdds || added.has_kernel(x));
  const Made made = in_one && output.trained.start->scalar_type() == at::kFloat ? Made::later : Made::now;
  const Scales scales = make_scales({kOp, nullptr, nullptr, nullptr, &output.trained}, {}, {}, made);
  if (in_one) {
    q = by_kernel(kOp, function, x, added, output, scales, type, value);
  } else {
    if constexpr (kAdds) x = added.sum = at::add(x, added.residual).contiguous();
    value = value_of(function, x);
    q = quantize_output(value.result, output, scales.y_scale);
    q.y = as_type(q.y, type);
  }
  for (const Tensor& t : {q.y, q.codes, *scales.y_scale, q.mask, value.mean, value.rstd}) {
    stack->emplace_back(or_empty(t, x.options()));
  }
  if constexpr (kAdds) stack->emplace_back(added.sum);
}

// The places of gradients in the results of function_fake_quant_backward, and of add_norm_fake_quant_backward, whose x
// is the sum and which alone has the last one.
enum { kX, kWeight, kBias, kYStart, kYRatio, kYZeroPoint, kNarrow, kCount };
using WantedOfFunction = std::array<bool, kCount>;
using GradientsOfFunction = std::array<Tensor, kCount>;

// From the gradient of the function's value, and of a norm's x from other users.
void through(const Function& f, const Tensor& grad, const optional<Tensor>& other, const Tensor& x, const Value& saved,
             const WantedOfFunction& wanted, GradientsOfFunction& gradients) {
  if (f.is_layer_norm()) {
    std::tie(gradients[kX], gradients[kWeight], gradients[kBias]) = at::native_layer_norm_backward_symint(
        grad, x, f.shape, saved.mean, saved.rstd, f.weight, f.bias,
        {wanted[kX], wanted[kWeight] && f.weight.has_value(), wanted[kBias] && f.bias.has_value()});
    if (wanted[kX]) gradients[kX] = plus(other, gradients[kX]);
  } else if (f.is_norm()) {
    RmsGradients of = rms_norm_backward(f, grad, x, saved.rstd, wanted[kWeight], other);
    gradients[kX] = std::move(of.x);
    gradients[kWeight] = std::move(of.weight);
  } else if (f.name == "relu") {
    gradients[kX] = at::threshold_backward(grad, x, 0);
  } else if (f.name == "silu") {
    gradients[kX] = at::silu_backward(grad, x);
  } else if (f.is_heads()) {
    gradients[kX] = f.eps == 1 ? grad : at::mul(grad, f.eps);
  } else {
    gradients[kX] = f.is_none() ? grad : at::gelu_backward(grad, x, f.approximate());
  }
}

// Of the sum of a norm's addends: its gradient from its other users, and the type of an addend that has another one.
struct GradientOfSum {
  optional<Tensor> grad;
  optional<at::ScalarType> narrow;
};

QuantizedGradients backward_by_kernel(const char* op, const Function& f, const Tensor& grad, const GradientOfSum& sum,
                                      at::IntArrayRef order, const Tensor& x, const Output& output,
                                      const Tensor& y_scale, const Tensor& mask, const Value& saved,
                                      const WantedOfFunction& wanted, GradientsOfFunction& gradients,
                                      LaterGradients& later) {
  const bool learned = mask.numel() == 0;
  check_float(op, "grad", grad);
  check_same_shape(op, "grad", grad, x);
  check_grid(op, x, y_scale, output.zero_point, std::nullopt, 1, 0);
  if (!learned) check_mask(op, mask, grad, order);
  const auto check_saved = [&](const Tensor& t) {
    TORCH_CHECK_VALUE(is_row_of_floats(t) && t.device() == x.device() && t.numel() == rows_in(f, x), op,
                      ": mean and rstd must be what function_fake_quant returned, one float32 for each row, got shape ",
                      t.sym_sizes(), " and ", t.scalar_type(), ".");
  };
  if (f.is_layer_norm()) check_saved(saved.mean);
  if (f.is_norm()) check_saved(saved.rstd);
  const at::ScalarType type = f.is_norm() ? grad.scalar_type() : x.scalar_type();
  Tensor of_y = as_type(grad, type);
  if (f.is_heads()) {
    of_y = of_y.contiguous();
  } else if (of_y.strides() != x.strides()) {
    of_y = at::empty_like(x, type).copy_(grad);
  }
  const Tensor sums = at::empty({2}, x.options().dtype(at::kDouble));
  FunctionRows args = rows_of(f, x, output, saved);
  args.grad = of_y.const_data_ptr();
  args.grad_dtype = dtype_of(of_y);
  const Tensor& dx = gradients[kX] = at::empty_like(x);  // heads: in the order of the view
  args.dx = dx.mutable_data_ptr();
  if (f.is_heads()) args.dx_strides = {dx.stride(0), dx.stride(1), dx.stride(2)};
  if (sum.grad.has_value()) {
    later.kept.push_back(as_type(*sum.grad, at::kFloat).contiguous());
    args.grad_sum = later.kept.back().const_data_ptr<float>();
  }
  if (wanted[kNarrow]) {
    args.narrow = (gradients[kNarrow] = at::empty_like(x, *sum.narrow)).mutable_data_ptr();
    args.narrow_dtype = dtype_of(gradients[kNarrow]);
  }
  const auto of_parameter = [&](Tensor& to, const optional<Tensor>& of, bool is_wanted) -> float* {
    if (!is_wanted || !of.has_value()) return nullptr;
    return (to = at::empty_like(*of)).mutable_data_ptr<float>();
  };
  args.dweight = of_parameter(gradients[kWeight], f.weight, wanted[kWeight]);
  args.dbias = of_parameter(gradients[kBias], f.bias, wanted[kBias]);
  if (learned) args.sums = sums.mutable_data_ptr<double>();
  if (!learned) args.mask = const_cast<uint8_t*>(mask.const_data_ptr<uint8_t>());  // only read
  if (learned) {
    later.function = args;
    later.scale = y_scale;
    later.zero_point = output.zero_point;
    later.kept.append({sums, of_y});
  } else {
    on(x.device()).function_rows(args, {&y_scale, pointer(output.zero_point)}, {}, {}, x.device());
  }
  QuantizedGradients behind;
  c10::SmallVector<GradientOfSums, 2> all;
  if (learned && (wanted[kYStart] || wanted[kYRatio])) {
    behind.scale = at::empty_like(y_scale);
    all.push_back({args.sums, output.grad_factor, y_scale, behind.scale});
  }
  if (learned && wanted[kYZeroPoint] && output.zero_point.has_value()) {
    behind.zero_point = at::empty_like(*output.zero_point);
    all.push_back({args.sums + 1, output.grad_factor, {}, behind.zero_point});
  }
  if (!all.empty()) write_gradients(all, sums, &later);
  return behind;
}

template <bool kAdds>
void function_fake_quant_backward(const c10::OperatorHandle& op, Stack* stack) {
  Tensor grad, y_scale, mask;
  GradientOfSum sum;
  std::vector<int64_t> order;
  optional<Tensor> x;
  Function function;
  OutputQuantizer output;
  Value saved;
  WantedOfFunction wanted = {};
  constexpr size_t kResults = kAdds ? kCount : kNarrow;
  std::array<bool, kResults> given;
  {
    Reader reader(op, stack);
    reader >> grad;
    if constexpr (kAdds) {
      reader >> sum.grad >> x >> sum.narrow;
      order.resize(static_cast<size_t>(grad.dim()));
      std::iota(order.begin(), order.end(), 0);
    } else {
      reader >> order >> x;
    }
    reader >> function;
    read_output(reader, output, /*in_range=*/kAdds);
    reader >> y_scale >> mask >> saved.mean >> saved.rstd >> given;
  }
  std::copy(given.begin(), given.end(), wanted.begin());
  wanted[kX] |= wanted[kNarrow];
  wanted[kNarrow] &= sum.narrow.has_value();

  const char* name = kAdds ? "add_norm_fake_quant_backward" : "function_fake_quant_backward";
  const UnitParts parts = {name, nullptr, nullptr, nullptr, &output.trained};
  check_parts(parts, 0);
  check_function(parts.op, function);
  TORCH_CHECK_VALUE(x.has_value() || function.is_linear(), parts.op, ": x must be given for a function, got None.");
  if constexpr (kAdds) check_norm(parts.op, function);
  if (sum.grad.has_value()) check_same_shape(parts.op, "grad_sum", *sum.grad, *x);
  output.learned = x.has_value() && mask.sym_numel() == 0;
  const WithoutAutocast guard;
  GradientsOfFunction gradients;
  QuantizedGradients behind;
  LaterGradients later;
  if (x.has_value() && has_kernel(function, *x)) {
    behind = backward_by_kernel(parts.op, function, grad, sum, order, *x, output, y_scale, mask, saved, wanted,
                                gradients, later);
  } else {
    // In the type of x, from which y may have been rounded.
    if (x.has_value()) grad = as_type(grad, x->scalar_type());
    const optional<Tensor> z = output.learned ? optional<Tensor>(value_of(function, *x).result) : std::nullopt;
    behind = quantize_output_backward(grad, z, mask, order, output, y_scale, later);
    through(function, behind.z, sum.grad, x.value_or(grad), saved, wanted, gradients);
    if (wanted[kNarrow]) gradients[kNarrow] = as_type(gradients[kX], *sum.narrow);
  }
  const PartGradients of_parts = gradients_of_parts(
      parts, {{}, behind.scale, {}, {}, {}}, {false, false, wanted[kYStart], wanted[kYRatio]}, {}, std::move(later));
  gradients[kYStart] = of_parts.y_start;
  gradients[kYRatio] = of_parts.y_ratio;
  gradients[kYZeroPoint] = behind.zero_point;
  push_wanted(stack, gradients, at::ArrayRef<bool>(wanted.data(), kResults), grad.options());
}

c10::OperatorHandle handle(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

}  // namespace

UnitOutput call_op(const c10::intrusive_ptr<FunctionUnit>& unit) {
  static const c10::OperatorHandle alone = handle("qtoolkit::function_fake_quant"),
                                   adding = handle("qtoolkit::add_norm_fake_quant");
  const Function& f = unit->function;
  const OutputQuantizer& q = unit->output;
  const bool adds = unit->residual.has_value();
  Stack stack;
  stack.reserve(20);
  const auto push = [&](auto&&... values) { torch::jit::push(stack, values...); };
  push(unit->x);
  if (adds) push(*unit->residual);
  push(f.name, c10::SymIntArrayRef(f.shape), f.weight, f.bias, f.eps);
  if (!adds) push(/*keeps_x=*/q.learned || !f.is_linear());
  push(q.trained.start, q.trained.ratio, q.trained.rate, q.zero_point);
  if (adds) {
    push(std::vector<int64_t>{q.qmin, q.qmax});
  } else {
    push(q.qmin, q.qmax);
  }
  push(q.grad_factor, q.trained.float16, q.learned, q.with_codes, unit->dtype);
  (adds ? adding : alone).callBoxed(&stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), adds ? stack[6].toTensor() : Tensor()};
}

QT_REGISTER_BODIES(m) {
  using torch::CppFunction;
  m.impl("function_fake_quant", CppFunction::makeFromBoxedFunction<&function_fake_quant<false>>());
  m.impl("function_fake_quant_backward", CppFunction::makeFromBoxedFunction<&function_fake_quant_backward<false>>());
  m.impl("add_norm_fake_quant", CppFunction::makeFromBoxedFunction<&function_fake_quant<true>>());
  m.impl("add_norm_fake_quant_backward", CppFunction::makeFromBoxedFunction<&function_fake_quant_backward<true>>());
}

}  // namespace qtoolkit
