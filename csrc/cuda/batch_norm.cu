// Batch norm in training with what is fused behind it, and its gradients, on CUDA.
#include "../batch_norm.h"
#include "../batch_norm_args.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// What belongs to a channel, in memory of the device: mean and bias are the arguments', the others computed once.
template <class A>
struct NormArgs {
  BatchNormArgs of;
  int64_t numel;
  Channels channels;
  double* sums;  // rows of channels: two sums for forward; four for backward
  A *factor, *slope, *offset;
};

template <class A>
QT_DEVICE A value_at(const void* values, int64_t c, A absent) {
  return values == nullptr ? absent : __ldg(static_cast<const A*>(values) + c);
}

template <class A>
QT_DEVICE double inverse_at(const BatchNormArgs& args, int64_t c) {
  return inverse_deviation(static_cast<const A*>(args.variance)[c], args.eps, value_at<A>(args.divisor, c, 1));
}

// How many blocks a multiprocessor holds at the least, as many as fit without spilling registers. Not in float64.
template <class A, int kMost = 3>
constexpr int kBlocks = std::is_same_v<A, float> ? kMost : 1;

// ---- elements

template <class A, class At>
QT_DEVICE void load_like(Dtype dtype, const void* from, const At& at, A (&v)[kVectorSize]) {
  with_type<A, Kind::values>(dtype, [&](const auto* type) { load_dense(static_cast<decltype(type)>(from), at, v); });
}

template <class A>
QT_DEVICE void store_like(Dtype dtype, void* to, const Contiguous& at, const A (&v)[kVectorSize]) {
  with_type<A, Kind::values>(dtype, [&](auto* type) { store_dense(static_cast<decltype(type)>(to), at, v); });
}

// The residual, or zeros. Rebuilt from its codes, it is rounded to x's dtype as it was before.
template <class A, class At>
QT_DEVICE void load_residual(const BatchNormArgs& args, const At& at, A (&v)[kVectorSize]) {
  if (args.residual_codes == nullptr) {
    if (args.residual != nullptr) load_like(args.dtype, args.residual, at, v);
    return;
  }
  if (args.residual_signed) {
    load_dense(reinterpret_cast<const int8_t*>(args.residual_codes), at, v);
  } else {
    load_dense(args.residual_codes, at, v);
  }
  const A scale = usable_scale(value_at<A>(args.residual_scale, 0, 1));
  const A zero_point = usable_zero_point(value_at<A>(args.residual_zero_point, 0, 0));
  with_type<A, Kind::values>(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
#pragma unroll
    for (int k = 0; k < kVectorSize; ++k) {
      v[k] = to_arithmetic<A>(from_arithmetic<T>(value_of(v[k], scale, zero_point)));
    }
  });
}

template <class A>
struct Elements {
  A x[kVectorSize], residual[kVectorSize], grad[kVectorSize];
};

template <class A, class At>
QT_DEVICE void load_elements(const BatchNormArgs& args, const At& at, Elements<A>& e) {
  load_like(args.dtype, args.x, at, e.x);
  load_residual(args, at, e.residual);
  if (args.grad != nullptr) load_like(args.dtype, args.grad, at, e.grad);
}

template <class A>
struct Channel {
  A mean, factor, bias;
};

template <class A>
struct SlopedChannel : Channel<A> {
  A slope, offset;
};

template <class A>
QT_DEVICE Channel<A> channel_at(const NormArgs<A>& args, int64_t c) {
  return {static_cast<const A*>(args.of.mean)[c], args.factor[c], value_at<A>(args.of.bias, c, 0)};
}

// What all elements share.
template <class A>
struct Settings {
  Activation<A> ends;
  bool quantized, has_residual;
  A scale, zero_point, lo, hi;
};

