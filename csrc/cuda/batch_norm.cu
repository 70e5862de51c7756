// Batch norm in training with what is fused behind it, and its gradients, on CUDA.
#include "../passed_interval.h"
#include "kernels.h"
#include "norm_elements.cuh"
#include "norm_sums.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

template <class A, Spread kSpread>
__global__ void __launch_bounds__(kThreads, kBlocks<A, 4>)
    norm_forward_kernel(const __grid_constant__ NormArgs<A> args) {
  const Settings<A> settings = settings_of<A>(args);
  with_elements<A>(args.of, [&](auto* type) {
    const auto of = operands_of<std::remove_pointer_t<decltype(type)>>(args.of);
    for_vectors(args.numel, [&](const Contiguous& at) {
      A centred[kVectorSize], y[kVectorSize];
      load_before(args, of, at, channels_of<kSpread, kForward>(args.channels, at), centred, y);
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
        if (args.of.codes != nullptr) store_dense(args.of.codes, at, of.aligned, codes);
      }
      store_dense(of.y, at, of.aligned, y);
    });
  });
}

template <class A, Spread kSpread>
__global__ void __launch_bounds__(kThreads, kBlocks<A>) norm_backward_kernel(const __grid_constant__ NormArgs<A> args) {
  const Settings<A> settings = settings_of<A>(args);
  with_elements<A>(args.of, [&](auto* type) {
    const auto of = operands_of<std::remove_pointer_t<decltype(type)>>(args.of);
    for_vectors(args.numel, [&](const Contiguous& at) {
      A centred[kVectorSize], before[kVectorSize], grads[kVectorSize];
      const auto channels = channels_of<kSpread, kBackward>(args.channels, at);
      load_before(args, of, at, channels, centred, before);
      load_dense(of.grad, at, of.aligned, grads);
      gradients_before(settings, before, grads);
#pragma unroll
      for (int k = 0; k < kVectorSize; ++k) {
        before[k] = input_gradient(grads[k], centred[k], channels.factor(k), channels.slope(k), channels.offset(k));
      }
      store_dense(of.y, at, of.aligned, before);
      if (of.residual_grad != nullptr) store_dense(of.residual_grad, at, of.aligned, grads);
    });
  });
}

// ---- channels

template <class A>
QT_DEVICE void set_channel(const NormArgs<A>& args, int64_t c, A mean) {
  A* values = args.channels.values + c;
  const int64_t count = args.channels.count;
  values[kMean * count] = mean;
  values[kFactor * count] = static_cast<A>(value_at<A>(args.of.weight, c, 1) * inverse_at<A>(args.of, c));
  values[kBias * count] = value_at<A>(args.of.bias, c, 0);
}

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

// What backward takes of each channel, from the statistics that forward has found.
template <class A>
__global__ void __launch_bounds__(kThreads) channels_kernel(const NormArgs<A> args) {
  if (blockIdx.x == 0) set_passed(args, threadIdx.x);
  const int64_t c = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (c < args.of.channels) set_channel(args, c, static_cast<const A*>(args.of.mean)[c]);
}

// The sum of a row of pairs, by the threads of a block; thread 0 has it.
QT_DEVICE Pair total_of(const Pairs& from, int64_t begin, int64_t count) {
  Pair mine = {0, 0};
  for (int64_t i = begin + threadIdx.x; i < begin + count; i += blockDim.x) {
    mine = Add()(mine, {from.first[i], from.second[i]});
  }
  return sum_of_block(mine);
}

// Joins the slices of a channel for each block.
template <class A>
__global__ void __launch_bounds__(kThreads) statistics_kernel(const NormArgs<A> args, int64_t slices) {
  const int64_t c = blockIdx.x;
  const Pair sums = total_of(args.sums, c * slices, slices);
  if (threadIdx.x != 0) return;
  A shift = 0;
  with_elements<A>(args.of,
                   [&](const auto* type) { shift = shift_of(args, static_cast<decltype(type)>(args.of.x), c); });
  const Moments moments = moments_about(shift, static_cast<double>(args.of.count()), sums.first, sums.second);
  static_cast<A*>(args.of.mean)[c] = static_cast<A>(moments.mean);
  static_cast<A*>(args.of.variance)[c] = static_cast<A>(moments.squares / moments.count);
  set_channel(args, c, static_cast<A>(moments.mean));
}

