#include "int8_product.h"

#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "../call_op.h"

namespace qtoolkit::int8_product {
namespace {

using at::Tensor;

// What torch checks on CUDA is more than 16 rows on the left, here a power of two, and multiples of 8
// (native/cuda/Blas.cpp).
constexpr int64_t kRows = 32, kMultiple = 8;
// cuBLASLt chooses its kernel for operands that begin at a multiple of so many bytes, unless it is told otherwise
// (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES); torch tells it nothing.
constexpr uintptr_t kAlignment = 256;

int64_t rounded_up(int64_t count) { return (count + kMultiple - 1) / kMultiple * kMultiple; }

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment == 0; }

Tensor with_zeros(const Tensor& codes, int64_t rows, int64_t rows_wanted, int64_t depth) {
  const int64_t depth_wanted = rounded_up(depth);
  if (rows == rows_wanted && depth == depth_wanted) {
    const Tensor dense = codes.reshape({rows, depth}).contiguous();
    return is_aligned(dense) ? dense : dense.clone();
  }
  const Tensor result = at::zeros({rows_wanted, depth_wanted}, codes.options());
  result.narrow(0, 0, rows).narrow(1, 0, depth).view(codes.sizes()).copy_(codes);
  return result;
}

bool try_out(const at::Device& device) {
  try {
    const Tensor zeros = at::zeros({kRows, kRows}, at::TensorOptions(device).dtype(at::kChar));
    return product(zeros, zeros).scalar_type() == at::kInt;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception&) {  // torch lacks the op, or has another of this name, or the GPU has no kernel
    return false;
  }
}

}  // namespace

bool is_on(const at::Device& device) {
  if (!device.is_cpu() && !device.is_cuda()) return false;
  enum : int8_t { unknown, no, yes };
  static std::array<std::atomic<int8_t>, 256> found = {};  // the CPU, then each GPU
  const c10::impl::VirtualGuardImpl of_type(device.type());
  const int gpu = device.has_index() ? device.index() : of_type.getDevice().index();
  auto& known = found.at(device.is_cpu() ? 0 : 1 + gpu);
  if (known == unknown) known = try_out(device) ? yes : no;
  return known == yes;
}

Tensor left_rows(const Tensor& codes, int64_t depth) {
  const int64_t rows = codes.numel() / depth;
  return with_zeros(codes, rows, std::max(rows, kRows), depth);
}

Tensor right_rows(const Tensor& codes, int64_t depth) {
  const int64_t rows = codes.numel() / depth;
  return with_zeros(codes, rows, rounded_up(rows), depth);
}

Tensor product(const Tensor& left, const Tensor& right) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&)>("aten::_int_mm");
  return op.call(left, right.t());
}

}  // namespace qtoolkit::int8_product
