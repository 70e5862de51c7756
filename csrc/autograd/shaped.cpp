// Autograd of the shaped quantizers: saves the input and the parameters; backward recomputes the rest.
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kShaped = "fake_quant_shaped";

using ShapedForward = Tensor(const Tensor&, const Tensor&, const optional<Tensor>&, const optional<Tensor>&, int64_t,
                             int64_t, std::string_view, at::IntArrayRef, optional<int64_t>, int64_t, int64_t);
using ShapedBackward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                                  const optional<Tensor>&, const optional<Tensor>&,
                                                                  int64_t, int64_t, std::string_view, at::IntArrayRef,
                                                                  optional<int64_t>, int64_t, int64_t);

struct FakeQuantShaped : torch::autograd::Function<FakeQuantShaped> {
  template <class Below>
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                        const optional<Tensor>& steepness, int64_t qmin, int64_t qmax, std::string_view shape,
                        at::IntArrayRef levels, optional<int64_t> axis, int64_t group, int64_t block_size,
                        const Below& below) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, scale, zero_point.value_or(Tensor()), steepness.value_or(Tensor())});
    ctx->saved_data["qmin"] = qmin;
    ctx->saved_data["qmax"] = qmax;
    ctx->saved_data["shape"] = std::string(shape);
    ctx->saved_data["levels"] = levels.vec();
    ctx->saved_data["axis"] = axis;
    ctx->saved_data["group"] = group;
    ctx->saved_data["block_size"] = block_size;
    return below();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<ShapedBackward>("qtoolkit::fake_quant_shaped_backward");
    variable_list result(12);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const auto given = [&](int i) { return saved[i].defined() ? optional<Tensor>(saved[i]) : std::nullopt; };
    auto& data = ctx->saved_data;
    auto [dx, ds, dz, dk] =
        op.call(grads[0], saved[0], saved[1], given(2), given(3), data["qmin"].toInt(), data["qmax"].toInt(),
                data["shape"].toStringRef(), data["levels"].toIntVector(), data["axis"].toOptional<int64_t>(),
                data["group"].toInt(), data["block_size"].toInt());
    result[0] = dx;
    result[1] = ds;
    if (saved[2].defined()) result[2] = dz;
    if (saved[3].defined()) result[3] = dk;
    return result;
  }
};

Tensor fake_quant_shaped(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                         const optional<Tensor>& steepness, int64_t qmin, int64_t qmax, std::string_view shape,
                         at::IntArrayRef levels, optional<int64_t> axis, int64_t group, int64_t block_size) {
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = find_op<ShapedForward>("qtoolkit::fake_quant_shaped");
    return op.call(x, scale, zero_point, steepness, qmin, qmax, shape, levels, axis, group, block_size);
  };
  bool differentiated = is_differentiated(kShaped, x);
  for (const optional<Tensor>& t : {optional<Tensor>(scale), zero_point, steepness}) {
    differentiated = is_differentiated(kShaped, t) || differentiated;
  }
  if (!differentiated) return below();
  return FakeQuantShaped::apply(x, scale, zero_point, steepness, qmin, qmax, shape, levels, axis, group, block_size,
                                below);
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("fake_quant_shaped", fake_quant_shaped); }

}  // namespace qtoolkit
