// Vectors of one instruction set. The compiler's vector extension has the operators; this file adds the few functions
// that it lacks, so that the formulas of grid.h, fake_quant.h and observe.h compile for vectors. Included once per
// instruction set, by kernels-inl.h.

namespace qtoolkit {
namespace QT_ISA {

template <class A>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(QT_BYTES)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(QT_BYTES)));
};
template <class A>
using Vector = typename VectorOf<A>::type;

template <class A>
constexpr int kLanes = QT_BYTES / sizeof(A);

template <class A>
QT_FN Vector<A> load(const A* from) {
  Vector<A> v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

template <class A>
QT_FN void store(A* to, Vector<A> v) {
  __builtin_memcpy(to, &v, sizeof(v));
}

// Stores a vector. A streaming store bypasses the caches: it saves reading the lines first, for results too large to
// stay in a cache. Stores of half a cache line (AVX2) would gain nothing. It needs an aligned address, and
// end_stores() before another thread reads.
template <class T, class V>
QT_FN void put(T* to, V v, bool stream) {
#if QT_BYTES == 64
  if constexpr (sizeof(V) == 64) {
    if (stream) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)v);
  }
#endif
  __builtin_memcpy(to, &v, sizeof(v));
}

QT_FN void end_stores(bool stream) {
#if QT_BYTES == 64
  if (stream) _mm_sfence();
#endif
}

#if QT_BYTES == 64

QT_FN Vector<float> round_vector(Vector<float> v) { return (Vector<float>)_mm512_roundscale_ps((__m512)v, 8); }
QT_FN unsigned bits_of(decltype(Vector<float>{} < Vector<float>{}) m) { return _mm512_movepi32_mask((__m512i)m); }
QT_FN Vector<float> keep(Vector<float> v, unsigned bits) { return (Vector<float>)_mm512_maskz_mov_ps(bits, (__m512)v); }

#elif QT_BYTES == 32

QT_FN Vector<float> round_vector(Vector<float> v) { return (Vector<float>)_mm256_round_ps((__m256)v, 8); }
QT_FN unsigned bits_of(decltype(Vector<float>{} < Vector<float>{}) m) { return _mm256_movemask_ps((__m256)m); }
QT_FN Vector<float> keep(Vector<float> v, unsigned bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lane), lane);
  return (Vector<float>)_mm256_and_ps((__m256)v, _mm256_castsi256_ps(set));
}

#else  // any processor: only the compiler's generic vectors

// Adding and subtracting 2^23 (2^52) rounds half to even; larger numbers are integers already.
template <class V, class A>
QT_FN V round_by_magic(V v, A magic) {
  const V magnitude = v < 0 ? -v : v;
  const V whole = (magnitude + magic) - magic;
  const V rounded = v < 0 ? -whole : whole;
  return magnitude < magic ? rounded : v;
}
QT_FN Vector<float> round_vector(Vector<float> v) { return round_by_magic(v, 8388608.0f); }
QT_FN Vector<double> round_vector(Vector<double> v) { return round_by_magic(v, 4503599627370496.0); }

template <class M>
QT_FN unsigned bits_of(M m) {
  unsigned bits = 0;
  for (unsigned lane = 0; lane < sizeof(m) / sizeof(m[0]); ++lane) bits |= (m[lane] != 0 ? 1u : 0u) << lane;
  return bits;
}
template <class V>
QT_FN V keep(V v, unsigned bits) {
  for (unsigned lane = 0; lane < sizeof(v) / sizeof(v[0]); ++lane) {
    if (!(bits >> lane & 1)) v[lane] = 0;
  }
  return v;
}

#endif

}  // namespace QT_ISA

template <>
struct PowerBelow<QT_ISA::Vector<float>> {
  QT_FN QT_ISA::Vector<float> of(QT_ISA::Vector<float> v) {
    using Bits = decltype(v < v);
    return (QT_ISA::Vector<float>)((Bits)v & 0x7f800000);
  }
};

template <>
struct PowerOfTwo<QT_ISA::Vector<float>> {
  QT_FN QT_ISA::Vector<float> of(QT_ISA::Vector<float> n) {
    typedef uint32_t Words __attribute__((vector_size(QT_BYTES)));
    return (QT_ISA::Vector<float>)(((Words)(n + 0x1.8p23f) << 23) + 0x3f800000u);
  }
};

template <>
struct Round<QT_ISA::Vector<float>> {
  QT_FN QT_ISA::Vector<float> half_even(QT_ISA::Vector<float> v) { return QT_ISA::round_vector(v); }
};

template <>
struct Fused<QT_ISA::Vector<float>> {
  typedef double Wide __attribute__((vector_size(2 * QT_BYTES)));
  QT_FN Wide wide(QT_ISA::Vector<float> v) { return __builtin_convertvector(v, Wide); }
  QT_FN QT_ISA::Vector<float> of(QT_ISA::Vector<float> a, QT_ISA::Vector<float> b, QT_ISA::Vector<float> c) {
    return __builtin_convertvector(wide(a) * wide(b) + wide(c), QT_ISA::Vector<float>);
  }
};

#if QT_BYTES == 64  // a compare instruction gives the bits directly
template <>
struct Bits<QT_ISA::Vector<float>> {
  using V = QT_ISA::Vector<float>;
  QT_FN unsigned equal(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
  QT_FN unsigned at_most(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ); }
};
#else
template <>
struct Bits<QT_ISA::Vector<float>> {
  using V = QT_ISA::Vector<float>;
  QT_FN unsigned equal(V a, V b) { return QT_ISA::bits_of(a == b); }
  QT_FN unsigned at_most(V a, V b) { return QT_ISA::bits_of(a <= b); }
};
#endif

#if QT_BYTES == 16  // float64 has these kernels alone
template <>
struct PowerBelow<QT_ISA::Vector<double>> {
  QT_FN QT_ISA::Vector<double> of(QT_ISA::Vector<double> v) {
    using Bits = decltype(v < v);
    return (QT_ISA::Vector<double>)((Bits)v & 0x7ff0000000000000);
  }
};
template <>
struct PowerOfTwo<QT_ISA::Vector<double>> {
  QT_FN QT_ISA::Vector<double> of(QT_ISA::Vector<double> n) {
    typedef uint64_t Words __attribute__((vector_size(QT_BYTES)));
    return (QT_ISA::Vector<double>)(((Words)(n + 0x1.8p52) << 52) + 0x3ff0000000000000u);
  }
};
template <>
struct Round<QT_ISA::Vector<double>> {
  QT_FN QT_ISA::Vector<double> half_even(QT_ISA::Vector<double> v) { return QT_ISA::round_vector(v); }
};
template <>
struct Bits<QT_ISA::Vector<double>> {
  using V = QT_ISA::Vector<double>;
  QT_FN unsigned equal(V a, V b) { return QT_ISA::bits_of(a == b); }
  QT_FN unsigned at_most(V a, V b) { return QT_ISA::bits_of(a <= b); }
};
#endif

}  // namespace qtoolkit
