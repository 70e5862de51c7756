// A transposed convolution with a stride as one convolution with stride 1 (as sub-pixel convolution, arXiv 1609.05158).
//
// Output row i = stride * u + r - padding is made of input rows u, u - 1, ... by the kernel's rows r, r + stride, ...:
// for each phase r a convolution with stride 1. All phases are the output channels of one convolution, whose results
// are interleaved.
#pragma once

#include "geometry.h"

namespace qtoolkit::sub_pixel {

// The kernel of the phases, (out * phases, in, rows, columns), from a weight (in, out, rows, columns). The convolution
// has stride 1, and padding of one less than the sides of this kernel.
at::Tensor kernel(const at::Tensor& weight, const std::vector<int64_t>& stride);
std::vector<int64_t> padding(const at::Tensor& kernel);

// One value per output channel as one per channel of the phases.
at::Tensor per_phase(const at::Tensor& values, const std::vector<int64_t>& stride);

// The output of the transposed convolution, of a size (N, out, rows, columns), from that of the phases. Rows and
// columns that no input reaches are zero.
at::Tensor output(const at::Tensor& phases, at::IntArrayRef size, const Geometry& g);

// Whether there are such rows or columns, for an input and the kernel of the phases.
bool reaches_all(at::IntArrayRef input, at::IntArrayRef size, const at::Tensor& kernel, const Geometry& g);

// Whether the gradient of an image that a strided convolution reads is faster in this form: torch's kernels for it on
// the CPU pad the channels to a whole vector, and an image has three.
bool has_few_channels(const at::Tensor& weight, const Geometry& g);

// That gradient, for the gradient of the convolution's output.
at::Tensor input_gradient(const at::Tensor& grad, at::IntArrayRef size, const at::Tensor& weight, const Geometry& g);

}  // namespace qtoolkit::sub_pixel
