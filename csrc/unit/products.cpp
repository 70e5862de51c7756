// Products of activations as torch computes them. Backward keeps the operands, as their codes where they have them.
#include <ATen/ops/bmm.h>

#include "../layer/layer_ops.h"
#include "../registration.h"
#include "operand.h"
#include "unit_parts.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::jit::Stack;

// One operand of an op below. Its codes may be packed, two in a byte, in the order of its memory.
struct KeptOperand : ProductOperand {
  std::vector<c10::SymInt> size;  // of the codes, or of the values without codes
  bool is_signed;                 // codes of four bits
  bool transposed;                // the codes are those of the transposed matrices
  bool kept;                      // whether backward keeps the values; only the autograd kernel asks
};

Reader& operator>>(Reader& reader, KeptOperand& o) {
  return reader >> static_cast<ProductOperand&>(o) >> o.size >> o.is_signed >> o.transposed >> o.kept;
}

void check_kept(const char* op, const char* name, const KeptOperand& o, int64_t dimensions) {
  check_given(op, name, o);
  TORCH_CHECK_VALUE(static_cast<int64_t>(o.size.size()) == dimensions, op, ": ", name, "_size must have ", dimensions,
                    " dimensions, got ", c10::SymIntArrayRef(o.size), ".");
  if (o.values.has_value()) {
    TORCH_CHECK_VALUE(o.values->dim() == dimensions, op, ": ", name, " must have ", dimensions,
                      " dimensions, got shape ", o.values->sym_sizes(), ".");
  }
  if (!o.codes.has_value()) return;
  const bool packed = o.codes->dim() == 1;
  c10::SymInt elements = 1;
  for (const c10::SymInt& size : o.size) elements *= size;
  TORCH_CHECK_VALUE(packed ? o.codes->sym_numel() == (elements + 1) / 2 : o.codes->sym_sizes() == o.size, op, ": ",
                    name, "_codes must have the shape ", name, "_size, ", c10::SymIntArrayRef(o.size),
                    ", or be packed in one dimension, got shape ", o.codes->sym_sizes(), ".");
}

Tensor values_of(const KeptOperand& o, at::ScalarType dtype) {
  if (o.values.has_value()) return o.values->to(dtype);
  const Tensor values = o.codes->dim() == 1
                            ? dequantize_int4_op(*o.codes, o.size, *o.scale, o.zero_point, o.is_signed, dtype)
                            : values_of(static_cast<const ProductOperand&>(o), dtype);
  return o.transposed ? values.transpose(-2, -1) : values;
}

// ---- matrix products

struct Product {
  KeptOperand x, other;
};

Reader& operator>>(Reader& reader, Product& p) { return reader >> p.x >> p.other; }

void product(const c10::OperatorHandle& op, Stack* stack) {
  constexpr const char* kOp = "product";
  Product p;
  optional<Tensor> computed;
  Reader(op, stack) >> p >> computed;
  TORCH_CHECK_VALUE(p.x.values.has_value() && p.other.values.has_value(), kOp,
                    ": x and other must be given, got None.");
  check_kept(kOp, "x", p.x, 3);
  check_kept(kOp, "other", p.other, 3);
  const Tensor &x = *p.x.values, &other = *p.other.values;
  check_same_device(kOp, "other", other, x);
  TORCH_CHECK_TYPE(other.scalar_type() == x.scalar_type(), kOp, ": other must have the dtype of x, ", x.scalar_type(),
                   ", got ", other.scalar_type(), ".");
  TORCH_CHECK_VALUE(x.sym_size(0) == other.sym_size(0) && x.sym_size(2) == other.sym_size(1), kOp,
                    ": other must have shape (batch, features, columns) for x of shape (batch, rows, features) = ",
                    x.sym_sizes(), ", got ", other.sym_sizes(), ".");
  const WithoutAutocast guard;
  if (!computed.has_value()) {
    stack->emplace_back(at::bmm(x, other));
    return;
  }
  const std::array<c10::SymInt, 3> size = {x.sym_size(0), x.sym_size(1), other.sym_size(2)};
  TORCH_CHECK_VALUE(computed->sym_sizes() == c10::SymIntArrayRef(size), kOp, ": computed must have the shape ",
                    c10::SymIntArrayRef(size), ", got ", computed->sym_sizes(), ".");
  stack->emplace_back(computed->to(x.scalar_type(), /*non_blocking=*/false, /*copy=*/true));
}

