// The small tensors of a unit, which a launch makes alone or before the weight.
#pragma once

#include "../unit/unit_scales.h"
#include "memory.cuh"

namespace qtoolkit {
namespace cuda {

template <class A>
QT_DEVICE void small_tensors_at(const UnitScales& u, int64_t i) {
  unit_scales_at<A>(u, i);
  if (u.bias.result == nullptr || i >= u.channels) return;
  with_type<A, Kind::values>(u.bias.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    static_cast<T*>(u.bias.result)[i] = from_arithmetic<T>(unit_bias<A>(u, i));
  });
}

// The scale of a whole tensor, which each thread makes and one of them writes, or which is made before.
QT_DEVICE float made_scale(const TrainedScale& made, const void* scale) {
  if (made.start == nullptr) return __ldg(static_cast<const float*>(scale));
  const float result = trained_scale_at<float>(made, 0);
  if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<float*>(made.scale) = result;
  return result;
}

}  // namespace cuda
}  // namespace qtoolkit
