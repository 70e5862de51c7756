// The steps of a layer on grids: calls of the library's ops on parts of a Layer, and of torch's.
#pragma once

#include "layer.h"

namespace qtoolkit {

// ---- the input

// The values of the codes.
at::Tensor dequantize_input(const Layer& l, c10::SymIntArrayRef size, at::ScalarType dtype);

// The codes of x, a byte each, in its memory format.
at::Tensor quantize_input(const at::Tensor& x, const Layer& l);

// ---- the layer

// The memory format of an output: channels_last where torch's convolutions choose it for images of some size. To leave
// it to them would make it depend on the size.
at::MemoryFormat output_format(const at::Tensor& x, const Layer& l);

at::Tensor apply(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                 const Geometry& g);

}  // namespace qtoolkit
