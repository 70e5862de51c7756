// Products of 16-bit matrices in the registers of a warp, sums in float32 (PTX ISA, "Matrix fragments for
// mma.m16n8k16"). Of a lane, `row` is lane / 4 and `pair` is 2 (lane % 4).
#pragma once

#include "memory.cuh"

namespace qtoolkit {
namespace cuda {

// 16 x 16, the left operand: (row, pair), (row + 8, pair), (row, pair + 8), (row + 8, pair + 8), two columns each.
struct LeftFragment {
  uint32_t v[4];
};
// 16 x 8, the result: (row, pair) and (row + 8, pair), two columns each.
struct ResultFragment {
  float v[4];
};

QT_DEVICE int lane_row() { return threadIdx.x % 32 / 4; }
QT_DEVICE int lane_pair() { return threadIdx.x % 4 * 2; }

// Four matrices of 8 x 8 in shared memory, of which eight lanes each name the rows. A lane gets two elements of a row
// of each, or with kTransposed of a column.
template <bool kTransposed, class T>
QT_DEVICE void load_matrices(const T* row, uint32_t (&v)[4]) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// sum += left * right, of which the warp has the right operand (16 x 8) in two registers of a lane.
template <class T>
QT_DEVICE void multiply(ResultFragment& sum, const LeftFragment& left, uint32_t right0, uint32_t right1) {
  float (&d)[4] = sum.v;
  const uint32_t (&a)[4] = left.v;
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(right0), "r"(right1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(right0), "r"(right1));
  }
#endif
}

template <class T>
QT_DEVICE uint32_t packed_pair(float first, float second) {
  const T pair[2] = {from_arithmetic<T>(first), from_arithmetic<T>(second)};
  uint32_t word;
  memcpy(&word, pair, sizeof(word));
  return word;
}

// 16 columns of results as a left operand.
template <class T>
QT_DEVICE LeftFragment as_left(const ResultFragment& left, const ResultFragment& right) {
  return {{packed_pair<T>(left.v[0], left.v[1]), packed_pair<T>(left.v[2], left.v[3]),
           packed_pair<T>(right.v[0], right.v[1]), packed_pair<T>(right.v[2], right.v[3])}};
}

// ---- tiles: rows of kStride elements in shared memory. With a stride of 8 elements more than a multiple of 16, eight
// rows lie in different banks.

template <int kStride, class T>
QT_DEVICE LeftFragment left_of_tile(const T* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  LeftFragment left;
  load_matrices<false>(tile + (row + lane % 16) * kStride + column + lane / 16 * 8, left.v);
  return left;
}

// result (16 x kRows) += left (16 x 16 kSteps) times the transposed tile (kRows x 16 kSteps). `left_at(k)` is the
// fragment of its columns 16 k to 16 k + 15.
template <class T, int kStride, int kSteps, int kRows, class Left>
QT_DEVICE void multiply_transposed(Left left_at, const T* tile, ResultFragment (&result)[kRows / 8]) {
  const int lane = threadIdx.x % 32;
  const T* from = tile + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const LeftFragment left = left_at(k);
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      uint32_t right[4];
      load_matrices<false>(from + n * 16 * kStride + k * 16, right);
      multiply<T>(result[2 * n], left, right[0], right[1]);
      multiply<T>(result[2 * n + 1], left, right[2], right[3]);
    }
  }
}

// result (16 x kColumns) += left (16 x 16 kSteps) times the tile (16 kSteps x kColumns).
template <class T, int kStride, int kSteps, int kColumns>
QT_DEVICE void multiply_tile(const LeftFragment (&left)[kSteps], const T* tile,
                             ResultFragment (&result)[kColumns / 8]) {
  const int lane = threadIdx.x % 32;
  const T* from = tile + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t right[4];
      load_matrices<true>(from + k * 16 * kStride + n * 16, right);
      multiply<T>(result[2 * n], left[k], right[0], right[1]);
      multiply<T>(result[2 * n + 1], left[k], right[2], right[3]);
    }
  }
}

}  // namespace cuda
}  // namespace qtoolkit
