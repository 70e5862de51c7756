// What a thread holds at once, and how it comes from and goes to memory: 8 elements, in the arithmetic's type,
// whatever the storage type and the strides. The type is chosen while the kernel runs: all threads agree on it, so
// the branch costs next to nothing, and one kernel serves all types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "../kernel_args.h"

#define QT_DEVICE static __device__ __forceinline__

namespace qtoolkit {
namespace cuda {

constexpr int kOctet = 8;  // one byte of the mask

// Where the elements of an octet lie; the first n of them exist.
struct Row {  // neighbours; `first` is a multiple of 8
  int64_t first;
  int n;
};
struct Spread {  // anywhere
  int64_t index[kOctet];
  int n;
};

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
    return static_cast<T>(static_cast<int32_t>(v));  // whole, and clamped to ends that A can hold
  } else {
    return static_cast<T>(v);
  }
}

enum class Kind { values, codes };

// Calls f with a null pointer of the storage type, of those that the arithmetic type A serves.
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

// ---- strided operands -------------------------------------------------------------------------------------------

QT_FN int64_t offset_of(const Operand& from, int64_t i) {
  int64_t offset = 0;
  for (int d = from.dims - 1; d > 0; --d) {
    const int64_t rest = i / from.size[d];
    offset += (i - rest * from.size[d]) * from.stride[d];
    i = rest;
  }
  return offset + i * from.stride[0];
}

QT_DEVICE void offsets_of(const Operand& from, const Spread& at, int64_t (&offset)[kOctet]) {
#pragma unroll
  for (int k = 0; k < kOctet; ++k) offset[k] = k < at.n ? offset_of(from, at.index[k]) : 0;
}

// Neighbours differ by the fastest stride, so that only the start of a run is divided for.
QT_DEVICE void offsets_of(const Operand& from, const Row& at, int64_t (&offset)[kOctet]) {
  const int64_t length = from.size[from.dims - 1], stride = from.stride[from.dims - 1];
  int64_t next = 0, left = 0;
#pragma unroll
  for (int k = 0; k < kOctet; ++k) {
    if (k < at.n && left == 0) {
      next = offset_of(from, at.first + k);
      left = length - (at.first + k) % length;
    }
    offset[k] = next;
    next += stride;
    --left;
  }
}

// ---- loads and stores -------------------------------------------------------------------------------------------

template <class T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Pack {
  T v[kOctet];
};

template <class T>
QT_DEVICE bool is_whole(const T* data, int n) {
  return n == kOctet && reinterpret_cast<uintptr_t>(data) % alignof(Pack<T>) == 0;
}

