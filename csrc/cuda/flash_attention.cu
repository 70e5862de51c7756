// An attention with quantized weights, and its gradients, without a matrix of scores in memory
// (unit/flash_attention.h). Four warps share the tiles of keys and values that pass by in shared memory, while each of
// them holds 16 queries, or 16 keys, and what is computed for them in registers.
#include <cuda_pipeline_primitives.h>

#include "../fake_quant.h"
#include "../passed_interval.h"
#include "../unit/flash_attention.h"
#include "divisor.cuh"
#include "gradients.cuh"
#include "kernels.h"
#include "mma.cuh"
#include "unit_scales.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

constexpr int kWarps = 4, kFlashThreads = 32 * kWarps;
constexpr int kOwnRows = 16 * kWarps;  // of a block: queries, or in one kernel keys
constexpr float kLog2E = 1.4426950408889634f;

// T is the type of the products; rows have kFeatures elements in shared memory, with zeros at their end.
template <class T_, int kFeatures_>
struct Tiles {
  using T = T_;
  static constexpr int kFeatures = kFeatures_, kSteps = kFeatures / 16, kStride = kFeatures + 8;
  static constexpr int kRows = kFeatures <= 64 ? 64 : 32;  // that pass by at once
  static constexpr int kTile = kRows * kStride, kOwn = kOwnRows * kStride;
  using Lefts = LeftFragment[kSteps];                           // the rows of a warp
  using Scores = ResultFragment[kRows / 8];                     // of a warp's rows and a tile
  using ScoresLeft = LeftFragment[kRows / 16];                  // the same in 16 bits
  using Results = ResultFragment[kFeatures / 8];                // for the rows of a warp
  static constexpr size_t kRowsMemory = 4 * kTile * sizeof(T);  // two stages of two tiles
  static constexpr size_t kColumnsMemory = kRowsMemory + 2 * kOwn * sizeof(T) + 2 * 3 * kRows * sizeof(float);
};

QT_DEVICE int own_row(int half) { return threadIdx.x / 32 * 16 + half * 8 + lane_row(); }

// The rows of a block in one matrix of the batch.
struct OwnRows {
  int64_t matrix;
  int first;

  __device__ explicit OwnRows(int64_t rows) {
    const unsigned blocks = static_cast<unsigned>(divide_up(rows, kOwnRows));
    matrix = blockIdx.x / blocks;
    first = static_cast<int>(blockIdx.x % blocks) * kOwnRows;
  }
};

// ---- memory

// Writes to shared memory, where store_dense() does not.
template <class T>
QT_DEVICE void put(const float (&v)[kVectorSize], T* to) {
  Pack<T> pack;
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) pack.v[k] = from_arithmetic<T>(v[k]);
  *reinterpret_cast<Pack<T>*>(to) = pack;
}

template <class T, class Code>
QT_DEVICE void load_codes(const AttentionRows& from, int64_t place, const Contiguous& at, T* to) {
  const float scale = usable_scale(__ldg(static_cast<const float*>(from.scale)));
  const auto* zero = static_cast<const float*>(from.zero_point);
  const float zero_point = zero == nullptr ? 0.0f : usable_zero_point(__ldg(zero));
  float v[kVectorSize];
  load_dense(static_cast<const Code*>(from.data) + place, at, v);
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) v[k] = k < at.n ? value_of(v[k], scale, zero_point) : 0.0f;
  put(v, to);
}

// Copies rows to a tile, from row `first` of a matrix with `places` of them. Zeros follow where rows or features end.
// Values are there after the next wait for copies and barrier.
template <class Shape, int kRows>
QT_DEVICE void load_rows(const AttentionRows& from, int64_t matrix, int64_t places, int first,
                         typename Shape::T* tile) {
  using T = typename Shape::T;
  constexpr int kVectors = Shape::kFeatures / kVectorSize;
  const int features = static_cast<int>(from.features);
#pragma unroll 4
  for (int vector = threadIdx.x; vector < kRows * kVectors; vector += kFlashThreads) {
    const int row = vector / kVectors, column = vector % kVectors * kVectorSize;
    T* to = tile + row * Shape::kStride + column;
    if (first + row >= places || column >= features) {
      *reinterpret_cast<Pack<T>*>(to) = Pack<T>{};
      continue;
    }
    const int64_t place = (matrix * places + first + row) * features + column;
    const Contiguous at = vector_at(column, features);
    const Contiguous here = {0, at.n, at.is_whole};
    if (from.scale == nullptr) {
      const T* data = static_cast<const T*>(from.data) + place;
      if (here.is_whole && is_aligned(data)) {
        __pipeline_memcpy_async(to, data, sizeof(Pack<T>));
      } else {
        float v[kVectorSize];
        load_dense(data, here, v);
        put(v, to);
      }
    } else if (from.dtype == Dtype::i8) {
      load_codes<T, int8_t>(from, place, here, to);
    } else {
      load_codes<T, uint8_t>(from, place, here, to);
    }
  }
}

