// Memory for a tensor that one call of an op makes and drops.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace qtoolkit {

// As at::empty, for a tensor that nobody keeps after the call. On the CPU each thread keeps the memory for the next
// one: a large tensor has new pages each time, which cost more than to fill them, and the old ones may be in the cache.
// The allocator has that for small tensors, and no cache holds the largest.
inline at::Tensor empty_scratch(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr int64_t kLeast = int64_t{1} << 18, kMost = int64_t{1} << 25;  // bytes
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  thread_local at::Tensor memory;
  const bool in_use = memory.defined() && memory.use_count() > 1;
  if (!options.device().is_cpu() || bytes < kLeast || bytes > kMost || in_use) return at::empty(sizes, options);
  if (!memory.defined() || memory.numel() < bytes) memory = at::empty({bytes}, at::kByte);
  const at::Tensor like = at::empty(sizes, options.device(at::kMeta));
  return at::from_blob(
      memory.mutable_data_ptr(), sizes, like.strides(), [held = memory](void*) {}, at::TensorOptions(options.dtype()));
}

}  // namespace qtoolkit
