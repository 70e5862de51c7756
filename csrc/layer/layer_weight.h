// The weight of a layer: fake_quant(weight * factor), with one factor for each output channel.
#pragma once

#include <array>

#include "layer.h"

namespace qtoolkit {

// Weights whose output channels are rows in memory have kernels of their own; others are computed by the library's ops
// one after another. Of a geometry only `transposed` and `groups` count here.

// The magnitudes of scales that count, as grid.h has them, in a type.
at::Tensor usable_scales(const at::Tensor& scale, at::ScalarType type);

// Whether a tensor is a result, or is dropped at the end of the call.
enum class Lifetime { result, call };

// Makes the small tensors of the weight's unit now, if they are not made.
void make_now(const LayerWeight& w);

// The fake-quantized weight, in a memory format and a type: without one, in that of weight * factor.
at::Tensor fake_quant_weight(const LayerWeight& w, const Geometry& g, at::MemoryFormat format,
                             std::optional<at::ScalarType> type, Lifetime lifetime);

// The weight's codes, int8, and for each output channel (or in one element) 0 in a type, or NaN where a value is not
// finite, which has no code.
struct WeightCodes {
  at::Tensor codes, poison;
};
WeightCodes quantize_weight(const LayerWeight& w, const Geometry& g, at::ScalarType type);

// Gradients of: weight, factor, scale, zero_point. Undefined where one is not wanted.
using WeightGradients = std::array<at::Tensor, 4>;
using WantedOfWeight = std::array<bool, 4>;

// What becomes of the memory of the incoming gradient: the weight's gradient may take it, if nobody else has it.
enum class OfGrad { kept, taken };

// The elements of a gradient of a weight, or of a value for each output channel, that belong to the channels that have
// one; zeros elsewhere.
at::Tensor only_updated(const at::Tensor& of_weight, const LayerWeight& w, const Geometry& g);
at::Tensor only_updated(const at::Tensor& per_channel, const at::Tensor& updated);

// From the gradient of the fake-quantized weight. The weight's gradient has its memory format. Those of factor and
// scale may be written later.
WeightGradients weight_backward(const at::Tensor& grad, const LayerWeight& w, const Geometry& g, WantedOfWeight wanted,
                                OfGrad memory, LaterGradients* later = nullptr);

// The same by differentiable ops, for a grid without gradients: for double backward.
WeightGradients differentiable_weight_backward(const at::Tensor& grad, const LayerWeight& w, const Geometry& g,
                                               WantedOfWeight wanted);

}  // namespace qtoolkit
