// Conversion between storage types and the type of the arithmetic (float64 for float64, else float32), a block at a
// time. Plain loops, which the compiler vectorizes. Included once per instruction set, inside namespace
// qtoolkit::QT_ISA.
#pragma once

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Conversion between the bit patterns of 16-bit floats, in the low half of U, and those of float32. U and F are
// uint32_t and float, or vectors of them.
template <class F, class U>
QT_FN F widen_bits(U half, bf16) {
  return __builtin_bit_cast(F, half << 16);
}

// The exponent bias changes from 15 to 127. Denormals are multiples of 2^-24, which adding and subtracting 2^23
// converts to floats. No step produces a denormal float32, which the processor may flush to zero.
template <class F, class U>
QT_FN F widen_bits(U half, f16) {
  const U sign = (half & 0x8000u) << 16;
  const U body = (half & 0x7fffu) << 13;
  const F denormal = (__builtin_bit_cast(F, (half & 0x3ffu) | 0x4b000000u) - 0x1p23f) * 0x1p-24f;
  const U normal = body + 0x38000000u;
  U magnitude = body < 0x00800000u ? __builtin_bit_cast(U, denormal) : normal;
  magnitude = body >= 0x0f800000u ? body | 0x7f800000u : magnitude;
  return __builtin_bit_cast(F, sign | magnitude);
}

// Rounds to nearest, ties to even. NaN stays NaN and keeps its upper bits, as in the processors' own conversions.
template <class U, class F>
QT_FN U narrow_bits(F v, bf16) {
  const U bits = __builtin_bit_cast(U, v);
  const U nan = bits >> 16 | 0x40u;
  return v != v ? nan : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

template <class U, class F>
QT_FN U narrow_bits(F v, f16) {
  const U bits = __builtin_bit_cast(U, v);
  const U sign = bits >> 16 & 0x8000u;
  const U magnitude = bits & 0x7fffffffu;
  // Denormal results: adding 0.5 aligns the last bit of the result with the last bit of float32, and so rounds.
  const F shifted = __builtin_bit_cast(F, magnitude) + 0.5f;
  const U denormal = __builtin_bit_cast(U, shifted) - 0x3f000000u;
  const U normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const U infinity = magnitude - magnitude + 0x7c00u;
  U result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x47800000u ? infinity : result;
  const U nan = infinity | 0x200u | (magnitude >> 13 & 0x3ffu);
  result = magnitude > 0x7f800000u ? nan : result;
  return sign | result;
}

template <class A, class T>
QT_FN A to_arithmetic(T v) {
  if constexpr (std::is_arithmetic<T>::value) {
    return static_cast<A>(v);
  } else {
    return widen_bits<float>(static_cast<uint32_t>(v.bits), v);
  }
}

template <class T>
QT_FN void from_arithmetic(float v, T* to, decltype(T::bits)* = nullptr) {
  to->bits = static_cast<uint16_t>(narrow_bits<uint32_t>(v, T{}));
}

QT_FN void from_arithmetic(float v, float* to) { *to = v; }
QT_FN void from_arithmetic(double v, double* to) { *to = v; }

// Codes are integers within bounds that the arithmetic represents (representable() in layout.h).
template <class A, class T>
QT_FN void from_arithmetic(A v, T* to) {
  *to = static_cast<T>(static_cast<int32_t>(v));
}

// Vectors directly from and to storage.
#if QT_BYTES == 64

// With intrinsics, since the compiler splits the conversion in halves and makes a vector of each comparison.
QT_FN __m256i load_halves(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
QT_FN Vector<float> widen_halves(const bf16* from) {
  return (Vector<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(from)), 16);
}
QT_FN Vector<float> widen_halves(const f16* from) { return (Vector<float>)_mm512_cvtph_ps(load_halves(from)); }

// Converts two vectors to one of 16-bit floats: narrow_bits on the upper and lower halves of both at once. A value is
// rounded up if its lower half is more than half a step, or exactly half a step and the upper half is odd. NaN is not
// rounded up; a NaN from arithmetic has its quiet bit in the upper half already.
QT_FN __m512i narrow_halves(Vector<float> a, Vector<float> b, bf16) {
  typedef uint16_t Line __attribute__((vector_size(64)));
  constexpr Line below = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                          32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i upper = _mm512_permutex2var_epi16((__m512i)a, (__m512i)(below + 1), (__m512i)b);
  const __m512i lower = _mm512_permutex2var_epi16((__m512i)a, (__m512i)below, (__m512i)b);
  const __m512i rest = _mm512_adds_epu16(lower, _mm512_and_si512(upper, one));
  const __m512i magnitude = _mm512_and_si512(upper, _mm512_set1_epi16(0x7fff));
  const __mmask32 number = _mm512_cmple_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80));
  const __mmask32 up = _mm512_mask_cmpgt_epu16_mask(number, rest, _mm512_set1_epi16(static_cast<short>(0x8000)));
  return _mm512_mask_add_epi16(upper, up, upper, one);
}
QT_FN __m512i narrow_halves(Vector<float> a, Vector<float> b, f16) {
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT));
  return _mm512_inserti64x4(low, _mm512_cvtps_ph((__m512)b, _MM_FROUND_TO_NEAREST_INT), 1);
}