// The same for the gradients; a block more has those of scale and zero point, if they are learned.
template <class A>
__global__ void __launch_bounds__(kThreads) gradients_kernel(const NormArgs<A> args, int64_t slices, int64_t blocks) {
  const int64_t c = blockIdx.x, channels = args.of.channels;
  const bool learned = c == channels;
  const Pair sums = learned ? total_of(args.learned, 0, blocks) : total_of(args.sums, c * slices, slices);
  if (threadIdx.x != 0) return;
  if (learned) {
    args.of.gradients[3 * channels] = sums.first;
    args.of.gradients[3 * channels + 1] = sums.second;
    return;
  }
  const NormGradients found =
      norm_gradients({sums.first, sums.second, 0, 0}, static_cast<double>(args.of.count()), inverse_at<A>(args.of, c),
                     value_at<A>(args.of.weight, c, 1), args.of.eps, value_at<A>(args.of.divisor, c, 1));
  args.channels.values[kSlope * channels + c] = static_cast<A>(found.slope);
  args.channels.values[kOffset * channels + c] = static_cast<A>(found.offset);
  args.of.gradients[c] = found.weight;
  args.of.gradients[channels + c] = found.bias;
  args.of.gradients[2 * channels + c] = found.divisor;
}

template <class A, class T>
QT_DEVICE void track(const TrackedStatistics& s, int64_t c) {
  using Running = std::conditional_t<std::is_same_v<T, double>, double, float>;
  T *means = static_cast<T*>(s.running_mean), *variances = static_cast<T*>(s.running_variance);
  const Statistics running = {to_arithmetic<Running>(means[c]), to_arithmetic<Running>(variances[c])};
  const Statistics batch = {value_at<A>(s.mean, c, 0), value_at<A>(s.variance, c, 0)};
  const Statistics next =
      tracked(running, batch, value_at<A>(s.divisor, c, 1), value_at<A>(s.offset, c, 0), s.momentum, s.count);
  means[c] = from_arithmetic<T>(static_cast<Running>(next.mean));
  variances[c] = from_arithmetic<T>(static_cast<Running>(next.variance));
}

template <class A>
__global__ void __launch_bounds__(kThreads) track_kernel(const TrackedStatistics s) {
  const int64_t c = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (c >= s.channels) return;
  if (s.dtype == Dtype::f64) {
    track<A, double>(s, c);
  } else {
    with_type<float, Kind::values>(s.dtype, [&](auto* type) { track<A, std::remove_pointer_t<decltype(type)>>(s, c); });
  }
}

// ---- launches

bool is_of_rows(const BatchNormArgs& args) {
  const bool whole = args.inner == 1 && args.channels % kVectorSize == 0;
  return whole && args.outer * (args.channels / kVectorSize) <= kMostDivisible;
}

// How a tensor is divided between the blocks of a reduction.
ReductionTiling division_of(const BatchNormArgs& args) {
  if (is_of_rows(args)) return tiling_of_rows(args.outer, args.channels);
  KernelArgs shape;
  shape.numel = args.outer * args.channels * args.inner;
  shape.channels = {args.channels, args.channels == 1 ? shape.numel : args.inner, shape.numel, args.channels};
  return tiling_of(shape);
}

int64_t blocks_of(const ReductionTiling& s) { return s.groups * s.tiles * s.count; }

// The workspace: five values for each channel and two for the interval, then the partial results.
template <class A>
NormArgs<A> with_memory(const BatchNormArgs& args, const ReductionTiling& s, double* workspace) {
  const int64_t slots = s.count * args.channels, blocks = blocks_of(s);
  A* values = reinterpret_cast<A*>(workspace);
  double* sums = workspace + kValues * args.channels + 2;
  double* learned = sums + 2 * slots;
  return {args,
          args.outer * args.channels * args.inner,
          {values, args.channels, places_of(args)},
          values + kValues * args.channels,
          {sums, sums + slots},
          {learned, learned + blocks}};
}

