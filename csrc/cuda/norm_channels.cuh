// What the batch norm kernels know of each channel, and which of it the elements of a vector take.
#pragma once

#include "../batch_norm/batch_norm_args.h"
#include "index_divisor.h"
#include "memory.cuh"

namespace qtoolkit {
namespace cuda {

// Values of a channel; forward takes the first three.
enum ChannelValue { kMean, kFactor, kBias, kSlope, kOffset, kValues };
constexpr int kForward = 3, kBackward = kValues;

// How channels lie along vectors of 8 elements: one has each, or two of them share one; 8 follow each other, or any
// other way.
enum class Spread { plane, planes, row, any };
constexpr int kSpreads = 4;

inline Spread spread_of(const BatchNormArgs& args) {
  const int64_t numel = args.outer * args.channels * args.inner;
  if (args.inner % kVectorSize == 0 && numel / kVectorSize <= kMostDivisible) return Spread::plane;
  if (args.inner >= kVectorSize && numel <= kMostDivisible) return Spread::planes;
  const bool row = args.inner == 1 && args.channels % kVectorSize == 0 && numel / kVectorSize <= kMostDivisible;
  return row ? Spread::row : Spread::any;
}

// Where the channels of a vector are. By its number, or that of its first element for `planes`: how many of them a
// plane has, and how many planes or vectors a period of the channels has.
struct ChannelPlaces {
  int64_t inner = 1;
  IndexDivisor plane, period;
};

inline ChannelPlaces places_of(const BatchNormArgs& args) {
  switch (spread_of(args)) {
    case Spread::plane: return {args.inner, IndexDivisor(args.inner / kVectorSize), IndexDivisor(args.channels)};
    case Spread::planes: return {args.inner, IndexDivisor(args.inner), IndexDivisor(args.channels)};
    case Spread::row: return {args.inner, IndexDivisor(), IndexDivisor(args.channels / kVectorSize)};
    default: return {args.inner, IndexDivisor(), IndexDivisor()};
  }
}

// Rows of `count` values each, in memory of the device.
template <class A>
struct NormChannels {
  A* values;
  int64_t count;
  ChannelPlaces places;
};

template <class A>
QT_DEVICE A channel_value(const NormChannels<A>& channels, int value, int64_t c) {
  return channels.values[value * channels.count + c];
}

// The values of the channels of a vector, by the number of an element in it.
template <class Derived, class A>
struct VectorChannels {
  __device__ __forceinline__ A mean(int k) const { return self().template of<kMean>(k); }
  __device__ __forceinline__ A factor(int k) const { return self().template of<kFactor>(k); }
  __device__ __forceinline__ A bias(int k) const { return self().template of<kBias>(k); }
  __device__ __forceinline__ A slope(int k) const { return self().template of<kSlope>(k); }
  __device__ __forceinline__ A offset(int k) const { return self().template of<kOffset>(k); }

 private:
  __device__ __forceinline__ const Derived& self() const { return static_cast<const Derived&>(*this); }
};

template <class A, int kCount>
class OneChannel : public VectorChannels<OneChannel<A, kCount>, A> {
 public:
  __device__ __forceinline__ OneChannel(const NormChannels<A>& channels, int64_t c) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values_[i] = channel_value(channels, i, c);
  }
  template <int kValue>
  __device__ __forceinline__ A of(int) const {
    return values_[kValue];
  }

 private:
  A values_[kCount];
};

template <class A, int kCount>
class TwoChannels : public VectorChannels<TwoChannels<A, kCount>, A> {
 public:
  // The first `left` elements are of channel c.
  __device__ __forceinline__ TwoChannels(const NormChannels<A>& channels, int64_t c, uint32_t left)
      : first_(channels, c), second_(channels, c + 1 == channels.count ? 0 : c + 1), left_(left) {}
  template <int kValue>
  __device__ __forceinline__ A of(int k) const {
    return k < left_ ? first_.template of<kValue>(k) : second_.template of<kValue>(k);
  }

 private:
  OneChannel<A, kCount> first_, second_;
  uint32_t left_;
};

template <class A, int kCount>
class RowOfChannels : public VectorChannels<RowOfChannels<A, kCount>, A> {
 public:
  __device__ __forceinline__ RowOfChannels(const NormChannels<A>& channels, int64_t first) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      load_dense(channels.values + i * channels.count, Contiguous{first, kVectorSize, true}, true, values_[i]);
    }
  }
  template <int kValue>
  __device__ __forceinline__ A of(int k) const {
    return values_[kValue][k];
  }

 private:
  A values_[kCount][kVectorSize];
};

template <class A>
class AnyChannels : public VectorChannels<AnyChannels<A>, A> {
 public:
  __device__ __forceinline__ AnyChannels(const NormChannels<A>& channels, int64_t first)
      : channels_(channels), first_(first) {}
  template <int kValue>
  __device__ __forceinline__ A of(int k) const {
    return channel_value(channels_, kValue, (first_ + k) / channels_.places.inner % channels_.count);
  }

 private:
  const NormChannels<A>& channels_;
  int64_t first_;
};

template <Spread kSpread, int kCount, class A>
QT_DEVICE auto channels_of(const NormChannels<A>& channels, const Contiguous& at) {
  const ChannelPlaces& places = channels.places;
  if constexpr (kSpread == Spread::plane) {
    const uint32_t vector = static_cast<uint32_t>(at.first / kVectorSize);
    return OneChannel<A, kCount>(channels, vector / places.plane % places.period);
  } else if constexpr (kSpread == Spread::planes) {
    const uint32_t first = static_cast<uint32_t>(at.first), plane = first / places.plane;
    return TwoChannels<A, kCount>(channels, plane % places.period, (plane + 1) * places.plane.number - first);
  } else if constexpr (kSpread == Spread::row) {
    const uint32_t vector = static_cast<uint32_t>(at.first / kVectorSize);
    return RowOfChannels<A, kCount>(channels, vector % places.period * kVectorSize);
  } else {
    return AnyChannels<A>(channels, at.first);
  }
}

}  // namespace cuda
}  // namespace qtoolkit
