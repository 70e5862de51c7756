// What becomes of the sums of a channel, in the block that adds up those of all slices.
#pragma once

#include "norm_elements.cuh"

namespace qtoolkit {
namespace cuda {

// The shift of a channel's sums is its first element.
template <class A, class T>
QT_DEVICE A shift_of(const NormArgs<A>& args, const T* x, int64_t channel) {
  return to_arithmetic<A>(x[channel * args.of.inner]);
}

template <class A>
QT_DEVICE void set_channel(const NormArgs<A>& args, int64_t c, A mean) {
  A* values = args.channels.values + c;
  const int64_t count = args.channels.count;
  values[kMean * count] = mean;
  values[kFactor * count] = static_cast<A>(value_at<A>(args.of.weight, c, 1) * inverse_at<A>(args.of, c));
  values[kBias * count] = value_at<A>(args.of.bias, c, 0);
}

template <class A>
QT_DEVICE void set_line(const NormArgs<A>& args, int64_t c, const NormLine& line) {
  args.channels.values[kSlope * args.channels.count + c] = static_cast<A>(line.slope);
  args.channels.values[kOffset * args.channels.count + c] = static_cast<A>(line.offset);
}

template <class A, class T>
QT_DEVICE void track(const TrackedStatistics& s, int64_t c) {
  const double count = s.counted == nullptr ? s.count : *s.counted;
  using Running = std::conditional_t<std::is_same_v<T, double>, double, float>;
  T *means = static_cast<T*>(s.running_mean), *variances = static_cast<T*>(s.running_variance);
  const Statistics running = {to_arithmetic<Running>(means[c]), to_arithmetic<Running>(variances[c])};
  const Statistics batch = {value_at<A>(s.mean, c, 0), value_at<A>(s.variance, c, 0)};
  const Statistics next =
      tracked(running, batch, value_at<A>(s.divisor, c, 1), value_at<A>(s.offset, c, 0), s.momentum, count);
  means[c] = from_arithmetic<T>(static_cast<Running>(next.mean));
  variances[c] = from_arithmetic<T>(static_cast<Running>(next.variance));
}

// The running statistics of a channel take in those of the batch, if there are some.
template <class A>
QT_DEVICE void track_at(const TrackedStatistics& s, int64_t c) {
  if (s.running_mean == nullptr) return;
  if (c == 0 && s.batches != nullptr) ++*s.batches;
  if (s.dtype == Dtype::f64) {
    track<A, double>(s, c);
  } else {
    with_type<float, Kind::values>(s.dtype, [&](auto* type) { track<A, std::remove_pointer_t<decltype(type)>>(s, c); });
  }
}

// The statistics of a channel, and what forward takes of them, from sums about its first element.
template <class T, class A>
QT_DEVICE void set_statistics(const NormArgs<A>& args, int64_t c, Pair sums) {
  const A shift = shift_of(args, static_cast<const T*>(args.of.x), c);
  const Moments moments = moments_about(shift, static_cast<double>(args.of.count()), sums.first, sums.second);
  if (args.of.stage == NormStage::totals) {
    const NormTotals totals = totals_of(moments, value_at<A>(args.of.divisor, c, 1));
    return args.of.set_totals(c, totals.sum, totals.squares);
  }
  static_cast<A*>(args.of.mean)[c] = static_cast<A>(moments.mean);
  static_cast<A*>(args.of.variance)[c] = static_cast<A>(moments.squares / moments.count);
  set_channel(args, c, static_cast<A>(moments.mean));
  track_at<A>(args.of.tracked, c);
}

// The gradients of a channel, and what backward takes of them.
template <class A>
QT_DEVICE void set_gradients(const NormArgs<A>& args, int64_t c, Pair sums) {
  const int64_t channels = args.of.channels;
  const double inverse = inverse_at<A>(args.of, c), weight = value_at<A>(args.of.weight, c, 1);
  const NormGradients found =
      norm_gradients({sums.first, sums.second, 0, 0}, inverse, weight, args.of.eps, value_at<A>(args.of.divisor, c, 1));
  args.of.gradients[c] = found.weight;
  args.of.gradients[channels + c] = found.bias;
  args.of.gradients[2 * channels + c] = found.divisor;
  if (args.of.stage == NormStage::totals) return args.of.set_totals(c, found.weight, found.bias);
  set_line(args, c, norm_line(found.weight, found.bias, static_cast<double>(args.of.count()), inverse, weight));
}

// The block that comes last to a tile adds up the sums of its slices, in their order, and calls finish(channel, sums)
// by a thread for each channel. A unit of the tiling has elements of `kChannels` channels. The flag is in memory that
// the block needs no more.
template <int kChannels = 1, class A, class F>
QT_DEVICE void finish_tile(const NormArgs<A>& args, const ReductionTiling& s, char* memory, F finish) {
  bool& is_last = *reinterpret_cast<bool*>(memory);
  __threadfence();  // behind the sums that this thread has written
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(args.arrived + blockIdx.x / s.count, 1u) + 1 == s.count;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const Tile tile = tile_of(s, blockIdx.x);
  const int64_t first = tile.first_channel * kChannels;
  const int channels = tile.channels * kChannels;
  int team = 32;  // threads of a channel
  while (team > 1 && team * channels > kThreads) team /= 2;
  const int own = threadIdx.x / team, lane = threadIdx.x % team;
  for (int before = 0; before < channels; before += kThreads / team) {
    const int channel = before + own;
    Pair sum = {0, 0};
    if (channel < channels) {
      const int64_t place = (first + channel) * s.count;
      for (int64_t i = lane; i < s.count; i += team) {
        sum = Add()(sum, {args.sums.first[place + i], args.sums.second[place + i]});
      }
    }
    for (int lanes = team / 2; lanes > 0; lanes /= 2) {
      sum = Add()(sum, {__shfl_xor_sync(~0u, sum.first, lanes), __shfl_xor_sync(~0u, sum.second, lanes)});
    }
    if (channel < channels && lane == 0) finish(first + channel, sum);
  }
}

}  // namespace cuda
}  // namespace qtoolkit
