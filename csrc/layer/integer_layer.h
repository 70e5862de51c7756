// A layer computed on integers.
#pragma once

#include "layer.h"

namespace qtoolkit {

// Returns exact sums of products of the codes of input and weight, times their steps, plus the bias: by torch's int8
// kernels on the CPU where they are exact, by int8 matrix products on a GPU (code_sums.h), else in float on integers.
// The result is float64 for x in float64, else float32, in any memory format.
at::Tensor integer_layer(const at::Tensor& x, const std::optional<at::Tensor>& bias, const Layer& l);

}  // namespace qtoolkit
