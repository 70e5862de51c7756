// The ops that change a tensor in place: what they change counts as changed, for autograd and for what it has saved;
// and the gradients of those that have one.
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using InPlaceSchema = Tensor(Tensor&, const Tensor&, const optional<Tensor>&, int64_t, int64_t, optional<int64_t>,
                             int64_t, int64_t, bool);
using ObserveFakeQuantSchema = std::tuple<Tensor, Tensor>(const Tensor&, Tensor&, Tensor&, Tensor&,
                                                          const optional<Tensor>&, int64_t, int64_t, optional<double>,
                                                          bool, optional<int64_t>, int64_t, int64_t, bool);
using ObserveSchema = void(const Tensor&, Tensor&, Tensor&, optional<double>, optional<int64_t>, int64_t, int64_t);
using HistogramSchema = void(const Tensor&, Tensor&, Tensor&, Tensor&);

bool is_differentiated(const optional<Tensor>& t) { return t.has_value() && qtoolkit::is_differentiated(*t); }

// ---- gradients: called above what counts changes ----------------------------------------------------------------

// x is an output too, so that its history goes on from here; the mask, which has no gradient, leaves by a pointer,
// since of a view that is changed in place autograd wants one output alone.
struct FakeQuantInPlace : torch::autograd::Function<FakeQuantInPlace> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t group, Tensor* mask,
                        const std::function<Tensor()>& below) {
    ctx->saved_data["order"] = memory_order(layout_of_result(x, group));
    *mask = below();
    ctx->save_for_backward({*mask});
    ctx->mark_dirty({x});
    return x;
  }

  // Not in place: the incoming gradient may be held by others (a sum hands the same one to all its terms).
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor dx = backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["order"].toIntVector());
    return {dx, {}, {}, {}};
  }
};

// Before anything is written: autograd would tell only afterwards.
void check_may_change(const Tensor& x) {
  TORCH_CHECK(!x.is_leaf(),
              "fake_quant_: x must not be a leaf that requires grad (a parameter, say), which no op may change in "
              "place; use fake_quant.");
  TORCH_CHECK(!x.is_view() || !x._base().is_leaf() || !x._base().requires_grad(),
              "fake_quant_: x must not be a view of a leaf that requires grad (a parameter, say), which no op may "
              "change in place; use fake_quant.");
  const auto* view = torch::autograd::impl::get_view_autograd_meta(x);
  TORCH_CHECK(
      view == nullptr || !view->has_bw_view() || view->get_creation_meta() == torch::autograd::CreationMeta::DEFAULT,
      "fake_quant_: x must not be one of several views that one op returns (unbind, split, chunk), nor a view "
      "made without grad mode, which no op may change in place; use fake_quant.");
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
  check_may_change(x);
  Tensor bits;
  FakeQuantInPlace::apply(x, group, &bits, [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;  // mark_dirty counts the change
    return call(true);
  });
  return bits;
}

std::tuple<Tensor, Tensor> observe_fake_quant(const Tensor& x, Tensor& lo, Tensor& hi, Tensor& scale,
                                              const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                              optional<double> momentum, bool pow2_scale, optional<int64_t> axis,
                                              int64_t group, int64_t block_size, bool mask) {
  for (const optional<Tensor>& t : {optional<Tensor>(lo), optional<Tensor>(hi), optional<Tensor>(scale), zero_point}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!is_differentiated(t),
                                "observe_fake_quant: lo, hi, scale and zero_point must not require grad, since they "
                                "are written from what is observed; for a learned scale use fake_quant.");
  }
  const auto call = [&](bool with_mask) {
    const at::AutoDispatchBelowAutograd guard;
    return op<ObserveFakeQuantSchema>("qtoolkit::observe_fake_quant")
        .call(x, lo, hi, scale, zero_point, qmin, qmax, momentum, pow2_scale, axis, group, block_size, with_mask);
  };
  if (!is_differentiated(x)) return call(mask);
  const auto out = StraightThrough::apply(x, [&]() -> variable_list {
    auto [y, bits] = call(true);
    return {y, bits};
  });
  return {out[0], out[1]};
}

// ---- changes are counted: called between autograd and the kernels -----------------------------------------------

Tensor counted_fake_quant_(Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin,
                           int64_t qmax, optional<int64_t> axis, int64_t group, int64_t block_size, bool mask) {
  Tensor bits;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    bits = op<InPlaceSchema>("qtoolkit::fake_quant_")
               .call(x, scale, zero_point, qmin, qmax, axis, group, block_size, mask);
  }
  torch::autograd::impl::bump_version(x);
  return bits;
}

std::tuple<Tensor, Tensor> counted_observe_fake_quant(const Tensor& x, Tensor& lo, Tensor& hi, Tensor& scale,
                                                      const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                                                      optional<double> momentum, bool pow2_scale,
                                                      optional<int64_t> axis, int64_t group, int64_t block_size,
                                                      bool mask) {
  std::tuple<Tensor, Tensor> results;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    results = op<ObserveFakeQuantSchema>("qtoolkit::observe_fake_quant")
                  .call(x, lo, hi, scale, zero_point, qmin, qmax, momentum, pow2_scale, axis, group, block_size, mask);
  }
  for (const Tensor& t : {lo, hi, scale}) torch::autograd::impl::bump_version(t);
  if (zero_point.has_value()) torch::autograd::impl::bump_version(*zero_point);
  return results;
}

void observe_minmax_(const Tensor& x, Tensor& lo, Tensor& hi, optional<double> momentum, optional<int64_t> axis,
                     int64_t group, int64_t block_size) {
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op<ObserveSchema>("qtoolkit::observe_minmax_").call(x, lo, hi, momentum, axis, group, block_size);
  }
  torch::autograd::impl::bump_version(lo);
  torch::autograd::impl::bump_version(hi);
}

void observe_histogram_(const Tensor& x, Tensor& counts, Tensor& lo, Tensor& hi) {
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op<HistogramSchema>("qtoolkit::observe_histogram_").call(x, counts, lo, hi);
  }
  for (const Tensor& t : {counts, lo, hi}) torch::autograd::impl::bump_version(t);
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) {
  m.impl("fake_quant_", fake_quant_);
  m.impl("observe_fake_quant", observe_fake_quant);
}

TORCH_LIBRARY_IMPL(qtoolkit, ADInplaceOrView, m) {
  m.impl("fake_quant_", counted_fake_quant_);
  m.impl("observe_fake_quant", counted_observe_fake_quant);
  m.impl("observe_minmax_", observe_minmax_);
  m.impl("observe_histogram_", observe_histogram_);
}

}  // namespace qtoolkit
