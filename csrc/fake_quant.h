// Fake quantization of one element (V is a scalar) or of a vector of elements, whether the element was clamped, and the
// gradients of a learned scale and zero point (LSQ, arXiv 1902.08153; LSQ+, 2004.09576).
#pragma once

#include "float_grid.h"
#include "grid.h"
#include "kernel_args.h"
#include "log_grid.h"

namespace qtoolkit {

// True where the gradient passes, which is judged after rounding; false for NaN. A vector V gives a vector of masks.
template <class V>
QT_FN auto is_inside(const GridPoint<V>& p) {
  return p.level == p.code;
}

// Comparisons as bits: one bit for a scalar, one bit per lane for a vector. A class for the same reason as Round.
template <class V>
struct Bits {
  QT_FN unsigned equal(V a, V b) { return a == b; }
  QT_FN unsigned at_most(V a, V b) { return a <= b; }
};

template <class V>
QT_FN unsigned inside_bits(const GridPoint<V>& p) {
  return Bits<V>::equal(p.level, p.code);
}

// The functors of the elementwise kernels (kernel_list.h). from() reads what the functor needs from the kernel's
// arguments (A is V's scalar), apply() gives the value of an element and whether its gradient passes. kMemoryBound says
// that the arithmetic is short, so that the kernel waits for memory: the CPU then has loops of its own for 16-bit
// floats and for writes past the caches.
template <class V>
struct Quantized {
  V value;
  unsigned inside;  // as in Bits
};

// With the code, which is the lowest one for NaN.
template <class V>
struct Coded {
  V value;
  unsigned inside;
  V code;
};

template <class A, class V>
struct IntegerFunctor {
  static constexpr bool kMemoryBound = true;
  V lo, hi;
  QT_FN IntegerFunctor from(const KernelArgs& args) {
    return {broadcast<V>(static_cast<A>(args.bounds.lo)), broadcast<V>(static_cast<A>(args.bounds.hi))};
  }
  template <class S>
  QT_FN Coded<V> apply(const IntegerFunctor& functor, V x, S scale, V zero_point) {
    const auto point = snap(x, scale, zero_point, functor.lo, functor.hi);
    const V code = point.code == point.code ? point.code : functor.lo;
    return {value_of<V>(point.code, scale, zero_point), inside_bits(point), code};
  }
};

template <class A, class V>
struct FloatFunctor {
  static constexpr bool kMemoryBound = true;
  FloatGrid<V> grid;
  QT_FN FloatFunctor from(const KernelArgs& args) { return {float_grid<A, V>(args.format)}; }
  template <class S>
  QT_FN Quantized<V> apply(const FloatFunctor& functor, V x, S scale, V) {
    const auto point = snap(functor.grid, x, scale);
    return {point.code * V(scale), inside_bits(point)};
  }
};

template <class A, class V>
struct LogFunctor {
  static constexpr bool kMemoryBound = false;
  QT_FN LogFunctor from(const KernelArgs&) { return {}; }
  QT_FN Quantized<V> apply(const LogFunctor&, V x, V scale, V) {
    const auto point = snap_log<A>(x, scale);
    return {point.code, inside_bits(point)};
  }
};

// Legacy: args.scale is amax (its magnitude, never zero, like every scale), and the gradient depends on x itself,
// before rounding.
template <class A, class V, bool kCodes>
struct LegacyFunctor {
  static constexpr bool kMemoryBound = true;
  V lo, hi;
  QT_FN LegacyFunctor from(const KernelArgs& args) {
    return {broadcast<V>(static_cast<A>(args.bounds.lo)), broadcast<V>(static_cast<A>(args.bounds.hi))};
  }
  QT_FN Quantized<V> apply(const LegacyFunctor& functor, V x, V amax, V) {
    const auto point = snap_legacy(x, amax, functor.lo, functor.hi);
    return {kCodes ? point.code : point.value, Bits<V>::at_most(x, amax) & Bits<V>::at_most(-amax, x)};
  }
};
template <class A, class V>
using LegacyCodeFunctor = LegacyFunctor<A, V, true>;
template <class A, class V>
using LegacyValueFunctor = LegacyFunctor<A, V, false>;

// args.scale is the step, the zero point the range's lowest value, args.shared its highest: inside the range the
// gradient passes.
template <class A, class V>
struct LegacyAffineFunctor {
  static constexpr bool kMemoryBound = true;
  V lowest, highest, high;
  QT_FN LegacyAffineFunctor from(const KernelArgs& args) {
    return {broadcast<V>(static_cast<A>(args.bounds.lo)), broadcast<V>(static_cast<A>(args.bounds.hi)),
            broadcast<V>(*static_cast<const A*>(args.shared))};
  }
  template <class S>
  QT_FN Quantized<V> apply(const LegacyAffineFunctor& functor, V x, S step, V low) {
    return {fake_quant_legacy_affine(x, step, low, functor.lowest, functor.highest),
            Bits<V>::at_most(x, functor.high) & Bits<V>::at_most(low, x)};
  }
};

template <class A, class V>
struct LegacyFloatFunctor {
  static constexpr bool kMemoryBound = true;
  FloatGrid<V> grid;
  QT_FN LegacyFloatFunctor from(const KernelArgs& args) { return {float_grid<A, V>(args.format)}; }
  QT_FN Quantized<V> apply(const LegacyFloatFunctor& functor, V x, V amax, V) {
    return {fake_quant_legacy(functor.grid, x, amax), Bits<V>::at_most(x, amax) & Bits<V>::at_most(-amax, x)};
  }
};

// d(value)/d(scale), times the incoming gradient.
template <class V>
QT_FN V scale_gradient(const GridPoint<V>& p, V grad, V zero_point) {
  const V steps = p.code - zero_point;
  const V residual = steps - p.quotient;
  return grad * (is_inside(p) ? residual : steps);
}

// The same for an incoming gradient of 1, as an elementwise kernel.
template <class A, class V>
struct ScaleTermsFunctor {
  static constexpr bool kMemoryBound = true;
  V lo, hi;
  QT_FN ScaleTermsFunctor from(const KernelArgs& args) {
    return {broadcast<V>(static_cast<A>(args.bounds.lo)), broadcast<V>(static_cast<A>(args.bounds.hi))};
  }
  template <class S>
  QT_FN Quantized<V> apply(const ScaleTermsFunctor& functor, V x, S scale, V zero_point) {
    const auto point = snap(x, scale, zero_point, functor.lo, functor.hi);
    return {scale_gradient(point, broadcast<V>(A(1)), zero_point), inside_bits(point)};
  }
};

// The gradient of `scale`, from the sum of the gradients of a channel: the sum times the gradient factor, with the sign
// of the scale, since a scale counts by its magnitude (usable_scale). For a zero point, pass 1.
template <class A>
QT_FN A learned_gradient(double sum, double factor, A scale) {
  const A gradient = static_cast<A>(sum * factor);
  return scale >= 0 ? gradient : -gradient;
}

// d(value)/d(zero_point), times the incoming gradient: only clamped elements depend on the zero point.
template <class V>
QT_FN V zero_point_gradient(const GridPoint<V>& p, V grad, V scale) {
  const V moved = -(grad * scale);
  return is_inside(p) ? V{} : moved;
}

// The functors of the backward of learned grids (kernel_list.h). apply() gives the gradient of an element of x, and its
// terms of the gradients of the scale and zero point of its channel.
template <class V>
struct Gradient {
  V dx;
  unsigned inside;  // as in Bits: where dx is the incoming gradient, if the functor kMasks; dx is 0 elsewhere
  V scale, zero_point;
};

// Which sums a functor has: that of the scale alone, or both.
constexpr unsigned kScaleSum = 1, kBothSums = 2;

template <class A, class V>
struct LearnedGradient {
  static constexpr bool kMemoryBound = true;
  static constexpr bool kMasks = true;
  static constexpr unsigned kSums = kScaleSum | kBothSums;
  V lo, hi;
  QT_FN LearnedGradient from(const KernelArgs& args) {
    return {broadcast<V>(static_cast<A>(args.bounds.lo)), broadcast<V>(static_cast<A>(args.bounds.hi))};
  }
  template <class S>
  QT_FN Gradient<V> apply(const LearnedGradient& functor, V x, V grad, S scale, V zero_point) {
    const auto point = snap(x, scale, zero_point, functor.lo, functor.hi);
    return {is_inside(point) ? grad : V{}, inside_bits(point), scale_gradient(point, grad, zero_point),
            zero_point_gradient<V>(point, grad, scale)};
  }
};

}  // namespace qtoolkit
