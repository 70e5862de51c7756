// The grid of the weights of an attention.
#pragma once

#include "../fake_quant.h"
#include "divisor.cuh"
#include "unit_scales.cuh"

namespace qtoolkit {
namespace cuda {

// Weights without a grid.
struct Unrounded {
  QT_DEVICE float point(float weight) { return weight; }
  QT_DEVICE float value(float weight) { return weight; }
  QT_DEVICE bool passes(float) { return true; }
  QT_DEVICE void add_terms(float, float, float&, float&) {}
};

// S divides weights by the scale.
template <class S>
struct Rounded {
  S scale;
  float zero_point, lo, hi;

  __device__ __forceinline__ GridPoint<float> point(float weight) const {
    return snap(weight, scale, zero_point, lo, hi);
  }
  __device__ __forceinline__ float value(const GridPoint<float>& p) const {
    return value_of(p.code, static_cast<float>(scale), zero_point);
  }
  // Whether the gradient passes.
  __device__ __forceinline__ bool passes(const GridPoint<float>& p) const { return is_inside(p); }
  // Adds the terms of a weight, whose gradient is given, to the gradients of scale and zero point.
  __device__ __forceinline__ void add_terms(const GridPoint<float>& p, float grad, float& of_scale,
                                            float& of_zero_point) const {
    of_scale += scale_gradient(p, grad, zero_point);
    of_zero_point += zero_point_gradient<float>(p, grad, static_cast<float>(scale));
  }
};

class AttentionGrid {
 public:
  template <class Args>
  __device__ AttentionGrid(const Args& args, const TrainedScale& made)
      : rounds_(args.scale != nullptr),
        zero_point_(args.zero_point == nullptr ? 0.0f
                                               : usable_zero_point(__ldg(static_cast<const float*>(args.zero_point)))),
        lo_(rounds_ ? static_cast<float>(args.bounds.lo) : -INFINITY),
        hi_(rounds_ ? static_cast<float>(args.bounds.hi) : INFINITY),
        divisor_(rounds_ ? usable_scale(made_scale(made, args.scale)) : 1.0f) {}

  // Whether the last bits of weights below 2^-40 do not matter.
  __device__ bool is_coarse() const { return rounds_ && divisor_.value >= 0x1p-30f; }

  // Calls f with what rounds weights, which are at most 1, with the bits of a division.
  template <class F>
  __device__ __forceinline__ void with_rounding(F f) const {
    if (!rounds_) return f(Unrounded{});
    if (divisor_.most >= 1) return f(near());
    f(Rounded<float>{divisor_.value, zero_point_, lo_, hi_});
  }

  // What rounds weights with those bits, but for scales far outside of all that weights have.
  __device__ __forceinline__ Rounded<Divisor> near() const { return {divisor_, zero_point_, lo_, hi_}; }
  __device__ __forceinline__ float value(const GridPoint<float>& p, float weight) const {
    return rounds_ ? near().value(p) : weight;
  }

 private:
  bool rounds_;
  float zero_point_, lo_, hi_;
  Divisor divisor_;
};

}  // namespace cuda
}  // namespace qtoolkit
