// PReLU (arXiv 1502.01852) and an integer grid after it, as one functor; see fake_quant.h. The zero point of the
// kernel's arguments is the slope below 0, one for each channel; that of the grid is the same for all channels.
#pragma once

#include "fake_quant.h"

namespace qtoolkit {

// As torch computes it: NaN and 0 take the lower branch.
template <class V>
QT_FN V prelu(V x, V slope) {
  const V below = slope * x;
  return x > 0 ? x : below;
}

template <class V, class A>
QT_FN V zero_point_behind(const KernelArgs& args, A zero) {
  if (args.shared == nullptr) return broadcast<V>(zero);
  return broadcast<V>(usable_zero_point(*static_cast<const A*>(args.shared)));
}

template <class A, class V>
struct PreluFunctor {
  static constexpr bool kMemoryBound = true;
  IntegerFunctor<A, V> grid;
  V zero_point;
  QT_FN PreluFunctor from(const KernelArgs& args) {
    return {IntegerFunctor<A, V>::from(args), zero_point_behind<V>(args, A(0))};
  }
  template <class S>
  QT_FN Quantized<V> apply(const PreluFunctor& functor, V x, S scale, V slope) {
    const auto coded = IntegerFunctor<A, V>::apply(functor.grid, prelu(x, slope), scale, functor.zero_point);
    return {coded.value, coded.inside};
  }
};

// The second sum is the gradient of the slope.
template <class A, class V>
struct PreluGradient {
  static constexpr bool kMemoryBound = true;
  static constexpr bool kMasks = false;
  static constexpr unsigned kSums = kBothSums;
  LearnedGradient<A, V> grid;
  V zero_point;
  QT_FN PreluGradient from(const KernelArgs& args) {
    return {LearnedGradient<A, V>::from(args), zero_point_behind<V>(args, A(0))};
  }
  template <class S>
  QT_FN Gradient<V> apply(const PreluGradient& functor, V x, V grad, S scale, V slope) {
    const Gradient<V> behind =
        LearnedGradient<A, V>::apply(functor.grid, prelu(x, slope), grad, scale, functor.zero_point);
    const V below = slope * behind.dx, product = x * behind.dx;
    return {x > 0 ? behind.dx : below, 0, behind.scale, x > 0 ? V{} : product};
  }
};

}  // namespace qtoolkit
