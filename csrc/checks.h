// Argument checks. Each error is a sentence that names the op, the argument, the rule, the value and the remedy. The
// checks read shapes, dtypes and devices, not values (which would wait for a GPU), so they serve meta tensors too.
// Python checks the values of a scale where it is set.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "kernel_args.h"

namespace qtoolkit {

inline bool is_float_dtype(c10::ScalarType t) {
  return t == at::kFloat || t == at::kDouble || t == at::kBFloat16 || t == at::kHalf;
}

inline bool is_code_dtype(c10::ScalarType t) {
  return t == at::kChar || t == at::kByte || t == at::kShort || t == at::kUInt16 || t == at::kInt;
}

inline void check_float(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK_TYPE(is_float_dtype(x.scalar_type()), op, ": ", name,
                   " must be float32, float64, bfloat16 or float16, got ", x.scalar_type(),
                   "; convert it with .float().");
}

inline void check_code_range(const char* op, int64_t qmin, int64_t qmax) {
  TORCH_CHECK_VALUE(qmin < qmax, op, ": qmin must be smaller than qmax, got qmin=", qmin, " and qmax=", qmax, ".");
  TORCH_CHECK_VALUE(qmin >= -2147483648LL && qmax <= 2147483647LL, op,
                    ": qmin and qmax must lie in the range of int32, got [", qmin, ", ", qmax, "].");
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& t, const at::Tensor& x) {
  TORCH_CHECK_VALUE(t.device() == x.device(), op, ": ", name, " must be on the device of the input, ", x.device(),
                    ", got ", t.device(), "; move it with .to(x.device).");
}

inline void check_block_size(const char* op, const at::Tensor& x, const Axis& axis, const char* input) {
  TORCH_CHECK_VALUE(axis.block >= 0, op, ": block_size must be at least 1, or 0 for no blocks, got ", axis.block, ".");
  if (axis.block == 0) return;
  TORCH_CHECK_VALUE(axis.index >= 0, op, ": block_size=", axis.block,
                    " needs an axis, got axis=None; pass the axis that blocks run along.");
  TORCH_CHECK_VALUE(axis.group == 1, op, ": block_size=", axis.block, " requires group=1, got group=", axis.group,
                    "; pass only one of them.");
  TORCH_CHECK_VALUE(x.sym_size(axis.index) % axis.block == 0, op, ": block_size must divide ", input, ".size(",
                    axis.index, ") = ", x.sym_size(axis.index), ", got ", axis.block, "; pad ", input,
                    " with zeros or choose a divisor.");
}

// Returns the axis counted from the front, -1 for None (per tensor).
inline Axis check_axis(const char* op, const at::Tensor& x, std::optional<int64_t> axis, int64_t group,
                       int64_t block_size = 0, const char* input = "x") {
  TORCH_CHECK_VALUE(group >= 1, op, ": group must be at least 1, got ", group, ".");
  TORCH_CHECK_VALUE(group <= 2147483647, op, ": group must be at most 2147483647, got ", group, ".");
  Axis found = {-1, group, block_size};
  if (!axis.has_value()) {
    TORCH_CHECK_VALUE(group == 1, op, ": group=", group, " needs an axis, got axis=None; pass the channel axis.");
    check_block_size(op, x, found, input);
    return found;
  }
  const int64_t dims = x.dim();
  TORCH_CHECK_VALUE(dims > 0, op, ": axis must be None for an input of no dimensions, got ", *axis, ".");
  TORCH_CHECK_VALUE(*axis >= -dims && *axis < dims, op, ": axis must lie in [", -dims, ", ", dims - 1,
                    "] for an input of ", dims, " dimensions, got ", *axis, ".");
  found.index = *axis < 0 ? *axis + dims : *axis;
  if (group > 1) {
    TORCH_CHECK_VALUE(found.index > 0, op, ": group=", group,
                      " divides dimension 0, so axis must be another dimension, got ", found.index, ".");
    TORCH_CHECK_VALUE(x.sym_size(0) % group == 0, op, ": group must divide ", input, ".size(0) = ", x.sym_size(0),
                      ", got ", group, ".");
  }
  check_block_size(op, x, found, input);
  return found;
}

// The shape of a tensor with one value per channel (per block, if there are blocks).
inline std::vector<c10::SymInt> shape_of_channels(const at::Tensor& x, const Axis& axis) {
  if (axis.index < 0) return {};
  if (axis.block == 0) return {x.sym_size(axis.index) * axis.group};
  std::vector<c10::SymInt> shape = x.sym_sizes().vec();
  shape[axis.index] = shape[axis.index] / axis.block;
  return shape;
}

inline c10::SymInt count_of_channels(const at::Tensor& x, const Axis& axis) {
  if (axis.index < 0) return 1;
  return axis.block > 0 ? x.sym_numel() / axis.block : x.sym_size(axis.index) * axis.group;
}

inline void check_per_block(const char* op, const char* name, const at::Tensor& t, const at::Tensor& x,
                            const Axis& axis, const char* input) {
  const std::vector<c10::SymInt> shape = shape_of_channels(x, axis);
  const bool flat = t.dim() == 1 && t.sym_numel() == count_of_channels(x, axis);
  TORCH_CHECK_VALUE(t.sym_numel() == 1 || flat || t.sym_sizes() == c10::SymIntArrayRef(shape), op, ": ", name,
                    " must have 1 element or shape ", c10::SymIntArrayRef(shape),
                    " (or as many elements in one dimension): ", "the shape of ", input, ", with dimension ",
                    axis.index, " divided by block_size = ", axis.block, "; got shape ", t.sym_sizes(), ".");
}

inline void check_per_channel(const char* op, const char* name, const at::Tensor& t, const at::Tensor& x,
                              const Axis& axis, const char* input = "x") {
  check_float(op, name, t);
  check_same_device(op, name, t, x);
  if (axis.index < 0) {
    TORCH_CHECK_VALUE(t.sym_numel() == 1, op, ": ", name, " must have 1 element if axis is None, got ", t.sym_numel(),
                      " (shape ", t.sym_sizes(), "); pass the channel axis.");
    return;
  }
  if (axis.block > 0) return check_per_block(op, name, t, x, axis, input);
  const auto wanted = x.sym_size(axis.index) * axis.group;
  TORCH_CHECK_VALUE(t.sym_numel() == 1 || t.sym_numel() == wanted, op, ": ", name, " must have 1 or ", wanted,
                    " elements (", axis.group > 1 ? "group * " : "", input, ".size(", axis.index, ")), got ",
                    t.sym_numel(), " (shape ", t.sym_sizes(), ").");
}

inline void check_one_element(const char* op, const char* name, const at::Tensor& t, const at::Tensor& x) {
  check_float(op, name, t);
  check_same_device(op, name, t, x);
  TORCH_CHECK_VALUE(t.sym_numel() == 1, op, ": ", name, " must have 1 element, got ", t.sym_numel(), " (shape ",
                    t.sym_sizes(), ").");
}

// Checks a tensor with as many elements as the scale.
inline void check_beside_scale(const char* op, const char* name, const at::Tensor& t, const at::Tensor& scale,
                               const at::Tensor& x, const Axis& axis, const char* input = "x") {
  check_per_channel(op, name, t, x, axis, input);
  TORCH_CHECK_VALUE(t.sym_numel() == scale.sym_numel(), op, ": ", name, " must have as many elements as scale, ",
                    scale.sym_numel(), ", got ", t.sym_numel(), ".");
}

// Checks scale and zero point against the input, which errors call `input`.
inline Axis check_grid(const char* op, const at::Tensor& x, const at::Tensor& scale,
                       const std::optional<at::Tensor>& zero_point, std::optional<int64_t> axis, int64_t group,
                       int64_t block_size = 0, const char* input = "x") {
  const Axis found = check_axis(op, x, axis, group, block_size, input);
  check_per_channel(op, "scale", scale, x, found, input);
  if (zero_point.has_value()) check_beside_scale(op, "zero_point", *zero_point, scale, x, found, input);
  return found;
}

// The exponents and largest numbers are those of OCP OFP8 and MX v1.0.
inline FloatFormat check_small_float(const char* op, std::string_view format) {
  if (format == "e4m3") return {3, 0x1p-6, 448};
  if (format == "e5m2") return {2, 0x1p-14, 57344};
  if (format == "e2m1") return {1, 1, 6};
  TORCH_CHECK_VALUE(false, op, ": format must be 'e4m3', 'e5m2' or 'e2m1', got '", format, "'.");
}

// The formats of fake_quant_float; nullopt for the logarithmic one, "nnie", whose numbers are in log_grid.h.
inline std::optional<FloatFormat> check_format(const char* op, std::string_view format) {
  const bool known = format == "e4m3" || format == "e5m2" || format == "e2m1" || format == "nnie";
  TORCH_CHECK_VALUE(known, op, ": format must be 'e4m3', 'e5m2', 'e2m1' or 'nnie', got '", format, "'.");
  return format == "nnie" ? std::nullopt : std::optional(check_small_float(op, format));
}

// Returns the format of the scales; its largest number is 0 for e8m0.
inline FloatFormat check_blocks(const char* op, const at::Tensor& x, int64_t block_size, std::string_view scale_format,
                                const std::optional<at::Tensor>& tensor_scale) {
  TORCH_CHECK_VALUE(block_size >= 16 && block_size <= 1024 && block_size % 16 == 0, op,
                    ": block_size must be a multiple of 16 up to 1024, got ", block_size, ".");
  TORCH_CHECK_VALUE(x.dim() > 0 && x.sym_size(-1) % block_size == 0, op, ": block_size must divide the last dimension ",
                    "of x, got block_size=", block_size, " and shape ", x.sym_sizes(), "; pad x with zeros.");
  TORCH_CHECK_VALUE(scale_format == "e8m0" || scale_format == "e4m3", op,
                    ": scale_format must be 'e8m0' or 'e4m3', got '", scale_format, "'.");
  if (tensor_scale.has_value()) {
    TORCH_CHECK_VALUE(scale_format == "e4m3", op, ": tensor_scale requires scale_format='e4m3', got '", scale_format,
                      "'; pass None.");
    check_per_channel(op, "tensor_scale", *tensor_scale, x, {});
  }
  return scale_format == "e8m0" ? FloatFormat{} : check_small_float(op, scale_format);
}

inline void check_bits(const char* op, int64_t num_bits) {
  TORCH_CHECK_VALUE(num_bits >= 1, op, ": num_bits must be 1 or more, got ", num_bits, ".");
  TORCH_CHECK_VALUE(num_bits <= 64, op, ": num_bits must be at most 64, got ", num_bits, ".");
}

// Values that broadcast to x, as one for each channel of an axis.
struct Broadcast {
  at::Tensor values;
  Axis axis;
};

// Along one dimension the axis is that; along several, x has blocks of one element. `name` is that of the argument.
inline Broadcast check_broadcast(const char* op, const char* name, const at::Tensor& x, const at::Tensor& values) {
  check_float(op, name, values);
  check_same_device(op, name, values, x);
  Axis found;
  bool several = false;
  for (int64_t d = 0; d < values.dim(); ++d) {
    if (values.sym_size(d) == 1) continue;
    several |= found.index >= 0;
    found.index = d + x.dim() - values.dim();
    TORCH_CHECK_VALUE(found.index >= 0 && values.sym_size(d) == x.sym_size(found.index), op, ": ", name,
                      " must broadcast to the shape of x, ", x.sym_sizes(), ", got shape ", values.sym_sizes(),
                      "; keep its reduced dimensions (keepdim=True).");
  }
  if (!several) return {values, found};
  std::vector<c10::SymInt> shape = values.sym_sizes().vec();
  shape.erase(shape.begin(), shape.end() - std::min<int64_t>(x.dim(), values.dim()));  // of one element each
  return {values.reshape_symint(shape).expand_symint(x.sym_sizes()), {x.dim() - 1, 1, 1}};
}

inline void check_same_shape(const char* op, const char* name, const at::Tensor& t, const at::Tensor& x) {
  TORCH_CHECK_VALUE(t.sym_sizes() == x.sym_sizes(), op, ": ", name, " must have the shape of x, ", x.sym_sizes(),
                    ", got ", t.sym_sizes(), ".");
  check_same_device(op, name, t, x);
}

// Checks the packed mask of an input and the order of dimensions that it was packed in.
inline void check_mask(const char* op, const at::Tensor& mask, const at::Tensor& grad, at::IntArrayRef order) {
  check_same_device(op, "mask", mask, grad);
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kByte, op, ": mask must be uint8, got ", mask.scalar_type(),
                   "; pass the mask that fake_quant returned.");
  TORCH_CHECK_VALUE(mask.dim() == 1 && mask.sym_numel() == (grad.sym_numel() + 7) / 8, op,
                    ": mask must have one bit per element, ", (grad.sym_numel() + 7) / 8, " bytes, got shape ",
                    mask.sym_sizes(), "; pass the mask that fake_quant returned with mask=True.");
  TORCH_CHECK_VALUE(mask.is_contiguous(), op, ": mask must be contiguous; pass the mask that fake_quant returned.");
  if (order.empty()) return;
  std::vector<bool> seen(grad.dim(), false);
  for (const int64_t d : order) {
    TORCH_CHECK_VALUE(d >= 0 && d < grad.dim() && !seen[d] && static_cast<int64_t>(order.size()) == grad.dim(), op,
                      ": order must be empty or name each of the ", grad.dim(), " dimensions once, got ", order, ".");
    seen[d] = true;
  }
}

