// A unit: modules of a prepared model that one op computes in a training step. Its object has all that the op is told,
// as named fields. Python makes it once, from a dict of their names; each step passes the tensors that differ
// (calls.h).
//
// Each unit lists its fields: `tensors` and `numbers` of the op, and those that only backward has, of which `results`
// are what the op returned for it. Whoever fills, checks, keeps or restores them walks these lists.
#pragma once

#include <torch/custom_class.h>

#include <memory>

#include "../layout.h"
#include "fields.h"
#include "operand.h"
#include "unit_parts.h"

namespace qtoolkit {

struct Calls;

// ---- what units have in common

struct CalledUnit : torch::CustomClassHolder {
  std::shared_ptr<const Calls> calls;  // the calls for which it was made; see calls.cpp
};

struct Unit : CalledUnit {
  at::Tensor x;
  OutputQuantizer output;

  const at::Tensor& first() const { return x; }

  template <class Visit>
  void output_tensors(Visit& visit) {
    visit("y_start", output.trained.start, Role{GradientOf::y_start, keeps_if(output.trained.ratio.has_value())});
    visit("y_ratio", output.trained.ratio, Role{GradientOf::y_ratio, Keeps::tensor});
    visit("y_rate", output.trained.rate, kConstant);
    visit("y_zero_point", output.zero_point, Role{GradientOf::y_zero_point, Keeps::copy});
  }

  template <class Visit>
  void output_numbers(Visit& visit) {
    visit("y_qmin", output.qmin);
    visit("y_qmax", output.qmax);
    visit("y_grad_factor", output.grad_factor);
    visit("y_float16", output.trained.float16);
    visit("learned", output.learned);
  }
};

// A unit that begins with a layer on grids.
struct UnitOfLayer : Unit {
  Layer layer;  // without the scale and the factor of its weight
  Trained weight;
  Followed followed;
  std::optional<at::ScalarType> dtype;  // of the computation
  bool channels_last;                   // whether an image is returned so; else as torch's layer returns it
  GivenBias bias;
  RawInput raw;

  // Of backward alone.
  std::vector<c10::SymInt> size;  // of x
  at::ScalarType x_dtype;
  std::vector<int64_t> order;  // of y in memory
  std::optional<at::Tensor> y_scale, scale;

  // Keeps for backward what it needs of the values besides tensors.
  void note(const UnitOfLayer& of_step, const at::Tensor& y) {
    size = of_step.x.sym_sizes().vec();
    x_dtype = of_step.x.scalar_type();
    order = memory_order(y);
  }

  std::optional<at::MemoryFormat> format() const {
    return channels_last ? std::optional(at::MemoryFormat::ChannelsLast) : std::nullopt;
  }

  // The type in which the layer adds its bias; integer arithmetic converts it itself.
  std::optional<at::ScalarType> bias_dtype() const {
    return layer.integer ? std::nullopt : std::optional(dtype.value_or(x.scalar_type()));
  }

  // `bias_kept` is whether backward needs the bias. Nobody changes the grid of the input before backward.
  template <class Visit>
  void layer_tensors(Visit& visit, Keeps bias_kept) {
    visit("x", x, Role{GradientOf::x, Keeps::nothing});
    visit("codes", layer.codes, kConstant);
    visit("x_scale", layer.x_scale, kConstant);
    visit("x_zero_point", layer.x_zero_point, kConstant);
    visit("weight", layer.weight, Role{GradientOf::weight, Keeps::tensor});
    visit("start", weight.start, Role{GradientOf::start, keeps_if(weight.ratio.has_value())});
    visit("ratio", weight.ratio, Role{GradientOf::ratio, Keeps::tensor});
    visit("rate", weight.rate, kConstant);
    visit("zero_point", layer.zero_point, Role{GradientOf::zero_point, Keeps::copy});
    visit("lo", followed.lo, kOfForward);
    visit("hi", followed.hi, kOfForward);
    visit("updated", layer.updated, kConstant);
    visit("bias", bias.bias, Role{GradientOf::bias, bias_kept});
    visit("raw", raw.x, kConstant);
    visit("raw_scale", raw.scale, Role{GradientOf::raw_scale, Keeps::copy});
    output_tensors(visit);
  }

