// Operands of products of activations: what backward keeps of them, as codes where their values lie on a grid.
#pragma once

#include "../call_op.h"
#include "../checks.h"
#include "../launch.h"
#include "../layer/layer.h"

namespace qtoolkit {

// The values, or where backward keeps them the codes.
struct ProductOperand {
  std::optional<at::Tensor> values, codes, scale, zero_point;

  const at::Tensor& shaped() const { return values.has_value() ? *values : *codes; }
};

inline Reader& operator>>(Reader& reader, ProductOperand& o) {
  return reader >> o.values >> o.codes >> o.scale >> o.zero_point;
}

// Its values or its codes, and what belongs to the codes.
inline void check_given(const char* op, const char* name, const ProductOperand& o) {
  TORCH_CHECK_VALUE(o.values.has_value() || o.codes.has_value(), op, ": ", name, " or ", name,
                    "_codes must be given, got None for both.");
  if (o.values.has_value()) check_float(op, name, *o.values);
  if (!o.codes.has_value()) return;
  TORCH_CHECK_TYPE(is_code_dtype(o.codes->scalar_type()), op, ": ", name, "_codes must have an integer dtype, got ",
                   o.codes->scalar_type(), ".");
  TORCH_CHECK_VALUE(o.scale.has_value(), op, ": ", name, "_codes require ", name, "_scale, got None.");
}

inline at::Tensor values_of(const ProductOperand& o, at::ScalarType dtype) {
  return o.values.has_value() ? o.values->to(dtype) : dequantize_op(*o.codes, *o.scale, o.zero_point, dtype);
}

}  // namespace qtoolkit