template <class A, class T>
QT_DEVICE void load_dense(const T* data, const Row& at, A (&v)[kOctet]) {
  data += at.first;
  if (is_whole(data, at.n)) {
    const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(data);
#pragma unroll
    for (int k = 0; k < kOctet; ++k) v[k] = to_arithmetic<A>(pack.v[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kOctet; ++k) v[k] = k < at.n ? to_arithmetic<A>(data[k]) : A(0);
  }
}

template <class A, class T>
QT_DEVICE void load_each(const T* data, const int64_t (&offset)[kOctet], int n, A (&v)[kOctet]) {
#pragma unroll
  for (int k = 0; k < kOctet; ++k) v[k] = k < n ? to_arithmetic<A>(data[offset[k]]) : A(0);
}

template <class A, class T>
QT_DEVICE void load_dense(const T* data, const Spread& at, A (&v)[kOctet]) {
  load_each(data, at.index, at.n, v);
}

// ---- two codes of 4 bits a byte: an octet is four bytes

QT_DEVICE uint32_t bytes_of(const uint8_t* data, const Row& at) {
  data += at.first / 2;
  if (at.n == kOctet && reinterpret_cast<uintptr_t>(data) % 4 == 0) return *reinterpret_cast<const uint32_t*>(data);
  uint32_t bytes = 0;
#pragma unroll
  for (int k = 0; k < kOctet / 2; ++k) bytes |= 2 * k < at.n ? static_cast<uint32_t>(data[k]) << 8 * k : 0u;
  return bytes;
}

template <class A>
QT_DEVICE void unpack(const uint8_t* data, bool is_signed, const Row& at, A (&v)[kOctet]) {
  const uint32_t bytes = bytes_of(data, at);
  const int sign = is_signed ? 8 : 0;
#pragma unroll
  for (int k = 0; k < kOctet; ++k) v[k] = static_cast<A>((static_cast<int>(bytes >> 4 * k & 15u) ^ sign) - sign);
}

template <class A>
QT_DEVICE void pack(uint8_t* data, const Row& at, const A (&v)[kOctet]) {
  data += at.first / 2;
  uint32_t bytes = 0;
#pragma unroll
  for (int k = 0; k < kOctet; ++k) {
    bytes |= k < at.n ? (static_cast<uint32_t>(static_cast<int32_t>(v[k])) & 15u) << 4 * k : 0u;
  }
  if (at.n == kOctet) {
    *reinterpret_cast<uint32_t*>(data) = bytes;  // `data` starts where the allocator put it
    return;
  }
#pragma unroll
  for (int k = 0; k < kOctet / 2; ++k) {
    if (2 * k < at.n) data[k] = static_cast<uint8_t>(bytes >> 8 * k);
  }
}

// Elements that do not exist are read as 0. A kernel for dense operands only is spared the registers that strides take.
template <bool kDense, Kind kKind = Kind::values, class A, class At>
QT_DEVICE void load(const Operand& from, const At& at, A (&v)[kOctet]) {
  if constexpr (kKind == Kind::codes) {
    if (is_packed(from.dtype)) return unpack(static_cast<const uint8_t*>(from.data), from.dtype == Dtype::i4, at, v);
  }
  if constexpr (!kDense) {
    if (!from.dense) {
      int64_t offset[kOctet];
      offsets_of(from, at, offset);
      return with_type<A, kKind>(
          from.dtype, [&](const auto* type) { load_each(static_cast<decltype(type)>(from.data), offset, at.n, v); });
    }
  }
  with_type<A, kKind>(from.dtype, [&](const auto* type) { load_dense(static_cast<decltype(type)>(from.data), at, v); });
}

template <class A, class T>
QT_DEVICE void store_dense(T* data, const Row& at, const A (&v)[kOctet]) {
  data += at.first;
  if (is_whole(data, at.n)) {
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < kOctet; ++k) pack.v[k] = from_arithmetic<T>(v[k]);
    *reinterpret_cast<Pack<T>*>(data) = pack;
  } else {
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      if (k < at.n) data[k] = from_arithmetic<T>(v[k]);
    }
  }
}

template <class A, class T>
QT_DEVICE void store_dense(T* data, const Spread& at, const A (&v)[kOctet]) {
#pragma unroll
  for (int k = 0; k < kOctet; ++k) {
    if (k < at.n) data[at.index[k]] = from_arithmetic<T>(v[k]);
  }
}

template <Kind kKind = Kind::values, class A, class At>
QT_DEVICE void store(const Job& job, const At& at, const A (&v)[kOctet]) {
  if constexpr (kKind == Kind::codes) {
    if (is_packed(job.y_dtype)) return pack(static_cast<uint8_t*>(job.y), at, v);
  }
  with_type<A, kKind>(job.y_dtype, [&](auto* type) { store_dense(static_cast<decltype(type)>(job.y), at, v); });
}

// ---- scales -----------------------------------------------------------------------------------------------------

template <class A>
struct Grid {
  A scale, zero_point;
};

template <class A>
QT_DEVICE Grid<A> grid_of(const Job& job, int64_t channel) {
  const A* scale = static_cast<const A*>(job.scale);
  const A* zero_point = static_cast<const A*>(job.zero_point);
  return {usable_scale(__ldg(scale + channel)),
          zero_point == nullptr ? A(0) : usable_zero_point(__ldg(zero_point + channel))};
}

}  // namespace cuda
}  // namespace qtoolkit
