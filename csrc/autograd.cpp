// What is saved for backward, and which backward op is called. Each kernel here calls its own op again below autograd:
// so the op stays one node in compiled and exported graphs.
#include "autograd.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <string_view>

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ForwardSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const optional<Tensor>&, int64_t,
                                                 int64_t, optional<int64_t>, int64_t, int64_t, double, bool);
using LearnedBackwardSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                                 const optional<Tensor>&, int64_t, int64_t,
                                                                 optional<int64_t>, int64_t, int64_t, double);

using FloatSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::string_view, optional<int64_t>,
                                               int64_t, int64_t, bool);
using BlockSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, std::string_view, int64_t, std::string_view,
                                                       const optional<Tensor>&, bool);
using TensorQuantSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, int64_t, bool, bool, bool);
using FakeTensorQuantSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, int64_t, bool, bool, bool);

std::tuple<Tensor, Tensor> forward_below(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                         int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                         int64_t block_size, double grad_factor, bool mask) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op<ForwardSchema>("qtoolkit::fake_quant")
      .call(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, mask);
}

// Fixed scale: only the packed mask is kept, an eighth of a byte an element.
struct FakeQuant : torch::autograd::Function<FakeQuant> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& scale,
                               const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax, optional<int64_t> axis,
                               int64_t group, int64_t block_size, double grad_factor) {
    auto [y, mask] = forward_below(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, true);
    ctx->save_for_backward({mask});
    ctx->saved_data["order"] = memory_order(y);
    ctx->mark_non_differentiable({mask});
    return {y, mask};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor dx = backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["order"].toIntVector());
    return {dx, {}, {}, {}, {}, {}, {}, {}, {}};
  }
};

// Learned scale (and zero point): the input is kept, and everything else computed anew.
struct FakeQuantLearned : torch::autograd::Function<FakeQuantLearned> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& scale,
                               const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax, optional<int64_t> axis,
                               int64_t group, int64_t block_size, double grad_factor, bool with_mask) {
    auto [y, mask] = forward_below(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, with_mask);
    ctx->save_for_backward({x, scale, zero_point.value_or(Tensor())});
    ctx->saved_data["qmin"] = qmin;
    ctx->saved_data["qmax"] = qmax;
    ctx->saved_data["axis"] = axis;
    ctx->saved_data["group"] = group;
    ctx->saved_data["block_size"] = block_size;
    ctx->saved_data["grad_factor"] = grad_factor;
    ctx->mark_non_differentiable({mask});
    return {y, mask};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const optional<Tensor> zero_point = saved[2].defined() ? optional<Tensor>(saved[2]) : std::nullopt;
    auto& data = ctx->saved_data;
    auto [dx, ds, dz] = op<LearnedBackwardSchema>("qtoolkit::fake_quant_learned_backward")
                            .call(grads[0], saved[0], saved[1], zero_point, data["qmin"].toInt(), data["qmax"].toInt(),
                                  data["axis"].toOptional<int64_t>(), data["group"].toInt(), data["block_size"].toInt(),
                                  data["grad_factor"].toDouble());
    return {dx, ds, zero_point ? dz : Tensor(), {}, {}, {}, {}, {}, {}, {}};
  }
};

// Linear in grad, so its derivative is the same op: double backward works.
struct FakeQuantBackward : torch::autograd::Function<FakeQuantBackward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& mask, std::vector<int64_t> order) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({mask});
    ctx->saved_data["order"] = order;
    return backward_op(grad, mask, order);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {backward_op(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["order"].toIntVector()), {}, {}};
  }
};

std::tuple<Tensor, Tensor> fake_quant(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point,
                                      int64_t qmin, int64_t qmax, optional<int64_t> axis, int64_t group,
                                      int64_t block_size, double grad_factor, bool mask) {
  const bool grad_mode = at::GradMode::is_enabled();
  const bool learned = grad_mode && (scale.requires_grad() || (zero_point.has_value() && zero_point->requires_grad()));
  if (learned) {
    const auto out =
        FakeQuantLearned::apply(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, mask);
    return {out[0], out[1]};
  }
  if (grad_mode && x.requires_grad()) {
    const auto out = FakeQuant::apply(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor);
    return {out[0], out[1]};
  }
  return forward_below(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor, mask);
}