#else

typedef uint32_t Words __attribute__((vector_size(QT_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(QT_BYTES / 2)));

template <class T>
QT_FN Vector<float> widen_halves(const T* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  return widen_bits<Vector<float> >(__builtin_convertvector(halves, Words), T{});
}
template <class T>
QT_FN Halves narrow_halves(Vector<float> v, T) {
  return __builtin_convertvector(narrow_bits<Words>(v, T{}), Halves);
}

#if QT_BYTES == 32  // the processor's own conversion, to the same bits
QT_FN Vector<float> widen_halves(const f16* from) {
  return (Vector<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
QT_FN Halves narrow_halves(Vector<float> v, f16) {
  return (Halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}
#endif

#endif

template <class A, class T>
QT_FN Vector<A> load_as(const T* from) {
  if constexpr (std::is_same<A, T>::value) {
    return load(from);
  } else {
    return widen_halves(from);
  }
}

// The number of vectors in a chunk.
template <class A>
constexpr int kVectors = cpu::kChunk / kLanes<A>;

template <class A, class T>
QT_FN void store_chunk(T* to, const Vector<A> (&v)[kVectors<A>], bool stream) {
  if constexpr (std::is_same<A, T>::value) {
    for (int i = 0; i < kVectors<A>; ++i) put(to + i * kLanes<A>, v[i], stream);
  } else {
#if QT_BYTES == 64
    put(to, narrow_halves(v[0], v[1], T{}), stream);
    put(to + 32, narrow_halves(v[2], v[3], T{}), stream);
#else
    for (int i = 0; i < kVectors<A>; ++i) put(to + i * kLanes<A>, narrow_halves(v[i], T{}), stream);
#endif
  }
}

// Calls f with a null pointer of the storage type; A is the type of the arithmetic.
template <class A, class F>
QT_FN void with_storage(Dtype dtype, F f) {
  if constexpr (std::is_same<A, double>::value) {
    f(static_cast<double*>(nullptr));
  } else {
    switch (dtype) {
      case Dtype::f32: return f(static_cast<float*>(nullptr));
      case Dtype::bf16: return f(static_cast<bf16*>(nullptr));
      case Dtype::f16: return f(static_cast<f16*>(nullptr));
      default: return;
    }
  }
}

template <class F>
void with_codes(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::i8: return f(static_cast<int8_t*>(nullptr));
    case Dtype::u8: return f(static_cast<uint8_t*>(nullptr));
    case Dtype::i16: return f(static_cast<int16_t*>(nullptr));
    case Dtype::u16: return f(static_cast<uint16_t*>(nullptr));
    case Dtype::i32: return f(static_cast<int32_t*>(nullptr));
    default: return;
  }
}

// Writes a chunk of gradients, zero where the bit of `inside` is not set; 16-bit ones are copied without conversion.
template <class A, class T>
QT_FN void pass_chunk(const T* grad, T* dx, uint64_t inside, bool stream) {
  if constexpr (sizeof(T) > 2) {
    for (int k = 0; k < cpu::kChunk; k += kLanes<T>) {
      put(dx + k, keep(load(grad + k), static_cast<unsigned>(inside >> k)), stream);
    }
  } else {
#if QT_BYTES == 64
    put(dx, _mm512_maskz_loadu_epi16(static_cast<__mmask32>(inside), grad), stream);
    put(dx + 32, _mm512_maskz_loadu_epi16(static_cast<__mmask32>(inside >> 32), grad + 32), stream);
#else
    typedef uint16_t Lanes16 __attribute__((vector_size(32)));
    constexpr Lanes16 bit = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                             1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    for (int k = 0; k < cpu::kChunk; k += 16) {
      Lanes16 values;
      __builtin_memcpy(&values, grad + k, sizeof(values));
      const Lanes16 bits = Lanes16{} + static_cast<uint16_t>(inside >> k);
      values &= (Lanes16)((bit & bits) == bit);
      __builtin_memcpy(dx + k, &values, sizeof(values));
    }
#endif
  }
}

// Element i of typed memory, or nothing of nothing.
template <class A, class T>
QT_FN T* at(T* data, int64_t i) {
  return data == nullptr ? nullptr : data + i;
}

// A chunk's elements, or those of another type of arrays that vectors are read from.
template <class T>
struct alignas(64) Padded {
  T values[cpu::kChunk];
};

// What load_as() reads of a chunk.
template <class A, class T>
QT_FN const T* values_of(const T* from, Padded<A>&) {
  return from;
}

// ---- the same for memory whose type is known at run time: one loop serves all types, and chooses once a chunk

// The storage type that needs no conversion.
template <class A>
constexpr Dtype kNative = std::is_same<A, double>::value ? Dtype::f64 : Dtype::f32;

// float64 is never another type in memory.
template <class A>
QT_FN bool is_native(Dtype dtype) {
  return std::is_same<A, double>::value || dtype == kNative<A>;
}

template <class A>
QT_FN int64_t bytes_of(Dtype dtype, int64_t n) {
  return n * static_cast<int64_t>(is_native<A>(dtype) ? sizeof(A) : 2);
}

struct Source {
  const void* data;
  Dtype dtype;
};

struct Target {
  void* data;
  Dtype dtype;
};

template <class A, class T>
constexpr Dtype kStored = std::is_same<T, bf16>::value  ? Dtype::bf16
                          : std::is_same<T, f16>::value ? Dtype::f16
                                                        : kNative<A>;

template <class A, class T>
QT_FN Source source_of(const T* data) {
  return {data, kStored<A, T>};
}
template <class A, class T>
QT_FN Target target_of(T* data) {
  return {data, kStored<A, T>};
}

template <class A>
QT_FN Source at(Source from, int64_t i) {
  return {at<A>(static_cast<const char*>(from.data), bytes_of<A>(from.dtype, i)), from.dtype};
}
template <class A>
QT_FN Target at(Target to, int64_t i) {
  return {at<A>(static_cast<char*>(to.data), bytes_of<A>(to.dtype, i)), to.dtype};
}

template <class A>
QT_FN A first_value_of(Source from) {
  A value = 0;
  with_storage<A>(from.dtype, [&](auto* type) {
    value = to_arithmetic<A>(*static_cast<const typename std::remove_pointer<decltype(type)>::type*>(from.data));
  });
  return value;
}

// 16-bit floats are widened into the buffer.
template <class A>
QT_FN const A* values_of(Source from, Padded<A>& buffer) {
  if (is_native<A>(from.dtype)) return static_cast<const A*>(from.data);
  if constexpr (std::is_same<A, float>::value) {
    const auto widen = [&](const auto* data) {
      for (int k = 0; k < cpu::kChunk; k += kLanes<A>) store(buffer.values + k, widen_halves(data + k));
    };
    from.dtype == Dtype::bf16 ? widen(static_cast<const bf16*>(from.data)) : widen(static_cast<const f16*>(from.data));
  }
  return buffer.values;
}

template <class A>
QT_FN void store_chunk(Target to, const Vector<A> (&v)[kVectors<A>], bool stream) {
  with_storage<A>(to.dtype, [&](auto* type) { store_chunk<A>(static_cast<decltype(type)>(to.data), v, stream); });
}

template <class A>
QT_FN void pass_chunk(Source grad, Target dx, uint64_t inside, bool stream) {
  if (is_native<A>(grad.dtype)) {
    pass_chunk<A>(static_cast<const A*>(grad.data), static_cast<A*>(dx.data), inside, stream);
  } else {
    pass_chunk<A>(static_cast<const bf16*>(grad.data), static_cast<bf16*>(dx.data), inside, stream);
  }
}
