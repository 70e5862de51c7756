// The layer of quant_layer and of its backward, and its weight alone: the runs of arguments that their schemas share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "geometry.h"

namespace qtoolkit {

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

// Reads arguments in the order of a schema.
class Reader {
 public:
  explicit Reader(at::ArrayRef<c10::IValue> values) : next_(values.begin()) {}

  template <class T>
  Reader& operator>>(T& argument) {
    argument = (next_++)->to<T>();
    return *this;
  }
  Reader& operator>>(std::vector<c10::SymInt>& argument) {
    argument = (next_++)->toSymIntVector();
    return *this;
  }
  Reader& operator>>(Geometry& g) {
    return *this >> g.stride >> g.padding >> g.dilation >> g.output_padding >> g.transposed >> g.groups;
  }
  Reader& operator>>(LayerWeight& w) {
    *this >> w.weight >> w.factor >> w.scale >> w.zero_point >> w.qmin >> w.qmax;
    return *this >> w.axis >> w.group >> w.block_size >> w.grad_factor;
  }
  Reader& operator>>(RawInput& raw) { return *this >> raw.x >> raw.scale >> raw.factor; }
  Reader& operator>>(Layer& l) {
    *this >> l.codes >> l.x_scale >> l.x_zero_point >> l.x_qmin >> l.x_qmax;
    return *this >> static_cast<LayerWeight&>(l) >> l.geometry >> l.integer;
  }

 private:
  const c10::IValue* next_;
};

}  // namespace qtoolkit
