// An attention whose weights are quantized. Backward keeps query, key and value, as their codes where they have them.
// Scores and weights are the largest tensors of a transformer: backward computes them again, if it is not told to keep
// the softmax. A GPU never writes them for products in 16 bits (flash_attention.h).
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/softmax.h>

#include "../launch.h"
#include "../layer/layer_ops.h"
#include "../registration.h"
#include "unit.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

using Attention = AttentionUnit;

void check_operand(const char* op, const char* name, const ProductOperand& o) {
  check_given(op, name, o);
  const Tensor& t = o.shaped();
  TORCH_CHECK_VALUE(t.dim() >= 3, op, ": ", name, " must have at least 3 dimensions, got shape ", t.sym_sizes(), ".");
  TORCH_CHECK_VALUE(!o.codes.has_value() || !o.values.has_value() || o.codes->sym_sizes() == o.values->sym_sizes(), op,
                    ": ", name, "_codes must have the shape of ", name, ", ", t.sym_sizes(), ", got ",
                    o.codes->sym_sizes(), ".");
}

void check_attention(const char* op, const Attention& a) {
  check_operand(op, "q", a.q);
  check_operand(op, "k", a.k);
  check_operand(op, "v", a.v);
  const Tensor &q = a.q.shaped(), &k = a.k.shaped(), &v = a.v.shaped();
  const auto batch = [](const Tensor& t) { return t.sym_sizes().slice(0, t.dim() - 2); };
  for (const Tensor* t : {&k, &v}) {
    TORCH_CHECK_VALUE(t->dim() == q.dim() && batch(*t) == batch(q), op,
                      ": q, k and v must have the same sizes in all dimensions but the last two, got shapes ",
                      q.sym_sizes(), ", ", k.sym_sizes(), " and ", v.sym_sizes(), ".");
    check_same_device(op, t == &k ? "k" : "v", *t, q);
  }
  TORCH_CHECK_VALUE(q.sym_size(-1) == k.sym_size(-1), op, ": q and k must have as many features, got ", q.sym_size(-1),
                    " and ", k.sym_size(-1), ".");
  TORCH_CHECK_VALUE(k.sym_size(-2) == v.sym_size(-2), op, ": k and v must have as many rows, got ", k.sym_size(-2),
                    " and ", v.sym_size(-2), ".");
  TORCH_CHECK_TYPE(is_float_dtype(a.dtype), op, ": dtype must be float32, float64, bfloat16 or float16, got ", a.dtype,
                   ".");
  TORCH_CHECK_VALUE(a.dropout >= 0 && a.dropout <= 1, op, ": dropout must be a probability from 0 to 1, got ",
                    a.dropout, ".");
}

// ---- batches of matrices

// Whether kernels may compute weights from scores.
bool is_for_kernels(const Attention& a) {
  const Tensor& k = a.k.shaped();
  const bool types = a.dtype != at::kDouble &&
                     (!a.mask.has_value() || a.mask->scalar_type() == a.dtype || a.mask->scalar_type() == at::kFloat);
  return !a.keeps_softmax && !k.is_meta() && types && k.numel() > 0 && a.q.shaped().numel() > 0;
}

// Whether one kernel makes weights of scores, and their gradients.
bool has_kernel(const Attention& a) {
  const Tensor& k = a.k.shaped();
  return is_for_kernels(a) && on(k.device()).attention_weights != nullptr && k.size(-2) <= kLongestScores;
}

// Whether scores are never written.
bool is_flash(const Attention& a) {
  const Tensor &k = a.k.shaped(), &v = a.v.shaped();
  constexpr int64_t kMost = 1 << 30;  // of places, and of blocks of them
  return is_for_kernels(a) && on(k.device()).has_flash_attention(k.device()) && a.dtype != at::kFloat &&
         k.size(-1) <= kMostHeadFeatures && v.size(-1) <= kMostHeadFeatures && v.numel() > 0 &&
         a.q.shaped().numel() / k.size(-1) < kMost && k.numel() / k.size(-1) < kMost;
}

// cuBLAS takes up to three times longer for rows of another number of elements. Where the kernel makes the weights,
// keys and values have rows of zeros after them.
constexpr int64_t kMultiple = 8;

Tensor matrices(const Tensor& values) { return values.flatten(0, -3).contiguous(); }

