// The reductions of batch norm: moments, and the sums of the gradients.
#pragma once

#include "norm_elements.cuh"

namespace qtoolkit {
namespace cuda {

// ---- reductions of vectors of one channel

// The shift of a channel's sums is its first element.
template <class A, class T>
QT_DEVICE A shift_of(const NormArgs<A>& args, const T* x, int64_t channel) {
  return to_arithmetic<A>(x[channel * args.of.inner]);
}

// Adds sums about a number nearby to those about the channel's shift, which may be far from its mean: only float64
// holds what that adds.
QT_DEVICE void add_moments(Pair& sum, double total, double squares, double n, double offset) {
  sum.first += total + n * offset;
  sum.second += squares + offset * (2 * total + n * offset);
}

// kWhole: all vectors have 8 elements, and are aligned.
template <class T, class At, bool kWhole>
__global__ void __launch_bounds__(kThreads) moments_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args,
                                                           const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  using A = ArithmeticOf<T>;
  const T* of = static_cast<const T*>(args.of.x);
  Pair sum = {0, 0};
  ReductionIterator it = reduction_iterator(tiling, blockIdx.x, threadIdx.x);
  const A shift = it.left > 0 ? shift_of(args, of, it.channel) : A(0);
  At at;
  while (next<kWhole>(tiling, args.numel, it, at)) {
    A x[kVectorSize];
    TreeSum<A> values, squares;
    load_dense(of, at, kWhole || args.aligned, x);
    const A nearby = x[0];
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      const int k = TreeSum<A>::place(i);
      const A value = k < at.n ? x[k] - nearby : A(0);
      values.add(i, value);
      squares.add(i, value * value);
    }
    add_moments(sum, values.total(), squares.total(), at.n, static_cast<double>(nearby) - shift);
  }
  join_block(tiling, sum, sums, Add());
}

// Which gradients of the quantizer are summed too.
enum class Learned { nothing, scale, both };

// The terms of the sums over elements: of the gradient and of its product with x - mean, and of the gradients of scale
// and zero point. `before` becomes what the quantizer saw.
template <Learned kLearned, class A, class F>
QT_DEVICE void for_terms(const Settings<A>& s, const A (&centred)[kVectorSize], A (&before)[kVectorSize],
                         const A (&given)[kVectorSize], F f) {
  A grads[kVectorSize];
#pragma unroll
  for (int k = 0; k < kVectorSize; ++k) grads[k] = given[k];
  gradients_before(s, before, grads);
  if constexpr (kLearned == Learned::nothing) {
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      const int k = TreeSum<A>::place(i);
      f(i, k, grads[k], grads[k] * centred[k], A(0), A(0));
    }
  } else {
    const A zero_point = kLearned == Learned::both ? s.zero_point : A(0);
    activate_all(s, before);
    with_divisor(s.scale, before, [&](auto scale) {
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        const int k = TreeSum<A>::place(i);
        const auto point = snap(before[k], scale, zero_point, s.lo, s.hi);
        const A of_zero_point = kLearned == Learned::both ? zero_point_gradient<A>(point, given[k], scale) : A(0);
        f(i, k, grads[k], grads[k] * centred[k], scale_gradient(point, given[k], zero_point), of_zero_point);
      }
    });
  }
}

// The sums of a block, of the gradients of scale and zero point.
QT_DEVICE void join_learned(Pair mine, const Pairs& to) {
  const Pair sum = sum_of_block(mine);
  if (threadIdx.x == 0) write(to, blockIdx.x, sum);
}

template <class T, class At, bool kWhole, Learned kLearned>
__global__ void __launch_bounds__(kThreads, kBlocks<T, 3, 3>)
    sums_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args, const __grid_constant__ ReductionTiling tiling,
                Pairs sums) {
  using A = ArithmeticOf<T>;
  const Settings<A> settings = settings_of<A>(args);
  const auto of = operands_of<T>(args.of);
  Pair sum = {0, 0}, learned = {0, 0};
  ReductionIterator it = reduction_iterator(tiling, blockIdx.x, threadIdx.x);
  const OneChannel<A, kForward> channel(args.channels, it.left > 0 ? it.channel : 0);
  At at;
  while (next<kWhole>(tiling, args.numel, it, at)) {
    A centred[kVectorSize], before[kVectorSize], grads[kVectorSize];
    TreeSum<A> all, products, scales, zero_points;
    load_dense(of.x, at, kWhole || args.aligned, centred);
    load_dense(of.grad, at, kWhole || args.aligned, grads);
    values_before(args.of, of, at, kWhole || args.aligned, channel, centred, before);
    for_terms<kLearned>(settings, centred, before, grads, [&](int i, int, A grad, A product, A scale, A zero_point) {
      all.add(i, grad);
      products.add(i, product);
      scales.add(i, scale);
      zero_points.add(i, zero_point);
    });
    sum.first += all.total();
    sum.second += products.total();
    learned.first += scales.total();
    if constexpr (kLearned == Learned::both) learned.second += zero_points.total();
  }
  join_block(tiling, sum, sums, Add());
  if constexpr (kLearned != Learned::nothing) join_learned(learned, args.learned);
}

// ---- reductions of rows of channels, of aligned vectors: a thread keeps 8 of them

// The sums of a block's threads, of 8 channels each. A thread adds some rows in the type of the arithmetic, and those
// sums here in float64: in registers they would take half of all.
class RowSums {
 public:
  static constexpr int kRows = 8;

