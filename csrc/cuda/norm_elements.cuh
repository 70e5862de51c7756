// Batch norm of a vector of 8 elements with what is fused after it, and its gradients.
#pragma once

#include "../batch_norm/batch_norm.h"
#include "../batch_norm/batch_norm_args.h"
#include "loops.cuh"
#include "norm_channels.cuh"

namespace qtoolkit {
namespace cuda {

template <class A>
struct NormArgs {
  BatchNormArgs of;
  int64_t numel;
  bool aligned;  // see are_aligned
  NormChannels<A> channels;
  A* passed;              // the open interval of values that the quantizer passes the gradient for; see BatchNormArgs
  unsigned* all_arrived;  // how many blocks have written their sums of the gradients of scale and zero point
  unsigned* arrived;      // how many have written those of channels, for each tile of them
  // Partial results of the reductions: two sums for each channel and slice, and for each block of the second pass those
  // of the gradients of scale and zero point.
  Pairs sums, learned;
};

template <class A>
QT_DEVICE A value_at(const void* values, int64_t c, A absent) {
  return values == nullptr ? absent : __ldg(static_cast<const A*>(values) + c);
}

template <class A>
QT_DEVICE double inverse_at(const BatchNormArgs& args, int64_t c) {
  return inverse_deviation(static_cast<const A*>(args.variance)[c], args.eps, value_at<A>(args.divisor, c, 1));
}

// How many blocks a multiprocessor holds at the least, as many as fit without spilling registers: elements of 16 bits
// take fewer of them. Not in float64.
template <class T, int kOf16Bits, int kOf32Bits>
constexpr int kBlocks = sizeof(T) == 2   ? kOf16Bits
                        : sizeof(T) == 4 ? kOf32Bits
                                         : 1;

// ---- elements

template <class T>
struct Operands {
  const T *x, *grad, *residual;
  T *y, *residual_grad;
};

template <class T>
QT_FN Operands<T> operands_of(const BatchNormArgs& args) {
  return {static_cast<const T*>(args.x), static_cast<const T*>(args.grad), static_cast<const T*>(args.residual),
          static_cast<T*>(args.y), static_cast<T*>(args.residual_grad)};
}

// Whether whole vectors of all operands can be loaded and stored at once.
static inline bool are_aligned(const BatchNormArgs& args) {
  const auto of = operands_of<float>(args);  // the alignment of all types of elements
  return is_aligned(args.codes) && is_aligned(args.residual_codes) && is_aligned(of.x) && is_aligned(of.grad) &&
         is_aligned(of.residual) && is_aligned(of.y) && is_aligned(of.residual_grad);
}

// What all elements share.
template <class A>
struct Settings {
  Activation<A> ends;
  A low, high;  // of the activation; infinite where there is none
  bool quantized;
  DivisorOf<A> scale;
  A zero_point, lo, hi, pass_low, pass_high;
};

template <class A>
QT_DEVICE Settings<A> settings_of(const NormArgs<A>& args) {
  const BatchNormArgs& of = args.of;
  const bool backward = of.grad != nullptr;
  return {activation<A, A>(of.low, of.high, of.slope),
          static_cast<A>(of.low),
          static_cast<A>(of.high),
          of.scale != nullptr,
          DivisorOf<A>(usable_scale(value_at<A>(of.scale, 0, 1))),
          usable_zero_point(value_at<A>(of.zero_point, 0, 0)),
          static_cast<A>(of.bounds.lo),
          static_cast<A>(of.bounds.hi),
          backward ? args.passed[0] : A(0),
          backward ? args.passed[1] : A(0)};
}

// The residual, if there is one. Rebuilt from its codes, it is rounded to x's dtype as it was before.
template <class A, class T, class At>
QT_DEVICE void add_residual(const BatchNormArgs& args, const Operands<T>& of, const At& at, bool aligned,
                            A (&v)[kVectorSize]) {
  A residual[kVectorSize];
  if (args.residual_codes != nullptr) {
    if (args.residual_signed) {
      load_dense(reinterpret_cast<const int8_t*>(args.residual_codes), at, aligned, residual);
    } else {
      load_dense(args.residual_codes, at, aligned, residual);
    }
    const A scale = usable_scale(value_at<A>(args.residual_scale, 0, 1));
    const A zero_point = usable_zero_point(value_at<A>(args.residual_zero_point, 0, 0));
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      residual[k] = to_arithmetic<A>(from_arithmetic<T>(value_of(residual[k], scale, zero_point)));
    }
  } else if (args.residual != nullptr) {
    load_dense(of.residual, at, aligned, residual);
  } else {
    return;
  }
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) v[k] = v[k] + residual[k];
}

// Of x in `centred`: x - mean, and the values before the activation.
template <class A, class T, class At, class Of>
QT_DEVICE void values_before(const BatchNormArgs& args, const Operands<T>& of, const At& at, bool aligned,
                             const Of& channels, A (&centred)[kVectorSize], A (&before)[kVectorSize]) {
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) {
    centred[k] = centred[k] - channels.mean(k);
    before[k] = normalized(centred[k], channels.factor(k), channels.bias(k));
  }
  add_residual(args, of, at, aligned, before);
}

template <class A>
QT_DEVICE void activate_all(const Settings<A>& s, A (&v)[kVectorSize]) {
  if (s.ends.sloped) {
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) v[k] = activate(s.ends, v[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) v[k] = smaller_or_nan(larger_or_nan(v[k], s.low), s.high);
  }
}

// The gradients of values before the activation, from those of the result. No division: the values whose gradient the
// quantizer passes are an interval.
template <class A>
QT_DEVICE void gradients_before(const Settings<A>& s, const A (&before)[kVectorSize], A (&grads)[kVectorSize]) {
  if (s.quantized && !s.ends.sloped) {
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      grads[k] = before[k] > s.pass_low && before[k] < s.pass_high ? grads[k] : A(0);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) {
    const A seen = activate(s.ends, before[k]);
    const bool passes = !s.quantized || (seen > s.pass_low && seen < s.pass_high);
    grads[k] = activation_gradient(s.ends, before[k], passes ? grads[k] : A(0));
  }
}

}  // namespace cuda
}  // namespace qtoolkit
