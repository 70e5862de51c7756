// What units have in common: the scales that are made of what is trained, and the quantizer after an op.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../layer/layer.h"
#include "unit_scales.h"

namespace qtoolkit {

// What a scale is made of: a start alone, or with the ratio that is trained.
struct Trained {
  std::optional<at::Tensor> start, ratio, rate;
  bool float16 = false;  // whether the scale is rounded to a number of float16

  // A tensor of its own: an observer may change the start before backward.
  std::optional<at::Tensor> scale() const;
};

// The range of the weight that start follows, or neither.
struct Followed {
  std::optional<at::Tensor> lo, hi;
  bool pow2_scale;
};

// The quantizer after an op; without a start there is none.
struct Output {
  Trained trained;
  std::optional<at::Tensor> zero_point;
  int64_t qmin, qmax;
  double grad_factor;
};

inline Reader& operator>>(Reader& reader, Output& o) {
  return reader >> o.trained.start >> o.trained.ratio >> o.trained.rate >> o.zero_point >> o.qmin >> o.qmax >>
         o.grad_factor;
}

// The running variance with which a weight is folded, and the parameters of the batch norm. With the running mean too,
// both are constants, and the layer computes the whole batch norm.
struct Norm {
  at::Tensor variance;
  std::optional<at::Tensor> gamma, beta;
  double eps;
  std::optional<at::Tensor> frozen_mean;

  bool is_frozen() const { return frozen_mean.has_value(); }
};

// A residual, its codes if it has some, and an activation.
struct Following {
  std::optional<at::Tensor> residual, codes, scale, zero_point;
  double low, high, slope;
};

// What is computed before a quantizer alone, with the arguments of torch's function of that name.
struct Function {
  std::string name;
  std::vector<c10::SymInt> shape;  // of a norm
  std::optional<at::Tensor> weight, bias;
  double eps;

  bool is_none() const { return name == "none"; }
  bool is_heads() const { return name == "heads"; }           // the copy of a view in contiguous memory, times eps
  bool is_linear() const { return is_none() || is_heads(); }  // backward needs no x but for a learned grid
  bool is_layer_norm() const { return name == "layer_norm"; }
  bool is_norm() const { return is_layer_norm() || name == "rms_norm"; }
  std::string_view approximate() const { return name == "gelu_tanh" ? "tanh" : "none"; }
};

// ---- scales

// What a unit has: absent parts are null.
struct UnitParts {
  const char* op;
  const Norm* norm = nullptr;
  const Layer* layer = nullptr;  // without its scale
  const Trained* weight = nullptr;
  const Trained* output = nullptr;
};

// As far as backward has them too: shapes. `scales` are those of the weight.
void check_parts(const UnitParts& parts, const c10::SymInt& scales);

// The bias of a layer, and whether it lies on the grid of the sums of products of codes, as a runtime adds it.
struct GivenBias {
  std::optional<at::Tensor> bias;
  bool on_grid;
  std::optional<at::ScalarType> dtype = {};  // in which the layer adds it, if it does not convert it itself
};

// The factor of a batch norm, the scales of weight and output, and what the layer adds to its sums: its bias, and with
// a frozen batch norm (bias - mean) factor + beta. A batch norm that is not frozen takes the bias itself.
struct Scales {
  at::Tensor factor, scale;
  std::optional<at::Tensor> y_scale, bias;
  at::Tensor arrived;                // of a batch norm on a GPU: zeros (int32) behind that launch, one for each channel
  std::optional<UnitScales> unmade;  // the launch that is to make them, if it is left to the caller's next one
};

// When the scales are made: on a GPU the caller's next launch may do it.
enum class Made { now, later };

Scales make_scales(const UnitParts& parts, const Followed& followed, const GivenBias& bias = {}, Made made = Made::now);

// The gradients of the scales, of the factor and of what a layer with a frozen batch norm adds; undefined where they
// are not wanted.
struct ScaleGradients {
  at::Tensor scale, y_scale;
  at::Tensor of_gamma, of_divisor, of_factor;  // of_factor is undefined where the gradient of gamma is not wanted
  at::Tensor of_bias;
};

struct WantedOfScales {
  bool start, ratio, y_start, y_ratio, bias;
};

// Those of what they are made of; undefined where they are not wanted. The bias has one after a frozen batch norm.
struct PartGradients {
  at::Tensor start, ratio, gamma, bias, y_start, y_ratio;
};

// `before` are gradients among `in` that are to be written first.
PartGradients gradients_of_parts(const UnitParts& parts, const ScaleGradients& in, const WantedOfScales& wanted,
                                 const std::optional<at::Tensor>& bias = {}, LaterGradients before = {});

// ---- the quantizer after an op

// How a unit quantizes what another op returns.
struct OutputQuantizer : Output {
  bool learned;     // backward keeps the values before: the scale or the zero point is trained
  bool with_codes;  // the codes are wanted
};

// The quantized values, their codes (empty if they are not wanted), and the packed mask (empty if backward keeps z).
struct QuantizedTensor {
  at::Tensor y, codes, mask;
};

QuantizedTensor quantize_output(const at::Tensor& z, const OutputQuantizer& q,
                                const std::optional<at::Tensor>& y_scale);

// The gradients of z, of the scale and of the zero point, from z or from the mask and the memory order of y. Those of
// the grid are among the `later` ones.
struct QuantizedGradients {
  at::Tensor z, scale, zero_point;
};

QuantizedGradients quantize_output_backward(const at::Tensor& grad, const std::optional<at::Tensor>& z,
                                            const at::Tensor& mask, at::IntArrayRef order, const OutputQuantizer& q,
                                            const at::Tensor& y_scale, LaterGradients& later);

// Counts a change of a tensor: below autograd nobody else does.
void note_change(const at::Tensor& t);

// What a boxed op returns for a tensor that there may not be. Each has memory of its own: a compiler keeps results
// apart.
at::Tensor or_empty(const at::Tensor& t, const at::TensorOptions& options);

// Returns the gradients that are wanted from a boxed op, which has as many results as `wanted` values.
void push_wanted(std::vector<c10::IValue>* stack, at::ArrayRef<at::Tensor> gradients, at::ArrayRef<bool> wanted,
                 const at::TensorOptions& options);

}  // namespace qtoolkit
