// The weights of an attention, as one CUDA kernel makes them and their gradients: the softmax of each row of scores, on
// a grid.
#pragma once

#include "../kernel_args.h"

namespace qtoolkit {

// A matrix with a row for each query. Rows begin at multiples of a stride; after those that are written are zeros.
struct ScoreRows {
  void* data = nullptr;
  int64_t stride = 0;  // in elements
  Dtype dtype = Dtype::f32;
};

struct AttentionWeights {
  int64_t rows = 0, length = 0;
  ScoreRows scores;   // read
  ScoreRows weights;  // written; may be the scores
  ScoreRows grad;     // of the weights: backward replaces it by that of the scores. Without data there is no backward
  const void* scale = nullptr;       // one float, or null: the weights are not rounded
  const void* zero_point = nullptr;  // likewise; null if symmetric
  CodeBounds bounds;
  double* sums = nullptr;  // of the gradients of scale and zero point; null if they are not wanted
};

// Longer rows do not fit into the registers of a block.
constexpr int64_t kLongestScores = 8192;

}  // namespace qtoolkit
