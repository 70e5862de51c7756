// An attention with quantized weights as CUDA kernels that never write its scores: memory is linear in the number of
// queries and keys (FlashAttention-2, arXiv 2307.08691). Unlike there, forward and backward go over the keys of a query
// twice: a weight is rounded after it is divided by its sum, and the rounding decides which gradients pass.
#pragma once

#include "unit_scales.h"

namespace qtoolkit {

// Rows of query, key, value or gradient: (batch, places, features), contiguous. Values, or codes with their scale.
struct AttentionRows {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t features = 0;
  const void *scale = nullptr, *zero_point = nullptr;  // one float each: of codes, and null if symmetric
};

// What is added to scores, with strides in elements. The batch is (outer, inner).
struct AttentionMask {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;  // float32, or that of the products
  int64_t inner = 1;
  int64_t outer_stride = 0, inner_stride = 0, query_stride = 0, key_stride = 0;
};

struct FlashAttention {
  int64_t batch = 0, queries = 0, keys = 0;
  Dtype dtype = Dtype::bf16;  // of the products: bfloat16 or float16
  AttentionRows q, k, v;
  AttentionMask mask;
  bool causal = false;          // query i has the keys up to i
  const void* scale = nullptr;  // one float, or null: the weights are not rounded
  const void* zero_point = nullptr;
  TrainedScale made;  // what the scale is made of, which forward writes; without a start it is made before
  CodeBounds bounds;
  double dropout = 0;             // the probability with which a weight becomes zero
  const int64_t* seed = nullptr;  // of dropout

  // Forward writes them: the largest score of each query times log2 e, the inverses of the sums of their exponentials,
  // and the interval of the weights whose gradient passes.
  float* statistics = nullptr;
  void* y = nullptr;  // (batch, queries, features of the value)

  AttentionRows grad;  // of y
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  float* dots = nullptr;   // memory for a number of each query
  double* sums = nullptr;  // of the gradients of scale and zero point; null if they are not wanted

  constexpr bool is_backward() const { return grad.data != nullptr; }
};

// Of a query, a key or a value.
constexpr int64_t kMostHeadFeatures = 128;

}  // namespace qtoolkit
