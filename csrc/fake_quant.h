// Fake quantization of one element (V a scalar) or of one vector of them: whether it was clamped, and the gradients of
// a learned scale and zero point (LSQ, arXiv 1902.08153; LSQ+, 2004.09576).
#pragma once

#include "grid.h"

namespace qtoolkit {

// True where the gradient passes: judged after rounding, false for NaN. A vector V gives a vector of masks.
template <class V>
QT_FN auto is_inside(const GridPoint<V>& p) {
  return p.level == p.code;
}

// d(value)/d(scale), times the incoming gradient.
template <class V>
QT_FN V scale_gradient(const GridPoint<V>& p, V grad, V zero_point) {
  const V steps = p.code - zero_point;
  const V residual = steps - p.quotient;
  return grad * (is_inside(p) ? residual : steps);
}

// d(value)/d(zero_point), times the incoming gradient: only clamped elements move with the zero point.
template <class V>
QT_FN V zero_point_gradient(const GridPoint<V>& p, V grad, V scale) {
  const V moved = -(grad * scale);
  return is_inside(p) ? V{} : moved;
}

}  // namespace qtoolkit
