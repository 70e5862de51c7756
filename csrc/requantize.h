// How runtimes round to codes where they do not do as grid.h does: after sums of products of codes, in a sum of two
// tensors, and where they quantize by a multiplication. Sources are files of onnxruntime 1.30 under onnxruntime/core,
// of XNNPACK under src, of OpenVINO under src/plugins/intel_cpu/src and of LiteRT under tensorflow/lite/kernels.
//
// The results are values, (code - zero point) * scale, and lo and hi are the lowest and highest code minus the zero
// point. Like grid.h, each formula is written once for any V.
#pragma once

#include "fake_quant.h"

namespace qtoolkit {

// a * b + c for float32 numbers, in float64, where the product is exact, then rounded to float32: as a fused
// multiply-add. A class for the same reason as Round.
template <class V>
struct Fused {
  QT_FN V of(V a, V b, V c) { return a * b + c; }
};
template <>
struct Fused<float> {
  QT_FN float of(float a, float b, float c) {
    return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
  }
};

// A zero point that was added before rounding is taken away after it.
template <class V>
QT_FN V requantized(V scaled, V zero_code, V lo, V hi) {
  return clamp(Round<V>::half_even(scaled) - zero_code, lo, hi);
}

template <class A, class V>
struct Requantization {
  V offset, zero_code, lo, hi;
  QT_FN Requantization from(const KernelArgs& args) {
    const A zero_code = static_cast<A>(args.zero_code);
    const A offset = args.shared == nullptr ? zero_code : *static_cast<const A*>(args.shared);
    return {broadcast<V>(offset), broadcast<V>(zero_code), broadcast<V>(static_cast<A>(args.bounds.lo)),
            broadcast<V>(static_cast<A>(args.bounds.hi))};
  }
  QT_FN V apply(const Requantization& to, V scaled, V scale) {
    return requantized(scaled, to.zero_code, to.lo, to.hi) * scale;
  }
};

// Sums of products times a factor: mlas/lib/requantize.cpp and XNNPACK's qs8-qc8w-gemm without an offset (they clamp
// first, which gives the same code), mlas/lib/qlmul.cpp with the zero point. Fused, with an offset of its own:
// OpenVINO's FakeQuantize::getOptimizedFormula in oneDNN's eltwise_linear. The factors take the place of the zero
// points.
template <class A, class V>
struct RequantizeFunctor {
  static constexpr bool kMemoryBound = false;
  Requantization<A, V> to;
  bool fused;
  QT_FN RequantizeFunctor from(const KernelArgs& args) { return {Requantization<A, V>::from(args), args.fused}; }
  template <class S>
  QT_FN Quantized<V> apply(const RequantizeFunctor& functor, V x, S scale, V factor) {
    const V offset = functor.to.offset;
    const V scaled = functor.fused ? Fused<V>::of(x, factor, offset) : x * factor + offset;
    return {Requantization<A, V>::apply(functor.to, scaled, V(scale)), 0};
  }
};

// Divided by the scale of the result: contrib_ops/cpu/quantization/qlinear_pool.cc.
template <class A, class V>
struct QuotientFunctor {
  static constexpr bool kMemoryBound = true;
  Requantization<A, V> to;
  QT_FN QuotientFunctor from(const KernelArgs& args) { return {Requantization<A, V>::from(args)}; }
  template <class S>
  QT_FN Quantized<V> apply(const QuotientFunctor& functor, V x, S scale, V) {
    return {Requantization<A, V>::apply(functor.to, x / scale + functor.to.offset, V(scale)), 0};
  }
};

// OpenVINO's FakeQuantize: x is multiplied by the steps per width of the range, and the range's lowest value is
// subtracted before rounding.
template <class A, class V>
struct ByFactorFunctor {
  static constexpr bool kMemoryBound = true;
  V lo, hi;
  QT_FN ByFactorFunctor from(const KernelArgs& args) {
    return {broadcast<V>(static_cast<A>(args.bounds.lo)), broadcast<V>(static_cast<A>(args.bounds.hi))};
  }
  template <class S>
  QT_FN Quantized<V> apply(const ByFactorFunctor& functor, V x, S step, V zero_point) {
    const V scale = V(step), steps = functor.hi - functor.lo;
    const V low = value_of<V>(functor.lo, scale, zero_point), high = value_of<V>(functor.hi, scale, zero_point);
    const V factor = steps / (high - low);
    const V code = clamp(Round<V>::half_even(x * factor - low * factor), V{}, steps);
    return {value_of<V>(code + functor.lo, scale, zero_point), 0};
  }
};

// ---- LiteRT's reference kernels: tensorflow/lite/kernels/internal, common.cc and quantization_util.cc

template <class V>
QT_FN V floor_of(V v) {
  const V near = Round<V>::half_even(v);
  return near > v ? near - V{} - 1 : near;
}

// A factor m 2^(e - 31) with 31 bits m (QuantizeMultiplier), and products of integers of 32 bits with it that are
// rounded twice (MultiplyByQuantizedMultiplier). All numbers are integers of less than 53 bits, or these times a power
// of two: exact in float64, which V is.
template <class V>
struct FixedPointFactor {
  V upper, lower;  // m = 2^16 upper + lower
  V left, right;   // 2^max(e, 0) and 2^min(e, 0)