  __device__ RowSums(Pair (&pairs)[kVectorSize][kThreads]) : pairs_(pairs) {
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) at(k) = {0, 0};
  }

  __device__ Pair& at(int k) const { return pairs_[k][threadIdx.x]; }

  // Adds those of all threads of a channel, and writes the sums of the tile.
  __device__ void join(const ReductionTiling& s, const Pairs& to) const {
    __syncthreads();
    const Tile tile = tile_of(s, blockIdx.x);
    const int width = static_cast<int>(s.width);
    for (int i = threadIdx.x; i < tile.channels * kVectorSize; i += kThreads) {
      const int unit = i / kVectorSize, k = i % kVectorSize;
      Pair sum = {0, 0};
      for (int lane = unit; lane < s.lanes; lane += width) sum = Add()(sum, pairs_[k][lane]);
      write(to, ((tile.first_channel + unit) * kVectorSize + k) * s.count + tile.slice, sum);
    }
  }

 private:
  Pair (&pairs_)[kVectorSize][kThreads];
};

// The rows of a thread, which are `step` vectors apart.
struct Rows {
  int64_t channel;
  uint32_t vector, step;
  int left;

  __device__ __forceinline__ explicit Rows(const ReductionTiling& s) : step(static_cast<uint32_t>(s.step)) {
    const ReductionIterator it = reduction_iterator(s, blockIdx.x, threadIdx.x);
    left = static_cast<int>(it.left);
    // What a thread without rows loads ahead is there too.
    channel = left > 0 ? it.channel * kVectorSize : 0, vector = left > 0 ? static_cast<uint32_t>(it.unit) : 0;
  }
  // The vector of a row from here on, and of the first again where that does not exist.
  __device__ __forceinline__ Contiguous at(int row) const {
    return whole_at(int64_t{vector + (row < left ? row * step : 0)} * kVectorSize);
  }
  __device__ __forceinline__ void advance(int rows) {
    vector += rows * step;
    left -= rows;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T, 2, 2>)
    row_moments_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args,
                       const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  using A = ArithmeticOf<T>;
  __shared__ Pair pairs[kVectorSize][kThreads];
  const RowSums all(pairs);
  const T* of = static_cast<const T*>(args.of.x);
  Rows rows(tiling);
  const Pack<T> first = pack_at(of, whole_at(rows.channel));
  for (; rows.left > 0; rows.advance(RowSums::kRows)) {
    Pack<T> loaded[RowSums::kRows];  // all of them on their way at once
#pragma unroll
    for (int row = 0; row < RowSums::kRows; ++row) loaded[row] = pack_at(of, rows.at(row));
    A nearby[kVectorSize], shift[kVectorSize], totals[kVectorSize] = {}, squares[kVectorSize] = {};
    unpack(loaded[0], nearby);
#pragma unroll
    for (int row = 1; row < RowSums::kRows; ++row) {  // one that does not exist adds 0
      A x[kVectorSize];
      unpack(loaded[row], x);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) {
        const A value = x[k] - nearby[k];
        totals[k] = totals[k] + value;
        squares[k] = ::fma(value, value, squares[k]);
      }
    }
    unpack(first, shift);
    const double count = static_cast<double>(rows.left < RowSums::kRows ? rows.left : RowSums::kRows);
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      add_moments(all.at(k), totals[k], squares[k], count, static_cast<double>(nearby[k]) - shift[k]);
    }
  }
  all.join(tiling, sums);
}

template <class T, Learned kLearned>
__global__ void __launch_bounds__(kThreads, kBlocks<T, 2, 2>)
    row_sums_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args,
                    const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  using A = ArithmeticOf<T>;
  constexpr int kAhead = sizeof(T) == 2 ? 2 : 1;  // rows that are on their way
  __shared__ Pair pairs[kVectorSize][kThreads];
  const RowSums all(pairs);
  const Settings<A> settings = settings_of<A>(args);
  const auto of = operands_of<T>(args.of);
  Pair learned = {0, 0};
  Rows rows(tiling);
  const RowOfChannels<A, kForward> channels(args.channels, rows.channel);
  Loaded<T> ahead[kAhead];
#pragma unroll
  for (int r = 0; r < kAhead; ++r) ahead[r] = loaded_at(of, rows.at(r));
  while (rows.left > 0) {
    A grads[kVectorSize] = {}, products[kVectorSize] = {};
    const int count = rows.left < RowSums::kRows ? rows.left : RowSums::kRows;
#pragma unroll kAhead
    for (int row = 0; row < count; ++row, rows.advance(1)) {
      const Loaded<T> loaded = ahead[0];
#pragma unroll
      for (int r = 1; r < kAhead; ++r) ahead[r - 1] = ahead[r];
      ahead[kAhead - 1] = loaded_at(of, rows.at(kAhead));
      A centred[kVectorSize], before[kVectorSize], given[kVectorSize];
      TreeSum<A> scales, zero_points;
      unpack(loaded.x, centred);
      unpack(loaded.grad, given);
      values_before(args.of, of, rows.at(0), true, channels, centred, before);
      for_terms<kLearned>(settings, centred, before, given, [&](int i, int k, A grad, A, A scale, A zero_point) {
        grads[k] = grads[k] + grad;
        products[k] = ::fma(grad, centred[k], products[k]);
        scales.add(i, scale);
        zero_points.add(i, zero_point);
      });
      learned.first += scales.total();
      if constexpr (kLearned == Learned::both) learned.second += zero_points.total();
    }
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) all.at(k) = Add()(all.at(k), {grads[k], products[k]});
  }
  all.join(tiling, sums);
  if constexpr (kLearned != Learned::nothing) join_learned(learned, args.learned);
}

}  // namespace cuda
}  // namespace qtoolkit