template <class A>
QT_DEVICE Settings<A> settings_of(const BatchNormArgs& args) {
  return {activation<A, A>(args.low, args.high, args.slope),
          args.scale != nullptr,
          args.residual != nullptr || args.residual_codes != nullptr,
          usable_scale(value_at<A>(args.scale, 0, 1)),
          usable_zero_point(value_at<A>(args.zero_point, 0, 0)),
          static_cast<A>(args.bounds.lo),
          static_cast<A>(args.bounds.hi)};
}

// The value before the activation.
template <class A>
QT_DEVICE A before_of(const Settings<A>& s, const Elements<A>& e, int k, const Channel<A>& c) {
  const A value = normalized(e.x[k] - c.mean, c.factor, c.bias);
  return s.has_residual ? value + e.residual[k] : value;
}

// The gradient of that value, and those of scale and zero point.
template <class A>
struct Gradient {
  A before, scale, zero_point;
};

template <class A>
QT_DEVICE Gradient<A> gradient_of(const Settings<A>& s, A before, A grad) {
  if (!s.quantized) return {activation_gradient(s.ends, before, grad), A(0), A(0)};
  const auto point = snap(activate(s.ends, before), s.scale, s.zero_point, s.lo, s.hi);
  return {activation_gradient(s.ends, before, is_inside(point) ? grad : A(0)),
          scale_gradient(point, grad, s.zero_point), zero_point_gradient(point, grad, s.scale)};
}

template <class A>
__global__ void __launch_bounds__(kThreads, kBlocks<A, 4>)
    norm_forward_kernel(const __grid_constant__ NormArgs<A> args) {
  const Settings<A> settings = settings_of<A>(args.of);
  for_vectors(args.numel, [&](const Contiguous& at) {
    Elements<A> e;
    A y[kVectorSize], codes[kVectorSize];
    load_elements(args.of, at, e);
    const auto channel_of = [&](int64_t c) { return channel_at(args, c); };
    for_channels(args.channels, args.numel, at, channel_of, [&](int k, const Channel<A>& channel) {
      y[k] = activate(settings.ends, before_of(settings, e, k, channel));
      if (!settings.quantized) return;
      const A code = snap(y[k], settings.scale, settings.zero_point, settings.lo, settings.hi).code;
      y[k] = value_of(code, settings.scale, settings.zero_point);
      codes[k] = code == code ? code : settings.lo;
    });
    store_like(args.of.dtype, args.of.y, at, y);
    if (args.of.codes != nullptr) store_dense(args.of.codes, at, codes);
  });
}

template <class A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>) norm_backward_kernel(const __grid_constant__ NormArgs<A> args) {
  const Settings<A> settings = settings_of<A>(args.of);
  for_vectors(args.numel, [&](const Contiguous& at) {
    Elements<A> e;
    A dx[kVectorSize], grads[kVectorSize];
    load_elements(args.of, at, e);
    const auto channel_of = [&](int64_t c) {
      return SlopedChannel<A>{channel_at(args, c), args.slope[c], args.offset[c]};
    };
    for_channels(args.channels, args.numel, at, channel_of, [&](int k, const SlopedChannel<A>& channel) {
      grads[k] = gradient_of(settings, before_of(settings, e, k, channel), e.grad[k]).before;
      dx[k] = input_gradient(grads[k], e.x[k] - channel.mean, channel.factor, channel.slope, channel.offset);
    });
    store_like(args.of.dtype, args.of.y, at, dx);
    if (args.of.residual_grad != nullptr) store_like(args.of.dtype, args.of.residual_grad, at, grads);
  });
}

// ---- reductions

// The shift of a channel's sums is its first element.
template <class A>
QT_DEVICE A shift_of(const NormArgs<A>& args, int64_t channel) {
  A shift = 0;
  with_type<A, Kind::values>(args.of.dtype, [&](const auto* type) {
    shift = to_arithmetic<A>(static_cast<decltype(type)>(args.of.x)[channel * args.of.inner]);
  });
  return shift;
}