  // Without a count m has its highest bit. The bits of a mean of `count` numbers are m 2^k / count, rounded down, with
  // the largest 2^k that fits (tensorflow/lite/kernels/reduce.cc); power_below is the power of two at or below the
  // count. A count of less than 2^20 keeps the quotient's distance from the next integer above a float64's rounding.
  QT_FN FixedPointFactor from(V real, V count, V power_below) {
    V power = PowerBelow<V>::of(real) * 2;
    V m = floor_of(real / power * 0x1p31 + 0.5);
    const auto whole = m >= V{} + 0x1p31;  // rounded up
    m = whole ? m * 0.5 : m;
    power = whole ? power * 2 : power;
    m = power < V{} + 0x1p-31 ? V{} : m;
    const V most = power * 0x1p31, one = V{} + 1;
    const V shift = power_below > most ? most : power_below;
    m = floor_of(m * shift / count);
    power = power / shift;
    const V upper = floor_of(m * 0x1p-16);
    const V lower = m - upper * 0x1p16;
    return {upper, lower, power > one ? power : one, power < one ? power : one};
  }

  // x m 2^max(e, 0) / 2^16, rounded down.
  QT_FN V product(const FixedPointFactor& factor, V x) {
    const V shifted = x * factor.left;
    return shifted * factor.upper + floor_of(shifted * factor.lower * 0x1p-16);
  }

  // floor(x m 2^(e - 31) + 1/2): as kernels of fully connected layers.
  QT_FN V times_rounded_once(const FixedPointFactor& factor, V x) {
    return floor_of((product(factor, x) * factor.right + 0x1p14) * 0x1p-15);
  }

