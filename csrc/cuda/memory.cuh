// Loads and stores of vectors: 8 elements in registers, in the type of the arithmetic, for any dtype in memory. The
// dtype is a run-time branch where one kernel serves all dtypes: all threads take the same side. Operands are dense:
// launch.cpp copies others.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "../kernel_args.h"

#define QT_DEVICE static __device__ __forceinline__

namespace qtoolkit {
namespace cuda {

constexpr int kVectorSize = 8;  // one byte of the mask

// The positions of the elements of a vector; the first n of them exist.
struct Contiguous {  // consecutive; `first` is a multiple of 8
  int64_t first;
  int n;
  bool is_whole;  // n == 8
};
struct Scattered {  // offsets from `first`, which take fewer registers than positions
  int64_t first;
  uint32_t offset[kVectorSize];
  int n;
};

QT_FN Contiguous whole_at(int64_t first) { return {first, kVectorSize, true}; }

QT_DEVICE Contiguous vector_at(int64_t first, int64_t numel) {
  const bool is_whole = first <= numel - kVectorSize;
  return {first, is_whole ? kVectorSize : static_cast<int>(numel - first), is_whole};
}

// The type of the arithmetic with elements of a type.
template <class T>
using ArithmeticOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// ---- storage types ----------------------------------------------------------------------------------------------

template <class A, class T>
QT_FN A to_arithmetic(T v) {
  if constexpr (std::is_same<T, __nv_bfloat16>::value) {
    return __bfloat162float(v);
  } else if constexpr (std::is_same<T, __half>::value) {
    return __half2float(v);
  } else {
    return static_cast<A>(v);
  }
}

template <class T, class A>
QT_FN T from_arithmetic(A v) {
  if constexpr (std::is_same<T, __nv_bfloat16>::value) {
    return __float2bfloat16_rn(v);
  } else if constexpr (std::is_same<T, __half>::value) {
    return __float2half_rn(v);
  } else if constexpr (std::is_integral<T>::value) {
    return static_cast<T>(static_cast<int32_t>(v));  // an integer within bounds that A represents
  } else {
    return static_cast<T>(v);
  }
}

enum class Kind { values, codes };

// Calls f with a null pointer of the storage type; A is the type of the arithmetic.
template <class A, Kind kKind, class F>
QT_DEVICE void with_type(Dtype dtype, F f) {
  if constexpr (kKind == Kind::codes) {
    switch (dtype) {
      case Dtype::i8: return f(static_cast<int8_t*>(nullptr));
      case Dtype::u8: return f(static_cast<uint8_t*>(nullptr));
      case Dtype::i16: return f(static_cast<int16_t*>(nullptr));
      case Dtype::u16: return f(static_cast<uint16_t*>(nullptr));
      case Dtype::i32: return f(static_cast<int32_t*>(nullptr));
      default: return;
    }
  } else if constexpr (std::is_same<A, double>::value) {
    f(static_cast<double*>(nullptr));
  } else {
    switch (dtype) {
      case Dtype::f32: return f(static_cast<float*>(nullptr));
      case Dtype::bf16: return f(static_cast<__nv_bfloat16*>(nullptr));
      case Dtype::f16: return f(static_cast<__half*>(nullptr));
      default: return;
    }
  }
}

// ---- comparisons ------------------------------------------------------------------------------------------------

// One instruction each on sm_80 and newer. +0 is larger than -0; the first two keep NaN.
template <class A>
QT_FN A larger_or_nan(A a, A b) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(A) == sizeof(float)) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
  }
#endif
  if (a == 0 && b == 0) return a + b;
  return a > b || a != a ? a : b;
}

template <class A>
QT_FN A smaller_or_nan(A a, A b) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(A) == sizeof(float)) {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
  }
#endif
  if (a == 0 && b == 0) return -(-a - b);
  return a < b || a != a ? a : b;
}

// b for a NaN.
QT_FN float larger_or_number(float a, float b) { return ::fmaxf(a, b); }
QT_FN double larger_or_number(double a, double b) { return ::fmax(a, b); }

// ---- loads and stores -------------------------------------------------------------------------------------------

template <class T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Pack {
  T v[kVectorSize];
};

// Whether whole vectors of a tensor can be loaded and stored at once.
template <class T>
QT_FN bool is_aligned(const T* data) {
  return reinterpret_cast<uintptr_t>(data) % alignof(Pack<T>) == 0;
}

template <class A, class T>
QT_DEVICE void unpack(const Pack<T>& pack, A (&v)[kVectorSize]) {
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) v[k] = to_arithmetic<A>(pack.v[k]);
}

// A bfloat16 is the upper half of a float: one instruction for each half of a word.
QT_DEVICE void unpack(const Pack<__nv_bfloat16>& pack, float (&v)[kVectorSize]) {
  uint32_t words[kVectorSize / 2];
  memcpy(words, &pack, sizeof(words));
#pragma unroll
  for (int k = 0; k < kVectorSize / 2; ++k) {
    v[2 * k] = __builtin_bit_cast(float, words[k] << 16);
    v[2 * k + 1] = __builtin_bit_cast(float, words[k] & 0xffff0000u);
  }
}

// A whole vector as it is in memory, aligned: it takes fewer registers than in the type of the arithmetic, for loads
// ahead of their use.
template <class T>
QT_DEVICE Pack<T> pack_at(const T* data, const Contiguous& at) {
  return *reinterpret_cast<const Pack<T>*>(data + at.first);
}

template <class A, class T, class Offset>
QT_DEVICE void load_each(const T* data, const Offset (&offset)[kVectorSize], int n, A (&v)[kVectorSize]) {
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) v[k] = k < n ? to_arithmetic<A>(data[offset[k]]) : A(0);
}