void product_backward(const c10::OperatorHandle& op, Stack* stack) {
  constexpr const char* kOp = "product_backward";
  Tensor grad;
  Product p;
  std::array<bool, 2> wanted;
  Reader(op, stack) >> grad >> p >> wanted;
  check_float(kOp, "grad", grad);
  if (wanted[0]) check_kept(kOp, "other", p.other, 3);
  if (wanted[1]) check_kept(kOp, "x", p.x, 3);
  const WithoutAutocast guard;
  const at::ScalarType dtype = grad.scalar_type();
  std::array<Tensor, 2> gradients;
  if (wanted[0]) gradients[0] = at::bmm(grad, values_of(p.other, dtype).transpose(1, 2));
  if (wanted[1]) gradients[1] = at::bmm(values_of(p.x, dtype).transpose(1, 2), grad);
  push_wanted(stack, gradients, wanted, grad.options());
}

// ---- torch's fused attention on the CPU, which is private to it: qtoolkit/nn/fused_attention.py asks whether it is
// there

struct FusedAttention {
  KeptOperand q, k, v;
  bool is_causal;
  optional<double> scale;
};

// The sizes of q and v are those of k and y.
void set_sizes(FusedAttention& a, c10::SymIntArrayRef y) {
  const std::vector<c10::SymInt>& k = a.k.size;
  if (k.size() != 4 || y.size() != 4) return;  // check_attention says so
  a.q.size = {y[0], y[1], y[2], k[3]};
  a.v.size = {k[0], k[1], k[2], y[3]};
}

Reader& operator>>(Reader& reader, FusedAttention& a) {
  for (KeptOperand* o : {&a.q, &a.k, &a.v}) {
    reader >> static_cast<ProductOperand&>(*o);
    o->transposed = false;
  }
  std::array<bool, 3> is_signed;
  reader >> a.k.size >> is_signed >> a.is_causal >> a.scale;
  a.q.is_signed = is_signed[0];
  a.k.is_signed = is_signed[1];
  a.v.is_signed = is_signed[2];
  return reader;
}

void check_attention(const char* op, const FusedAttention& a) {
  check_kept(op, "k", a.k, 4);
  check_kept(op, "q", a.q, 4);
  check_kept(op, "v", a.v, 4);
}

void fused_attention(const c10::OperatorHandle& op, Stack* stack) {
  constexpr const char* kOp = "fused_attention";
  FusedAttention a;
  Reader(op, stack) >> a;
  TORCH_CHECK_VALUE(a.q.values.has_value() && a.k.values.has_value() && a.v.values.has_value(), kOp,
                    ": q, k and v must be given, got None.");
  a.q.size = a.q.values->sym_sizes().vec();
  a.v.size = a.v.values->sym_sizes().vec();
  check_attention(kOp, a);
  static const auto fused = find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double,
                                                               bool, const optional<Tensor>&, optional<double>)>(
      "aten::_scaled_dot_product_flash_attention_for_cpu");
  const WithoutAutocast guard;
  const auto [y, logsumexp] =
      fused.call(*a.q.values, *a.k.values, *a.v.values, 0.0, a.is_causal, std::nullopt, a.scale);
  stack->emplace_back(y);
  stack->emplace_back(logsumexp);
}

void fused_attention_backward(const c10::OperatorHandle& op, Stack* stack) {
  constexpr const char* kOp = "fused_attention_backward";
  Tensor grad, y, logsumexp;
  FusedAttention a;
  std::array<bool, 3> wanted;
  Reader(op, stack) >> grad >> a >> y >> logsumexp >> wanted;
  check_float(kOp, "grad", grad);
  set_sizes(a, y.sym_sizes());
  check_attention(kOp, a);
  static const auto fused = find_op<std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, bool,
      const optional<Tensor>&, optional<double>)>("aten::_scaled_dot_product_flash_attention_for_cpu_backward");
  const WithoutAutocast guard;
  const at::ScalarType dtype = y.scalar_type();
  const auto [q, k, v] = fused.call(grad, values_of(a.q, dtype), values_of(a.k, dtype), values_of(a.v, dtype), y,
                                    logsumexp, 0.0, a.is_causal, std::nullopt, a.scale);
  push_wanted(stack, {q, k, v}, wanted, grad.options());
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("product", torch::CppFunction::makeFromBoxedFunction<&product>());
  m.impl("product_backward", torch::CppFunction::makeFromBoxedFunction<&product_backward>());
  m.impl("fused_attention", torch::CppFunction::makeFromBoxedFunction<&fused_attention>());
  m.impl("fused_attention_backward", torch::CppFunction::makeFromBoxedFunction<&fused_attention_backward>());
}

}  // namespace qtoolkit
