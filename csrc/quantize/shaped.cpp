// The bodies of the shaped quantizers' ops; see shaped.h.
#include "../shaped.h"

#include <ATen/ops/empty.h>

#include <tuple>

#include "../checks.h"
#include "../layout.h"
#include "../registration.h"
#include "elementwise.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

struct Shape {
  KernelId forward, backward;
  bool fractional;  // the zero point is no code
};

Shape check_shape(const char* op, std::string_view shape) {
  if (shape == "clip") return {KernelId::fake_quant, KernelId::clipped_backward, false};
  if (shape == "levels") return {KernelId::to_levels, KernelId::levels_backward, false};
  if (shape == "interval") return {KernelId::to_interval, KernelId::interval_backward, true};
  TORCH_CHECK_VALUE(false, op, ": shape must be 'clip', 'levels' or 'interval', got '", shape, "'.");
}

Levels check_levels(const char* op, at::IntArrayRef levels, int64_t qmin, int64_t qmax) {
  TORCH_CHECK_VALUE(levels.size() >= 2 && levels.size() <= kMostLevels, op, ": levels must be 2 to ", kMostLevels,
                    " magnitudes, got ", levels.size(), ".");
  TORCH_CHECK_VALUE(levels.front() == 0 && levels.back() == qmax && levels.back() < (1 << 24), op,
                    ": levels must begin at 0 and end at qmax, below 2^24, got ", levels, " and qmax=", qmax, ".");
  TORCH_CHECK_VALUE(qmin == 0 || qmin == -qmax, op, ": qmin must be 0 or -qmax with shape='levels', got qmin=", qmin,
                    " and qmax=", qmax, ".");
  Levels found;
  for (const int64_t level : levels) {
    TORCH_CHECK_VALUE(found.count == 0 || level > found.values[found.count - 1], op, ": levels must ascend, got ",
                      levels, ".");
    found.values[found.count++] = static_cast<float>(level);
  }
  return found;
}

// What a shape, which the ops call `shape`, takes and does not take.
void check_parts(const char* op, std::string_view shape, bool zero_point, bool steepness, bool levels) {
  const auto check = [&](const char* name, bool given, bool needed, bool taken) {
    TORCH_CHECK_VALUE(given || !needed, op, ": shape='", shape, "' needs ", name, ", got None.");
    TORCH_CHECK_VALUE(!given || taken, op, ": shape='", shape, "' takes no ", name, "; leave it out.");
  };
  check("zero_point", zero_point, shape == "interval", shape != "levels");
  check("steepness", steepness, false, shape == "clip");
  check("levels", levels, shape == "levels", shape == "levels");
}

// The checked arguments of an op.
struct Shaped {
  Shape shape;
  Axis axis;
  KernelArgs args;  // what the kernels need besides tensors

  Shaped(const char* op, const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
         const optional<Tensor>& steepness, int64_t qmin, int64_t qmax, std::string_view name, at::IntArrayRef levels,
         optional<int64_t> channels, int64_t group, int64_t block_size)
      : shape(check_shape(op, name)) {
    check_float(op, "x", x);
    check_code_range(op, qmin, qmax);
    check_parts(op, name, zero_point.has_value(), steepness.has_value(), !levels.empty());
    axis = check_grid(op, x, scale, zero_point, channels, group, block_size);
    if (steepness.has_value()) check_beside_scale(op, "steepness", *steepness, scale, x, axis);
    if (!levels.empty()) args.levels = check_levels(op, levels, qmin, qmax);
    args.bounds = representable(qmin, qmax, x);
    args.fractional = shape.fractional;
  }
};

constexpr const char* kShaped = "fake_quant_shaped";
constexpr const char* kBackward = "fake_quant_shaped_backward";

Tensor fake_quant_shaped(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                         const optional<Tensor>& steepness, int64_t qmin, int64_t qmax, std::string_view shape,
                         at::IntArrayRef levels, optional<int64_t> axis, int64_t group, int64_t block_size) {
  const Shaped given(kShaped, x, scale, zero_point, steepness, qmin, qmax, shape, levels, axis, group, block_size);
  const Tensor y = empty_result(x, x.options(), group);
  run_elementwise(given.shape.forward, given.args, y, empty_mask(x, false), x, scale, zero_point, given.axis);
  return y;
}

// The soft staircase scales the gradient that has passed the clipping, in place: it is zero beyond the range.
std::tuple<Tensor, Tensor, Tensor, Tensor> fake_quant_shaped_backward(
    const Tensor& grad, const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
    const optional<Tensor>& steepness, int64_t qmin, int64_t qmax, std::string_view shape, at::IntArrayRef levels,
    optional<int64_t> axis, int64_t group, int64_t block_size) {
  Shaped given(kBackward, x, scale, zero_point, steepness, qmin, qmax, shape, levels, axis, group, block_size);
  check_float(kBackward, "grad", grad);
  check_same_shape(kBackward, "grad", grad, x);
  const auto like = [&](const optional<Tensor>& t) {
    return t ? at::empty_symint(t->sym_sizes(), t->options()) : at::empty({0}, scale.options());
  };
  const Tensor dx = empty_result(x, x.options(), group), ds = like(scale), dz = like(zero_point), dk = like(steepness);
  if (dx.is_meta()) return {dx, ds, dz, dk};
  const LearnedSums sums(given.shape.backward, given.args, dx, grad, x, scale, zero_point, given.axis);
  sums.write_gradients(1, scale, ds, dz, nullptr);
  if (steepness) {
    given.args.fractional = true;
    const LearnedSums soft(KernelId::soft_backward, given.args, dx, dx, x, scale, steepness, given.axis);
    soft.write_gradient(0, 1, nullptr, dk);
  }
  return {dx, ds, dz, dk};
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("fake_quant_shaped", fake_quant_shaped);
  m.impl("fake_quant_shaped_backward", fake_quant_shaped_backward);
}

}  // namespace qtoolkit