  template <class Visit>
  void layer_numbers(Visit& visit) {
    visit("x_qmin", layer.x_qmin);
    visit("x_qmax", layer.x_qmax);
    visit("qmin", layer.qmin);
    visit("qmax", layer.qmax);
    visit("axis", layer.axis);
    visit("group", layer.group);
    visit("block_size", layer.block_size);
    visit("grad_factor", layer.grad_factor);
    visit("float16", weight.float16);
    visit("stride", layer.geometry.stride);
    visit("padding", layer.geometry.padding);
    visit("dilation", layer.geometry.dilation);
    visit("output_padding", layer.geometry.output_padding);
    visit("transposed", layer.geometry.transposed);
    visit("groups", layer.geometry.groups);
    visit("integer", layer.integer);
    visit("pow2_scale", followed.pow2_scale);
    visit("dtype", dtype);
    visit("channels_last", channels_last);
    visit("rounds_bias", bias.on_grid);
    visit("raw_factor", raw.factor);
    output_numbers(visit);
  }

  template <class Visit>
  void backward_numbers(Visit&& visit) {
    visit("size", size);
    visit("x_dtype", x_dtype);
    visit("order", order);
  }
};

// ---- the units

// A layer without a batch norm, and the quantizer after it or none.
struct LayerUnit : UnitOfLayer {
  static constexpr const char *kClass = "LayerUnit", *kOp = "layer_fake_quant",
                              *kBackward = "layer_fake_quant_backward";
  static constexpr size_t kResults = 3;  // of the op

  std::optional<at::Tensor> kept;  // the values before a learned quantizer, or the packed mask

  template <class Visit>
  void tensors(Visit&& visit) {
    layer_tensors(visit, Keeps::nothing);
  }

  template <class Visit>
  void numbers(Visit&& visit) {
    layer_numbers(visit);
    visit("with_codes", output.with_codes);
  }

  template <class Visit>
  void results(Visit&& visit) {
    visit("y_scale", y_scale, kConstant);
    visit("scale", scale, kConstant);
    visit("kept", kept, kConstant);
  }
};

// A layer with its batch norm and all that follows it up to a quantizer: a residual add and an activation.
struct BatchNormUnit : UnitOfLayer {
  static constexpr const char *kClass = "BatchNormUnit", *kOp = "unit", *kBackward = "unit_backward";
  static constexpr size_t kResults = 3;

  Norm norm;
  std::optional<at::Tensor> running_mean, running_var, batches;
  double momentum;
  bool tracks;  // whether the running statistics take in the batch
  std::optional<std::string> process_group;
  Following following;

  // Of backward alone: the factor of each channel, the layer's output and its statistics; of a frozen batch norm the
  // statistics are copies of the constants.
  std::optional<at::Tensor> factor, undivided, mean, batch_variance, totals;

  template <class Visit>
  void tensors(Visit&& visit) {
    layer_tensors(visit, Keeps::tensor);
    // Of constants backward takes the copies: a process group sends them in place.
    visit("variance", norm.variance, Role{GradientOf::none, keeps_if(!norm.is_frozen())});
    visit("gamma", norm.gamma, Role{GradientOf::gamma, Keeps::tensor});
    visit("beta", norm.beta, Role{GradientOf::beta, Keeps::tensor});
    visit("frozen_mean", norm.frozen_mean, kOfForward);
    visit("running_mean", running_mean, kOfForward);
    visit("running_var", running_var, kOfForward);
    visit("batches", batches, kOfForward);
    // Backward takes the codes of a residual, if it has some. Nobody changes their grid before.
    visit("residual", following.residual, Role{GradientOf::residual, keeps_if(!following.codes.has_value())});
    visit("residual_codes", following.codes, kConstant);
    visit("residual_scale", following.scale, kConstant);
    visit("residual_zero_point", following.zero_point, kConstant);
  }