std::tuple<Tensor, Tensor> fake_quant_float(const Tensor& x, const Tensor& scale, std::string_view format,
                                            optional<int64_t> axis, int64_t group, int64_t block_size, bool mask) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_differentiated(scale),
                              "fake_quant_float: scale has no gradient, got one that requires grad; pass "
                              "scale.detach().");
  const auto call = [&](bool with_mask) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op<FloatSchema>("qtoolkit::fake_quant_float").call(x, scale, format, axis, group, block_size, with_mask);
  };
  if (!is_differentiated(x)) return call(mask);
  const auto out = StraightThrough::apply(x, [&]() -> variable_list {
    auto [y, bits] = call(true);
    return {y, bits};
  });
  return {out[0], out[1]};
}

std::tuple<Tensor, Tensor, Tensor> fake_quant_block(const Tensor& x, std::string_view format, int64_t block_size,
                                                    std::string_view scale_format, const optional<Tensor>& tensor_scale,
                                                    bool mask) {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor_scale.has_value() || !is_differentiated(*tensor_scale),
                              "fake_quant_block: tensor_scale has no gradient, got one that requires grad; pass "
                              "tensor_scale.detach().");
  const auto call = [&](bool with_mask) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op<BlockSchema>("qtoolkit::fake_quant_block")
        .call(x, format, block_size, scale_format, tensor_scale, with_mask);
  };
  if (!is_differentiated(x)) return call(mask);
  const auto out = StraightThrough::apply(x, [&]() -> variable_list {
    auto [y, scales, bits] = call(true);
    return {y, scales, bits};
  });
  return {out[0], out[1], out[2]};
}

// amax has no gradient, as in pytorch-quantization.
std::tuple<Tensor, Tensor, Tensor> tensor_quant(const Tensor& x, const Tensor& amax, int64_t num_bits, bool is_unsigned,
                                                bool narrow_range, bool mask) {
  const auto call = [&](bool with_mask) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op<TensorQuantSchema>("qtoolkit::tensor_quant")
        .call(x, amax, num_bits, is_unsigned, narrow_range, with_mask);
  };
  if (!is_differentiated(x)) return call(mask);
  const auto out = StraightThrough::apply(x, [&]() -> variable_list {
    auto [codes, scale, bits] = call(true);
    return {codes, scale, bits};
  });
  return {out[0], out[1], out[2]};
}

std::tuple<Tensor, Tensor> fake_tensor_quant(const Tensor& x, const Tensor& amax, int64_t num_bits, bool is_unsigned,
                                             bool narrow_range, bool mask) {
  const auto call = [&](bool with_mask) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op<FakeTensorQuantSchema>("qtoolkit::fake_tensor_quant")
        .call(x, amax, num_bits, is_unsigned, narrow_range, with_mask);
  };
  if (!is_differentiated(x)) return call(mask);
  const auto out = StraightThrough::apply(x, [&]() -> variable_list {
    auto [y, bits] = call(true);
    return {y, bits};
  });
  return {out[0], out[1]};
}

Tensor fake_quant_backward(const Tensor& grad, const Tensor& mask, at::IntArrayRef order) {
  return FakeQuantBackward::apply(grad, mask, order.vec());
}

Tensor snapshot(const Tensor& x) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op<Tensor(const Tensor&)>("qtoolkit::snapshot").call(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, Autograd, m) {
  m.impl("fake_quant", fake_quant);
  m.impl("fake_quant_float", fake_quant_float);
  m.impl("fake_quant_block", fake_quant_block);
  m.impl("tensor_quant", tensor_quant);
  m.impl("fake_tensor_quant", fake_tensor_quant);
  m.impl("fake_quant_backward", fake_quant_backward);
  m.impl("snapshot", snapshot);
  // No gradient is lost in silence.
  for (const char* name :
       {"fake_quant_learned_backward", "dequantize", "dequantize_int4", "minmax", "grid_of_range", "search_range"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace qtoolkit
