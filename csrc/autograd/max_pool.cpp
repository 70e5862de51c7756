// Autograd of max pooling: keeps the offsets, one byte for each element of the result, and not x.
#include "autograd.h"

namespace qtoolkit {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kMaxPool = "max_pool_offsets";

using MaxPoolForward = std::tuple<Tensor, Tensor>(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                                                  bool);
using MaxPoolBackward = Tensor(const Tensor&, const Tensor&, c10::SymIntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                               IntArrayRef, bool);

struct MaxPool : torch::autograd::Function<MaxPool> {
  // `below` returns the values and the offsets.
  template <class Below>
  static Tensor forward(AutogradContext* ctx, const Tensor& x, IntArrayRef kernel_size, IntArrayRef stride,
                        IntArrayRef padding, IntArrayRef dilation, bool ceil_mode, const Below& below) {
    const auto [y, offsets] = below();
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({offsets});
    ctx->saved_data["rows"] = x.sym_size(-2);
    ctx->saved_data["columns"] = x.sym_size(-1);
    ctx->saved_data["kernel_size"] = kernel_size;
    ctx->saved_data["stride"] = stride;
    ctx->saved_data["padding"] = padding;
    ctx->saved_data["dilation"] = dilation;
    ctx->saved_data["ceil_mode"] = ceil_mode;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<MaxPoolBackward>("qtoolkit::max_pool_offsets_backward");
    if (!grads[0].defined()) return variable_list(7);
    auto& data = ctx->saved_data;
    std::vector<c10::SymInt> size = grads[0].sym_sizes().vec();
    size[size.size() - 2] = data["rows"].toSymInt();
    size[size.size() - 1] = data["columns"].toSymInt();
    const auto sides = [&](const char* name) { return data[name].toIntVector(); };
    const Tensor dx = op.call(grads[0], ctx->get_saved_variables()[0], size, sides("kernel_size"), sides("stride"),
                              sides("padding"), sides("dilation"), data["ceil_mode"].toBool());
    return {dx, {}, {}, {}, {}, {}, {}};
  }
};

std::tuple<Tensor, Tensor> max_pool_offsets(const Tensor& x, IntArrayRef kernel_size, IntArrayRef stride,
                                            IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  static const auto op = find_op<MaxPoolForward>("qtoolkit::max_pool_offsets");
  const auto below = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(x, kernel_size, stride, padding, dilation, ceil_mode);
  };
  if (!is_differentiated(kMaxPool, x)) return below();
  Tensor y, offsets;
  y = MaxPool::apply(x, kernel_size, stride, padding, dilation, ceil_mode, [&] {
    std::tie(y, offsets) = below();
    return std::make_tuple(y, offsets);
  });
  return {y, offsets};
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) { m.impl("max_pool_offsets", max_pool_offsets); }

}  // namespace qtoolkit
