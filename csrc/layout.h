// Tensors as operands of a kernel: the memory layout of a result, and how each operand is read in that order.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernel_args.h"

namespace qtoolkit {

Dtype dtype_of(const at::Tensor& t);

// t converted to a dtype; t itself if it has that dtype.
at::Tensor as_type(const at::Tensor& t, at::ScalarType type);

// The values of a scale or zero point in the type of the arithmetic (float32 or float64), contiguous.
at::Tensor in_arithmetic(const at::Tensor& values, bool f64);

// The code bounds that the arithmetic of x's dtype represents. Where float32 is too coarse (beyond 2^24) they are the
// next values inwards, so that no code leaves [qmin, qmax].
CodeBounds representable(int64_t qmin, int64_t qmax, const at::Tensor& x);

// Dimensions of a dense tensor from the slowest to the fastest in memory; empty for row-major.
std::vector<int64_t> memory_order(const at::Tensor& dense);

// A tensor of the sizes and strides of a dense one. at::empty_like asks the dispatcher twice.
at::Tensor empty_as(const at::Tensor& dense, const at::TensorOptions& options);
inline at::Tensor empty_as(const at::Tensor& dense) { return empty_as(dense, dense.options()); }

// A dense tensor of the sizes (and dtype, device) of `like`, with its dimensions in that order.
at::Tensor empty_in_order(const at::Tensor& like, at::IntArrayRef order);

// t as read in the memory order of `dense`, without a copy (except for a tensor with more than kMaxDims dimensions that
// cannot be joined: t is then replaced by a copy).
Operand operand_of(at::Tensor& t, const at::Tensor& dense);

// t in the memory order of `dense`, without gaps: t itself if it lies so, else a copy.
at::Tensor in_order_of(const at::Tensor& t, const at::Tensor& dense);

// The channels of a dense result with `scales` scales. For groups, dimension 0 must be the slowest in memory. Blocks
// are numbered in the memory order of the result; to_memory_order sorts their scales likewise.
Channels channels_of(const at::Tensor& dense, const Axis& axis, int64_t scales);

// Sorts one value per block from row-major order to the order of channels_of, and back (contiguous). Without blocks,
// returns the values unchanged.
at::Tensor to_memory_order(const at::Tensor& values, const at::Tensor& dense, const Axis& axis);
at::Tensor from_memory_order(const at::Tensor& values, const at::Tensor& dense, const Axis& axis);

// A dense tensor for the result of an op on x, in the memory order of x wherever channels_of allows it.
at::Tensor empty_result(const at::Tensor& x, const at::TensorOptions& options, int64_t group);

// For the codes of y, in the order of its memory: int8 or uint8 of its shape; if they are packed, two a
// byte, as layers take them. Packed codes have an order of their own, row-major or (images) with two channels a byte:
// where the memory has another one, the result is empty.
at::Tensor empty_codes(const at::Tensor& y, bool is_signed, bool packed);

// A tensor with the strides of such a result but without memory of its own: x itself if it has these strides.
at::Tensor layout_of_result(const at::Tensor& x, int64_t group);

}  // namespace qtoolkit
