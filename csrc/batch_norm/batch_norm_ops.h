// The bodies of the ops of batch norm in training, which serve all devices; library.cpp describes the ops.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace qtoolkit {

at::Tensor batch_norm_totals(const at::Tensor& x, const std::optional<at::Tensor>& divisor,
                             const std::optional<at::Tensor>& offset, std::optional<std::string_view> process_group);

// Whether codes are returned.
inline bool fit_a_byte(int64_t qmin, int64_t qmax) { return qmin < 0 ? qmin >= -128 && qmax <= 127 : qmax <= 255; }

// What follows a batch norm, or a layer that has folded it.
struct Epilogue {
  std::optional<at::Tensor> residual, residual_codes, residual_scale, residual_zero_point;
  double low, high, slope;
  std::optional<at::Tensor> scale, zero_point;
  int64_t qmin, qmax;
  double grad_factor;
};

// The arguments of batch_norm_fake_quant that its backward shares.
struct BatchNorm : Epilogue {
  std::optional<at::Tensor> weight, bias, divisor;
  double eps;
  std::optional<at::Tensor> totals;
  std::optional<std::string> process_group;
};

struct BatchNormResult {
  at::Tensor y, codes, mean, variance;
};

// Running statistics, and what they take in besides those of a batch, as the op batch_norm_track_ has it. The number of
// batches grows by one.
struct Tracking {
  at::Tensor running_mean, running_var;
  std::optional<at::Tensor> divisor, offset;
  double momentum;
  c10::SymInt count;  // of the elements of a channel
  std::optional<at::Tensor> totals, batches;
};

// `arrived` has a zero (int32) for each channel that a GPU counts blocks in; without it the op makes some.
BatchNormResult batch_norm_fake_quant(const at::Tensor& x, const BatchNorm& norm, bool packs_codes,
                                      const std::optional<Tracking>& tracking = {}, at::Tensor arrived = {});

// Of: x, weight, bias, divisor, residual, scale, zero_point. Empty where one is not wanted or there is none. All but
// those of x and the residual may be written later.
using WantedOfBatchNorm = std::array<bool, 7>;
using GradientsOfBatchNorm = std::array<at::Tensor, 7>;

GradientsOfBatchNorm batch_norm_fake_quant_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& mean,
                                                    const at::Tensor& variance, const WantedOfBatchNorm& wanted,
                                                    const BatchNorm& norm, LaterGradients* later = nullptr);

// batch_norm_fake_quant without its batch norm: y and its codes, packed if they fit in 4 bits.
std::tuple<at::Tensor, at::Tensor> epilogue_fake_quant(const at::Tensor& x, const Epilogue& epilogue);

struct WantedOfEpilogue {
  bool channels, residual, scale;
};

// `channels`: the sums of the gradient of x over each channel, in the type of the arithmetic. Empty where not wanted.
struct EpilogueGradients {
  at::Tensor x, channels, residual, scale, zero_point;
};

EpilogueGradients epilogue_fake_quant_backward(const at::Tensor& grad, const at::Tensor& x, const Epilogue& epilogue,
                                               const WantedOfEpilogue& wanted);

}  // namespace qtoolkit
