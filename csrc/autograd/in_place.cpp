// Autograd of fake_quant_, which writes its result over x.
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

constexpr const char* kInPlace = "fake_quant_";

using InPlaceSchema = Tensor(Tensor&, const Tensor&, const optional<Tensor>&, int64_t, int64_t, optional<int64_t>,
                             int64_t, int64_t, bool);

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
  static const auto op = find_op<InPlaceSchema>("qtoolkit::fake_quant_");
  const bool in_scale = is_differentiated(kInPlace, scale), in_zero_point = is_differentiated(kInPlace, zero_point);
  TORCH_CHECK_NOT_IMPLEMENTED(!in_scale && !in_zero_point,
                              "fake_quant_: scale and zero_point must not require grad, since their gradients are "
                              "computed from x, which is overwritten; use fake_quant.");
  const auto call = [&](bool with_mask) {
    const at::AutoDispatchBelowAutograd guard;
    return op.call(x, scale, zero_point, qmin, qmax, axis, group, block_size, with_mask);
  };
  if (!is_differentiated(kInPlace, x)) return call(mask);
  check_writable(x);
  Tensor bits;
  // The node's output is an alias of x, whose history becomes that of x. The incoming gradient is not overwritten,
  // since it may be shared (a sum passes the same one to all its terms).
  const Tensor y = StraightThrough::apply(x, [&] {
    const auto order = memory_order(layout_of_result(x, group));
    bits = call(true);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Masked{x.alias(), bits, order};
  });
  torch::autograd::impl::rebase_history(x, torch::autograd::impl::gradient_edge(y));
  return bits;
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("fake_quant_", fake_quant_); }

}  // namespace qtoolkit