QT_DEVICE void wait_for_copies() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
}

// Calls load(tile, stage) for each tile, and use(tile, stage) when it has arrived: while one is used, the next comes.
template <class Load, class Use>
QT_DEVICE void for_tiles(int begin, int end, Load load, Use use) {
  if (begin >= end) return wait_for_copies();  // of those before
  load(begin, 0);
  __pipeline_commit();
  for (int tile = begin; tile < end; ++tile) {
    const int stage = (tile - begin) % 2;
    if (tile + 1 < end) load(tile + 1, 1 - stage);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    use(tile, stage);
    __syncthreads();  // before the next but one comes
  }
}

// Writes a warp's rows to memory, through a tile of the block.
template <class Shape>
QT_DEVICE void store_rows(const typename Shape::Results& rows, typename Shape::T* tile, int64_t matrix, int64_t places,
                          int first, int features, void* to) {
  using T = typename Shape::T;
#pragma unroll
  for (int n = 0; n < Shape::kFeatures / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* at = tile + own_row(half) * Shape::kStride + n * 8 + lane_pair();
      *reinterpret_cast<uint32_t*>(at) = packed_pair<T>(rows[n].v[2 * half], rows[n].v[2 * half + 1]);
    }
  }
  __syncthreads();
  constexpr int kVectors = Shape::kFeatures / kVectorSize;
  for (int vector = threadIdx.x; vector < kOwnRows * kVectors; vector += kFlashThreads) {
    const int row = vector / kVectors, column = vector % kVectors * kVectorSize;
    if (first + row >= places || column >= features) continue;
    float v[kVectorSize];
    load_dense(tile + row * Shape::kStride + column, whole_at(0), true, v);
    const Contiguous at = vector_at(column, features);
    store_dense(static_cast<T*>(to) + (matrix * places + first + row) * features + column,
                Contiguous{0, at.n, at.is_whole}, v);
  }
}

// ---- scores and weights

template <int kRows, class F>
QT_DEVICE void each_score(F f) {
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f(n, i, own_row(i / 2), n * 8 + lane_pair() + i % 2);
  }
}

// What happens to scores and weights at their places in a matrix of the batch.
template <class T>
class Places {
 public:
  __device__ Places(const FlashAttention& args, int64_t matrix) : args_(args), matrix_(matrix) {
    mask_ = (matrix / args.mask.inner) * args.mask.outer_stride + (matrix % args.mask.inner) * args.mask.inner_stride;
    dropped_ = static_cast<uint64_t>(args.dropout * 4294967296.0);
    factor_ = args.dropout >= 1 ? 0.0f : static_cast<float>(1 / (1 - args.dropout));
    seed_ = args.seed == nullptr ? 0 : static_cast<uint64_t>(__ldg(args.seed));
  }

  // Makes scores of the products of rows, from `first_query` and `first_key` on; queries are the rows, or kKeys are.
  template <bool kKeys, int kRows>
  __device__ __forceinline__ void mask(int first_query, int first_key, ResultFragment (&products)[kRows / 8]) const {
    const int queries = kKeys ? kRows : kOwnRows, keys = kKeys ? kOwnRows : kRows;
    const bool whole = first_query + queries <= args_.queries && first_key + keys <= args_.keys;
    if (whole && args_.mask.data == nullptr && !(args_.causal && first_key + keys - 1 > first_query)) return;
    each_score<kRows>([&](int n, int i, int row, int column) {
      products[n].v[i] =
          masked(products[n].v[i], first_query + (kKeys ? column : row), first_key + (kKeys ? row : column));
    });
  }

