#include "layer_weight.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "../call_op.h"
#include "../grid.h"
#include "../launch.h"
#include "../scratch.h"
#include "weight_rows.h"

namespace qtoolkit {
namespace {

using at::MemoryFormat;
using at::Tensor;
using std::optional;

// ---- op by op

// A weight seen with its output channels along dimension 0, or along dimensions 0 and 2 if it is transposed.
Tensor grouped(const Tensor& weight, const Geometry& g) {
  if (!g.transposed) return weight;
  std::vector<c10::SymInt> shape = weight.sym_sizes().vec();
  shape[0] = shape[0] / g.groups;
  shape.insert(shape.begin(), g.groups);
  return weight.view_symint(shape);
}

// One value per output channel, shaped to broadcast over a grouped weight.
Tensor over_grouped(const Tensor& values, const Tensor& weight, const Geometry& g) {
  std::vector<int64_t> shape(weight.dim() + (g.transposed ? 1 : 0), 1);
  shape[0] = g.transposed ? g.groups : -1;
  if (g.transposed) shape[2] = -1;
  return values.reshape(shape);
}

// The sum of the elements of each output channel.
Tensor sum_per_output(const Tensor& weight, const Geometry& g) {
  const Tensor each = grouped(weight, g);
  std::vector<int64_t> others;
  for (int64_t d = 1; d < each.dim(); ++d) {
    if (!(g.transposed && d == 2)) others.push_back(d);
  }
  return (others.empty() ? each : each.sum(others)).reshape({-1});
}

// weight * factor.
Tensor scaled(const LayerWeight& w, const Geometry& g) {
  if (!w.factor.has_value()) return w.weight;
  const Tensor factor = over_grouped(*w.factor, w.weight, g);
  return at::mul(grouped(w.weight, g), factor).reshape_symint(w.weight.sym_sizes());
}

std::tuple<Tensor, Tensor> fake_quant(const Tensor& product, const LayerWeight& w, bool mask) {
  return fake_quant_op(product, w.scale, w.zero_point, w.qmin, w.qmax, w.axis, w.group, w.block_size, w.grad_factor,
                       mask);
}

std::tuple<Tensor, Tensor, Tensor> learned_backward(const Tensor& grad, const Tensor& product, const LayerWeight& w) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&,
                                                 int64_t, int64_t, optional<int64_t>, int64_t, int64_t, double)>(
          "qtoolkit::fake_quant_learned_backward");
  return op.call(grad, product, w.scale, w.zero_point, w.qmin, w.qmax, w.axis, w.group, w.block_size, w.grad_factor);
}

// From the gradient of weight * factor.
void through_factor(const Tensor& of_product, const LayerWeight& w, const Geometry& g, const WantedOfWeight& wanted,
                    WeightGradients& result) {
  if (!w.factor.has_value()) {
    result[0] = of_product.to(w.weight.scalar_type());
    return;
  }
  if (wanted[0]) {
    const Tensor factor = over_grouped(*w.factor, w.weight, g);
    result[0] = at::mul(grouped(of_product, g), factor).reshape_symint(w.weight.sym_sizes()).to(w.weight.scalar_type());
  }
  if (wanted[1]) {
    result[1] = sum_per_output(at::mul(of_product, w.weight), g).to(w.factor->scalar_type());
  }
}

Tensor is_updated(const c10::SymInt& channels, const Tensor& updated) {
  return at::zeros_symint({channels}, updated.options().dtype(at::kBool)).index_fill_(0, updated, true);
}

// In a memory format, with its strides along dimensions of one element too: torch's convolutions in float16 need them.
Tensor laid_out(const Tensor& weight, MemoryFormat format) {
  const Tensor y = weight.contiguous(format);
  if (format != MemoryFormat::ChannelsLast) return y;
  return y.as_strided_symint(y.sym_sizes(), c10::get_channels_last_strides_2d(y.sym_sizes()));
}

// ---- by rows

MemoryFormat other_format(MemoryFormat format) {
  return format == MemoryFormat::Contiguous ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous;
}

Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }

// A row of the weight is a matrix: of channels and kernel positions, or of kernel positions and channels.
class Rows {
 public:
  Rows(const LayerWeight& w, const Geometry& g) : w_(w) {
    if (!fits(g)) return;
    format_ = w.weight.suggest_memory_format();
    const bool last = format_ == MemoryFormat::ChannelsLast;
    const int64_t channels = w.weight.dim() > 1 ? w.weight.size(1) : 1;
    args_.rows = w.weight.size(0);
    args_.major = channels;
    args_.minor = w.weight.numel() / (args_.rows * channels);
    if (last) std::swap(args_.major, args_.minor);
    args_.f64 = w.weight.scalar_type() == at::kDouble;
    args_.weight = w.weight.const_data_ptr();
    args_.bounds = representable(w.qmin, w.qmax, w.weight);
    args_.y_dtype = args_.grad_dtype = dtype_of(w.weight);
    scale_ = in_arithmetic(w.scale, args_.f64);
    args_.scale = scale_.const_data_ptr();
    args_.scale_step = scale_.numel() == 1 ? 0 : 1;
    if (w.factor.has_value()) {
      factor_ = in_arithmetic(*w.factor, args_.f64);
      args_.factor = factor_.const_data_ptr();
    }
    valid_ = true;
  }

  explicit operator bool() const { return valid_; }

  Tensor values(MemoryFormat format, at::ScalarType type, Lifetime lifetime, const UnitScales* unit) {
    const bool is_image = w_.weight.dim() == 4;
    args_.other_format = is_image && format != format_ && !w_.weight.is_contiguous(format);
    const auto options = w_.weight.options().memory_format(is_image ? format : format_);
    const auto of_values = takes(type) ? options.dtype(type) : options;
    const auto empty = lifetime == Lifetime::call ? &empty_scratch : &empty_result;
    const Tensor y = empty(w_.weight.sizes(), of_values);
    args_.y = y.mutable_data_ptr();
    args_.y_dtype = dtype_of(y);
    on(y.device()).weight_forward(args_, unit, y.device());
    return as_type(y, type);
  }

  WeightCodes codes(at::ScalarType type) {
    const auto options = w_.weight.options();
    const Tensor result = at::empty(w_.weight.sizes(), options.dtype(at::kChar).memory_format(format_));
    const Tensor poison = at::empty({args_.rows}, options);
    args_.codes = static_cast<uint8_t*>(result.mutable_data_ptr());
    args_.poison = poison.mutable_data_ptr();
    on(result.device()).weight_forward(args_, nullptr, result.device());
    return {result, poison.to(type)};
  }

  WeightGradients gradients(const Tensor& given, const WantedOfWeight& wanted, OfGrad memory, LaterGradients* later) {
    const Tensor grad = takes(given.scalar_type()) ? given : given.to(w_.weight.scalar_type());
    const bool turned =
        !grad.is_contiguous(format_) && w_.weight.dim() == 4 && grad.is_contiguous(other_format(format_));
    const Tensor in = turned ? grad : grad.contiguous(format_);
    const Tensor sums = at::empty({2, args_.rows}, grad.options().dtype(at::kDouble));
    const DeviceKernels& kernels = on(sums.device());
    WeightGradients result;
    // Large buffers are new pages each time, and a new page costs more than the kernel's work on it. CUDA's kernels
    // read grad through a cache that does not see writes.
    const bool takes_over = memory == OfGrad::taken && !kernels.on_gpu && in.strides() == w_.weight.strides();
    result[0] = takes_over ? in : empty_as(w_.weight);
    args_.other_format = turned;
    args_.grad = in.const_data_ptr();
    args_.grad_dtype = dtype_of(in);
    args_.dweight = result[0].mutable_data_ptr();
    args_.sum_scale = sums.mutable_data_ptr<double>();
    args_.sum_factor = args_.sum_scale + args_.rows;
    const bool sums_rows = wanted[2] && w_.scale.numel() == 1;
    if (later != nullptr && kernels.on_gpu && !sums_rows) {
      later->weight = args_;
      for (const Tensor& t : {w_.weight, in, result[0], scale_, factor_}) later->kept.push_back(t);
    } else {
      kernels.weight_backward(args_, {}, {}, sums.device());
    }
    c10::SmallVector<GradientOfSums, 2> of_sums;
    if (wanted[1] && w_.factor.has_value()) {
      result[1] = at::empty(w_.factor->sizes(), w_.factor->options());
      of_sums.push_back({args_.sum_factor, 1, {}, result[1]});
    }
    const Tensor of_scale = sums_rows ? sums.select(0, 0).sum() : sums;
    if (wanted[2]) {
      result[2] = at::empty(w_.scale.sizes(), w_.scale.options());
      of_sums.push_back({of_scale.const_data_ptr<double>(), w_.grad_factor, w_.scale, result[2]});
    }
    write_gradients(of_sums, sums, later);
    if (later != nullptr) later->kept.push_back(of_scale);
    return result;
  }

