// Tensors as the operands of a Job: which way a result lies in memory, and how each operand is read in that order.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernel_args.h"

namespace qtoolkit {

Dtype dtype_of(const at::Tensor& t);

// t in another type; t itself where it is of that type.
at::Tensor as_type(const at::Tensor& t, at::ScalarType type);

// Values of a scale or zero point as the arithmetic (float32 or float64) reads them, one after the other.
at::Tensor in_arithmetic(const at::Tensor& values, bool f64);

// The ends of a range as the arithmetic of x's type can hold them: the next values inwards where float32 is too coarse
// (beyond 2^24), so that no code leaves [qmin, qmax].
Ends representable(int64_t qmin, int64_t qmax, const at::Tensor& x);

// Dimensions of a dense tensor from the slowest to the fastest in memory; empty for row-major.
std::vector<int64_t> memory_order(const at::Tensor& dense);

// A dense tensor of the sizes (and dtype, device) of `like`, with its dimensions in that order.
at::Tensor empty_in_order(const at::Tensor& like, at::IntArrayRef order);

// t as read in the memory order of `dense`, without a copy (t is replaced by one only where more than kMaxDims
// dimensions cannot be joined, which takes a tensor of nine dimensions or more).
Operand operand_of(at::Tensor& t, const at::Tensor& dense);

// The channels of a dense result with so many scales. A grouped one has dimension 0 slowest in memory. Where there are
// blocks, channels are numbered in the memory order of the result: to_memory_order sorts their scales so.
Channels channels_of(const at::Tensor& dense, const Axis& axis, int64_t scales);

// One value for each block, from row-major order to the order in which channels_of numbers them, and back (contiguous).
// Without blocks, the values as they are.
at::Tensor to_memory_order(const at::Tensor& values, const at::Tensor& dense, const Axis& axis);
at::Tensor from_memory_order(const at::Tensor& values, const at::Tensor& dense, const Axis& axis);

// A dense tensor for the result of an op on x: in x's own memory order wherever channels_of allows it.
at::Tensor empty_result(const at::Tensor& x, const at::TensorOptions& options, int64_t group);

// A tensor with the strides of such a result, but without memory of its own: x itself where x lies so.
at::Tensor layout_of_result(const at::Tensor& x, int64_t group);

}  // namespace qtoolkit