  // Multiplies weights, or their gradients, by what dropout leaves of them.
  template <bool kKeys, int kRows>
  __device__ __forceinline__ void drop(int first_query, int first_key, ResultFragment (&weights)[kRows / 8]) const {
    if (args_.seed == nullptr) return;
    each_score<kRows>([&](int n, int i, int row, int column) {
      const int query = first_query + (kKeys ? column : row), key = first_key + (kKeys ? row : column);
      weights[n].v[i] *= is_dropped(query, key) ? 0.0f : factor_;
    });
  }

 private:
  // Queries that there are not have zeros, so that nothing becomes NaN.
  __device__ __forceinline__ float masked(float product, int query, int key) const {
    if (query >= args_.queries) return 0.0f;
    if (key >= args_.keys || (args_.causal && key > query)) return -INFINITY;
    if (args_.mask.data == nullptr) return product;
    const int64_t place = mask_ + query * args_.mask.query_stride + key * args_.mask.key_stride;
    return product + (args_.mask.dtype == Dtype::f32
                          ? static_cast<const float*>(args_.mask.data)[place]
                          : to_arithmetic<float>(static_cast<const T*>(args_.mask.data)[place]));
  }

  // By the number that SplitMix64 has for the place (Steele, Lea and Flood, OOPSLA 2014).
  __device__ __forceinline__ bool is_dropped(int query, int key) const {
    const uint64_t place = (static_cast<uint64_t>(matrix_) * args_.queries + query) * args_.keys + key;
    uint64_t bits = seed_ + (place + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return ((bits ^ bits >> 31) >> 32) < dropped_;
  }

  const FlashAttention& args_;
  int64_t matrix_, mask_;
  uint64_t dropped_, seed_;
  float factor_;
};

// e^(score - largest), where `shift` is the largest score times log2 e: one operation and an instruction.
QT_DEVICE float exponential(float score, float shift) {
  float result = ::fmaf(score, kLog2E, -shift);
#if __CUDA_ARCH__ >= 800
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(result));
#endif
  return result;
}

// Of a query: the largest score times log2 e, and the inverse of the sum of all exponentials.
struct Softmax {
  float shift, inverse;

  __device__ __forceinline__ float weight(float score) const { return exponential(score, shift) * inverse; }
};

// The largest of some scores, and the sum of their exponentials.
struct RunningSoftmax {
  float largest = -INFINITY, sum = 0;

  // Makes room for scores of up to `other`, and returns by what scores are shifted.
  __device__ __forceinline__ float grow(float other) {
    const float before = largest;
    largest = ::fmaxf(largest, other);
    const float shift = largest == -INFINITY ? 0.0f : largest * kLog2E;
    sum *= exponential(before, shift);
    return shift;
  }
};

// The grid of weights, which are from 0 to 1.
class WeightGrid {
 public:
  __device__ explicit WeightGrid(const FlashAttention& args)
      : rounds_(args.scale != nullptr), scale_(rounds_ ? usable_scale(made_scale(args.made, args.scale)) : 1.0f) {
    const auto* zero = static_cast<const float*>(args.zero_point);
    const float zero_point = zero == nullptr ? 0.0f : usable_zero_point(__ldg(zero));
    const float lo = static_cast<float>(args.bounds.lo), hi = static_cast<float>(args.bounds.hi);
    low_ = lo - zero_point;
    high_ = hi - zero_point;
    float* interval = args.statistics + 2 * args.batch * args.queries;
    if (args.is_backward()) {
      above_ = interval[0];
      below_ = interval[1];
    } else if (blockIdx.x == 0 && threadIdx.x == 0) {
      interval[0] = rounds_ ? passed_above(scale_.value, zero_point, lo, hi) : -INFINITY;
      interval[1] = rounds_ ? passed_below(scale_.value, zero_point, lo, hi) : INFINITY;
    }
  }

  __device__ float scale() const { return scale_.value; }
  __device__ __forceinline__ float value(float weight) const {
    return rounds_ ? steps(weight / scale_) * scale_.value : weight;
  }
  // Whether the gradient passes; in backward.
  __device__ __forceinline__ bool passes(float weight) const { return above_ < weight && weight < below_; }
  // The derivative of the value with respect to the scale.
  __device__ __forceinline__ float of_scale(float weight) const {
    const float quotient = weight / scale_;
    return steps(quotient) - (passes(weight) ? quotient : 0.0f);
  }