 private:
  bool fits(const Geometry& g) const {
    const Tensor& weight = w_.weight;
    const auto type = weight.scalar_type();
    if (weight.is_meta() || g.transposed || (type != at::kFloat && type != at::kDouble)) return false;
    if (weight.numel() == 0 || !weight.is_contiguous(weight.suggest_memory_format())) return false;
    if (w_.zero_point.has_value() || w_.block_size > 0 || w_.group != 1) return false;
    if (w_.scale.numel() != 1 && !(w_.axis.has_value() && at::maybe_wrap_dim(*w_.axis, weight.dim()) == 0))
      return false;
    return !w_.factor.has_value() || w_.factor->scalar_type() == type;
  }

  // Whether the kernels read and write values of a type beside the weight's: a GPU's do, as autocast has them.
  bool takes(at::ScalarType type) const {
    return on(w_.weight.device()).on_gpu && !args_.f64 && (type == at::kBFloat16 || type == at::kHalf);
  }

  const LayerWeight& w_;
  bool valid_ = false;
  MemoryFormat format_ = MemoryFormat::Contiguous;
  WeightRows args_;
  Tensor scale_, factor_;
};

}  // namespace

Tensor only_updated(const Tensor& of_weight, const LayerWeight& w, const Geometry& g) {
  const Tensor mask = over_grouped(is_updated(output_channels(of_weight, g), *w.updated), of_weight, g);
  return at::where(mask, grouped(of_weight, g), 0).reshape_symint(of_weight.sym_sizes());
}

Tensor only_updated(const Tensor& per_channel, const Tensor& updated) {
  return at::where(is_updated(per_channel.sym_numel(), updated), per_channel, 0);
}

Tensor usable_scales(const Tensor& scale, at::ScalarType type) { return scale.to(type).abs().clamp_min(0x1p-126); }

void make_now(const LayerWeight& w) {
  if (w.unmade != nullptr) on(w.weight.device()).unit_scales(*w.unmade, w.weight.device());
}

Tensor fake_quant_weight(const LayerWeight& w, const Geometry& g, MemoryFormat format, optional<at::ScalarType> type,
                         Lifetime lifetime) {
  // A launch makes both in one type.
  const bool apart = w.unmade != nullptr && w.unmade->f64 != (w.weight.scalar_type() == at::kDouble);
  if (apart) make_now(w);
  const auto in_type = type.value_or(w.weight.scalar_type());
  if (Rows rows{w, g}) return rows.values(format, in_type, lifetime, apart ? nullptr : w.unmade);
  if (!apart) make_now(w);
  const Tensor values = std::get<0>(fake_quant(scaled(w, g), w, false));
  const Tensor y = type.has_value() ? values.to(*type) : values;
  return w.weight.dim() == 4 ? laid_out(y, format) : y;
}

WeightCodes quantize_weight(const LayerWeight& w, const Geometry& g, at::ScalarType type) {
  if (!on(w.weight.device()).on_gpu) {
    if (Rows rows{w, g}) return rows.codes(type);
  }
  const Tensor product = scaled(w, g);
  const Tensor codes = quantize_op(product, w.scale, std::nullopt, w.qmin, w.qmax, w.axis, w.group, at::kChar);
  return {codes, at::mul(sum_per_output(product.to(type), g), 0)};
}

WeightGradients weight_backward(const Tensor& grad, const LayerWeight& w, const Geometry& g, WantedOfWeight wanted,
                                OfGrad memory, LaterGradients* later) {
  if (Rows rows{w, g}) return rows.gradients(grad, wanted, memory, later);
  WeightGradients result;
  Tensor of_product;
  const Tensor product = scaled(w, g);
  // In the order of the weight: elementwise loops over two orders take many times as long as this copy.
  const MemoryFormat format = w.weight.suggest_memory_format();
  const Tensor in = grad.to(product.scalar_type()).contiguous(format);
  std::tie(of_product, result[2], result[3]) = learned_backward(in, product, w);
  if (!w.zero_point.has_value()) result[3] = Tensor();
  through_factor(of_product, w, g, wanted, result);
  if (result[0].defined()) result[0] = result[0].contiguous(format);
  return result;
}

WeightGradients differentiable_weight_backward(const Tensor& grad, const LayerWeight& w, const Geometry& g,
                                               WantedOfWeight wanted) {
  WeightGradients result;
  const auto [y, mask] = fake_quant(scaled(w, g).detach(), w, true);
  through_factor(backward_op(grad.to(y.scalar_type()), mask, memory_order(y)), w, g, wanted, result);
  return result;
}

}  // namespace qtoolkit