  template <class Visit>
  void numbers(Visit&& visit) {
    layer_numbers(visit);
    visit("eps", norm.eps);
    visit("momentum", momentum);
    visit("tracks", tracks);
    visit("process_group", process_group);
    visit("low", following.low);
    visit("high", following.high);
    visit("slope", following.slope);
  }

  template <class Visit>
  void results(Visit&& visit) {
    visit("y_scale", y_scale, kConstant);
    visit("factor", factor, kConstant);
    visit("scale", scale, kConstant);
    visit("undivided", undivided, kConstant);
    visit("mean", mean, kConstant);
    visit("batch_variance", batch_variance, kConstant);
    visit("totals", totals, kConstant);
  }
};

// A function of one tensor, or none, and the quantizer of its result. A norm may be of the sum of two tensors, which
// the unit returns too.
struct FunctionUnit : Unit {
  static constexpr const char *kClass = "FunctionUnit", *kOp = "function_fake_quant";

  std::optional<at::Tensor> residual;
  Function function;
  std::optional<at::ScalarType> dtype;  // of y; else x's

  template <class Visit>
  void tensors(Visit&& visit) {
    visit("x", x, kOfForward);
    visit("residual", residual, kOfForward);
    visit("weight", function.weight, kOfForward);
    visit("bias", function.bias, kOfForward);
    output_tensors(visit);
  }

  template <class Visit>
  void numbers(Visit&& visit) {
    visit("function", function.name);
    visit("shape", function.shape);
    visit("eps", function.eps);
    visit("dtype", dtype);
    output_numbers(visit);
    visit("with_codes", output.with_codes);
  }
};

// The products of an attention, with the softmax and its quantizer between them.
struct AttentionUnit : CalledUnit {
  static constexpr const char *kClass = "AttentionUnit", *kOp = "attention_fake_quant",
                              *kBackward = "attention_fake_quant_backward";
  static constexpr size_t kResults = 2;

  ProductOperand q, k, v;
  std::optional<at::Tensor> mask;
  at::ScalarType dtype;
  bool keeps_softmax;
  bool causal;     // query i takes the keys up to i
  double dropout;  // the probability with which a weight becomes zero, after its rounding; where fits_dropout() is true
  OutputQuantizer weights;

  std::optional<at::Tensor> weights_scale, softmax, statistics, seed;  // of backward alone

  at::Tensor first() const { return tensor_in(q.values); }
  void note(const AttentionUnit& /*of_step*/, const at::Tensor& /*y*/) {}

  template <class Visit>
  void tensors(Visit&& visit) {
    // Nobody changes the grids of operands before backward.
    visit("q", q.values, Role{GradientOf::x, keeps_if(!q.codes.has_value())});
    visit("q_codes", q.codes, kConstant);
    visit("q_scale", q.scale, kConstant);
    visit("q_zero_point", q.zero_point, kConstant);
    visit("k", k.values, Role{GradientOf::k, keeps_if(!k.codes.has_value())});
    visit("k_codes", k.codes, kConstant);
    visit("k_scale", k.scale, kConstant);
    visit("k_zero_point", k.zero_point, kConstant);
    visit("v", v.values, Role{GradientOf::v, keeps_if(!v.codes.has_value())});
    visit("v_codes", v.codes, kConstant);
    visit("v_scale", v.scale, kConstant);
    visit("v_zero_point", v.zero_point, kConstant);
    visit("mask", mask, Role{GradientOf::none, keeps_if(!keeps_softmax)});
    const bool is_trained = weights.trained.ratio.has_value();
    visit("weights_start", weights.trained.start, Role{GradientOf::y_start, keeps_if(is_trained)});
    visit("weights_ratio", weights.trained.ratio, Role{GradientOf::y_ratio, Keeps::tensor});
    visit("weights_rate", weights.trained.rate, kConstant);
    visit("weights_zero_point", weights.zero_point, Role{GradientOf::y_zero_point, Keeps::copy});
  }

