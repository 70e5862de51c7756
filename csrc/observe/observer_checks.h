// Argument checks of the observers and of their ranges and histograms; see checks.h.
#pragma once

#include "../checks.h"

namespace qtoolkit {

inline void check_not_empty(const char* op, const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.sym_numel() > 0, op, ": x must have at least one element, got shape ", x.sym_sizes(), ".");
}

inline void check_momentum(const char* op, std::optional<double> momentum) {
  TORCH_CHECK_VALUE(!momentum.has_value() || (*momentum > 0 && *momentum <= 1), op,
                    ": momentum must lie in (0, 1] or be None, got ", momentum.value_or(0), ".");
}

inline void check_bins(const char* op, const at::Tensor& counts, const c10::SymInt& bins, int64_t most) {
  TORCH_CHECK_TYPE(counts.scalar_type() == at::kLong, op, ": counts must be int64, got ", counts.scalar_type(), ".");
  TORCH_CHECK_VALUE(bins >= 2 && bins <= most && bins % 2 == 0, op,
                    ": counts must have an even number of bins from 2 to ", most, ", got ", bins, " (shape ",
                    counts.sym_sizes(), ").");
}

// The outer edges of histograms.
inline void check_edges(const char* op, const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& counts,
                        const c10::SymInt& wanted) {
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>{"lo", lo}, {"hi", hi}}) {
    TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, op, ": ", name, " must be float32, got ", t.scalar_type(), ".");
    TORCH_CHECK_VALUE(t.device() == counts.device(), op, ": ", name, " must be on the device of counts, ",
                      counts.device(), ", got ", t.device(), ".");
    TORCH_CHECK_VALUE(t.sym_numel() == wanted, op, ": ", name, " must have ", wanted,
                      wanted == 1 ? " element, got " : " elements, one per histogram, got ", t.sym_numel(), " (shape ",
                      t.sym_sizes(), ").");
  }
}

// Running histograms that an observer updates in place.
inline void check_histogram(const char* op, const at::Tensor& x, const at::Tensor& counts, const at::Tensor& lo,
                            const at::Tensor& hi, const Axis& axis) {
  check_same_device(op, "counts", counts, x);
  const c10::SymInt channels = count_of_channels(x, axis);
  if (axis.index < 0) {
    TORCH_CHECK_VALUE(counts.dim() == 1, op, ": counts must have 1 dimension if axis is None, got shape ",
                      counts.sym_sizes(), "; pass the channel axis for a histogram per channel.");
  } else {
    TORCH_CHECK_VALUE(counts.dim() == 2 && counts.sym_size(0) == channels, op,
                      ": counts must have shape (channels, bins) with ", channels, " channels, got ",
                      counts.sym_sizes(), ".");
  }
  check_bins(op, counts, counts.sym_size(-1), 1 << 20);
  check_edges(op, lo, hi, counts, channels);
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>{"counts", counts}, {"lo", lo}, {"hi", hi}}) {
    TORCH_CHECK_VALUE(t.is_contiguous(), op, ": ", name, " must be contiguous, since it is updated in place.");
  }
}

inline void check_search(const char* op, const at::Tensor& counts, const at::Tensor& lo, const at::Tensor& hi,
                         int64_t qmin, int64_t qmax, std::string_view method, double percentile) {
  TORCH_CHECK_VALUE(counts.dim() == 1 || counts.dim() == 2, op,
                    ": counts must have shape (bins,) or (channels, bins), got ", counts.sym_sizes(), ".");
  check_bins(op, counts, counts.sym_size(-1), 1 << 24);  // float32 holds such edges exactly
  check_edges(op, lo, hi, counts, counts.dim() == 1 ? c10::SymInt(1) : counts.sym_size(0));
  check_code_range(op, qmin, qmax);
  TORCH_CHECK_VALUE(qmin <= 0 && qmax > 0 && qmax - qmin < (1 << 16), op,
                    ": qmin and qmax must include 0 and a positive integer, and span at most 16 bits, got [", qmin,
                    ", ", qmax, "].");
  TORCH_CHECK_VALUE(method == "percentile" || method == "mse" || method == "l2" || method == "entropy", op,
                    ": method must be 'percentile', 'mse', 'l2' or 'entropy', got '", method, "'.");
  TORCH_CHECK_VALUE(percentile > 0 && percentile <= 100, op, ": percentile must lie in (0, 100], got ", percentile,
                    ".");
}

// The ranges that a search by entropy compares.
inline void check_candidates(const char* op, at::IntArrayRef candidates, const c10::SymInt& bins,
                             std::string_view method, bool symmetric) {
  TORCH_CHECK_VALUE(candidates.empty() || (method == "entropy" && symmetric), op,
                    ": candidates need method 'entropy' and symmetric=True, got '", method,
                    "' and symmetric=", symmetric ? "True" : "False", "; leave candidates empty.");
  for (const int64_t bin : candidates) {
    TORCH_CHECK_VALUE(bin >= 1 && bin <= bins, op, ": candidates must lie in [1, ", bins,
                      "], since counts has that many bins, got ", bin, ".");
  }
}

