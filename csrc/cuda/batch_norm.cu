// Batch norm in training with what is fused after it, and its gradients, on CUDA.
#include <numeric>

#include "../passed_interval.h"
#include "kernels.h"
#include "norm_elements.cuh"
#include "norm_sums.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// The whole vectors of a thread.
QT_DEVICE Walk walk_of(int64_t numel) {
  const uint32_t first = kThreads * blockIdx.x + threadIdx.x, step = kThreads * gridDim.x;
  const uint32_t count = static_cast<uint32_t>(numel / kVectorSize);
  return {first, step, first < count ? static_cast<int>((count - first + step - 1) / step) : 0};
}

// Calls f(at, aligned, x, grad, channels) with each vector of elements, with x and the gradient, if there is one. Whole
// vectors, which are aligned, are copied ahead to the memory of the block. Of whole rows of channels, a thread keeps
// its channels: the launch takes blocks that make them the same in all its vectors.
template <Spread kSpread, int kCount, class T, class A, class F>
QT_DEVICE void for_elements(const NormArgs<A>& args, const Operands<T>& of, char* memory, F f) {
  const auto channels_at = [&](const Contiguous& at) { return channels_of<kSpread, kCount>(args.channels, at); };
  if constexpr (kSpread == Spread::plane || kSpread == Spread::row) {
    const auto run = [&](auto channels) {
      Walk walk = walk_of(args.numel);
      constexpr int kOperands = kCount == kBackward ? 2 : 1;
      Stream<T, kOperands, Walk> stream(memory, walk, of.x, of.grad);
      for (; walk.has(); walk.advance()) {
        Pack<T> packs[kOperands];
        A x[kVectorSize], grad[kVectorSize];
        stream.take(packs);
        unpack(packs[0], x);
        if constexpr (kCount == kBackward) unpack(packs[1], grad);
        f(walk.at(), true, x, grad, channels(walk.at()));
      }
    };
    if constexpr (kSpread == Spread::row) {
      const auto own = channels_at(whole_at((int64_t{kThreads} * blockIdx.x + threadIdx.x) * kVectorSize));
      run([&](const Contiguous&) { return own; });
    } else {
      run(channels_at);
    }
  } else {
    for_vectors(args.numel, [&](const Contiguous& at) {
      A x[kVectorSize], grad[kVectorSize];
      load_dense(of.x, at, args.aligned, x);
      if constexpr (kCount == kBackward) load_dense(of.grad, at, args.aligned, grad);
      f(at, args.aligned, x, grad, channels_at(at));
    });
  }
}

// The memory of a block: of its stream, or of what joins its sums.
template <Spread kSpread>
constexpr int kMemory = kSpread == Spread::plane || kSpread == Spread::row ? kStreamBytes : 256;

template <class T, Spread kSpread>
__global__ void __launch_bounds__(kThreads, kSpread == Spread::row ? kBlocks<T, 3, 2> : kBlocks<T, 4, 4>)
    norm_forward_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args) {
  using A = ArithmeticOf<T>;
  const Settings<A> settings = settings_of<A>(args);
  const auto of = operands_of<T>(args.of);
  alignas(16) __shared__ char memory[kMemory<kSpread>];
  for_elements<kSpread, kForward>(
      args, of, memory, [&](const Contiguous& at, bool aligned, auto& x, auto&, const auto& channels) {
        A y[kVectorSize];
        values_before(args.of, of, at, aligned, channels, x, y);
        activate_all(settings, y);
        if (settings.quantized) {
          A codes[kVectorSize];
          with_divisor(settings.scale, y, [&](auto scale) {
#pragma unroll
            for (int k = 0; k < kVectorSize; ++k) {
              const A code = snap(y[k], scale, settings.zero_point, settings.lo, settings.hi).code;
              y[k] = value_of<A>(code, scale, settings.zero_point);
              codes[k] = larger_or_number(code, settings.lo);  // of NaN, the lowest
            }
          });
          if (args.of.codes != nullptr) store_codes(args.of.codes, args.of.packed, at, aligned, codes);
        }
        store_dense(of.y, at, aligned, y);
      });
}

// Which gradients of the quantizer are summed too.
enum class Learned { nothing, scale, both };

