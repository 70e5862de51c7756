// torch's int8 convolutions and matrix products on the CPU, which its compiler uses for quantized models on x86. They
// are private to torch: nothing else in the library names them.
#pragma once

#include <ATen/core/Tensor.h>

#include "geometry.h"

namespace qtoolkit::onednn {

// Returns the sums of products of a layer times their steps, plus the bias, in float32 and channels_last.
//   codes        uint8, dense
//   zero_point   the code of zero
//   weight       int8
//   steps        float32, one per output channel
at::Tensor layer(const at::Tensor& codes, int64_t zero_point, const at::Tensor& weight, const at::Tensor& steps,
                 const std::optional<at::Tensor>& bias, const Geometry& geometry);

}  // namespace qtoolkit::onednn