template <class A, class At>
__global__ void __launch_bounds__(kThreads) moments_kernel(const __grid_constant__ NormArgs<A> args,
                                                           const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  Pair sum = {0, 0};
  ReductionIterator it = reduction_iterator(tiling, blockIdx.x, threadIdx.x);
  const A shift = it.left > 0 ? shift_of(args, it.channel) : A(0);
  At at;
  while (next(tiling, args.numel, it, at)) {
    A x[kVectorSize];
    TreeSum<A> values, squares;
    load_like(args.of.dtype, args.of.x, at, x);
    const A nearby = x[0];  // the channel's shift may be far from its mean; only float64 holds what it adds
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      const int k = TreeSum<A>::place(i);
      const A value = k < at.n ? x[k] - nearby : A(0);
      values.add(i, value);
      squares.add(i, value * value);
    }
    const double total = values.total(), n = at.n, offset = static_cast<double>(nearby) - shift;
    sum.first += total + n * offset;
    sum.second += squares.total() + offset * (2 * total + n * offset);
  }
  join_block(tiling, sum, sums, Add());
}

// The sums of scale and zero point go to the rows behind those of the gradient and the product.
template <class A, class At>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    sums_kernel(const __grid_constant__ NormArgs<A> args, const __grid_constant__ ReductionTiling tiling, Pairs sums) {
  const Settings<A> settings = settings_of<A>(args.of);
  Pair sum = {0, 0}, learned = {0, 0};
  ReductionIterator it = reduction_iterator(tiling, blockIdx.x, threadIdx.x);
  const Channel<A> channel = it.left > 0 ? channel_at(args, it.channel) : Channel<A>{};
  At at;
  while (next(tiling, args.numel, it, at)) {
    Elements<A> e;
    TreeSum<A> grads, products, scales, zero_points;
    load_elements(args.of, at, e);
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      const int k = TreeSum<A>::place(i);
      const auto g = gradient_of(settings, before_of(settings, e, k, channel), e.grad[k]);
      const bool exists = k < at.n;
      grads.add(i, exists ? g.before : A(0));
      products.add(i, exists ? g.before * (e.x[k] - channel.mean) : A(0));
      scales.add(i, exists ? g.scale : A(0));
      zero_points.add(i, exists ? g.zero_point : A(0));
    }
    sum.first += grads.total();
    sum.second += products.total();
    learned.first += scales.total();
    learned.second += zero_points.total();
  }
  join_block(tiling, sum, sums, Add());
  if (!args.of.learned) return;
  __syncthreads();
  const int64_t slots = args.channels.count * tiling.count;
  join_block(tiling, learned, {sums.first + 2 * slots, sums.second + 2 * slots}, Add());
}

// ---- channels

template <class A>
__global__ void __launch_bounds__(kThreads) statistics_kernel(const NormArgs<A> args, bool known) {
  const int64_t c = int64_t{kThreads} * blockIdx.x + threadIdx.x, channels = args.of.channels;
  if (c >= channels) return;
  if (!known) {
    const double count = static_cast<double>(args.of.outer * args.of.inner);
    const Moments moments = moments_about(shift_of(args, c), count, args.sums[c], args.sums[channels + c]);
    static_cast<A*>(args.of.mean)[c] = static_cast<A>(moments.mean);
    static_cast<A*>(args.of.variance)[c] = static_cast<A>(moments.squares / moments.count);
  }
  args.factor[c] = static_cast<A>(value_at<A>(args.of.weight, c, 1) * inverse_at<A>(args.of, c));
}

