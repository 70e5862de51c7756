// The weights of an attention and their gradients on CUDA. A row of scores stays in the registers of a warp, or of a
// block, so that backward reads scores and gradients once.
#include "../fake_quant.h"
#include "../unit/attention_weights.h"
#include "kernels.h"
#include "loops.cuh"
#include "rows.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// The elements of a row that a thread holds: those at `thread`, `thread` + kTeam, ... That is torch's order of sums for
// rows of up to 1024 elements, so that both have the same bits.
template <int kTeam, int kMost, class F>
QT_DEVICE void each_element(int64_t length, F f) {
  const int thread = threadIdx.x % kTeam;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int place = thread + i * kTeam;
    if (place < length) f(i, place);
  }
}

// `coarse`: the result is rounded to a grid on which the last bits of values below 2^-40 do not matter.
template <int kTeam, int kMost>
QT_DEVICE void softmax_of_row(int64_t length, bool coarse, float (&v)[kMost]) {
  float largest = -INFINITY;
  each_element<kTeam, kMost>(length, [&](int i, int) { largest = RowLargest::join(largest, v[i]); });
  largest = join_row<RowLargest, kTeam>(largest);
  float sum = 0;
  each_element<kTeam, kMost>(length, [&](int i, int) {
    v[i] = ::expf(v[i] - largest);
    sum += v[i];
  });
  sum = join_row<RowSum, kTeam>(sum);
  const Divisor divisor(sum);
  if (coarse && divisor.most >= 1) {  // the largest element is 1
    each_element<kTeam, kMost>(length, [&](int i, int) { v[i] = v[i] / divisor; });
  } else {
    each_element<kTeam, kMost>(length, [&](int i, int) { v[i] = v[i] / sum; });
  }
}

// Zeros after the elements of a row, up to the next row.
template <int kTeam, class T>
QT_DEVICE void clear_gap(T* row, int64_t length, int64_t stride) {
  for (int64_t place = length + threadIdx.x % kTeam; place < stride; place += kTeam)
    row[place] = from_arithmetic<T>(0.0f);
}

template <class T>
QT_DEVICE T* row_of(const ScoreRows& rows, int64_t row) {
  return static_cast<T*>(rows.data) + row * rows.stride;
}

// X is the type of the scores, Y that of weights and gradients; a row has kTeam threads with up to kMost elements each.
template <class X, class Y, int kTeam, int kMost, bool kBackward>
__global__ void __launch_bounds__(kThreads, kMost == 8  ? 3
                                            : kBackward ? 1
                                                        : 2)
    attention_weights_kernel(const __grid_constant__ AttentionWeights args, double* parts) {
  constexpr int kRows = kThreads / kTeam;
  const bool rounds = args.scale != nullptr;
  const float scale = rounds ? usable_scale(__ldg(static_cast<const float*>(args.scale))) : 1.0f;
  const float* zero = static_cast<const float*>(args.zero_point);
  const float zero_point = zero == nullptr ? 0.0f : usable_zero_point(__ldg(zero));
  const float lo = static_cast<float>(args.bounds.lo), hi = static_cast<float>(args.bounds.hi);
  const Divisor divisor(scale);
  const bool divides_weights = divisor.most >= 1;  // which are at most 1
  Pair total = {0, 0};
  // All threads of a block take part in each reduction, those of a row that there is not too.
  for (int64_t first = int64_t{blockIdx.x} * kRows; first < args.rows; first += int64_t{gridDim.x} * kRows) {
    const int64_t row = first + threadIdx.x / kTeam;
    const int64_t length = row < args.rows ? args.length : 0;
    float weights[kMost];
    const X* scores = row_of<X>(args.scores, row);
    each_element<kTeam, kMost>(length, [&](int i, int place) { weights[i] = to_arithmetic<float>(scores[place]); });
    float grads[kBackward ? kMost : 1];
    Y* grad = kBackward ? row_of<Y>(args.grad, row) : nullptr;
    if constexpr (kBackward) {
      each_element<kTeam, kMost>(length, [&](int i, int place) { grads[i] = to_arithmetic<float>(grad[place]); });
    }
    softmax_of_row<kTeam>(length, rounds && scale >= 0x1p-30f, weights);
    Y* to = row_of<Y>(args.weights, row);
    float dot = 0, of_scale = 0, of_zero_point = 0;
    const auto round_by = [&](auto by) {
      each_element<kTeam, kMost>(length, [&](int i, int place) {
        const auto point = snap(weights[i], by, zero_point, lo, hi);
        to[place] = from_arithmetic<Y>(value_of(point.code, scale, zero_point));
        if constexpr (kBackward) {
          of_scale += scale_gradient(point, grads[i], zero_point);
          of_zero_point += zero_point_gradient<float>(point, grads[i], scale);
          grads[i] = is_inside(point) ? grads[i] : 0.0f;
          dot += grads[i] * weights[i];
        }
      });
    };
    if (!rounds) {
      each_element<kTeam, kMost>(length, [&](int i, int place) {
        to[place] = from_arithmetic<Y>(weights[i]);
        if constexpr (kBackward) dot += grads[i] * weights[i];
      });
    } else if (divides_weights) {
      round_by(divisor);
    } else {
      round_by(scale);
    }
    if (length > 0) clear_gap<kTeam>(to, length, args.weights.stride);
    if constexpr (kBackward) {
      dot = join_row<RowSum, kTeam>(dot);
      each_element<kTeam, kMost>(
          length, [&](int i, int place) { grad[place] = from_arithmetic<Y>(weights[i] * (grads[i] - dot)); });
      if (length > 0) clear_gap<kTeam>(grad, length, args.grad.stride);
      total.first += of_scale;
      total.second += of_zero_point;
    }
  }
  if constexpr (kBackward) {
    if (parts == nullptr) return;
    const Pair sum = sum_of_block(total);
    if (threadIdx.x == 0) write({parts, parts + gridDim.x}, blockIdx.x, sum);
  }
}

