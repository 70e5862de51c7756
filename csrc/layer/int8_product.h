// torch's product of int8 matrices with int32 sums: cuBLASLt's on a GPU. It is private to torch: nothing else in the
// package names it, and whoever calls it has another way where a device has none.
#pragma once

#include <ATen/core/Tensor.h>

namespace qtoolkit::int8_product {

// Whether torch has the product and a device computes it. Reads no value: it does not wait for a GPU.
bool is_on(const at::Device& device);

// The elements of a tensor as rows of `depth` codes, with zeros after them up to what the product takes: a number of
// rows, and a depth that is a multiple of 8. Dense tensors are not copied where nothing is missing.
at::Tensor left_rows(const at::Tensor& codes, int64_t depth);
at::Tensor right_rows(const at::Tensor& codes, int64_t depth);

// Returns the sums of products of each row of the one with each row of the other: int32 (rows of left, rows of right).
at::Tensor product(const at::Tensor& left, const at::Tensor& right);

}  // namespace qtoolkit::int8_product
