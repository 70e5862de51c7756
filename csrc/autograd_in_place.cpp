// Autograd of fake_quant_, which writes its result over x.
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using InPlaceSchema = Tensor(Tensor&, const Tensor&, const optional<Tensor>&, int64_t, int64_t, optional<int64_t>,
                             int64_t, int64_t, bool);

bool is_differentiated(const optional<Tensor>& t) { return t.has_value() && qtoolkit::is_differentiated(*t); }

// x is an output, so that its autograd history continues from here. The mask, which has no gradient, is returned
// through a pointer: autograd allows one output only if x is a view.
struct FakeQuantInPlace : torch::autograd::Function<FakeQuantInPlace> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t group, Tensor* mask,
                        const std::function<Tensor()>& below) {
    ctx->saved_data["order"] = memory_order(layout_of_result(x, group));
    *mask = below();
    ctx->save_for_backward({*mask});
    ctx->mark_dirty({x});
    return x;
  }

  // Not in place, since the incoming gradient may be shared (a sum passes the same one to all its terms).
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor dx = backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["order"].toIntVector());
    return {dx, {}, {}, {}};
  }
};

// Checked before x is written: autograd would raise only afterwards.
void check_writable(const Tensor& x) {
  TORCH_CHECK(!x.is_leaf(),
              "fake_quant_: x must not be a leaf tensor that requires grad (a parameter, for example), since autograd "
              "does not allow in-place changes of it; use fake_quant.");
  TORCH_CHECK(!x.is_view() || !x._base().is_leaf() || !x._base().requires_grad(),
              "fake_quant_: x must not be a view of a leaf tensor that requires grad (a parameter, for example), since "
              "autograd does not allow in-place changes of it; use fake_quant.");
  const auto* view = torch::autograd::impl::get_view_autograd_meta(x);
  TORCH_CHECK(
      view == nullptr || !view->has_bw_view() || view->get_creation_meta() == torch::autograd::CreationMeta::DEFAULT,
      "fake_quant_: x must not be one of several views returned by one op (unbind, split, chunk), nor a view made "
      "with grad mode disabled, since autograd does not allow in-place changes of them; use fake_quant.");
}

Tensor fake_quant_(Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                   optional<int64_t> axis, int64_t group, int64_t block_size, bool mask) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_differentiated(scale) && !is_differentiated(zero_point),
                              "fake_quant_: scale and zero_point must not require grad, since their gradients are "
                              "computed from x, which is overwritten; use fake_quant.");
  const auto call = [&](bool with_mask) {
    const at::AutoDispatchBelowAutograd guard;
    return op<InPlaceSchema>("qtoolkit::fake_quant_")
        .call(x, scale, zero_point, qmin, qmax, axis, group, block_size, with_mask);
  };
  if (!is_differentiated(x)) return call(mask);
  check_writable(x);
  Tensor bits;
  FakeQuantInPlace::apply(x, group, &bits, [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;  // mark_dirty bumps the version
    return call(true);
  });
  return bits;
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("fake_quant_", fake_quant_); }

}  // namespace qtoolkit