// Running ranges, and the count of skipped batches, that an observer updates in place.
inline void check_running_ranges(const char* op, const at::Tensor& lo, const at::Tensor& hi,
                                 const std::optional<at::Tensor>& skipped, const at::Tensor& x, const Axis& axis) {
  const c10::SymInt wanted = count_of_channels(x, axis);
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>{"lo", lo}, {"hi", hi}}) {
    TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble, op, ": ", name,
                     " must be float32 or float64, got ", t.scalar_type(), ".");
    check_same_device(op, name, t, x);
    TORCH_CHECK_VALUE(t.sym_numel() == wanted, op, ": ", name, " must have ", wanted,
                      axis.block > 0 ? " elements, one per block, got " : " elements, one per channel, got ",
                      t.sym_numel(), " (shape ", t.sym_sizes(), ").");
    TORCH_CHECK_VALUE(t.is_contiguous(), op, ": ", name, " must be contiguous, since it is updated in place.");
  }
  TORCH_CHECK_TYPE(lo.scalar_type() == hi.scalar_type(), op, ": lo and hi must have the same dtype, got ",
                   lo.scalar_type(), " and ", hi.scalar_type(), ".");
  if (!skipped.has_value()) return;
  TORCH_CHECK_TYPE(skipped->scalar_type() == at::kLong, op, ": skipped must be int64, got ", skipped->scalar_type(),
                   ".");
  check_same_device(op, "skipped", *skipped, x);
  TORCH_CHECK_VALUE(skipped->sym_numel() == wanted && skipped->is_contiguous(), op,
                    ": skipped must be contiguous and have as many elements as lo, ", wanted, ", got ",
                    skipped->sym_numel(), ".");
}

// What a grid has seen of a training.
inline void check_steps_seen(const char* op, const at::Tensor& count, const at::Tensor& clock, const at::Tensor& lo) {
  TORCH_CHECK_VALUE(count.sym_numel() == 2 && count.is_contiguous(), op,
                    ": count must be contiguous and have 2 elements, a time and a number of steps, got shape ",
                    count.sym_sizes(), ".");
  TORCH_CHECK_VALUE(clock.sym_numel() == 1, op, ": clock must have one element, got shape ", clock.sym_sizes(), ".");
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>{"count", count}, {"clock", clock}}) {
    TORCH_CHECK_TYPE(t.scalar_type() == at::kLong, op, ": ", name, " must be int64, got ", t.scalar_type(), ".");
    TORCH_CHECK_VALUE(t.device() == lo.device(), op, ": ", name, " must be on the device of lo, ", lo.device(),
                      ", got ", t.device(), ".");
  }
}

// The codes that cover a range.
inline void check_covering_codes(const char* op, int64_t qmin, int64_t qmax, bool symmetric) {
  check_code_range(op, qmin, qmax);
  TORCH_CHECK_VALUE(!symmetric || qmax > 0, op, ": qmax must be positive if there is no zero point, got [", qmin, ", ",
                    qmax, "].");
}

inline void check_grid_of_range(const char* op, const at::Tensor& lo, const at::Tensor& hi, int64_t qmin, int64_t qmax,
                                bool symmetric) {
  TORCH_CHECK_TYPE(lo.scalar_type() == at::kFloat || lo.scalar_type() == at::kDouble, op,
                   ": lo must be float32 or float64, got ", lo.scalar_type(), "; convert it with .float().");
  TORCH_CHECK_TYPE(hi.scalar_type() == lo.scalar_type(), op, ": hi must have the dtype of lo, ", lo.scalar_type(),
                   ", got ", hi.scalar_type(), ".");
  TORCH_CHECK_VALUE(hi.device() == lo.device(), op, ": hi must be on the device of lo, ", lo.device(), ", got ",
                    hi.device(), ".");
  TORCH_CHECK_VALUE(hi.sym_sizes() == lo.sym_sizes(), op, ": hi must have the shape of lo, ", lo.sym_sizes(), ", got ",
                    hi.sym_sizes(), ".");
  check_covering_codes(op, qmin, qmax, symmetric);
}

// A scale or zero point that is computed from running ranges.
inline void check_written(const char* op, const char* name, const at::Tensor& t, const at::Tensor& lo) {
  TORCH_CHECK_TYPE(t.scalar_type() == lo.scalar_type(), op, ": ", name, " must have the dtype of lo, ",
                   lo.scalar_type(), ", got ", t.scalar_type(), ".");
  TORCH_CHECK_VALUE(t.device() == lo.device(), op, ": ", name, " must be on the device of lo, ", lo.device(), ", got ",
                    t.device(), ".");
  TORCH_CHECK_VALUE(t.sym_numel() == lo.sym_numel(), op, ": ", name, " must have as many elements as lo, ",
                    lo.sym_numel(), ", got ", t.sym_numel(), " (shape ", t.sym_sizes(), ").");
  TORCH_CHECK_VALUE(t.is_contiguous(), op, ": ", name, " must be contiguous, since it is updated in place.");
}

inline Axis check_observe_fake_quant(const at::Tensor& x, const at::Tensor& lo, const at::Tensor& hi,
                                     const at::Tensor& scale, const std::optional<at::Tensor>& zero_point, int64_t qmin,
                                     int64_t qmax, std::optional<double> momentum, std::optional<int64_t> axis,
                                     int64_t group, int64_t block_size, const std::optional<at::Tensor>& skipped) {
  constexpr const char* kOp = "observe_fake_quant";
  check_float(kOp, "x", x);
  const Axis a = check_axis(kOp, x, axis, group, block_size);
  check_running_ranges(kOp, lo, hi, skipped, x, a);
  check_momentum(kOp, momentum);
  check_covering_codes(kOp, qmin, qmax, !zero_point.has_value());
  check_written(kOp, "scale", scale, lo);
  if (zero_point.has_value()) check_written(kOp, "zero_point", *zero_point, lo);
  return a;
}

}  // namespace qtoolkit
