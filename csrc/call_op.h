// Calls of the library's ops through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace qtoolkit {

// Callers keep the handle in a static variable of their own: finding it is slow.
template <class Schema>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
}

inline at::Tensor backward_op(const at::Tensor& grad, const at::Tensor& mask, at::IntArrayRef order) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef)>("qtoolkit::fake_quant_backward");
  return op.call(grad, mask, order);
}

// The values on a grid, and the packed mask if it is wanted.
inline std::tuple<at::Tensor, at::Tensor> fake_quant_op(const at::Tensor& x, const at::Tensor& scale,
                                                        const std::optional<at::Tensor>& zero_point, int64_t qmin,
                                                        int64_t qmax, std::optional<int64_t> axis, int64_t group,
                                                        int64_t block_size, double grad_factor, bool mask) {
  static const auto op = find_op<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t, int64_t, std::optional<int64_t>,
      int64_t, int64_t, double, bool)>("qtoolkit::fake_quant");
  return op.call(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, mask);
}

inline at::Tensor quantize_op(const at::Tensor& x, const at::Tensor& scale, const std::optional<at::Tensor>& zero_point,
                              int64_t qmin, int64_t qmax, std::optional<int64_t> axis, int64_t group,
                              at::ScalarType dtype) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t, int64_t,
                         std::optional<int64_t>, int64_t, int64_t, at::ScalarType)>("qtoolkit::quantize");
  return op.call(x, scale, zero_point, qmin, qmax, axis, group, 0, dtype);
}

// The values of codes with one scale.
inline at::Tensor dequantize_op(const at::Tensor& codes, const at::Tensor& scale,
                                const std::optional<at::Tensor>& zero_point, at::ScalarType dtype) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::optional<int64_t>,
                         int64_t, int64_t, at::ScalarType)>("qtoolkit::dequantize");
  return op.call(codes, scale, zero_point, std::nullopt, 1, 0, dtype);
}

// The same for codes of four bits, two in a byte, of a tensor of this size.
inline at::Tensor dequantize_int4_op(const at::Tensor& packed, c10::SymIntArrayRef size, const at::Tensor& scale,
                                     const std::optional<at::Tensor>& zero_point, bool is_signed,
                                     at::ScalarType dtype) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, c10::SymIntArrayRef, const at::Tensor&, const std::optional<at::Tensor>&,
                         bool, std::optional<int64_t>, int64_t, int64_t, at::ScalarType)>("qtoolkit::dequantize_int4");
  return op.call(packed, size, scale, zero_point, is_signed, std::nullopt, 1, 0, dtype);
}

}  // namespace qtoolkit
