// Checks of quant_layer and its backward. `size` is that of the input, `like` a tensor on its device.
#pragma once

#include "../checks.h"
#include "layer.h"

namespace qtoolkit {

inline void check_one(const char* op, const char* name, const at::Tensor& t, const at::Tensor& like) {
  check_float(op, name, t);
  check_same_device(op, name, t, like);
  TORCH_CHECK_VALUE(t.sym_numel() == 1, op, ": ", name, " must have 1 element, since the input has one scale, got ",
                    t.sym_numel(), " (shape ", t.sym_sizes(), ").");
}

inline void check_per_output(const char* op, const char* name, const std::optional<at::Tensor>& t,
                             const c10::SymInt& channels, const at::Tensor& like) {
  if (!t.has_value()) return;
  check_float(op, name, *t);
  check_same_device(op, name, *t, like);
  TORCH_CHECK_VALUE(t->dim() == 1 && t->sym_numel() == channels, op, ": ", name,
                    " must have one dimension with 1 element per output channel, ", channels, ", got shape ",
                    t->sym_sizes(), ".");
}

inline void check_raw(const char* op, const RawInput& raw, c10::SymIntArrayRef size, const at::Tensor& like) {
  TORCH_CHECK_VALUE(raw.x.has_value() == raw.scale.has_value(), op, ": raw and raw_scale must be given together, got ",
                    raw.x.has_value() ? "raw" : "raw_scale", " alone; pass both, or neither.");
  if (!raw.x.has_value()) return;
  check_float(op, "raw", *raw.x);
  check_same_device(op, "raw", *raw.x, like);
  TORCH_CHECK_VALUE(raw.x->sym_sizes() == size, op, ": raw must have the shape of x, ", size, ", got ",
                    raw.x->sym_sizes(), ".");
  check_one(op, "raw_scale", *raw.scale, like);
}

inline void check_memory_format(const char* op, std::optional<at::MemoryFormat> format, const Layer& l) {
  if (!format.has_value() || *format == at::MemoryFormat::Contiguous) return;
  const auto number = static_cast<int>(*format);  // torch cannot print one that it does not know
  TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int>(at::MemoryFormat::NumOptions), op,
                    ": memory_format must be a torch.memory_format or None, got the number ", number, ".");
  const bool is_2d = l.geometry.stride.size() == 2;
  TORCH_CHECK_VALUE(is_2d && *format == at::MemoryFormat::ChannelsLast, op,
                    ": memory_format must be None, torch.contiguous_format or, for a 2-d convolution, "
                    "torch.channels_last, got ",
                    *format, " and stride=", at::IntArrayRef(l.geometry.stride), ".");
}

// Whether the codes have the shape of an image but for half the channels.
inline bool is_packed_by_channels(const at::Tensor& codes, c10::SymIntArrayRef size) {
  if (codes.dim() != 4 || size.size() != 4 || size[1] == 0) return false;
  return codes.sym_size(0) == size[0] && codes.sym_size(1) * 2 == size[1] && codes.sym_size(2) == size[2] &&
         codes.sym_size(3) == size[3];
}

inline void check_input_codes(const char* op, const Layer& l, c10::SymIntArrayRef size, const at::Tensor& like) {
  const at::Tensor& codes = l.codes;
  check_same_device(op, "codes", codes, like);
  TORCH_CHECK_TYPE(codes.scalar_type() == at::kChar || codes.scalar_type() == at::kByte, op,
                   ": codes must be int8 or uint8, got ", codes.scalar_type(),
                   "; pass the result of quantize() with one of these dtypes, or of quantize_int4().");
  TORCH_CHECK_VALUE(l.x_qmin < l.x_qmax, op, ": x_qmin must be smaller than x_qmax, got x_qmin=", l.x_qmin,
                    " and x_qmax=", l.x_qmax, ".");
  check_one(op, "x_scale", l.x_scale, like);
  if (l.x_zero_point.has_value()) check_one(op, "x_zero_point", *l.x_zero_point, like);
  const bool in_rows = codes.dim() == 1, by_channels = !in_rows && is_packed_by_channels(codes, size);
  if (in_rows) check_packed(op, codes, size, "codes");
  if (by_channels) check_packed_type(op, codes, "codes");
  if (in_rows || by_channels) {
    TORCH_CHECK_VALUE(fit_4_bits(l.x_qmin, l.x_qmax), op,
                      ": x_qmin and x_qmax must lie in [-8, 7] or in [0, 15] for packed codes, got [", l.x_qmin, ", ",
                      l.x_qmax, "]; pass codes of the shape of x, a byte each.");
    return;
  }
  TORCH_CHECK_VALUE(codes.sym_sizes() == size, op, ": codes must have the shape of x, ", size,
                    ", or one dimension with two elements per byte, or half the channels of an image, got shape ",
                    codes.sym_sizes(), ".");
  const int64_t lowest = codes.scalar_type() == at::kChar ? -128 : 0;
  TORCH_CHECK_VALUE(l.x_qmin >= lowest && l.x_qmax <= lowest + 255, op, ": x_qmin and x_qmax must lie in [", lowest,
                    ", ", lowest + 255, "], the range of ", codes.scalar_type(), ", got [", l.x_qmin, ", ", l.x_qmax,
                    "]; pass codes of the other dtype, or keep the input in float.");
}