// A function of the shape alone: every GPU sums in the same order.
int64_t attention_blocks(const AttentionWeights& args) {
  constexpr int64_t kMostBlocks = 1 << 12;
  return least(divide_up(args.rows, args.length <= 32 * 32 ? kThreads / 32 : 1), kMostBlocks);
}

template <class X, class Y, int kTeam, int kMost>
void launch_rows(const AttentionWeights& args, double* parts, cudaStream_t stream) {
  const auto kernel = args.grad.data == nullptr ? attention_weights_kernel<X, Y, kTeam, kMost, false>
                                                : attention_weights_kernel<X, Y, kTeam, kMost, true>;
  kernel<<<static_cast<unsigned>(attention_blocks(args)), kThreads, 0, stream>>>(args, parts);
}

template <class X, class Y>
void launch_lengths(const AttentionWeights& args, double* parts, cudaStream_t stream) {
  if (args.length <= 32 * 8) return launch_rows<X, Y, 32, 8>(args, parts, stream);
  if (args.length <= 32 * 32) return launch_rows<X, Y, 32, 32>(args, parts, stream);
  launch_rows<X, Y, kThreads, kLongestScores / kThreads>(args, parts, stream);
}

template <class Y>
void launch_types(const AttentionWeights& args, double* parts, cudaStream_t stream) {
  if (args.scores.dtype == args.weights.dtype) return launch_lengths<Y, Y>(args, parts, stream);
  launch_lengths<float, Y>(args, parts, stream);  // scores and a mask of float32
}

}  // namespace

int64_t attention_workspace(const AttentionWeights& args) {
  return args.sums == nullptr ? 0 : 2 * attention_blocks(args);
}

void attention_weights(const AttentionWeights& args, double* workspace, cudaStream_t stream) {
  double* parts = args.sums == nullptr ? nullptr : workspace;
  switch (args.weights.dtype) {
    case Dtype::f32: launch_types<float>(args, parts, stream); break;
    case Dtype::bf16: launch_types<__nv_bfloat16>(args, parts, stream); break;
    default: launch_types<__half>(args, parts, stream);
  }
  if (parts == nullptr) return;
  const int64_t blocks = attention_blocks(args);
  const Pairs from = {parts, parts + blocks}, to = {args.sums, args.sums + 1};
  join_slices<Add><<<1, kThreads, 0, stream>>>(from, blocks, to, Pair{0, 0}, Add());
}

}  // namespace cuda
}  // namespace qtoolkit