template <class A, class T>
QT_DEVICE void load_dense(const T* data, const Contiguous& at, bool aligned, A (&v)[kVectorSize]) {
  if (aligned && at.is_whole) {
    unpack(pack_at(data, at), v);
  } else {
    data += at.first;
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) v[k] = k < at.n ? to_arithmetic<A>(data[k]) : A(0);
  }
}

template <class A, class T>
QT_DEVICE void load_dense(const T* data, const Scattered& at, bool, A (&v)[kVectorSize]) {
  load_each(data + at.first, at.offset, at.n, v);
}

template <class A, class T, class At>
QT_DEVICE void load_dense(const T* data, const At& at, A (&v)[kVectorSize]) {
  load_dense(data, at, is_aligned(data), v);
}

// ---- 4-bit codes, two a byte: a vector is four bytes

QT_DEVICE uint32_t bytes_of(const uint8_t* data, const Contiguous& at) {
  data += at.first / 2;
  if (at.is_whole && reinterpret_cast<uintptr_t>(data) % 4 == 0) return *reinterpret_cast<const uint32_t*>(data);
  uint32_t bytes = 0;
#pragma unroll
  for (int k = 0; k < kVectorSize / 2; ++k) bytes |= 2 * k < at.n ? static_cast<uint32_t>(data[k]) << 8 * k : 0u;
  return bytes;
}

template <class A>
QT_DEVICE void unpack(const uint8_t* data, bool is_signed, const Contiguous& at, A (&v)[kVectorSize]) {
  const uint32_t bytes = bytes_of(data, at);
  const int sign = is_signed ? 8 : 0;
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) v[k] = static_cast<A>((static_cast<int>(bytes >> 4 * k & 15u) ^ sign) - sign);
}

template <class A>
QT_DEVICE void pack(uint8_t* data, const Contiguous& at, const A (&v)[kVectorSize]) {
  data += at.first / 2;
  uint32_t bytes = 0;
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) {
    bytes |= k < at.n ? (static_cast<uint32_t>(static_cast<int32_t>(v[k])) & 15u) << 4 * k : 0u;
  }
  if (at.is_whole) {
    *reinterpret_cast<uint32_t*>(data) = bytes;  // aligned, as the allocator aligns `data`
    return;
  }
#pragma unroll
  for (int k = 0; k < kVectorSize / 2; ++k) {
    if (2 * k < at.n) data[k] = static_cast<uint8_t>(bytes >> 8 * k);
  }
}

// Elements that do not exist are read as 0.
template <Kind kKind = Kind::values, class A, class At>
QT_DEVICE void load(const Operand& from, const At& at, A (&v)[kVectorSize]) {
  if constexpr (kKind == Kind::codes) {
    if (is_packed(from.dtype)) return unpack(static_cast<const uint8_t*>(from.data), from.dtype == Dtype::i4, at, v);
  }
  with_type<A, kKind>(from.dtype, [&](const auto* type) { load_dense(static_cast<decltype(type)>(from.data), at, v); });
}

// In one instruction for 16 bytes: the compiler takes four where the words of a pack are in registers far apart.
template <class T>
QT_DEVICE void store_pack(T* data, const Pack<T>& pack) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(pack) == 16) {
    uint32_t words[4];
    memcpy(words, &pack, sizeof(words));
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(data), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Pack<T>*>(data) = pack;
}

template <class A, class T>
QT_DEVICE void store_dense(T* data, const Contiguous& at, bool aligned, const A (&v)[kVectorSize]) {
  data += at.first;
  if (aligned && at.is_whole) {
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) pack.v[k] = from_arithmetic<T>(v[k]);
    store_pack(data, pack);
  } else {
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      if (k < at.n) data[k] = from_arithmetic<T>(v[k]);
    }
  }
}

template <class A, class T>
QT_DEVICE void store_dense(T* data, const Contiguous& at, const A (&v)[kVectorSize]) {
  store_dense(data, at, is_aligned(data), v);
}

template <class A, class T>
QT_DEVICE void store_dense(T* data, const Scattered& at, const A (&v)[kVectorSize]) {
  data += at.first;
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) {
    if (k < at.n) data[at.offset[k]] = from_arithmetic<T>(v[k]);
  }
}

template <class A, class T>
QT_DEVICE void store_dense(T* data, const Scattered& at, bool, const A (&v)[kVectorSize]) {
  store_dense(data, at, v);
}

// A byte each, or two a byte.
template <class A>
QT_DEVICE void store_codes(uint8_t* data, bool packed, const Contiguous& at, bool aligned, const A (&v)[kVectorSize]) {
  packed ? pack(data, at, v) : store_dense(data, at, aligned, v);
}

template <Kind kKind = Kind::values, class A, class At>
QT_DEVICE void store(const KernelArgs& args, const At& at, const A (&v)[kVectorSize]) {
  if constexpr (kKind == Kind::codes) {
    if (is_packed(args.y_dtype)) return pack(static_cast<uint8_t*>(args.y), at, v);
  }
  with_type<A, kKind>(args.y_dtype, [&](auto* type) { store_dense(static_cast<decltype(type)>(args.y), at, v); });
}

// ---- scales -----------------------------------------------------------------------------------------------------

template <class A, class S = A>
struct Grid {
  S scale;
  A zero_point;
};

template <class A, class S = A>
QT_DEVICE Grid<A, S> grid_of(const KernelArgs& args, int64_t channel) {
  const A* scale = static_cast<const A*>(args.scale);
  const A* zero_point = static_cast<const A*>(args.zero_point);
  const A zero = zero_point == nullptr ? A(0) : __ldg(zero_point + channel);
  return {S(usable_scale(__ldg(scale + channel))), args.fractional ? zero : usable_zero_point(zero)};
}

}  // namespace cuda
}  // namespace qtoolkit