inline void check_codes(const char* op, c10::ScalarType dtype, int64_t qmin, int64_t qmax) {
  TORCH_CHECK_TYPE(is_code_dtype(dtype), op, ": dtype must be int8, uint8, int16, uint16 or int32, got ", dtype, ".");
  const bool is_signed = dtype == at::kChar || dtype == at::kShort || dtype == at::kInt;
  const int bits = dtype == at::kInt ? 32 : (dtype == at::kShort || dtype == at::kUInt16 ? 16 : 8);
  const int64_t lowest = is_signed ? -(int64_t{1} << (bits - 1)) : 0;
  const int64_t highest = is_signed ? (int64_t{1} << (bits - 1)) - 1 : (int64_t{1} << bits) - 1;
  TORCH_CHECK_VALUE(qmin >= lowest && qmax <= highest, op, ": qmin and qmax must lie in the range of ", dtype, ", [",
                    lowest, ", ", highest, "], got [", qmin, ", ", qmax, "]; choose a wider dtype.");
}

inline bool fit_4_bits(int64_t qmin, int64_t qmax) { return qmin < 0 ? qmin >= -8 && qmax <= 7 : qmax <= 15; }

// Returns whether the codes are signed.
inline bool check_int4(const char* op, int64_t qmin, int64_t qmax) {
  TORCH_CHECK_VALUE(fit_4_bits(qmin, qmax), op,
                    ": qmin and qmax must lie in [-8, 7] (signed) or in [0, 15] (unsigned), got [", qmin, ", ", qmax,
                    "]; use quantize() for wider integers.");
  return qmin < 0;
}