Tensor padded(const Tensor& values) {
  const int64_t rows = values.size(-2), all = (rows + kMultiple - 1) / kMultiple * kMultiple;
  if (rows == all) return matrices(values);
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes[sizes.size() - 2] = all;
  const Tensor result = at::empty(sizes, values.options());
  result.narrow(-2, 0, rows).copy_(values);
  result.narrow(-2, rows, all - rows).zero_();
  return result.flatten(0, -3);
}

struct Matrices {
  Tensor q, k, v;

  explicit Matrices(const Attention& a) : q(matrices(values_of(a.q, a.dtype))) {
    const auto rows = has_kernel(a) ? padded : matrices;
    k = rows(values_of(a.k, a.dtype));
    v = rows(values_of(a.v, a.dtype));
  }
};

// Matrices in the shape of a batch of them.
Tensor shaped_as(const Tensor& matrices, const Tensor& batch) {
  std::vector<c10::SymInt> sizes = batch.sym_sizes().slice(0, batch.dim() - 2).vec();
  sizes.push_back(matrices.sym_size(1));
  sizes.push_back(matrices.sym_size(2));
  return matrices.view_symint(sizes);
}

Tensor scores_of(const Attention& a, const Matrices& m) {
  Tensor scores = at::bmm(m.q, m.k.transpose(1, 2));
  if (a.causal) {
    const Tensor hidden = at::ones({scores.size(1), scores.size(2)}, scores.options().dtype(at::kBool)).triu(1);
    scores = at::masked_fill(scores, hidden, -std::numeric_limits<double>::infinity());
  }
  if (!a.mask.has_value()) return scores;
  Tensor mask = *a.mask;
  if (has_kernel(a) && mask.size(-1) != 1) mask = at::constant_pad_nd(mask, {0, scores.size(2) - mask.size(-1)});
  return at::add(shaped_as(scores, a.q.shaped()), mask).flatten(0, -3).contiguous();
}

// The gradient of keys or values, from one with the rows after them.
Tensor without_padding(const Tensor& gradient, const Attention& a, const Tensor& grad) {
  const Tensor rows = has_kernel(a) ? gradient.narrow(1, 0, a.k.shaped().size(-2)).contiguous() : gradient;
  return shaped_as(rows, grad);
}

// ---- the weights

// The gradients of the grid of the weights.
struct GridGradients {
  Tensor scale, zero_point;
  LaterGradients later;
};

// Returns where a kernel writes the sums of the gradients, from which they are computed later; null if nobody wants
// them.
double* sums_for(const Attention& a, const optional<Tensor>& scale, GridGradients& gradients) {
  if (!scale.has_value() || !a.weights.learned) return nullptr;
  const Tensor sums = at::empty({2}, scale->options().dtype(at::kDouble));
  double* of = sums.mutable_data_ptr<double>();
  gradients.scale = at::empty_like(*scale);
  std::vector<GradientOfSums> all = {{of, a.weights.grad_factor, *scale, gradients.scale}};
  if (a.weights.zero_point.has_value()) {
    gradients.zero_point = at::empty_like(*a.weights.zero_point);
    all.push_back({of + 1, a.weights.grad_factor, {}, gradients.zero_point});
  }
  write_gradients(all, sums, &gradients.later);
  return of;
}

struct Weights {
  Tensor weights;
  Tensor softmax;    // of them, if it is kept
  Tensor of_scores;  // their gradient, in backward
  GridGradients of_grid;
};

ScoreRows rows_of(const Tensor& t) { return {t.mutable_data_ptr(), t.size(2), dtype_of(t)}; }

// From scores, which it may overwrite, and in backward from the gradient of the weights, which becomes theirs.
Weights by_kernel(const Attention& a, const Tensor& scores, const optional<Tensor>& scale, const Tensor& grad) {
  Weights result;
  result.weights = scores.scalar_type() == a.dtype ? scores : at::empty_like(scores, a.dtype);
  result.of_scores = grad;
  AttentionWeights args;
  args.rows = scores.size(0) * scores.size(1);
  args.length = a.k.shaped().size(-2);
  args.scores = rows_of(scores);
  args.weights = rows_of(result.weights);
  if (scale.has_value()) args.bounds = representable(a.weights.qmin, a.weights.qmax, result.weights);
  if (grad.defined()) {
    args.grad = rows_of(grad);
    args.sums = sums_for(a, scale, result.of_grid);
  }
  const c10::Device device = scores.device();
  on(device).attention_weights(args, {pointer(scale), pointer(a.weights.zero_point)}, device);
  return result;
}