inline void check_linear(const char* op, const Layer& l, c10::SymIntArrayRef size) {
  const Geometry& g = l.geometry;
  const bool plain = g.padding.empty() && g.dilation.empty() && g.output_padding.empty() && !g.transposed;
  TORCH_CHECK_VALUE(plain && g.groups == 1, op,
                    ": stride must not be empty for a convolution, got padding=", at::IntArrayRef(g.padding),
                    ", dilation=", at::IntArrayRef(g.dilation), ", output_padding=", at::IntArrayRef(g.output_padding),
                    ", transposed=", g.transposed, " and groups=", g.groups, "; pass none of them for a linear layer.");
  TORCH_CHECK_VALUE(l.weight.dim() == 2, op,
                    ": weight must have 2 dimensions, (out, in), for a linear layer, got shape ", l.weight.sym_sizes(),
                    "; pass the stride of a convolution.");
  TORCH_CHECK_VALUE(size.size() >= 2, op, ": x must have at least 2 dimensions, (..., features), got ", size.size(),
                    "; add a batch dimension: x.unsqueeze(0).");
  TORCH_CHECK_VALUE(size.back() == l.weight.sym_size(1), op, ": x must have weight.size(1) = ", l.weight.sym_size(1),
                    " features in its last dimension, got shape ", size, ".");
}

inline void check_per_dimension(const char* op, const char* name, const std::vector<int64_t>& values, size_t dims,
                                int64_t lowest) {
  constexpr int64_t kHighest = 2147483647;  // torch's kernels count in int32
  bool fit = values.size() == dims;
  for (const int64_t value : values) fit = fit && value >= lowest && value <= kHighest;
  TORCH_CHECK_VALUE(fit, op, ": ", name, " must have ", dims, " integers of at least ", lowest, " and at most ",
                    kHighest, ", one for each spatial dimension of weight, got ", at::IntArrayRef(values), ".");
}

inline void check_convolution(const char* op, const Layer& l, c10::SymIntArrayRef size) {
  const Geometry& g = l.geometry;
  const at::Tensor& weight = l.weight;
  TORCH_CHECK_VALUE(weight.dim() >= 3 && weight.dim() <= 5, op,
                    ": weight must have 3 to 5 dimensions for a convolution, got shape ", weight.sym_sizes(),
                    "; pass an empty stride for a linear layer.");
  TORCH_CHECK_VALUE(static_cast<int64_t>(size.size()) == weight.dim(), op, ": x must have the ", weight.dim(),
                    " dimensions of weight, (N, C, ...), got shape ", size,
                    "; add a batch dimension to a single sample: x.unsqueeze(0).");
  const size_t dims = size.size() - 2;
  check_per_dimension(op, "stride", g.stride, dims, 1);
  check_per_dimension(op, "padding", g.padding, dims, 0);
  check_per_dimension(op, "dilation", g.dilation, dims, 1);
  check_per_dimension(op, "output_padding", g.output_padding, dims, 0);
  TORCH_CHECK_VALUE(g.groups >= 1 && g.groups <= 2147483647 && weight.sym_size(0) % g.groups == 0, op,
                    ": groups must be at least 1 and divide weight.size(0) = ", weight.sym_size(0), ", got ", g.groups,
                    ".");
  const c10::SymInt channels = g.transposed ? weight.sym_size(0) : weight.sym_size(1) * g.groups;
  TORCH_CHECK_VALUE(size[1] == channels, op, ": x must have ", channels, " channels (",
                    g.transposed ? "weight.size(0)" : "groups * weight.size(1)", "), got shape ", size, ".");
  for (size_t d = 0; d < dims; ++d) {
    TORCH_CHECK_VALUE(size[d + 2] > 0, op, ": x must not be empty in its spatial dimensions, got shape ", size, ".");
    const bool fits =
        g.transposed ? g.output_padding[d] < std::max(g.stride[d], g.dilation[d]) : g.output_padding[d] == 0;
    TORCH_CHECK_VALUE(fits, op,
                      ": output_padding must be smaller than stride or dilation of a transposed convolution, ",
                      "and 0 for others, got output_padding=", at::IntArrayRef(g.output_padding),
                      ", stride=", at::IntArrayRef(g.stride), ", dilation=", at::IntArrayRef(g.dilation),
                      " and transposed=", g.transposed, ".");
    const c10::SymInt length = output_length(size[d + 2], weight.sym_size(static_cast<int64_t>(d) + 2), d, g);
    TORCH_CHECK_VALUE(length > 0, op, ": the output must not be empty, got length ", length, " in spatial dimension ",
                      d, " for an input of shape ", size, " and a weight of shape ", weight.sym_sizes(),
                      "; change padding, dilation or the size of x.");
  }
}

