// Scales as numbers of float16; see float16_scale in range_grid.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace qtoolkit {

// Without a gradient, in one launch.
at::Tensor float16_scales(const at::Tensor& scale);

}  // namespace qtoolkit