// Adds the gradients of the scale and of the zero point, from the values before the activation.
template <Learned kLearned, class A>
QT_DEVICE void add_learned(const Settings<A>& s, A (&before)[kVectorSize], const A (&grads)[kVectorSize], Pair& sum) {
  const A zero_point = kLearned == Learned::both ? s.zero_point : A(0);
  TreeSum<A> scales, zero_points;
  activate_all(s, before);
  with_divisor(s.scale, before, [&](auto scale) {
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      const int k = TreeSum<A>::place(i);
      const auto point = snap(before[k], scale, zero_point, s.lo, s.hi);
      scales.add(i, scale_gradient(point, grads[k], zero_point));
      if constexpr (kLearned == Learned::both) zero_points.add(i, zero_point_gradient<A>(point, grads[k], scale));
    }
  });
  sum.first += scales.total();
  if constexpr (kLearned == Learned::both) sum.second += zero_points.total();
}

// A thread's part of the sum of a row of pairs.
QT_DEVICE Pair sum_of(const Pairs& from, int64_t begin, int64_t count) {
  Pair mine = {0, 0};
  for (int64_t i = begin + threadIdx.x; i < begin + count; i += blockDim.x) {
    mine = Add()(mine, {from.first[i], from.second[i]});
  }
  return mine;
}

template <class A>
QT_DEVICE void set_learned(const NormArgs<A>& args, Pair sum) {
  args.of.gradients[3 * args.of.channels] = sum.first;
  args.of.gradients[3 * args.of.channels + 1] = sum.second;
}