 private:
  // The code less the zero point, as snap() has it: bounds are integers, so that it may be clamped first. Then an
  // addition rounds it, which is faster than the instruction.
  __device__ __forceinline__ float steps(float quotient) const {
    constexpr float kIntegers = 0x1.8p23f;  // the next numbers are integers
    return (clamp(quotient, low_, high_) + kIntegers) - kIntegers;
  }

  bool rounds_;
  Divisor scale_;
  float low_, high_, above_ = 0, below_ = 0;
};

template <class T, int kCount>
QT_DEVICE void to_left(const ResultFragment (&from)[2 * kCount], LeftFragment (&to)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) to[k] = as_left<T>(from[2 * k], from[2 * k + 1]);
}

// The products of a warp's rows and those of a tile.
template <class Shape, class Left>
QT_DEVICE void products(Left left_at, const typename Shape::T* tile, typename Shape::Scores& result) {
#pragma unroll
  for (auto& each : result) each = {};
  multiply_transposed<typename Shape::T, Shape::kStride, Shape::kSteps, Shape::kRows>(left_at, tile, result);
}

// ---- kernels

// The tiles of keys that the queries of a block look at: all, where hidden weights, which are zero, become others.
template <class Shape>
QT_DEVICE int tiles_of_keys(const FlashAttention& args, const WeightGrid& grid, int first) {
  int64_t keys = args.keys;
  if (args.causal && grid.value(0.0f) == 0) keys = least(keys, int64_t{first} + kOwnRows);
  return static_cast<int>(divide_up(keys, Shape::kRows));
}

template <class Shape>
QT_DEVICE void take_left(const AttentionRows& rows, const OwnRows& own, int64_t places, typename Shape::T* tile,
                         typename Shape::Lefts& left) {
  load_rows<Shape, kOwnRows>(rows, own.matrix, places, own.first, tile);
  wait_for_copies();
#pragma unroll
  for (int k = 0; k < Shape::kSteps; ++k) {
    left[k] = left_of_tile<Shape::kStride>(tile, threadIdx.x / 32 * 16, k * 16);
  }
  __syncthreads();  // before the tile is written again
}

template <class T, int kFeatures>
__global__ void __launch_bounds__(kFlashThreads, 2) flash_forward_kernel(const __grid_constant__ FlashAttention args) {
  using Shape = Tiles<T, kFeatures>;
  extern __shared__ uint4 flash_memory[];
  T* tiles = reinterpret_cast<T*>(flash_memory);
  const WeightGrid grid(args);
  const OwnRows own(args.queries);
  const Places<T> places(args, own.matrix);
  const int count = tiles_of_keys<Shape>(args, grid, own.first);
  typename Shape::Lefts q;
  take_left<Shape>(args.q, own, args.queries, tiles, q);
  const auto of_q = [&](int k) { return q[k]; };
  const auto keys_at = [&](int stage) { return tiles + 2 * stage * Shape::kTile; };
  const auto load_keys = [&](int tile, int stage) {
    load_rows<Shape, Shape::kRows>(args.k, own.matrix, args.keys, tile * Shape::kRows, keys_at(stage));
  };

  RunningSoftmax running[2];
  for_tiles(0, count, load_keys, [&](int tile, int stage) {
    typename Shape::Scores s;
    products<Shape>(of_q, keys_at(stage), s);
    places.template mask<false, Shape::kRows>(own.first, tile * Shape::kRows, s);
    float largest[2] = {-INFINITY, -INFINITY};
    each_score<Shape::kRows>([&](int n, int i, int, int) { largest[i / 2] = ::fmaxf(largest[i / 2], s[n].v[i]); });
    const float shift[2] = {running[0].grow(largest[0]), running[1].grow(largest[1])};
    each_score<Shape::kRows>(
        [&](int n, int i, int, int) { running[i / 2].sum += exponential(s[n].v[i], shift[i / 2]); });
  });
  Softmax softmax[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      const float largest = __shfl_xor_sync(~0u, running[half].largest, lanes);
      const float sum = __shfl_xor_sync(~0u, running[half].sum, lanes);
      const float shift = running[half].grow(largest);
      running[half].sum += sum * exponential(largest, shift);
    }
    softmax[half] = {running[half].largest * kLog2E, 1 / running[half].sum};
    const int query = own.first + own_row(half);
    if (lane_pair() == 0 && query < args.queries) {
      float* statistics = args.statistics + own.matrix * args.queries + query;
      statistics[0] = softmax[half].shift;
      statistics[args.batch * args.queries] = softmax[half].inverse;
    }
  }

  typename Shape::Results y = {};
  const auto load_both = [&](int tile, int stage) {
    load_keys(tile, stage);
    load_rows<Shape, Shape::kRows>(args.v, own.matrix, args.keys, tile * Shape::kRows, keys_at(stage) + Shape::kTile);
  };
  for_tiles(0, count, load_both, [&](int tile, int stage) {
    typename Shape::Scores s;
    products<Shape>(of_q, keys_at(stage), s);
    places.template mask<false, Shape::kRows>(own.first, tile * Shape::kRows, s);
    each_score<Shape::kRows>([&](int n, int i, int, int) { s[n].v[i] = grid.value(softmax[i / 2].weight(s[n].v[i])); });
    places.template drop<false, Shape::kRows>(own.first, tile * Shape::kRows, s);
    typename Shape::ScoresLeft weights;
    to_left<T>(s, weights);
    multiply_tile<T, Shape::kStride, Shape::kRows / 16, kFeatures>(weights, keys_at(stage) + Shape::kTile, y);
  });
  store_rows<Shape>(y, tiles, own.matrix, args.queries, own.first, static_cast<int>(args.v.features), args.y);
}

