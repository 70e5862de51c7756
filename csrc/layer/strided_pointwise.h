// 1x1 convolutions with a stride, whose gradients torch computes in channels_last.
//
// oneDNN copies the input without what the stride leaves out before it computes the gradient of the weight, if each
// stride divides the side of the input. With fewer channels than a vector has elements, it copies whole vectors after
// the end of its memory (docs/troubleshooting.md). Without rows that no output reads, it takes another route, which
// gives the same sums. So it is for a transposed convolution, whose output is that input.
#pragma once

#include "geometry.h"

namespace qtoolkit::strided_pointwise {

// The spatial dimension at whose end stride - 1 rows must be cut off; nullopt where the gradient is safe. size: that of
// the input, or of the output of a transposed convolution. input: that of the layer.
std::optional<int64_t> unread_dimension(c10::SymIntArrayRef size, const at::Tensor& input, const at::Tensor& weight,
                                        const Geometry& g);

// Returns a tensor without these rows.
at::Tensor without_unread(const at::Tensor& t, int64_t dimension, const Geometry& g);

// Returns torch's convolution, of which torch can compute all gradients: that of the weight within rounding.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       const Geometry& g);

}  // namespace qtoolkit::strided_pointwise