// Sums of products of codes have one step for each output channel.
inline void check_integer(const char* op, const Layer& l, const Axis& axis) {
  TORCH_CHECK_VALUE(!l.zero_point.has_value(), op,
                    ": zero_point must be None with integer=True, since the int8 kernels need a symmetric weight; pass "
                    "integer=False.");
  TORCH_CHECK_VALUE(l.qmin >= -128 && l.qmax <= 127, op, ": qmin and qmax must lie in [-128, 127] with integer=True, ",
                    "got [", l.qmin, ", ", l.qmax, "]; pass integer=False.");
  const bool along =
      axis.index == (l.geometry.transposed ? 1 : 0) && axis.group == (l.geometry.transposed ? l.geometry.groups : 1);
  TORCH_CHECK_VALUE(axis.block == 0 && (l.scale.sym_numel() == 1 || along), op,
                    ": scale must have 1 element or 1 per output channel, and no blocks, with integer=True, got shape ",
                    l.scale.sym_sizes(), " with axis=", axis.index, ", group=", axis.group,
                    " and block_size=", axis.block, "; pass integer=False.");
}

// The values are checked on the CPU alone: a GPU would have to be waited for.
inline void check_updated(const char* op, const at::Tensor& updated, const c10::SymInt& channels,
                          const at::Tensor& like) {
  TORCH_CHECK_TYPE(updated.scalar_type() == at::kLong, op, ": updated must have dtype int64, got ",
                   updated.scalar_type(), "; pass the indices of output channels.");
  check_same_device(op, "updated", updated, like);
  TORCH_CHECK_VALUE(updated.dim() == 1, op, ": updated must have one dimension, of output channels, got shape ",
                    updated.sym_sizes(), ".");
  if (!updated.is_cpu()) return;
  const at::Tensor indices = updated.contiguous();
  const int64_t* index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) {
    TORCH_CHECK_VALUE(index[i] >= 0 && index[i] < channels, op, ": updated must have indices of the ", channels,
                      " output channels, got ", index[i], ".");
  }
}

// Returns the axis of the scales.
inline Axis check_layer_weight(const char* op, const LayerWeight& w, const Geometry& g, const at::Tensor& like) {
  TORCH_CHECK_VALUE(w.weight.sym_numel() > 0, op, ": weight must not be empty, got shape ", w.weight.sym_sizes(), ".");
  check_per_output(op, "factor", w.factor, output_channels(w.weight, g), like);
  if (w.updated.has_value()) check_updated(op, *w.updated, output_channels(w.weight, g), like);
  check_code_range(op, w.qmin, w.qmax);
  return check_grid(op, w.weight, w.scale, w.zero_point, w.axis, w.group, w.block_size, "weight");
}

inline void check_layer(const char* op, const Layer& l, c10::SymIntArrayRef size, const at::Tensor& like) {
  check_input_codes(op, l, size, like);
  check_float(op, "weight", l.weight);
  check_same_device(op, "weight", l.weight, like);
  if (l.geometry.is_linear()) {
    check_linear(op, l, size);
  } else {
    check_convolution(op, l, size);
  }
  const Axis axis = check_layer_weight(op, l, l.geometry, like);
  if (l.integer) check_integer(op, l, axis);
}

}  // namespace qtoolkit