template <class A>
__global__ void __launch_bounds__(kThreads) gradients_kernel(const NormArgs<A> args) {
  const int64_t c = int64_t{kThreads} * blockIdx.x + threadIdx.x, channels = args.of.channels;
  if (c >= channels) return;
  const NormSums sums = {args.sums[c], args.sums[channels + c], 0, 0};
  const NormGradients found =
      norm_gradients(sums, static_cast<double>(args.of.outer * args.of.inner), inverse_at<A>(args.of, c),
                     value_at<A>(args.of.weight, c, 1), args.of.eps, value_at<A>(args.of.divisor, c, 1));
  args.slope[c] = static_cast<A>(found.slope);
  args.offset[c] = static_cast<A>(found.offset);
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

KernelArgs shape_of(const BatchNormArgs& args) {
  KernelArgs shape;
  shape.numel = args.outer * args.channels * args.inner;
  shape.channels = {args.channels, args.channels == 1 ? shape.numel : args.inner, shape.numel, args.channels};
  return shape;
}

// The workspace: results of the sums, their slices if there are several, and three values for each channel.
template <class A>
NormArgs<A> with_memory(const BatchNormArgs& args, double* workspace) {
  const KernelArgs shape = shape_of(args);
  const int64_t slots = slots_of(tiling_of(shape), shape);
  A* values = reinterpret_cast<A*>(workspace + 4 * (args.channels + slots));
  return {args, shape.numel, shape.channels, workspace, values, values + args.channels, values + 2 * args.channels};
}

template <class A>
using Reduction = void (*)(NormArgs<A>, ReductionTiling, Pairs);

// `pairs`: of sums, one or two.
template <class A>
void reduce(Reduction<A> contiguous, Reduction<A> scattered, const NormArgs<A>& args, int pairs, cudaStream_t stream) {
  const KernelArgs shape = shape_of(args.of);
  const ReductionTiling s = tiling_of(shape);
  const int64_t channels = args.of.channels, slots = slots_of(s, shape);
  double* parts = s.count == 1 ? args.sums : args.sums + 4 * channels;
  const int64_t row = s.count == 1 ? channels : slots;
  launch_parts(contiguous, scattered, args, s, {parts, parts + row}, stream);
  for (int i = 0; i < pairs; ++i) {
    double *from = parts + 2 * i * row, *to = args.sums + 2 * i * channels;
    launch_join(s, channels, {from, from + row}, {to, to + channels}, Pair{0, 0}, Add(), stream);
  }
}

template <class A>
void launch_vectors(void (*kernel)(NormArgs<A>), const NormArgs<A>& args, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(least(divide_up(args.numel, int64_t{kVectorSize} * kThreads), int64_t{1} << 14));
  kernel<<<blocks, kThreads, 0, stream>>>(args);
}

template <class A>
void forward(const BatchNormArgs& given, double* workspace, cudaStream_t stream) {
  const NormArgs<A> args = with_memory<A>(given, workspace);
  reduce<A>(moments_kernel<A, Contiguous>, moments_kernel<A, Scattered>, args, 1, stream);
  launch_each(statistics_kernel<A>, given.channels, stream, args, false);
  launch_vectors<A>(norm_forward_kernel<A>, args, stream);
}

template <class A>
void backward(const BatchNormArgs& given, double* workspace, cudaStream_t stream) {
  const NormArgs<A> args = with_memory<A>(given, workspace);
  launch_each(statistics_kernel<A>, given.channels, stream, args, true);
  reduce<A>(sums_kernel<A, Contiguous>, sums_kernel<A, Scattered>, args, given.learned ? 2 : 1, stream);
  launch_each(gradients_kernel<A>, given.channels, stream, args);
  if (given.learned) {
    double *from = args.sums + 2 * given.channels, *to = given.gradients + 3 * given.channels;
    const Pairs all = {from, from + given.channels}, results = {to, to + 1};
    join_slices<Add><<<1, kThreads, 0, stream>>>(all, given.channels, results, Pair{0, 0}, Add());
  }
  launch_vectors<A>(norm_backward_kernel<A>, args, stream);
}

}  // namespace

int64_t batch_norm_workspace(const BatchNormArgs& args) {
  const KernelArgs shape = shape_of(args);
  return 4 * (args.channels + slots_of(tiling_of(shape), shape)) + 3 * args.channels;
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
