// The steps of a layer on grids: calls of the library's ops on parts of a Layer, and of torch's.
#pragma once

#include <tuple>

#include "layer.h"

namespace qtoolkit {

// ---- the input

// The values of the codes.
at::Tensor dequantize_input(const Layer& l, c10::SymIntArrayRef size, at::ScalarType dtype);

// The codes of x, a byte each, in its memory format.
at::Tensor quantize_input(const at::Tensor& x, const Layer& l);

// ---- the weight

// A weight seen with its output channels along dimension 0, or along dimensions 0 and 2 if it is transposed.
at::Tensor grouped(const at::Tensor& weight, const Geometry& g);

// One value per output channel, shaped to broadcast over a grouped weight.
at::Tensor over_grouped(const at::Tensor& values, const at::Tensor& weight, const Geometry& g);

// The dimensions of a grouped weight that do not run along output channels.
std::vector<int64_t> but_outputs(int64_t dims, const Geometry& g);

// weight * factor.
at::Tensor scaled_weight(const Layer& l);

// fake_quant of such a product on the weight's grid, with its mask, and the backward of a learned grid.
std::tuple<at::Tensor, at::Tensor> fake_quant_weight(const at::Tensor& product, const Layer& l, bool mask);
std::tuple<at::Tensor, at::Tensor, at::Tensor> weight_learned_backward(const at::Tensor& grad,
                                                                       const at::Tensor& product, const Layer& l);

// Its codes, int8.
at::Tensor quantize_weight(const at::Tensor& product, const Layer& l);

// ---- the layer

// The memory format of an output: channels_last where torch's convolutions choose it for images of some size. To leave
// it to them would make it depend on the size.
at::MemoryFormat output_format(const at::Tensor& x, const Layer& l);

at::Tensor apply(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                 const Geometry& g);

}  // namespace qtoolkit