// From the softmax of the scores.
Weights by_ops(const Attention& a, const Tensor& softmax, const optional<Tensor>& scale, const Tensor& grad) {
  const QuantizedTensor q = quantize_output(softmax, a.weights, scale);
  Weights result = {q.y.to(a.dtype), softmax, {}, {}};
  if (!grad.defined()) return result;
  QuantizedGradients behind = {grad.to(softmax.scalar_type()), {}, {}};
  if (scale.has_value()) {
    behind = quantize_output_backward(behind.z, softmax, q.mask, {}, a.weights, *scale, result.of_grid.later);
  }
  result.of_scores = at::_softmax_backward_data(behind.z, softmax, -1, softmax.scalar_type()).to(a.dtype);
  result.of_grid.scale = behind.scale;
  result.of_grid.zero_point = behind.zero_point;
  return result;
}

Weights weights_of(const Attention& a, const Matrices& m, const optional<Tensor>& scale, const Tensor& grad) {
  const Tensor scores = scores_of(a, m);
  if (has_kernel(a)) return by_kernel(a, scores, scale, grad);
  return by_ops(a, at::softmax(scores, -1, a.dtype == at::kDouble ? at::kDouble : at::kFloat), scale, grad);
}

// ---- without scores in memory

// The mask of all matrices. Where its batch has more than two strides it is copied to `copy`.
AttentionMask mask_of(const Attention& a, Tensor& copy) {
  std::vector<int64_t> sizes = a.q.shaped().sizes().vec();
  sizes.back() = a.k.shaped().size(-2);
  Tensor mask = a.mask->expand(sizes);
  struct Run {
    int64_t size = 1, stride = 0;
  };
  c10::SmallVector<Run, 4> runs;  // of matrices with equal distances, from the last dimension on
  for (int64_t d = mask.dim() - 3; d >= 0; --d) {
    if (mask.size(d) == 1) continue;
    if (!runs.empty() && mask.stride(d) == runs.back().size * runs.back().stride) {
      runs.back().size *= mask.size(d);
    } else {
      runs.push_back({mask.size(d), mask.stride(d)});
    }
  }
  if (runs.size() > 2) {
    copy = mask.contiguous();
    mask = copy;
    runs = {{copy.numel() / (copy.size(-2) * copy.size(-1)), copy.size(-2) * copy.size(-1)}};
  }
  runs.resize(2);
  return {mask.const_data_ptr(), dtype_of(mask),  runs[0].size,   runs[1].stride,
          runs[0].stride,        mask.stride(-2), mask.stride(-1)};
}

// The arguments of the kernels, and the tensors that they point to.
struct FlashCall {
  FlashAttention args;
  c10::SmallVector<Tensor, 12> kept;

  explicit FlashCall(const Attention& a) {
    const Tensor &q = a.q.shaped(), &k = a.k.shaped();
    args.queries = q.size(-2);
    args.keys = k.size(-2);
    args.batch = q.numel() / (args.queries * q.size(-1));
    args.q = rows_of(a.q, a.dtype);
    args.k = rows_of(a.k, a.dtype);
    args.v = rows_of(a.v, a.dtype);
    if (a.mask.has_value()) args.mask = mask_of(a, kept.emplace_back());
    args.causal = a.causal;
    args.dropout = a.dropout;
    if (a.seed.has_value()) args.seed = a.seed->const_data_ptr<int64_t>();
    if (a.weights_scale.has_value()) args.bounds = representable(a.weights.qmin, a.weights.qmax, q);
    args.dtype = a.dtype == at::kHalf ? Dtype::f16 : Dtype::bf16;
  }

  AttentionRows rows_of(const Tensor& values) {
    const Tensor& rows = kept.emplace_back(values.contiguous());
    return {rows.const_data_ptr(), dtype_of(rows), rows.size(-1)};
  }

