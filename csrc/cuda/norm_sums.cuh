// The reductions of batch norm: moments, and the sums of the gradients.
#pragma once

#include "norm_finish.cuh"
#include "stream.cuh"

namespace qtoolkit {
namespace cuda {

// ---- reductions of vectors of one channel

constexpr int kPairs = kThreads * sizeof(Pair);  // bytes of a block that joins its sums

// Adds sums about a number nearby to those about the channel's shift, which may be far from its mean: only float64
// holds what that adds.
QT_DEVICE void add_moments(Pair& sum, double total, double squares, double n, double offset) {
  sum.first += total + n * offset;
  sum.second += squares + offset * (2 * total + n * offset);
}

// Adds the first n elements of a vector.
template <class A>
QT_DEVICE void add_vector(Pair& sum, const A (&x)[kVectorSize], int n, A shift) {
  TreeSum<A> values, squares;
  const A nearby = x[0];
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    const int k = TreeSum<A>::place(i);
    const A value = k < n ? x[k] - nearby : A(0);
    values.add(i, value);
    squares.add(i, value * value);
  }
  add_moments(sum, values.total(), squares.total(), n, static_cast<double>(nearby) - shift);
}

template <class T, class At>
__global__ void __launch_bounds__(kThreads) moments_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args,
                                                           const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  using A = ArithmeticOf<T>;
  const T* of = static_cast<const T*>(args.of.x);
  alignas(16) __shared__ char memory[kPairs];
  Pair sum = {0, 0};
  ReductionIterator it = reduction_iterator(tiling, blockIdx.x, threadIdx.x);
  const A shift = it.left > 0 ? shift_of(args, of, it.channel) : A(0);
  At at;
  while (next(tiling, args.numel, it, at)) {
    A x[kVectorSize];
    load_dense(of, at, args.aligned, x);
    add_vector(sum, x, at.n, shift);
  }
  join_block(tiling, sum, sums, Add(), reinterpret_cast<Pair*>(memory));
  finish_tile(args, tiling, memory, [&](int64_t c, Pair found) { set_statistics<T>(args, c, found); });
}

// The vectors of a thread that are of one channel.
struct PlaneWalk {
  const ReductionTiling& s;
  ReductionIterator it;

  __device__ __forceinline__ explicit PlaneWalk(const ReductionTiling& tiling)
      : s(tiling), it(reduction_iterator(tiling, blockIdx.x, threadIdx.x)) {}
  __device__ __forceinline__ int64_t channel() const { return has() ? it.channel : 0; }
  __device__ __forceinline__ bool has() const { return it.left > 0; }
  __device__ __forceinline__ Contiguous at() const { return whole_at(it.unit * kVectorSize); }
  __device__ __forceinline__ void advance() {
    cuda::advance(s, it);
    --it.left;
  }
};

// The same for whole vectors, which are aligned.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    plane_moments_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args,
                         const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  using A = ArithmeticOf<T>;
  alignas(16) __shared__ char memory[kStreamBytes];
  const T* of = static_cast<const T*>(args.of.x);
  PlaneWalk walk(tiling);
  const A shift = shift_of(args, of, walk.channel());
  Stream<T, 1, PlaneWalk> stream(memory, walk, of);
  Pair sum = {0, 0};
  for (; walk.has(); walk.advance()) {
    Pack<T> packs[1];
    A x[kVectorSize];
    stream.take(packs);
    unpack(packs[0], x);
    add_vector(sum, x, kVectorSize, shift);
  }
  join_block(tiling, sum, sums, Add(), reinterpret_cast<Pair*>(memory));
  finish_tile(args, tiling, memory, [&](int64_t c, Pair found) { set_statistics<T>(args, c, found); });
}

// Adds the gradients before the activation of a vector, and their products with x - mean.
template <class A>
QT_DEVICE void add_terms(const Settings<A>& settings, const A (&centred)[kVectorSize], const A (&before)[kVectorSize],
                         A (&grads)[kVectorSize], Pair& sum) {
  TreeSum<A> all, products;
  gradients_before(settings, before, grads);
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    const int k = TreeSum<A>::place(i);
    all.add(i, grads[k]);
    products.add(i, grads[k] * centred[k]);
  }
  sum.first += all.total();
  sum.second += products.total();
}

template <class T, class At>
__global__ void __launch_bounds__(kThreads, kBlocks<T, 3, 3>)
    sums_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args, const __grid_constant__ ReductionTiling tiling,
                Pairs sums) {
  using A = ArithmeticOf<T>;
  const Settings<A> settings = settings_of<A>(args);
  const auto of = operands_of<T>(args.of);
  alignas(16) __shared__ char memory[kPairs];
  Pair sum = {0, 0};
  ReductionIterator it = reduction_iterator(tiling, blockIdx.x, threadIdx.x);
  const OneChannel<A, kForward> channel(args.channels, it.left > 0 ? it.channel : 0);
  At at;
  while (next(tiling, args.numel, it, at)) {
    A centred[kVectorSize], before[kVectorSize], grads[kVectorSize];
    load_dense(of.x, at, args.aligned, centred);
    load_dense(of.grad, at, args.aligned, grads);
    values_before(args.of, of, at, args.aligned, channel, centred, before);
    add_terms(settings, centred, before, grads, sum);
  }
  join_block(tiling, sum, sums, Add(), reinterpret_cast<Pair*>(memory));
  finish_tile(args, tiling, memory, [&](int64_t c, Pair found) { set_gradients(args, c, found); });
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T, 4, 3>)
    plane_sums_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args,
                      const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  using A = ArithmeticOf<T>;
  alignas(16) __shared__ char memory[kStreamBytes];
  const Settings<A> settings = settings_of<A>(args);
  const auto of = operands_of<T>(args.of);
  PlaneWalk walk(tiling);
  const OneChannel<A, kForward> channel(args.channels, walk.channel());
  Stream<T, 2, PlaneWalk> stream(memory, walk, of.x, of.grad);
  Pair sum = {0, 0};
  for (; walk.has(); walk.advance()) {
    Pack<T> packs[2];
    A centred[kVectorSize], before[kVectorSize], grads[kVectorSize];
    stream.take(packs);
    unpack(packs[0], centred);
    unpack(packs[1], grads);
    values_before(args.of, of, walk.at(), true, channel, centred, before);
    add_terms(settings, centred, before, grads, sum);
  }
  join_block(tiling, sum, sums, Add(), reinterpret_cast<Pair*>(memory));
  finish_tile(args, tiling, memory, [&](int64_t c, Pair found) { set_gradients(args, c, found); });
}