// Runs a kernel of vectors as the channels lie along them.
template <class A>
void launch_vectors(void (*const (&kernels)[kSpreads])(NormArgs<A>), const NormArgs<A>& args, cudaStream_t stream) {
  const auto kernel = kernels[static_cast<int>(spread_of(args.of))];
  const unsigned blocks = blocks_for_vectors(args.numel);
  kernel<<<blocks, kThreads, 0, stream>>>(args);
}

template <class A>
using Reduction = void (*)(NormArgs<A>, ReductionTiling, Pairs);

template <class A>
void reduce(Reduction<A> contiguous, Reduction<A> scattered, Reduction<A> rows, const NormArgs<A>& args,
            const ReductionTiling& s, cudaStream_t stream) {
  const auto kernel = is_of_rows(args.of) ? rows : s.unit == kVectorSize ? contiguous : scattered;
  kernel<<<static_cast<unsigned>(blocks_of(s)), kThreads, 0, stream>>>(args, s, args.sums);
}

template <class A, Learned kLearned>
void reduce_gradients(const NormArgs<A>& args, const ReductionTiling& s, cudaStream_t stream) {
  reduce<A>(sums_kernel<A, Contiguous, kLearned>, sums_kernel<A, Scattered, kLearned>, row_sums_kernel<A, kLearned>,
            args, s, stream);
}

// Threads of a block that joins slices.
unsigned threads_for(const ReductionTiling& s) { return s.count > 32 ? kThreads : 32; }

template <class A>
void forward(const BatchNormArgs& given, double* workspace, cudaStream_t stream) {
  static constexpr void (*kKernels[])(NormArgs<A>) = {
      norm_forward_kernel<A, Spread::plane>, norm_forward_kernel<A, Spread::planes>,
      norm_forward_kernel<A, Spread::row>, norm_forward_kernel<A, Spread::any>};
  const ReductionTiling s = division_of(given);
  const NormArgs<A> args = with_memory<A>(given, s, workspace);
  const unsigned channels = static_cast<unsigned>(given.channels), threads = threads_for(s);
  reduce<A>(moments_kernel<A, Contiguous>, moments_kernel<A, Scattered>, row_moments_kernel<A>, args, s, stream);
  statistics_kernel<A><<<channels, threads, 0, stream>>>(args, s.count);
  launch_vectors<A>(kKernels, args, stream);
}

template <class A>
void backward(const BatchNormArgs& given, double* workspace, cudaStream_t stream) {
  static constexpr void (*kKernels[])(NormArgs<A>) = {
      norm_backward_kernel<A, Spread::plane>, norm_backward_kernel<A, Spread::planes>,
      norm_backward_kernel<A, Spread::row>, norm_backward_kernel<A, Spread::any>};
  const ReductionTiling s = division_of(given);
  const NormArgs<A> args = with_memory<A>(given, s, workspace);
  const unsigned channels = static_cast<unsigned>(given.channels + given.learned), threads = threads_for(s);
  launch_each(channels_kernel<A>, given.channels, stream, args);
  if (!given.learned) {
    reduce_gradients<A, Learned::nothing>(args, s, stream);
  } else if (given.zero_point == nullptr) {
    reduce_gradients<A, Learned::scale>(args, s, stream);
  } else {
    reduce_gradients<A, Learned::both>(args, s, stream);
  }
  gradients_kernel<A><<<channels, threads, 0, stream>>>(args, s.count, blocks_of(s));
  launch_vectors<A>(kKernels, args, stream);
}

}  // namespace

int64_t batch_norm_workspace(const BatchNormArgs& args) {
  const ReductionTiling s = division_of(args);
  return kValues * args.channels + 2 + 2 * s.count * args.channels + 2 * blocks_of(s);
}

void batch_norm_forward(const BatchNormArgs& args, double* workspace, cudaStream_t stream) {
  args.is_f64() ? forward<double>(args, workspace, stream) : forward<float>(args, workspace, stream);
}

void batch_norm_backward(const BatchNormArgs& args, double* workspace, cudaStream_t stream) {
  args.is_f64() ? backward<double>(args, workspace, stream) : backward<float>(args, workspace, stream);
}

void batch_norm_track(const TrackedStatistics& s, cudaStream_t stream) {
  launch_each(s.f64 ? track_kernel<double> : track_kernel<float>, s.channels, stream, s);
}

}  // namespace cuda
}  // namespace qtoolkit