inline void check_packed_type(const char* op, const at::Tensor& packed, const char* name) {
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, op, ": ", name, " must be uint8, got ", packed.scalar_type(),
                   "; pass the result of quantize_int4().");
}

inline void check_packed(const char* op, const at::Tensor& packed, c10::SymIntArrayRef size,
                         const char* name = "packed") {
  check_packed_type(op, packed, name);
  c10::SymInt codes = 1;
  for (const auto& length : size) {
    TORCH_CHECK_VALUE(length >= 0, op, ": size must not be negative, got ", size, ".");
    const auto so_far = codes.maybe_as_int(), more = length.maybe_as_int();
    int64_t product = 0;
    TORCH_CHECK_VALUE(!so_far || !more || !__builtin_mul_overflow(*so_far, *more, &product), op,
                      ": size must hold fewer than 2^63 elements, got ", size, ".");
    codes = codes * length;
  }
  TORCH_CHECK_VALUE(packed.dim() == 1 && packed.sym_numel() == (codes + 1) / 2, op, ": ", name,
                    " must have one byte per two elements, ", (codes + 1) / 2, " for size ", size, ", got shape ",
                    packed.sym_sizes(), "; pass the result of quantize_int4().");
}

inline void check_code_input(const char* op, const at::Tensor& codes) {
  TORCH_CHECK_TYPE(is_code_dtype(codes.scalar_type()), op, ": codes must be int8, uint8, int16, uint16 or int32, got ",
                   codes.scalar_type(), "; pass the result of quantize().");
}

inline void check_float_dtype(const char* op, c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(is_float_dtype(dtype), op, ": dtype must be float32, float64, bfloat16 or float16, got ", dtype,
                   ".");
}

inline Axis check_fake_quant_(const at::Tensor& x, const at::Tensor& scale, const std::optional<at::Tensor>& zero_point,
                              int64_t qmin, int64_t qmax, std::optional<int64_t> axis, int64_t group,
                              int64_t block_size) {
  constexpr const char* kOp = "fake_quant_";
  check_float(kOp, "x", x);
  check_code_range(kOp, qmin, qmax);
  for (int64_t d = 0; d < x.dim(); ++d) {
    TORCH_CHECK_VALUE(
        x.sym_size(d) <= 1 || x.sym_stride(d) != 0, kOp, ": x must not be expanded, since its elements are ",
        "written in place, got stride 0 in dimension ", d, " (shape ", x.sym_sizes(), "); use fake_quant.");
  }
  return check_grid(kOp, x, scale, zero_point, axis, group, block_size);
}

}  // namespace qtoolkit
