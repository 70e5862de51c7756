// The layer of quant_layer and of its backward, and its weight alone: the runs of arguments that their schemas share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "../reader.h"
#include "geometry.h"

namespace qtoolkit {

struct UnitScales;

// A weight, the factor of each output channel, and its grid.
struct LayerWeight {
  at::Tensor weight;
  std::optional<at::Tensor> factor;
  at::Tensor scale;
  std::optional<at::Tensor> zero_point;
  int64_t qmin, qmax;
  std::optional<int64_t> axis;
  int64_t group, block_size;
  double grad_factor;
  std::optional<at::Tensor> updated;  // the output channels that have a gradient; absent, all of them
  // In a unit's forward: what makes the factor, the scale and the unit's other small tensors, if nothing has made them
  // yet. The first launch that is about the weight does.
  const UnitScales* unmade = nullptr;
};

struct Layer : LayerWeight {
  // The grid of the input.
  at::Tensor codes, x_scale;
  std::optional<at::Tensor> x_zero_point;
  int64_t x_qmin, x_qmax;

  Geometry geometry;
  bool integer;
};

// What the input of a layer was before it was fake-quantized, and the scale that is trained by it; or neither.
struct RawInput {
  std::optional<at::Tensor> x, scale;
  double factor;  // of the scale's gradient
};

// qtoolkit.ops.layer.WeightGrid.numbers
inline Reader& operator>>(Reader& reader, LayerWeight& w) {
  std::vector<int64_t> grid;
  reader >> w.weight >> w.factor >> w.scale >> w.zero_point >> grid >> w.grad_factor >> w.updated;
  TORCH_CHECK_VALUE(grid.size() == 4 || grid.size() == 5, reader.op(),
                    ": grid must have qmin, qmax, group, block_size and, if there is one, the axis, got ",
                    at::IntArrayRef(grid), ".");
  w.qmin = grid[0];
  w.qmax = grid[1];
  w.group = grid[2];
  w.block_size = grid[3];
  w.axis = grid.size() == 5 ? std::optional(grid[4]) : std::nullopt;
  return reader;
}

// qtoolkit.ops.layer.Geometry.numbers
inline Reader& operator>>(Reader& reader, Geometry& g) {
  std::vector<int64_t> numbers;
  reader >> numbers;
  const size_t dims = numbers.size() / 4;
  TORCH_CHECK_VALUE(numbers.size() == 4 * dims + 2 && (numbers[1] == 0 || numbers[1] == 1), reader.op(),
                    ": geometry must have groups, transposed (0 or 1), and then the strides, paddings, dilations and "
                    "output paddings of all spatial dimensions, got ",
                    at::IntArrayRef(numbers), ".");
  g.groups = numbers[0];
  g.transposed = numbers[1] == 1;
  auto next = numbers.begin() + 2;
  for (auto* field : {&g.stride, &g.padding, &g.dilation, &g.output_padding}) {
    field->assign(next, next + dims);
    next += dims;
  }
  return reader;
}

// qtoolkit.ops.layer.Codes.range
inline Reader& operator>>(Reader& reader, Layer& l) {
  std::vector<int64_t> range;
  reader >> l.codes >> l.x_scale >> l.x_zero_point >> range;
  TORCH_CHECK_VALUE(range.size() == 2, reader.op(), ": x_range must have x_qmin and x_qmax, got ",
                    at::IntArrayRef(range), ".");
  l.x_qmin = range[0];
  l.x_qmax = range[1];
  return reader >> static_cast<LayerWeight&>(l) >> l.geometry >> l.integer;
}

inline Reader& operator>>(Reader& reader, RawInput& raw) { return reader >> raw.x >> raw.scale >> raw.factor; }

}  // namespace qtoolkit