// ---- reductions of rows of channels, of aligned vectors: a thread keeps 8 of them

// The sums of a thread, of 8 channels each: of some rows in the type of the arithmetic, and of those in float64.
class RowSums {
 public:
  static constexpr int kRows = 8;

  __device__ __forceinline__ Pair& at(int k) { return sums_[k]; }

  // Adds those of all threads of a channel, and writes the sums of the tile. The block needs its memory no more.
  __device__ void join(const ReductionTiling& s, void* memory, const Pairs& to) const {
    auto* pairs = static_cast<Pair(*)[kThreads]>(memory);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) pairs[k][threadIdx.x] = sums_[k];
    __syncthreads();
    const Tile tile = tile_of(s, blockIdx.x);
    const int width = static_cast<int>(s.width);
    for (int i = threadIdx.x; i < tile.channels * kVectorSize; i += kThreads) {
      const int unit = i / kVectorSize, k = i % kVectorSize;
      Pair sum = {0, 0};
      for (int lane = unit; lane < s.lanes; lane += width) sum = Add()(sum, pairs[k][lane]);
      write(to, ((tile.first_channel + unit) * kVectorSize + k) * s.count + tile.slice, sum);
    }
  }

 private:
  Pair sums_[kVectorSize] = {};
};
static_assert(sizeof(Pair) * kVectorSize * kThreads <= kStreamBytes);

// The rows of a thread; of one without rows, the first channels.
struct RowWalk : Walk {
  int64_t channel = 0;

  __device__ __forceinline__ explicit RowWalk(const ReductionTiling& s) : Walk{0, static_cast<uint32_t>(s.step), 0} {
    const ReductionIterator it = reduction_iterator(s, blockIdx.x, threadIdx.x);
    left = static_cast<int>(it.left);
    if (left > 0) channel = it.channel * kVectorSize, vector = static_cast<uint32_t>(it.unit);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    row_moments_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args,
                       const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  using A = ArithmeticOf<T>;
  alignas(16) __shared__ char memory[kStreamBytes];
  const T* of = static_cast<const T*>(args.of.x);
  const RowWalk walk(tiling);
  Stream<T, 1, Walk> stream(memory, walk, of);
  const Pack<T> first = pack_at(of, whole_at(walk.channel));
  RowSums all;
  for (int left = walk.left; left > 0; left -= RowSums::kRows) {
    const int count = left < RowSums::kRows ? left : RowSums::kRows;
    A nearby[kVectorSize], shift[kVectorSize], totals[kVectorSize] = {}, squares[kVectorSize] = {};
    Pack<T> packs[1];
    stream.take(packs);
    unpack(packs[0], nearby);
#pragma unroll 2
    for (int row = 1; row < count; ++row) {
      A x[kVectorSize];
      stream.take(packs);
      unpack(packs[0], x);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) {
        const A value = x[k] - nearby[k];
        totals[k] = totals[k] + value;
        squares[k] = ::fma(value, value, squares[k]);
      }
    }
    unpack(first, shift);
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      add_moments(all.at(k), totals[k], squares[k], count, static_cast<double>(nearby[k]) - shift[k]);
    }
  }
  all.join(tiling, memory, sums);
  finish_tile<kVectorSize>(args, tiling, memory, [&](int64_t c, Pair found) { set_statistics<T>(args, c, found); });
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    row_sums_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args,
                    const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  using A = ArithmeticOf<T>;
  alignas(16) __shared__ char memory[kStreamBytes];
  const Settings<A> settings = settings_of<A>(args);
  const auto of = operands_of<T>(args.of);
  RowWalk walk(tiling);
  Stream<T, 2, Walk> stream(memory, walk, of.x, of.grad);
  const RowOfChannels<A, kForward> channels(args.channels, walk.channel);
  RowSums all;
  while (walk.has()) {
    A grads[kVectorSize] = {}, products[kVectorSize] = {};
    const int count = walk.left < RowSums::kRows ? walk.left : RowSums::kRows;
#pragma unroll 2
    for (int row = 0; row < count; ++row, walk.advance()) {
      Pack<T> packs[2];
      A centred[kVectorSize], before[kVectorSize], grad[kVectorSize];
      stream.take(packs);
      unpack(packs[0], centred);
      unpack(packs[1], grad);
      values_before(args.of, of, walk.at(), true, channels, centred, before);
      gradients_before(settings, before, grad);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) {
        grads[k] = grads[k] + grad[k];
        products[k] = ::fma(grad[k], centred[k], products[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) all.at(k) = Add()(all.at(k), {grads[k], products[k]});
  }
  all.join(tiling, memory, sums);
  finish_tile<kVectorSize>(args, tiling, memory, [&](int64_t c, Pair found) { set_gradients(args, c, found); });
}

}  // namespace cuda
}  // namespace qtoolkit
