// The gradient of an image that a strided convolution reads, where torch's kernels for it are slow.
#pragma once

#include "geometry.h"

namespace qtoolkit {

// Whether input_gradient is the faster way: on the CPU, kernels for the gradient of the input pad its channels to a
// whole vector, and an image has three.
bool has_few_channels(const at::Tensor& weight, const Geometry& g);

// The gradient of a convolution's input of this size, for the gradient of its output.
//
// Input row i = stride * u + r - padding takes part in output rows u, u - 1, ..., with the kernel's rows r, r + stride,
// ...: for each phase r a convolution with stride 1, whose output channels are the phases (as in sub-pixel convolution,
// arXiv 1609.05158). All phases are one convolution of the output's gradient.
at::Tensor input_gradient(const at::Tensor& grad, at::IntArrayRef size, const at::Tensor& weight, const Geometry& g);

}  // namespace qtoolkit
