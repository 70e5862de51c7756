// Argument checks of batch norm; see checks.h.
#pragma once

#include <limits>

#include "../checks.h"

namespace qtoolkit {

using OptionalTensor = std::optional<at::Tensor>;

// One value for each channel.
inline void check_of_channels(const char* op, const char* name, const OptionalTensor& t, const c10::SymInt& channels,
                              const at::Tensor& x) {
  if (!t.has_value()) return;
  check_float(op, name, *t);
  check_same_device(op, name, *t, x);
  TORCH_CHECK_VALUE(t->dim() == 1 && t->sym_size(0) == channels, op, ": ", name, " must have one dimension of ",
                    channels, " elements, one for each channel, got shape ", t->sym_sizes(), ".");
}

// A quantizer of the whole tensor, if there is a scale. `prefix` is that of the arguments' names.
inline void check_one_grid(const char* op, const std::string& prefix, const OptionalTensor& scale,
                           const OptionalTensor& zero_point, const at::Tensor& x) {
  const std::string names[] = {prefix + "scale", prefix + "zero_point"};
  TORCH_CHECK_VALUE(scale.has_value() || !zero_point.has_value(), op, ": ", names[1], " requires ", names[0],
                    ", got None; pass both, or neither.");
  const OptionalTensor* tensors[] = {&scale, &zero_point};
  for (int i = 0; i < 2; ++i) {
    if (!tensors[i]->has_value()) continue;
    const at::Tensor& t = **tensors[i];
    check_float(op, names[i].c_str(), t);
    check_same_device(op, names[i].c_str(), t, x);
    TORCH_CHECK_VALUE(t.sym_numel() == 1, op, ": ", names[i],
                      " must have 1 element, since the op has one grid for all ", "channels, got ", t.sym_numel(),
                      " (shape ", t.sym_sizes(), ").");
  }
}

inline void check_residual(const char* op, const OptionalTensor& residual, const OptionalTensor& codes,
                           const OptionalTensor& scale, const OptionalTensor& zero_point, const at::Tensor& x) {
  check_one_grid(op, "residual_", scale, zero_point, x);
  if (residual.has_value()) {
    check_same_shape(op, "residual", *residual, x);
    TORCH_CHECK_TYPE(residual->scalar_type() == x.scalar_type(), op, ": residual must have the dtype of x, ",
                     x.scalar_type(), ", got ", residual->scalar_type(), "; convert it with .to(x.dtype).");
  }
  TORCH_CHECK_VALUE(codes.has_value() == scale.has_value(), op,
                    ": residual_codes and residual_scale belong together; pass both, or neither.");
  if (!codes.has_value()) return;
  check_same_shape(op, "residual_codes", *codes, x);
  TORCH_CHECK_TYPE(codes->scalar_type() == at::kChar || codes->scalar_type() == at::kByte, op,
                   ": residual_codes must be int8 or uint8, got ", codes->scalar_type(),
                   "; pass the result of quantize(), or the residual alone.");
}

inline void check_activation(const char* op, double eps, double low, double high) {
  TORCH_CHECK_VALUE(eps >= 0, op, ": eps must not be negative, got ", eps, ".");
  TORCH_CHECK_VALUE(low < high, op, ": low must be less than high, got low=", low, " and high=", high, ".");
}

// x as batch norm takes it in training: with totals, other values may be those of other ranks.
inline void check_norm_input(const char* op, const at::Tensor& x, bool with_totals) {
  check_float(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 2, op, ": x must have at least 2 dimensions, (batch, channels, ...), got shape ",
                    x.sym_sizes(), ".");
  if (with_totals) return;
  c10::SymInt values = x.sym_size(0);
  for (int64_t d = 2; d < x.dim(); ++d) values = values * x.sym_size(d);
  TORCH_CHECK_VALUE(values > 1, op, ": x must have more than 1 value for each channel, to compute a variance, got ",
                    values, " (shape ", x.sym_sizes(), "); use larger batches, or put the batch norm in eval mode.");
}

// What batch_norm_totals returned for x, whose channels are `channels`.
inline void check_totals(const char* op, const OptionalTensor& totals, const c10::SymInt& channels, const at::Tensor& x,
                         bool with_group = false) {
  TORCH_CHECK_VALUE(totals.has_value() || !with_group, op,
                    ": process_group requires totals, got None; pass the result ", "of batch_norm_totals() for it.");
  if (!totals.has_value()) return;
  check_same_device(op, "totals", *totals, x);
  TORCH_CHECK_TYPE(totals->scalar_type() == at::kDouble, op, ": totals must be float64, got ", totals->scalar_type(),
                   "; pass the result of batch_norm_totals().");
  const bool fits = totals->dim() == 2 && totals->sym_size(0) == 2 && totals->sym_size(1) == 2 * channels + 1;
  TORCH_CHECK_VALUE(fits && totals->is_contiguous(), op, ": totals must have the shape [2, ", 2 * channels + 1,
                    "], for two sums of each channel and the number of values, got ", totals->sym_sizes(),
                    "; pass the result of batch_norm_totals().");
}

inline void check_track(const char* op, const at::Tensor& running_mean, const at::Tensor& running_var,
                        const at::Tensor& mean, const at::Tensor& variance, const OptionalTensor& divisor,
                        const OptionalTensor& offset, double momentum, const c10::SymInt& count,
                        const OptionalTensor& totals) {
  check_float(op, "running_mean", running_mean);
  TORCH_CHECK_VALUE(running_mean.dim() == 1, op, ": running_mean must have one dimension, got shape ",
                    running_mean.sym_sizes(), ".");
  const c10::SymInt channels = running_mean.sym_size(0);
  check_of_channels(op, "running_var", running_var, channels, running_mean);
  check_of_channels(op, "mean", mean, channels, running_mean);
  check_of_channels(op, "variance", variance, channels, running_mean);
  check_of_channels(op, "divisor", divisor, channels, running_mean);
  check_of_channels(op, "offset", offset, channels, running_mean);
  check_totals(op, totals, channels, running_mean);
  TORCH_CHECK_TYPE(running_var.scalar_type() == running_mean.scalar_type(), op,
                   ": running_var must have the dtype of running_mean, ", running_mean.scalar_type(), ", got ",
                   running_var.scalar_type(), ".");
  TORCH_CHECK_VALUE(running_mean.is_contiguous() && running_var.is_contiguous(), op,
                    ": running_mean and running_var must be contiguous, since they are written in place.");
  TORCH_CHECK_VALUE(momentum >= 0 && momentum <= 1, op, ": momentum must lie in [0, 1], got ", momentum, ".");
  TORCH_CHECK_VALUE(totals.has_value() || count > 1, op,
                    ": count, the number of values of a channel, must be more than 1, got ", count, ".");
}

}  // namespace qtoolkit
