// The scale of a learned quantizer, from the parameter that is trained; see positive_scale.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace qtoolkit {

at::Tensor positive_scale(const at::Tensor& start, const at::Tensor& ratio, const std::optional<at::Tensor>& rate);

// The gradient of the ratio.
at::Tensor positive_scale_backward(const at::Tensor& grad, const at::Tensor& start, const at::Tensor& ratio,
                                   const std::optional<at::Tensor>& rate);

}  // namespace qtoolkit
