// What kernels share whose warps or blocks hold a row of a matrix in registers.
#pragma once

#include "memory.cuh"

namespace qtoolkit {
namespace cuda {

// The reduction of a row's threads; each of them gets the result.
struct RowLargest {
  QT_FN float join(float a, float b) { return a > b ? a : b; }
};
struct RowSum {
  QT_FN float join(float a, float b) { return a + b; }
};

template <class Join, int kTeam>
QT_DEVICE float join_row(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v = Join::join(v, __shfl_xor_sync(0xffffffffu, v, lanes));
  if constexpr (kTeam > 32) {
    __shared__ float of_warps[kTeam / 32];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = of_warps[0];
#pragma unroll
    for (int warp = 1; warp < kTeam / 32; ++warp) v = Join::join(v, of_warps[warp]);
    __syncthreads();  // before the next call writes
  }
  return v;
}

}  // namespace cuda
}  // namespace qtoolkit