  template <class Visit>
  void numbers(Visit&& visit) {
    visit("dtype", dtype);
    visit("keeps_softmax", keeps_softmax);
    visit("causal", causal);
    visit("dropout", dropout);
    visit("weights_qmin", weights.qmin);
    visit("weights_qmax", weights.qmax);
    visit("weights_grad_factor", weights.grad_factor);
    visit("weights_float16", weights.trained.float16);
    visit("learned", weights.learned);
  }

  template <class Visit>
  void backward_numbers(Visit&& /*visit*/) {}

  template <class Visit>
  void results(Visit&& visit) {
    visit("weights_scale", weights_scale, kConstant);
    visit("softmax", softmax, kConstant);
    visit("statistics", statistics, kConstant);
    visit("seed", seed, kConstant);
  }
};

// Whether the op may drop weights of an attention with these operands: CUDA's kernel alone does.
bool fits_dropout(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                  at::ScalarType dtype);

// ---- the ops

// The results of a unit's op that the model takes. The codes are undefined where there are none, the scale where there
// is no quantizer, and the sum where the unit adds nothing.
struct UnitOutput {
  at::Tensor y, codes, y_scale, sum = {};
};

UnitOutput call_op(const c10::intrusive_ptr<LayerUnit>& unit);
UnitOutput call_op(const c10::intrusive_ptr<BatchNormUnit>& unit);
UnitOutput call_op(const c10::intrusive_ptr<FunctionUnit>& unit);

// Below are the results and arguments of `unit` and `layer_fake_quant`, and of their backward ops:
//   (U unit, Tensor x) -> (Tensor y, Tensor y_codes, Tensor?[] kept), with x as the dispatcher sees it;
//   (U unit, Tensor grad, bool[] wanted) -> Tensor[], which are the gradients that are wanted.
// Those of an attention have no codes.

template <class U>
c10::List<std::optional<at::Tensor>> results_of(U& unit) {
  c10::List<std::optional<at::Tensor>> kept;
  unit.results([&](const char*, const std::optional<at::Tensor>& field, Role) { kept.push_back(field); });
  return kept;
}

template <class U>
void push_output(torch::jit::Stack* stack, const at::Tensor& y, const at::Tensor& codes, U& unit) {
  torch::jit::drop(*stack, 2);
  torch::jit::push(*stack, y, or_empty(codes, y.options()), results_of(unit));
}

template <class U>
struct UnitBackward {
  c10::intrusive_ptr<U> unit;
  at::Tensor grad;
  ForGradients<bool> wanted;

  explicit UnitBackward(const torch::jit::Stack& stack)
      : unit(torch::jit::peek(stack, 0, 3).toCustomClass<U>()), grad(torch::jit::peek(stack, 1, 3).toTensor()) {
    const c10::List<bool> given = torch::jit::peek(stack, 2, 3).toBoolList();
    TORCH_CHECK_VALUE(given.size() == wanted.values.size(), U::kBackward, ": wanted must have ", wanted.values.size(),
                      " values, one for each gradient, got ", given.size(), ".");
    std::copy(given.begin(), given.end(), wanted.values.begin());
  }

  // One of the results of the op.
  const at::Tensor& kept(const char* name, const std::optional<at::Tensor>& t) const {
    TORCH_CHECK_VALUE(t.has_value(), U::kBackward, ": ", name, " must be given, got None.");
    return *t;
  }

  void push(torch::jit::Stack* stack, const ForGradients<at::Tensor>& gradients) const {
    c10::List<at::Tensor> found;
    for (size_t i = 0; i < wanted.values.size(); ++i) {
      if (wanted.values[i]) found.push_back(or_empty(gradients.values[i], grad.options()));
    }
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, std::move(found));
  }
};

}  // namespace qtoolkit
