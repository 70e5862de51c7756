// The steps of a layer on grids: calls of the library's ops on parts of a Layer, and of torch's.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>

#include "layer.h"

namespace qtoolkit {

// ---- the input

// Whether two codes of an input of a size share a byte: the next two in row-major order, or those of two channels.
inline bool is_packed(const Layer& l, c10::SymIntArrayRef size) { return l.codes.sym_sizes() != size; }

// The values of the codes, in the memory format of these.
at::Tensor dequantize_input(const Layer& l, c10::SymIntArrayRef size, at::ScalarType dtype);

// The codes of x, a byte each, in its memory format.
at::Tensor quantize_input(const at::Tensor& x, const Layer& l);

// ---- the layer

// The memory format of an output: channels_last where torch's convolutions choose it for images of some size. To leave
// it to them would make it depend on the size.
at::MemoryFormat output_format(const at::Tensor& x, const Layer& l);

at::Tensor apply(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                 const Geometry& g);

// The ops compute in the dtype that they are told, under autocast too.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// ---- the bodies of quant_layer and its backward, which serve all devices

at::Tensor quant_layer(const at::Tensor& x, const std::optional<at::Tensor>& bias, const Layer& l,
                       std::optional<at::ScalarType> dtype, std::optional<at::MemoryFormat> format,
                       const RawInput& raw);

// Of: x, weight, factor, scale, zero_point, bias, raw_scale. A gradient that is not wanted is undefined. Those of
// factor and scale may be written later.
using WantedOfLayer = std::array<bool, 7>;
using GradientsOfLayer = std::array<at::Tensor, 7>;

GradientsOfLayer quant_layer_backward(const at::Tensor& grad, c10::SymIntArrayRef size, const Layer& l,
                                      at::ScalarType x_dtype, const WantedOfLayer& wanted, const RawInput& raw,
                                      LaterGradients* later = nullptr);

}  // namespace qtoolkit
