// PReLU (arXiv 1502.01852) and a symmetric integer grid behind it, as one functor; see fake_quant.h. The zero point of
// the kernel's arguments is the slope below 0, one for each channel.
#pragma once

#include "fake_quant.h"

namespace qtoolkit {

// As torch computes it: NaN and 0 take the lower branch.
template <class V>
QT_FN V prelu(V x, V slope) {
  const V below = slope * x;
  return x > 0 ? x : below;
}

template <class A, class V>
struct PreluFunctor {
  static constexpr bool kMemoryBound = true;
  IntegerFunctor<A, V> grid;
  QT_FN PreluFunctor from(const KernelArgs& args) { return {IntegerFunctor<A, V>::from(args)}; }
  template <class S>
  QT_FN Quantized<V> apply(const PreluFunctor& functor, V x, S scale, V slope) {
    return IntegerFunctor<A, V>::apply(functor.grid, prelu(x, slope), scale, V{});
  }
};

// The second sum is the gradient of the slope.
template <class A, class V>
struct PreluGradient {
  static constexpr bool kMemoryBound = true;
  static constexpr bool kMasks = false;
  static constexpr unsigned kSums = kBothSums;
  LearnedGradient<A, V> grid;
  QT_FN PreluGradient from(const KernelArgs& args) { return {LearnedGradient<A, V>::from(args)}; }
  template <class S>
  QT_FN Gradient<V> apply(const PreluGradient& functor, V x, V grad, S scale, V slope) {
    const Gradient<V> behind = LearnedGradient<A, V>::apply(functor.grid, prelu(x, slope), grad, scale, V{});
    const V below = slope * behind.dx, product = x * behind.dx;
    return {x > 0 ? behind.dx : below, 0, behind.scale, x > 0 ? V{} : product};
  }
};

}  // namespace qtoolkit