// The gradient of the queries, the sum of a query's weights times their gradients, and terms of the grid's gradients.
template <class T, int kFeatures>
__global__ void __launch_bounds__(kFlashThreads, 2)
    flash_queries_backward_kernel(const __grid_constant__ FlashAttention args, double* parts) {
  using Shape = Tiles<T, kFeatures>;
  extern __shared__ uint4 flash_memory[];
  T* tiles = reinterpret_cast<T*>(flash_memory);
  const WeightGrid grid(args);
  const OwnRows own(args.queries);
  const Places<T> places(args, own.matrix);
  const int count = tiles_of_keys<Shape>(args, grid, own.first);
  typename Shape::Lefts q, dy;
  take_left<Shape>(args.q, own, args.queries, tiles, q);
  take_left<Shape>(args.grad, own, args.queries, tiles, dy);
  Softmax softmax[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = own.first + own_row(half);
    const float* statistics = args.statistics + own.matrix * args.queries + query;
    if (query < args.queries) softmax[half] = {statistics[0], statistics[args.batch * args.queries]};
  }
  const auto keys_at = [&](int stage) { return tiles + 2 * stage * Shape::kTile; };
  const auto load_both = [&](int tile, int stage) {
    const int first = tile * Shape::kRows;
    load_rows<Shape, Shape::kRows>(args.k, own.matrix, args.keys, first, keys_at(stage));
    load_rows<Shape, Shape::kRows>(args.v, own.matrix, args.keys, first, keys_at(stage) + Shape::kTile);
  };
  // The weights of a tile, and their gradients.
  const auto weights_of = [&](int tile, int stage, typename Shape::Scores& weights, typename Shape::Scores& grads) {
    products<Shape>([&](int k) { return q[k]; }, keys_at(stage), weights);
    products<Shape>([&](int k) { return dy[k]; }, keys_at(stage) + Shape::kTile, grads);
    places.template mask<false, Shape::kRows>(own.first, tile * Shape::kRows, weights);
    places.template drop<false, Shape::kRows>(own.first, tile * Shape::kRows, grads);
    each_score<Shape::kRows>([&](int n, int i, int, int) { weights[n].v[i] = softmax[i / 2].weight(weights[n].v[i]); });
  };

  float dots[2] = {0, 0};
  Pair total = {0, 0};
  for_tiles(0, count, load_both, [&](int tile, int stage) {
    typename Shape::Scores weights, grads;
    weights_of(tile, stage, weights, grads);
    if (parts != nullptr) {
      float sum = 0;
      each_score<Shape::kRows>([&](int n, int i, int, int) { sum += grads[n].v[i] * grid.of_scale(weights[n].v[i]); });
      total.first += sum;
    }
    if (parts != nullptr && args.zero_point != nullptr) {
      float sum = 0;
      each_score<Shape::kRows>(
          [&](int n, int i, int, int) { sum += grid.passes(weights[n].v[i]) ? 0.0f : grads[n].v[i]; });
      total.second -= sum * grid.scale();
    }
    each_score<Shape::kRows>([&](int n, int i, int, int) {
      const float grad = grid.passes(weights[n].v[i]) ? grads[n].v[i] : 0.0f;
      dots[i / 2] += grad * weights[n].v[i];
    });
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    dots[half] += __shfl_xor_sync(~0u, dots[half], 1);
    dots[half] += __shfl_xor_sync(~0u, dots[half], 2);
    const int query = own.first + own_row(half);
    if (lane_pair() == 0 && query < args.queries) args.dots[own.matrix * args.queries + query] = dots[half];
  }

  typename Shape::Results dq = {};
  for_tiles(0, count, load_both, [&](int tile, int stage) {
    typename Shape::Scores weights, grads;
    weights_of(tile, stage, weights, grads);
    each_score<Shape::kRows>([&](int n, int i, int, int) {
      const float grad = grid.passes(weights[n].v[i]) ? grads[n].v[i] : 0.0f;
      grads[n].v[i] = weights[n].v[i] * (grad - dots[i / 2]);
    });
    typename Shape::ScoresLeft left;
    to_left<T>(grads, left);
    multiply_tile<T, Shape::kStride, Shape::kRows / 16, kFeatures>(left, keys_at(stage), dq);
  });
  store_rows<Shape>(dq, tiles, own.matrix, args.queries, own.first, static_cast<int>(args.q.features), args.dq);
  if (parts == nullptr) return;
  const Pair sum = sum_of_block(total);
  if (threadIdx.x == 0) write({parts, parts + gridDim.x}, blockIdx.x, sum);
}

// The gradients of keys and values, after those of the queries, of whose blocks there are `count`: the first block
// joins their parts, and writes the gradients that are computed from the sums.
template <class T, int kFeatures>
__global__ void __launch_bounds__(kFlashThreads, 2)
    flash_keys_backward_kernel(const __grid_constant__ FlashAttention args, const __grid_constant__ UnitGradients unit,
                               const __grid_constant__ AllGradients before, const double* parts, int64_t count) {
  using Shape = Tiles<T, kFeatures>;
  extern __shared__ uint4 flash_memory[];
  T* own_keys = reinterpret_cast<T*>(flash_memory);
  T* own_values = own_keys + Shape::kOwn;
  T* tiles = own_values + Shape::kOwn;
  float* numbers = reinterpret_cast<float*>(tiles + 4 * Shape::kTile);  // of queries, three each
  const WeightGrid grid(args);
  const OwnRows own(args.keys);
  const Places<T> places(args, own.matrix);
  load_rows<Shape, kOwnRows>(args.k, own.matrix, args.keys, own.first, own_keys);
  load_rows<Shape, kOwnRows>(args.v, own.matrix, args.keys, own.first, own_values);
  const auto queries_at = [&](int stage) { return tiles + 2 * stage * Shape::kTile; };
  const auto numbers_at = [&](int stage) { return numbers + 3 * stage * Shape::kRows; };
  const auto load_both = [&](int tile, int stage) {
    const int first = tile * Shape::kRows, query = first + static_cast<int>(threadIdx.x);
    load_rows<Shape, Shape::kRows>(args.q, own.matrix, args.queries, first, queries_at(stage));
    load_rows<Shape, Shape::kRows>(args.grad, own.matrix, args.queries, first, queries_at(stage) + Shape::kTile);
    if (threadIdx.x >= Shape::kRows) return;
    const bool exists = query < args.queries;
    const int64_t place = own.matrix * args.queries + query, all = args.batch * args.queries;
    float* to = numbers_at(stage) + threadIdx.x;
    to[0] = exists ? args.statistics[place] : 0.0f;
    to[Shape::kRows] = exists ? args.statistics[all + place] : 0.0f;
    to[2 * Shape::kRows] = exists ? args.dots[place] : 0.0f;
  };

  typename Shape::Results dk = {}, dv = {};
  const int begin = args.causal && grid.value(0.0f) == 0 ? own.first / Shape::kRows : 0;
  const int end = static_cast<int>(divide_up(args.queries, Shape::kRows));
  for_tiles(begin, end, load_both, [&](int tile, int stage) {
    const int warp_row = threadIdx.x / 32 * 16;
    const int first = tile * Shape::kRows;
    typename Shape::Scores weights, grads;
    const auto of_keys = [&](int k) { return left_of_tile<Shape::kStride>(own_keys, warp_row, k * 16); };
    const auto of_values = [&](int k) { return left_of_tile<Shape::kStride>(own_values, warp_row, k * 16); };
    products<Shape>(of_keys, queries_at(stage), weights);
    products<Shape>(of_values, queries_at(stage) + Shape::kTile, grads);
    places.template mask<true, Shape::kRows>(first, own.first, weights);
    places.template drop<true, Shape::kRows>(first, own.first, grads);
    each_score<Shape::kRows>([&](int n, int i, int, int column) {
      const float* of_query = numbers_at(stage) + column;
      const Softmax softmax = {of_query[0], of_query[Shape::kRows]};
      const float weight = softmax.weight(weights[n].v[i]);
      const float grad = grid.passes(weight) ? grads[n].v[i] : 0.0f;
      grads[n].v[i] = weight * (grad - of_query[2 * Shape::kRows]);
      weights[n].v[i] = grid.value(weight);
    });
    places.template drop<true, Shape::kRows>(first, own.first, weights);
    typename Shape::ScoresLeft left;
    to_left<T>(weights, left);
    multiply_tile<T, Shape::kStride, Shape::kRows / 16, kFeatures>(left, queries_at(stage) + Shape::kTile, dv);
    to_left<T>(grads, left);
    multiply_tile<T, Shape::kStride, Shape::kRows / 16, kFeatures>(left, queries_at(stage), dk);
  });
  store_rows<Shape>(dk, own_keys, own.matrix, args.keys, own.first, static_cast<int>(args.k.features), args.dk);
  store_rows<Shape>(dv, own_values, own.matrix, args.keys, own.first, static_cast<int>(args.v.features), args.dv);
  if (blockIdx.x == 0 && args.sums != nullptr) join_sums(args.sums, parts, parts + count, count, unit, before);
}

// ---- launches

int64_t blocks_of(const FlashAttention& args, int64_t rows) { return args.batch * divide_up(rows, kOwnRows); }

// A block may have more shared memory than it has without being asked for.
template <class... Parameters>
void allow_memory(void (*kernel)(Parameters...), size_t bytes) {
  constexpr size_t kUnasked = 48 << 10;
  if (bytes <= kUnasked) return;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

template <class T, int kFeatures>
void launch_features(const FlashAttention& args, const UnitGradients& unit, const AllGradients& before, double* parts,
                     cudaStream_t stream) {
  using Shape = Tiles<T, kFeatures>;
  constexpr size_t rows_memory = Shape::kRowsMemory, columns_memory = Shape::kColumnsMemory;
  const int64_t of_queries = blocks_of(args, args.queries), of_keys = blocks_of(args, args.keys);
  if (!args.is_backward()) {
    const auto kernel = flash_forward_kernel<T, kFeatures>;
    kernel<<<static_cast<unsigned>(of_queries), kFlashThreads, rows_memory, stream>>>(args);
    return;
  }
  const auto queries = flash_queries_backward_kernel<T, kFeatures>;
  queries<<<static_cast<unsigned>(of_queries), kFlashThreads, rows_memory, stream>>>(args, parts);
  const auto keys = flash_keys_backward_kernel<T, kFeatures>;
  allow_memory(keys, columns_memory);
  keys<<<static_cast<unsigned>(of_keys), kFlashThreads, columns_memory, stream>>>(args, unit, before, parts,
                                                                                  of_queries);
}

template <class T>
void launch_type(const FlashAttention& args, const UnitGradients& unit, const AllGradients& before, double* parts,
                 cudaStream_t stream) {
  const int64_t features = args.q.features < args.v.features ? args.v.features : args.q.features;
  if (features <= 32) return launch_features<T, 32>(args, unit, before, parts, stream);
  if (features <= 64) return launch_features<T, 64>(args, unit, before, parts, stream);
  launch_features<T, 128>(args, unit, before, parts, stream);
}

}  // namespace

int64_t flash_attention_workspace(const FlashAttention& args) {
  return args.sums == nullptr ? 0 : 2 * blocks_of(args, args.queries);
}

void flash_attention(const FlashAttention& args, const UnitGradients& unit, const AllGradients& before,
                     double* workspace, cudaStream_t stream) {
  double* parts = args.sums == nullptr ? nullptr : workspace;
  const auto launch = args.dtype == Dtype::f16 ? launch_type<__half> : launch_type<__nv_bfloat16>;
  launch(args, unit, before, parts, stream);
}

}  // namespace cuda
}  // namespace qtoolkit
