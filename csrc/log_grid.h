// The rounding rule of the logarithmic grid of HiSilicon's NNIE: 0 and 2^(n/16), with a sign.
//
// A byte holds a sign and a magnitude k from 0 to 127, which stands for 2^((k + z) / 16), so that 127 is the largest
// number. Negative 0 stands for zero, hence the lowest magnitude has no negative (MQBench 0.0.6, NNIEFakeQuantize).
// Like grid.h, the rule is written once for any V. It takes no logarithm, since those of two libraries differ.
#pragma once

#include "float_grid.h"

namespace qtoolkit {

// 2^((2j + 1) / 32), halfway between two sixteenths of an octave, rounded up: a number is below the rounded value
// exactly if it is below the true one.
constexpr double kHalfways[] = {0x1.059b0d3158575p+0, 0x1.11301d0125b51p+0, 0x1.1d4873168b9abp+0, 0x1.29e9df51fdee2p+0,
                                0x1.371a7373aa9cbp+0, 0x1.44e086061892ep+0, 0x1.5342b569d4f82p+0, 0x1.6247eb03a5585p+0,
                                0x1.71f75e8ec5f74p+0, 0x1.82589994cce13p+0, 0x1.93737b0cdc5e5p+0, 0x1.a5503b23e255dp+0,
                                0x1.b7f76f2fb5e47p+0, 0x1.cb720dcef906ap+0, 0x1.dfc97337b9b5fp+0, 0x1.f50765b6e4541p+0};
// 2^(j / 16).
constexpr double kSixteenths[] = {
    0x1.0000000000000p+0, 0x1.0b5586cf9890fp+0, 0x1.172b83c7d517bp+0, 0x1.2387a6e756238p+0,
    0x1.306fe0a31b715p+0, 0x1.3dea64c123422p+0, 0x1.4bfdad5362a27p+0, 0x1.5ab07dd485429p+0,
    0x1.6a09e667f3bcdp+0, 0x1.7a11473eb0187p+0, 0x1.8ace5422aa0dbp+0, 0x1.9c49182a3f090p+0,
    0x1.ae89f995ad3adp+0, 0x1.c199bdd85529cp+0, 0x1.d5818dcfba487p+0, 0x1.ea4afa2a490dap+0};

template <class A>
QT_FN constexpr A rounded_up(double v) {
  if constexpr (sizeof(A) == 8) return v;
  const float near = static_cast<float>(v);
  return near < v ? __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, near) + 1) : near;
}

// Rounds m in [1, 2) to the nearest sixteenth of an octave.
template <class A, class V, int kStep = 0>
QT_FN V round_mantissa(V m) {
  if constexpr (kStep == 16) {
    return broadcast<V>(static_cast<A>(2));
  } else {
    constexpr A halfway = rounded_up<A>(kHalfways[kStep]), below = static_cast<A>(kSixteenths[kStep]);
    const V above = round_mantissa<A, V, kStep + 1>(m);
    return m < halfway ? broadcast<V>(below) : above;
  }
}

// Rounds a positive normal number to the nearest 2^(n / 16) on the logarithmic scale. There are no ties. NaN stays NaN.
template <class A, class V>
QT_FN V round_log(V v) {
  const V power = PowerBelow<V>::of(v);
  return power * round_mantissa<A>(v / power) + (v - v);
}

// The scale is the largest magnitude. It counts as the nearest 2^(n / 16) between 2^-117, below which the lowest
// magnitudes would be denormal, and 2^126 (float64: 2^1022). Numbers up to half the lowest magnitude become zero.
template <class A, class V>
QT_FN GridPoint<V> snap_log(V x, V scale) {
  const V least = broadcast<V>(static_cast<A>(0x1p-117)),
          most = broadcast<V>(static_cast<A>(sizeof(A) == 8 ? 0x1p1022 : 0x1p126));
  const V top = round_log<A>(clamp(scale, least, most));
  const V magnitude = x < 0 ? -x : x;
  const V lowest = round_log<A>(top * (x < 0 ? broadcast<V>(static_cast<A>(kSixteenths[2] / 256))
                                             : broadcast<V>(static_cast<A>(kSixteenths[1] / 256))));
  const V rounded = round_log<A>(clamp(magnitude, lowest, top + top)) + (top - top);  // NaN if the scale is NaN
  const V level = magnitude + magnitude <= lowest ? V{} : x < 0 ? -rounded : rounded;
  return {x, level, clamp(level, -top, top)};
}

}  // namespace qtoolkit
