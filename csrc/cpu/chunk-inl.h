// Chunks of which only the first elements exist, and codes of 8 bits. Included once per instruction set, inside
// namespace qtoolkit::QT_ISA.
#pragma once

#include "convert-inl.h"

// The vectors of a chunk that have elements: all of them, or the first ones of a chunk that ends early.
struct AllVectors {};

template <class A>
struct FirstVectors {
  int elements;  // whole vectors of them
  QT_FN FirstVectors of(int n) { return {(n + kLanes<A> - 1) / kLanes<A> * kLanes<A>}; }
};

// Calls f(i) for these vectors. The numbers are constants, so that an array of vectors may stay in registers; but not
// in the plain kernels, where a chunk has as many vectors as the processor has registers.
#if QT_BYTES > 16
#define QT_UNROLLED _Pragma("GCC unroll 8")
#else
#define QT_UNROLLED
#endif

template <class A, class F>
QT_FN void for_vectors(AllVectors, F f) {
  QT_UNROLLED
  for (int i = 0; i < kVectors<A>; ++i) f(i);
}

template <class A, class F>
QT_FN void for_vectors(FirstVectors<A> vectors, F f) {
  QT_UNROLLED
  for (int i = 0; i < kVectors<A>; ++i) {
    if (i * kLanes<A> < vectors.elements) f(i);
  }
}

// Copies the first n elements of a chunk to a padded one, with zeros after them up to `end`; and back.

#if QT_BYTES == 64

QT_FN __mmask64 first_bytes(int64_t n) { return n >= 64 ? ~__mmask64{0} : n <= 0 ? 0 : _bzhi_u64(~0ull, n); }

template <class T>
QT_FN const T* padded(const T* from, int n, Padded<T>& to, int end = cpu::kChunk) {
  const char* bytes = reinterpret_cast<const char*>(from);
  for (size_t line = 0; 64 * line < end * sizeof(T); ++line) {
    const __mmask64 mask = first_bytes(n * static_cast<int64_t>(sizeof(T)) - 64 * line);
    _mm512_store_si512(reinterpret_cast<char*>(to.values) + 64 * line,
                       _mm512_maskz_loadu_epi8(mask, bytes + 64 * line));
  }
  return to.values;
}

QT_FN void put_bytes(const void* from, int64_t n, void* to) {
  for (int64_t at = 0; at < n; at += 64) {
    _mm512_mask_storeu_epi8(static_cast<char*>(to) + at, first_bytes(n - at),
                            _mm512_load_si512(static_cast<const char*>(from) + at));
  }
}

#else

template <class T>
QT_FN const T* padded(const T* from, int n, Padded<T>& to, int end = cpu::kChunk) {
  __builtin_memcpy(to.values, from, n * sizeof(T));
  __builtin_memset(to.values + n, 0, (end - n) * sizeof(T));
  return to.values;
}

QT_FN void put_bytes(const void* from, int64_t n, void* to) { __builtin_memcpy(to, from, n); }

#endif

template <class T>
QT_FN void put_first(const Padded<T>& from, int n, T* to) {
  put_bytes(from.values, n * sizeof(T), to);
}

// Vectors of bytes and of integers with as many lanes as those of A; of pairs of these bytes, and of a byte for each.
template <class A>
struct Codes {
  typedef int8_t Signed __attribute__((vector_size(QT_BYTES / sizeof(A))));
  typedef uint8_t Unsigned __attribute__((vector_size(QT_BYTES / sizeof(A))));
  typedef int32_t Integers __attribute__((vector_size(QT_BYTES / sizeof(A) * 4)));
  typedef uint16_t Pairs __attribute__((vector_size(QT_BYTES / sizeof(A))));
  typedef uint8_t Packed __attribute__((vector_size(QT_BYTES / sizeof(A) / 2)));
};

template <class A>
QT_FN Vector<A> load_codes(const uint8_t* from, bool is_signed) {
  typename Codes<A>::Signed bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  using Integers = typename Codes<A>::Integers;
  const Integers values = is_signed ? __builtin_convertvector(bytes, Integers)
                                    : __builtin_convertvector((typename Codes<A>::Unsigned)bytes, Integers);
  return __builtin_convertvector(values, Vector<A>);
}

// The lower 8 bits of integers: signed and unsigned codes alike.
template <class A>
QT_FN void store_codes(uint8_t* to, Vector<A> v) {
  const auto values = __builtin_convertvector(v, typename Codes<A>::Integers);
  const auto bytes = __builtin_convertvector(values, typename Codes<A>::Signed);
  __builtin_memcpy(to, &bytes, sizeof(bytes));
}

// The lower 4 bits, two codes a byte, the first in the low half.
template <class A>
QT_FN void pack_codes(uint8_t* to, Vector<A> v) {
  const auto values = __builtin_convertvector(v, typename Codes<A>::Integers);
  const auto bytes = __builtin_convertvector(values, typename Codes<A>::Signed);
  const auto pairs = (typename Codes<A>::Pairs)bytes;
  const typename Codes<A>::Pairs joined = (pairs & 15) | (pairs >> 4 & 240);
  const auto packed = __builtin_convertvector(joined, typename Codes<A>::Packed);
  __builtin_memcpy(to, &packed, sizeof(packed));
}

// Where codes are written, or null: a byte each, or two a byte.
struct CodesAt {
  uint8_t* data;
  bool packed;
};

// `i` is even.
QT_FN CodesAt codes_at(CodesAt codes, int64_t i) {
  return {codes.data == nullptr ? nullptr : codes.data + (codes.packed ? i / 2 : i), codes.packed};
}

template <class A>
QT_FN void store_codes(CodesAt to, Vector<A> v) {
  to.packed ? pack_codes<A>(to.data, v) : store_codes<A>(to.data, v);
}

// The bytes of the first n codes. Half a byte that is left is 0.
QT_FN int bytes_of_codes(CodesAt codes, int n) {
  if (!codes.packed) return n;
  if (n % 2 != 0) codes.data[n / 2] &= 15;
  return (n + 1) / 2;
}