  // The kernels read codes of a byte.
  AttentionRows rows_of(const ProductOperand& o, at::ScalarType dtype) {
    if (o.values.has_value() || o.codes->element_size() > 1 || o.scale->numel() != 1)
      return rows_of(values_of(o, dtype));
    AttentionRows rows = rows_of(*o.codes);
    rows.scale = kept.emplace_back(in_arithmetic(*o.scale, /*f64=*/false)).const_data_ptr();
    if (o.zero_point.has_value()) {
      rows.zero_point = kept.emplace_back(in_arithmetic(*o.zero_point, /*f64=*/false)).const_data_ptr();
    }
    return rows;
  }

  // A result with the sizes of an operand, but the last one of another.
  Tensor result(const ProductOperand& of, const ProductOperand& last, const Attention& a) {
    std::vector<int64_t> sizes = of.shaped().sizes().vec();
    sizes.back() = last.shaped().size(-1);
    return at::empty(sizes, of.shaped().options().dtype(a.dtype));
  }

  void launch(const Attention& a) {
    const c10::Device device = a.q.shaped().device();
    on(device).flash_attention(args, {pointer(a.weights_scale), pointer(a.weights.zero_point)}, {}, {}, device);
  }
};

Tensor flash_forward(Attention& a, const Scales& scales) {
  const at::TensorOptions options = a.q.shaped().options();
  if (a.dropout > 0) a.seed = at::randint(std::numeric_limits<int64_t>::max(), {1}, options.dtype(at::kLong));
  FlashCall call(a);
  if (scales.unmade.has_value()) call.args.made = scales.unmade->output;
  const Tensor y = call.result(a.q, a.v, a);
  a.statistics = at::empty({2 * call.args.batch * call.args.queries + 2}, options.dtype(at::kFloat));
  call.args.statistics = a.statistics->mutable_data_ptr<float>();
  call.args.y = y.mutable_data_ptr();
  call.launch(a);
  return y;
}

// The gradients of query, key and value.
std::array<Tensor, 3> flash_backward(const Attention& a, const Tensor& grad, GridGradients& of_grid) {
  FlashCall call(a);
  const std::array<Tensor, 3> gradients = {call.result(a.q, a.q, a), call.result(a.k, a.k, a),
                                           call.result(a.v, a.v, a)};
  const Tensor dots = at::empty({call.args.batch * call.args.queries}, a.statistics->options());
  call.args.statistics = a.statistics->mutable_data_ptr<float>();
  call.args.dots = dots.mutable_data_ptr<float>();
  call.args.grad = call.rows_of(grad.to(a.dtype));
  call.args.dq = gradients[0].mutable_data_ptr();
  call.args.dk = gradients[1].mutable_data_ptr();
  call.args.dv = gradients[2].mutable_data_ptr();
  call.args.sums = sums_for(a, a.weights_scale, of_grid);
  if (call.args.sums == nullptr) {
    call.launch(a);
    return gradients;
  }
  LaterGradients& later = of_grid.later;
  later.attention = call.args;
  later.scale = a.weights_scale;
  later.zero_point = a.weights.zero_point;
  later.kept.append(call.kept.begin(), call.kept.end());
  later.kept.append({dots, gradients[0], gradients[1], gradients[2]});
  return gradients;
}

// ---- the ops

// The gradients of query, key and value, as far as they are wanted.
ForGradients<Tensor> gradients_of_products(const Attention& a, const Tensor& grad, const ForGradients<bool>& wanted,
                                           GridGradients& of_grid) {
  const optional<Tensor>& scale = a.weights_scale;
  const Matrices m(a);
  const Tensor dy = matrices(grad.to(a.dtype)), of_weights = at::bmm(dy, m.v.transpose(1, 2));
  Weights w = a.keeps_softmax ? by_ops(a, *a.softmax, scale, of_weights) : weights_of(a, m, scale, of_weights);
  of_grid = std::move(w.of_grid);
  ForGradients<Tensor> gradients;
  if (wanted[GradientOf::x]) gradients[GradientOf::x] = shaped_as(at::bmm(w.of_scores, m.k), grad);
  if (wanted[GradientOf::k]) {
    // The order of torch's own gradient decides its last bits. On CUDA the other one is faster.
    const Tensor dk = has_kernel(a) ? at::bmm(w.of_scores.transpose(1, 2), m.q)
                                    : at::bmm(m.q.transpose(1, 2), w.of_scores).transpose(1, 2);
    gradients[GradientOf::k] = without_padding(dk, a, grad);
  }
  if (wanted[GradientOf::v]) {
    gradients[GradientOf::v] = without_padding(at::bmm(w.weights.transpose(1, 2), dy), a, grad);
  }
  return gradients;
}

