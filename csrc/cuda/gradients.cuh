// Gradients from their sums, which several kernels write.
#pragma once

#include "../fake_quant.h"
#include "../unit/unit_scales.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {

template <class A>
QT_DEVICE void write_gradient(const GradientsOfSums& g, int64_t i) {
  with_type<A, Kind::values>(g.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const A of = g.scale == nullptr ? A(1) : to_arithmetic<A>(static_cast<const T*>(g.scale)[i]);
    static_cast<T*>(g.gradient)[i] = from_arithmetic<T>(learned_gradient(g.sums[i], g.factor, of));
  });
}

// Those of all that have a place `i`.
QT_DEVICE void write_gradients(const AllGradients& all, int64_t i) {
#pragma unroll
  for (int k = 0; k < kMostGradients; ++k) {
    if (k >= all.count || i >= all.of[k].count) continue;
    all.of[k].dtype == Dtype::f64 ? write_gradient<double>(all.of[k], i) : write_gradient<float>(all.of[k], i);
  }
}

// The sums of all blocks, and the gradients that are computed from them; by one block. `sums` may be null.
QT_DEVICE void join_sums(double* sums, const double* scale, const double* zero_point, int64_t blocks,
                         const UnitGradients& unit, const AllGradients& before) {
  Pair mine = {0, 0};
  for (int64_t b = threadIdx.x; b < blocks; b += blockDim.x) mine = Add()(mine, {scale[b], zero_point[b]});
  const Pair pair = sum_of_block(mine);
  if (threadIdx.x != 0 || sums == nullptr) return;
  write({sums, sums + 1}, 0, pair);
  write_gradients(before, 0);
  unit_gradients_at<float>(unit, 0);
}

inline int64_t longest_of(const AllGradients& all) {
  int64_t longest = 0;
  for (int k = 0; k < all.count; ++k) longest = longest < all.of[k].count ? all.of[k].count : longest;
  return longest;
}

}  // namespace cuda
}  // namespace qtoolkit