// The block that arrives last adds up the sums of all, in their order.
template <class A>
QT_DEVICE void join_learned(const NormArgs<A>& args, Pair mine, char* memory) {
  auto* of_warps = reinterpret_cast<Pair*>(memory);
  bool& is_last = *reinterpret_cast<bool*>(of_warps + kThreads / 32);
  const Pair sum = sum_of_block(mine, of_warps);
  if (threadIdx.x == 0) {
    write(args.learned, blockIdx.x, sum);
    __threadfence();
    is_last = atomicAdd(args.all_arrived, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const Pair all = sum_of_block(sum_of(args.learned, 0, gridDim.x), of_warps);
  if (threadIdx.x == 0) set_learned(args, all);
}

template <class T, Spread kSpread, Learned kLearned>
constexpr int kBackwardBlocks = kSpread == Spread::row || kSpread == Spread::any ? kBlocks<T, 2, 2>
                                : kLearned == Learned::nothing                   ? kBlocks<T, 4, 3>
                                                                                 : kBlocks<T, 3, 3>;

// A kernel that has all sums leaves them out where there is nothing to learn.
template <class T, Spread kSpread, Learned kLearned>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<T, kSpread, kLearned>)
    norm_backward_kernel(const __grid_constant__ NormArgs<ArithmeticOf<T>> args) {
  using A = ArithmeticOf<T>;
  const Settings<A> settings = settings_of<A>(args);
  const auto of = operands_of<T>(args.of);
  alignas(16) __shared__ char memory[kMemory<kSpread>];
  Pair learned = {0, 0};
  for_elements<kSpread, kBackward>(
      args, of, memory, [&](const Contiguous& at, bool aligned, auto& x, auto& grad, const auto& channels) {
        A before[kVectorSize], given[kVectorSize];
#pragma unroll
        for (int k = 0; k < kVectorSize; ++k) given[k] = grad[k];
        values_before(args.of, of, at, aligned, channels, x, before);
        gradients_before(settings, before, grad);
#pragma unroll
        for (int k = 0; k < kVectorSize; ++k) {
          x[k] = input_gradient(grad[k], x[k], channels.factor(k), channels.slope(k), channels.offset(k));
        }
        store_dense(of.y, at, aligned, x);
        if (of.residual_grad != nullptr) store_dense(of.residual_grad, at, aligned, grad);
        if constexpr (kLearned != Learned::nothing) {
          if (args.of.learned) add_learned<kLearned>(settings, before, given, learned);
        }
      });
  if constexpr (kLearned != Learned::nothing) {
    if (args.of.learned) join_learned(args, learned, memory);
  }
}

// ---- channels

// The ends of the interval of values that pass the gradient: thread 0 the lower one, thread 1 the upper one.
template <class A>
QT_DEVICE void set_passed(const NormArgs<A>& args, int thread) {
  const BatchNormArgs& of = args.of;
  if (of.scale == nullptr || thread > 1) return;
  const A scale = usable_scale(value_at<A>(of.scale, 0, 1)),
          zero_point = usable_zero_point(value_at<A>(of.zero_point, 0, 0));
  const A lo = static_cast<A>(of.bounds.lo), hi = static_cast<A>(of.bounds.hi);
  A end = thread == 0 ? passed_above(scale, zero_point, lo, hi) : passed_below(scale, zero_point, lo, hi);
  if (of.slope == 0 && thread == 0 && !(end > static_cast<A>(of.low))) end = static_cast<A>(of.low);
  if (of.slope == 0 && thread == 1 && !(end < static_cast<A>(of.high))) end = static_cast<A>(of.high);
  args.passed[thread] = end;
}

// What backward takes of each channel, from the statistics that forward has found, and from the totals if they are
// known: then the gradient of the divisor too.
template <class A>
__global__ void __launch_bounds__(kThreads) channels_kernel(const NormArgs<A> args) {
  if (blockIdx.x == 0) set_passed(args, threadIdx.x);
  if (blockIdx.x == 0 && threadIdx.x == 0 && args.of.learned) {
    *args.all_arrived = 0;
    set_learned(args, {0, 0});  // of an empty tensor
  }
  const int64_t c = int64_t{kThreads} * blockIdx.x + threadIdx.x, channels = args.of.channels;
  if (c >= channels) return;
  args.arrived[c] = 0;
  set_channel(args, c, static_cast<const A*>(args.of.mean)[c]);
  if (args.of.stage != NormStage::rest) return;
  const int64_t bias = channels + c;
  const double *totals = args.of.totals, *own = args.of.own;
  const NormChannel channel = {static_cast<const A*>(args.of.mean)[c], inverse_at<A>(args.of, c),
                               value_at<A>(args.of.weight, c, 1), value_at<A>(args.of.divisor, c, 1)};
  const NormLine line = norm_line(totals[c], totals[bias], args.of.total_count(), channel.inverse, channel.weight);
  set_line(args, c, line);
  double* gradients = args.of.gradients;
  gradients[2 * channels + c] = divisor_gradient({own[c], own[bias]}, static_cast<double>(args.of.count()),
                                                 gradients[c], gradients[bias], line, channel);
}

// The statistics of each channel, from totals, and what forward takes of them.
template <class A>
__global__ void __launch_bounds__(kThreads) totals_kernel(const NormArgs<A> args) {
  const int64_t c = int64_t{kThreads} * blockIdx.x + threadIdx.x, channels = args.of.channels;
  if (c >= channels) return;
  const Statistics found = statistics_of({args.of.totals[c], args.of.totals[channels + c]}, args.of.total_count(),
                                         value_at<A>(args.of.divisor, c, 1));
  static_cast<A*>(args.of.variance)[c] = static_cast<A>(found.variance);
  static_cast<A*>(args.of.mean)[c] = static_cast<A>(found.mean);
  set_channel(args, c, static_cast<A>(found.mean));
  track_at<A>(args.of.tracked, c);
}

template <class A>
__global__ void __launch_bounds__(kThreads) track_kernel(const TrackedStatistics s) {
  const int64_t c = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (c < s.channels) track_at<A>(s, c);
}

// ---- launches

bool is_of_rows(const BatchNormArgs& args) {
  if (args.is_f64()) return false;
  const bool whole = args.inner == 1 && args.channels % kVectorSize == 0 && are_aligned(args);
  return whole && args.outer * (args.channels / kVectorSize) <= kMostDivisible;
}

// How a tensor is divided between the blocks of a reduction, if there is one.
ReductionTiling division_of(const BatchNormArgs& args) {
  if (args.stage == NormStage::rest) return {};
  if (is_of_rows(args)) return tiling_of_rows(args.outer, args.channels);
  KernelArgs shape;
  shape.numel = args.outer * args.channels * args.inner;
  shape.channels = {args.channels, args.channels == 1 ? shape.numel : args.inner, shape.numel, args.channels};
  return tiling_of(shape);
}

int64_t blocks_of(const ReductionTiling& s) { return s.groups * s.tiles * s.count; }

// Float64 is rare: its kernels take channels that lie in any way, vectors that are whole or not, and have all sums.
template <class T>
constexpr bool kIsRare = std::is_same_v<T, double>;

// How the second pass walks over a tensor, and by how many blocks.
struct SecondPass {
  Spread spread;
  int64_t blocks;
};

// With whole rows of channels, a thread's vectors are a multiple of a row apart.
SecondPass second_pass_of(const BatchNormArgs& args) {
  const Spread spread = are_aligned(args) && !args.is_f64() ? spread_of(args) : Spread::any;
  // On an H200, forward of 64 x 256 x 56 x 56 in channels_last takes, with bfloat16, 69 us in 2,048 blocks and 75 in
  // 6,272, and with float32 133 and 116. Fewer blocks have fewer sums of what is learned to join.
  const bool is_f32 = args.dtype == Dtype::f32;
  const int64_t most = is_f32 && !args.learned ? int64_t{1} << 14 : int64_t{1} << 11;
  int64_t blocks = least(blocks_for_vectors(args.outer * args.channels * args.inner), most);
  if (spread == Spread::row) {
    const int64_t row = args.channels / kVectorSize, of = row / std::gcd(row, int64_t{kThreads});
    blocks = divide_up(blocks, of) * of;
  }
  return {spread, blocks};
}

// The workspace: five values for each channel and two for the interval, the blocks that have arrived, in all and for
// each channel, then the partial results.
int64_t counters_of(const BatchNormArgs& args) { return divide_up(args.channels + 1, 2); }

template <class T>
NormArgs<ArithmeticOf<T>> with_memory(const BatchNormArgs& args, const ReductionTiling& s, double* workspace) {
  const int64_t slots = s.count * args.channels, blocks = second_pass_of(args).blocks;
  auto* values = reinterpret_cast<ArithmeticOf<T>*>(workspace);
  auto* arrived = reinterpret_cast<unsigned*>(workspace + kValues * args.channels + 2);
  double* sums = workspace + kValues * args.channels + 2 + counters_of(args);
  double* learned = sums + 2 * slots;
  return {args,
          args.outer * args.channels * args.inner,
          are_aligned(args),
          {values, args.channels, places_of(args)},
          values + kValues * args.channels,
          arrived,
          args.arrived == nullptr ? arrived + 1 : args.arrived,
          {sums, sums + slots},
          {learned, learned + blocks}};
}

// Runs the second pass by the kernel for how the channels lie along the vectors.
template <class A>
void launch_second(void (*const (&kernels)[kSpreads])(NormArgs<A>), const NormArgs<A>& args, cudaStream_t stream) {
  if (args.numel == 0) return;  // of this rank
  const SecondPass pass = second_pass_of(args.of);
  const auto kernel = kernels[static_cast<int>(pass.spread)];
  kernel<<<static_cast<unsigned>(pass.blocks), kThreads, 0, stream>>>(args);
}

template <class A>
using Reduction = void (*)(NormArgs<A>, ReductionTiling, Pairs);

// The kernels of a reduction: of the vectors of a channel, of vectors that are whole and aligned, of single elements,
// and of rows of channels.
template <class A>
struct Reductions {
  Reduction<A> contiguous, planes, scattered, rows;
};

template <class A>
void reduce(const Reductions<A>& kernels, const NormArgs<A>& args, const ReductionTiling& s, cudaStream_t stream) {
  const auto contiguous = args.aligned && args.numel % kVectorSize == 0 ? kernels.planes : kernels.contiguous;
  const auto kernel = is_of_rows(args.of) ? kernels.rows : s.unit == kVectorSize ? contiguous : kernels.scattered;
  kernel<<<static_cast<unsigned>(blocks_of(s)), kThreads, 0, stream>>>(args, s, args.sums);
}

template <class T>
constexpr Spread kernel_of(Spread spread) {
  return kIsRare<T> ? Spread::any : spread;
}

template <class T, Learned kLearned>
void second_backward(const NormArgs<ArithmeticOf<T>>& args, cudaStream_t stream) {
  constexpr Learned kCommon = kIsRare<T> ? Learned::both : kLearned;
  static constexpr void (*kKernels[])(NormArgs<ArithmeticOf<T>>) = {
      norm_backward_kernel<T, kernel_of<T>(Spread::plane), kCommon>,
      norm_backward_kernel<T, kernel_of<T>(Spread::planes), kCommon>,
      norm_backward_kernel<T, kernel_of<T>(Spread::row), kCommon>, norm_backward_kernel<T, Spread::any, Learned::both>};
  launch_second<ArithmeticOf<T>>(kKernels, args, stream);
}

template <class T>
void reduce_gradients(const NormArgs<ArithmeticOf<T>>& args, const ReductionTiling& s, cudaStream_t stream) {
  const auto contiguous = sums_kernel<T, Contiguous>, scattered = sums_kernel<T, Scattered>;
  if constexpr (kIsRare<T>) {
    reduce<double>({contiguous, contiguous, scattered, nullptr}, args, s, stream);
  } else {
    reduce<float>({contiguous, plane_sums_kernel<T>, scattered, row_sums_kernel<T>}, args, s, stream);
  }
}

template <class T>
void reduce_moments(const NormArgs<ArithmeticOf<T>>& args, const ReductionTiling& s, cudaStream_t stream) {
  const auto contiguous = moments_kernel<T, Contiguous>, scattered = moments_kernel<T, Scattered>;
  if constexpr (kIsRare<T>) {
    reduce<double>({contiguous, contiguous, scattered, nullptr}, args, s, stream);
  } else {
    reduce<float>({contiguous, plane_moments_kernel<T>, scattered, row_moments_kernel<T>}, args, s, stream);
  }
}

template <class T>
void forward(const BatchNormArgs& given, double* workspace, cudaStream_t stream) {
  using A = ArithmeticOf<T>;
  static constexpr void (*kKernels[])(NormArgs<A>) = {
      norm_forward_kernel<T, kernel_of<T>(Spread::plane)>, norm_forward_kernel<T, kernel_of<T>(Spread::planes)>,
      norm_forward_kernel<T, kernel_of<T>(Spread::row)>, norm_forward_kernel<T, Spread::any>};
  const ReductionTiling s = division_of(given);
  const NormArgs<A> args = with_memory<T>(given, s, workspace);
  if (given.stage == NormStage::rest) {
    launch_each(totals_kernel<A>, given.channels, stream, args);
  } else {
    reduce_moments<T>(args, s, stream);
  }
  if (given.stage != NormStage::totals) launch_second<A>(kKernels, args, stream);
}

template <class T>
void backward(const BatchNormArgs& given, double* workspace, cudaStream_t stream) {
  using A = ArithmeticOf<T>;
  const ReductionTiling s = division_of(given);
  const NormArgs<A> args = with_memory<T>(given, s, workspace);
  launch_each(channels_kernel<A>, given.channels, stream, args);
  if (given.stage != NormStage::rest) reduce_gradients<T>(args, s, stream);
  if (given.stage == NormStage::totals) return;
  if (!given.learned) return second_backward<T, Learned::nothing>(args, stream);
  given.zero_point == nullptr ? second_backward<T, Learned::scale>(args, stream)
                              : second_backward<T, Learned::both>(args, stream);
}

// Calls f with a null pointer of the type of the elements.
template <class F>
void with_elements(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f64: return f(static_cast<double*>(nullptr));
    case Dtype::bf16: return f(static_cast<__nv_bfloat16*>(nullptr));
    case Dtype::f16: return f(static_cast<__half*>(nullptr));
    default: return f(static_cast<float*>(nullptr));
  }
}

}  // namespace

int64_t batch_norm_workspace(const BatchNormArgs& args) {
  const ReductionTiling s = division_of(args);
  return kValues * args.channels + 2 + counters_of(args) + 2 * s.count * args.channels +
         2 * second_pass_of(args).blocks;
}

void batch_norm_forward(const BatchNormArgs& args, double* workspace, cudaStream_t stream) {
  with_elements(args.dtype,
                [&](auto* type) { forward<std::remove_pointer_t<decltype(type)>>(args, workspace, stream); });
}

void batch_norm_backward(const BatchNormArgs& args, double* workspace, cudaStream_t stream) {
  with_elements(args.dtype,
                [&](auto* type) { backward<std::remove_pointer_t<decltype(type)>>(args, workspace, stream); });
}

void batch_norm_track(const TrackedStatistics& s, cudaStream_t stream) {
  launch_each(s.f64 ? track_kernel<double> : track_kernel<float>, s.channels, stream, s);
}

}  // namespace cuda
}  // namespace qtoolkit