void attention_fake_quant(const c10::OperatorHandle& /*op*/, Stack* stack) {
  constexpr const char* kOp = Attention::kOp;
  Attention a = *torch::jit::peek(*stack, 0, 2).toCustomClass<Attention>();
  TORCH_CHECK_VALUE(a.q.values.has_value() && a.k.values.has_value() && a.v.values.has_value(), kOp,
                    ": q, k and v must be given, got None.");
  check_attention(kOp, a);
  const bool flash = is_flash(a);
  TORCH_CHECK_NOT_IMPLEMENTED(a.dropout == 0 || flash, kOp, ": dropout must be 0 where fits_dropout() is false, got ",
                              a.dropout, "; drop weights by torch.nn.functional.dropout between two products.");
  const UnitParts parts = {kOp, nullptr, nullptr, nullptr, &a.weights.trained};
  check_parts(parts, 0);
  const WithoutAutocast guard;
  Scales scales;
  if (const optional<Tensor>& start = a.weights.trained.start; start.has_value()) {
    scales = make_scales(parts, {}, {}, flash && start->scalar_type() == at::kFloat ? Made::later : Made::now);
    a.weights_scale = scales.y_scale;
  }
  Tensor y;
  if (flash) {
    y = flash_forward(a, scales);
  } else {
    const Matrices m(a);
    const Weights w = weights_of(a, m, a.weights_scale, {});
    if (a.keeps_softmax) a.softmax = w.softmax;
    y = shaped_as(at::bmm(w.weights, m.v), *a.q.values);
  }
  torch::jit::drop(*stack, 2);
  torch::jit::push(*stack, y, results_of(a));
}

void attention_fake_quant_backward(const c10::OperatorHandle& /*op*/, Stack* stack) {
  const UnitBackward<Attention> given(*stack);
  const auto& [unit, grad, wanted] = given;
  Attention a = *unit;
  const UnitParts parts = {Attention::kBackward, nullptr, nullptr, nullptr, &a.weights.trained};
  check_attention(parts.op, a);
  check_parts(parts, 0);
  const WithoutAutocast guard;
  TORCH_CHECK_VALUE(!a.keeps_softmax || given.kept("softmax", a.softmax).dim() == 3, parts.op,
                    ": softmax must be what the forward returned with keeps_softmax=True, got shape ",
                    a.softmax->sym_sizes(), ".");
  for (ProductOperand* o : {&a.q, &a.k, &a.v}) {
    if (o->codes.has_value()) o->values.reset();  // the codes are less to read
  }
  GridGradients of_grid;
  ForGradients<Tensor> gradients;
  if (a.statistics.has_value()) {
    std::array<Tensor, 3> found = flash_backward(a, grad, of_grid);
    gradients[GradientOf::x] = std::move(found[0]);
    gradients[GradientOf::k] = std::move(found[1]);
    gradients[GradientOf::v] = std::move(found[2]);
  } else {
    gradients = gradients_of_products(a, grad, wanted, of_grid);
  }
  const PartGradients of_parts = gradients_of_parts(
      parts, {{}, of_grid.scale, {}, {}, {}}, {false, false, wanted[GradientOf::y_start], wanted[GradientOf::y_ratio]},
      {}, std::move(of_grid.later));
  gradients[GradientOf::y_start] = of_parts.y_start;
  gradients[GradientOf::y_ratio] = of_parts.y_ratio;
  gradients[GradientOf::y_zero_point] = of_grid.zero_point;
  given.push(stack, gradients);
}

}  // namespace

bool fits_dropout(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& mask,
                  at::ScalarType dtype) {
  Attention a;
  a.q.values = q;
  a.k.values = k;
  a.v.values = v;
  a.mask = mask;
  a.dtype = dtype;
  a.keeps_softmax = false;
  return is_flash(a);
}

QT_REGISTER_BODIES(m) {
  m.impl("attention_fake_quant", torch::CppFunction::makeFromBoxedFunction<&attention_fake_quant>());
  m.impl("attention_fake_quant_backward", torch::CppFunction::makeFromBoxedFunction<&attention_fake_quant_backward>());
}

}  // namespace qtoolkit
