// Storage types to and from the type of the arithmetic (float32; float64 for float64), a block at a time.
// Included once per instruction set, inside namespace qtoolkit::QT_ISA. Plain loops: the compiler
// vectorises them for the instruction set at hand.
#pragma once

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// The bit patterns of 16-bit floats in the low half of U, to and from those of float32: U is uint32_t with F float, or
// vectors of them.
template <class F, class U>
QT_FN F widen_bits(U half, bf16) {
  return __builtin_bit_cast(F, half << 16);
}

// The exponent is rebased by a multiplication by 2^112, which also normalises denormals; inf and NaN are put back.
template <class F, class U>
QT_FN F widen_bits(U half, f16) {
  const U sign = (half & 0x8000u) << 16;
  const U body = (half & 0x7fffu) << 13;
  const F rebased = __builtin_bit_cast(F, body) * 0x1p112f;
  const U special = body | 0x7f800000u;
  const U magnitude = body >= 0x0f800000u ? special : __builtin_bit_cast(U, rebased);
  return __builtin_bit_cast(F, sign | magnitude);
}

// Round to nearest, ties to even; a NaN stays one.
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
  // Denormal results: adding 0.5 lines the last kept bit up with float32's last bit, and rounds.
  const F shifted = __builtin_bit_cast(F, magnitude) + 0.5f;
  const U denormal = __builtin_bit_cast(U, shifted) - 0x3f000000u;
  const U normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const U infinity = magnitude - magnitude + 0x7c00u;
  U result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x47800000u ? infinity : result;
  result = magnitude > 0x7f800000u ? infinity + 0x200u : result;
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

// Codes are whole, and clamped to ends that the arithmetic can hold (representable, in layout.h).
template <class A, class T>
QT_FN void from_arithmetic(A v, T* to) {
  *to = static_cast<T>(static_cast<int32_t>(v));
}

// Vectors straight from and to storage.
typedef uint32_t Words __attribute__((vector_size(QT_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(QT_BYTES / 2)));

template <class A, class T>
QT_FN Vector<A> load_as(const T* from) {
  if constexpr (std::is_same<A, T>::value) {
    return load(from);
  } else {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof(halves));
    return widen_bits<Vector<float>>(__builtin_convertvector(halves, Words), T{});
  }
}

template <bool kStream = false, class T, class V>
QT_FN void store_as(T* to, V v) {
  if constexpr (sizeof(v[0]) == sizeof(T)) {
    put<kStream>(to, v);
  } else {
    put<kStream>(to, __builtin_convertvector(narrow_bits<Words>(v, T{}), Halves));
  }
}

// Calls f with a null pointer of the storage type, of those that the arithmetic type A serves.
template <class A, class F>
void with_storage(Dtype dtype, F f) {
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
