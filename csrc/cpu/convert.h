// Storage types to and from the type of the arithmetic (float32; float64 for float64), a block at a time.
// Included by kernels.inc once per instruction set, inside namespace qtoolkit::QT_ISA. Plain loops: the compiler
// vectorises them for the instruction set at hand.

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

QT_FN float widen(bf16 v) { return __builtin_bit_cast(float, static_cast<uint32_t>(v.bits) << 16); }

// The exponent is rebased by a multiplication, which also normalises denormals; inf and NaN are put back.
QT_FN float widen(f16 v) {
  const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000u) << 16;
  const uint32_t body = static_cast<uint32_t>(v.bits & 0x7fffu) << 13;
  const float rebased = __builtin_bit_cast(float, body) * __builtin_bit_cast(float, 0x77800000u);  // 2^112
  const uint32_t special = body | 0x7f800000u;
  const uint32_t magnitude = body >= 0x0f800000u ? special : __builtin_bit_cast(uint32_t, rebased);
  return __builtin_bit_cast(float, sign | magnitude);
}

template <class A, class T>
QT_FN A to_arithmetic(T v) {
  if constexpr (std::is_arithmetic<T>::value) {
    return static_cast<A>(v);
  } else {
    return widen(v);
  }
}

// Round to nearest, ties to even; a NaN stays one.
QT_FN void from_arithmetic(float v, bf16* to) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  to->bits = static_cast<uint16_t>(v != v ? bits >> 16 | 0x40u : rounded);
}

QT_FN void from_arithmetic(float v, f16* to) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Denormal results: adding 0.5 lines the last kept bit up with float32's last bit, and rounds.
  const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
  const uint32_t denormal = __builtin_bit_cast(uint32_t, shifted) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  uint32_t result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x47800000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  to->bits = static_cast<uint16_t>(sign | result);
}

QT_FN void from_arithmetic(float v, float* to) { *to = v; }
QT_FN void from_arithmetic(double v, double* to) { *to = v; }

// Codes are whole, and clamped to ends that the arithmetic can hold (representable, in layout.h).
template <class A, class T>
QT_FN void from_arithmetic(A v, T* to) {
  *to = static_cast<T>(static_cast<int32_t>(v));
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