  // floor(x m / 2^31 + 1/2), then that times 2^min(e, 0), halves rounded away from zero.
  QT_FN V times(const FixedPointFactor& factor, V x) {
    const V once = floor_of((product(factor, x) + 0x1p14) * 0x1p-15) * factor.right;
    const V magnitude = floor_of((once < 0 ? -once : once) + 0.5);
    return once < 0 ? -magnitude : magnitude;
  }
};

// Sums of products times a factor. The factors take the place of the zero points.
template <class A, class V>
struct FixedPointFunctor {
  static constexpr bool kMemoryBound = false;
  V count, power_below, lo, hi;
  bool once;
  QT_FN FixedPointFunctor from(const KernelArgs& args) {
    const A count = static_cast<A>(args.count);
    return {broadcast<V>(count), broadcast<V>(PowerBelow<A>::of(count)), broadcast<V>(static_cast<A>(args.bounds.lo)),
            broadcast<V>(static_cast<A>(args.bounds.hi)), args.fused};
  }
  template <class S>
  QT_FN Quantized<V> apply(const FixedPointFunctor& functor, V x, S scale, V factor) {
    using Factor = FixedPointFactor<V>;
    const Factor by = Factor::from(factor, functor.count, functor.power_below);
    const V scaled = functor.once ? Factor::times_rounded_once(by, x) : Factor::times(by, x);
    return {clamp(scaled, functor.lo, functor.hi) * V(scale), 0};
  }
};

// The codes minus the zero point of values on a grid, which determine them. -0 becomes 0: instruction sets round it to
// either.
template <class V, class S>
QT_FN V centred_code(V x, S scale) {
  return Round<V>::half_even(x / scale) + V{};
}

template <class A, class V>
struct CentredFunctor {
  static constexpr bool kMemoryBound = true;
  QT_FN CentredFunctor from(const KernelArgs&) { return {}; }
  template <class S>
  QT_FN Quantized<V> apply(const CentredFunctor&, V x, S scale, V) {
    return {centred_code(x, scale), 0};
  }
};

// ---- a sum of two tensors

// Grids of a and b, the operands, and y, the result.
template <class A>
struct SumGrids {
  A a_scale, b_scale, y_scale, a_zero, b_zero, y_zero, lo, hi;
  QT_FN SumGrids from(const KernelArgs& args) {
    const A* scales = static_cast<const A*>(args.sum.scales);
    const double* zeros = args.sum.zero_points;
    return {usable_scale(scales[0]),        usable_scale(scales[1]),       usable_scale(scales[2]),
            static_cast<A>(zeros[0]),       static_cast<A>(zeros[1]),      static_cast<A>(zeros[2]),
            static_cast<A>(args.bounds.lo), static_cast<A>(args.bounds.hi)};
  }
};

// fma(a, ra, fma(b, rb, yz - fma(ra, az, rb bz))) of codes, rounded, with ra = as / ys and rb = bs / ys. Source:
// mlas/lib/intrinsics/avx2/qladd_avx2.cpp.
template <class A>
struct FloatSum {
  SumGrids<A> grids;
  A a_factor, b_factor, fixed;
  QT_FN FloatSum from(const KernelArgs& args) {
    const SumGrids<A> g = SumGrids<A>::from(args);
    const A ra = g.a_scale / g.y_scale, rb = g.b_scale / g.y_scale;
    return {g, ra, rb, g.y_zero - Fused<A>::of(ra, g.a_zero, rb * g.b_zero)};
  }
  QT_FN A of(const FloatSum& s, A a, A b) {
    const SumGrids<A>& g = s.grids;
    const A inner = Fused<A>::of(centred_code(b, g.b_scale) + g.b_zero, s.b_factor, s.fixed);
    const A sum = Fused<A>::of(centred_code(a, g.a_scale) + g.a_zero, s.a_factor, inner);
    return requantized(sum, g.y_zero, g.lo, g.hi) * g.y_scale;
  }
};

// (a round(ra 2^k) + b round(rb 2^k) + 2^(k - 1)) >> k of codes minus their zero points, where the larger factor has 20
// bits after its highest one: halves are rounded up. Integers of 32 bits are exact in float64, and 2^k is too. Source:
// xnn_init_qs8_add_minmax_scalar_params in microparams-init.c, and qs8-vadd.
template <class A>
struct FixedPointSum {
  SumGrids<A> grids;
  double a_factor, b_factor, step;
  QT_FN FixedPointSum from(const KernelArgs& args) {
    const SumGrids<A> g = SumGrids<A>::from(args);
    const double ra = g.a_scale / g.y_scale, rb = g.b_scale / g.y_scale;
    const double unit = 0x1p20 / PowerBelow<double>::of(ra > rb ? ra : rb);
    return {g, Round<double>::half_even(ra * unit), Round<double>::half_even(rb * unit), 1 / unit};
  }
  QT_FN A of(const FixedPointSum& s, A a, A b) {
    const SumGrids<A>& g = s.grids;
    const double sum = static_cast<double>(centred_code(a, g.a_scale)) * s.a_factor +
                       static_cast<double>(centred_code(b, g.b_scale)) * s.b_factor;
    return clamp(static_cast<A>(::floor(sum * s.step + 0.5)), g.lo, g.hi) * g.y_scale;
  }
};

// Operands with 20 bits more are scaled to twice the larger step, their sum or difference to the result's. Source:
// tensorflow/lite/kernels/add.cc, sub.cc and internal/reference/integer_ops/add.h.
template <class A>
struct ReferenceSum {
  SumGrids<A> grids;
  FixedPointFactor<double> a_factor, b_factor, factor;
  double sign;
  QT_FN ReferenceSum from(const KernelArgs& args) {
    const SumGrids<A> g = SumGrids<A>::from(args);
    const double a = g.a_scale, b = g.b_scale, twice = 2 * (a > b ? a : b);
    const auto factor_of = [](double real) { return FixedPointFactor<double>::from(real, 1, 1); };
    return {g, factor_of(a / twice), factor_of(b / twice), factor_of(twice / (0x1p20 * static_cast<double>(g.y_scale))),
            args.sum.subtract ? -1.0 : 1.0};
  }
  QT_FN A of(const ReferenceSum& s, A a, A b) {
    const SumGrids<A>& g = s.grids;
    using Factor = FixedPointFactor<double>;
    const double left = Factor::times(s.a_factor, static_cast<double>(centred_code(a, g.a_scale)) * 0x1p20);
    const double right = Factor::times(s.b_factor, static_cast<double>(centred_code(b, g.b_scale)) * 0x1p20);
    return clamp(static_cast<A>(Factor::times(s.factor, left + s.sign * right)), g.lo, g.hi) * g.y_scale;
  }
};

// Calls f with the sum that the arguments ask for.
template <class A, class F>
QT_FN void with_sum(const KernelArgs& args, F f) {
  if (args.sum.rounded_twice) return f(ReferenceSum<A>::from(args));
  args.sum.fixed_point ? f(FixedPointSum<A>::from(args)) : f(FloatSum<A>::from(args));
}

}  // namespace qtoolkit
