// Max pooling and its backward on CUDA: a thread for each element that is written, or for 8 channels of a pixel.
#include "../pool/max_pool.h"
#include "index_divisor.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// A dimension with its numbers as indices.
template <class I>
struct Side {
  I size, results, kernel, stride, padding, dilation;
  DivisorOfIndex<I> by_stride, by_dilation;

  explicit Side(const PoolDimension& d)
      : size(static_cast<I>(d.size)),
        results(static_cast<I>(d.results)),
        kernel(static_cast<I>(d.kernel)),
        stride(static_cast<I>(d.stride)),
        padding(static_cast<I>(d.padding)),
        dilation(static_cast<I>(d.dilation)),
        by_stride(d.stride),
        by_dilation(d.dilation) {}
};

// A pass over images of `vectors` of channels each. A contiguous tensor is one of images of one channel.
template <class I>
struct PoolPass {
  PoolArgs of;
  Side<I> rows, columns;
  int64_t count;                                      // of threads
  I vectors;                                          // of a pixel
  DivisorOfIndex<I> by_vectors, by_width, by_height;  // of the threads of an image
};

template <class I>
struct Pixel {
  I vector, x, y, image;
};

template <class I>
QT_DEVICE Pixel<I> pixel_at(const PoolPass<I>& pass, I i) {
  const I pixel = i / pass.by_vectors, row = pixel / pass.by_width, image = row / pass.by_height;
  return {i - pixel * pass.vectors, pixel - row * static_cast<I>(pass.by_width.number),
          row - image * static_cast<I>(pass.by_height.number), image};
}

// The results whose windows may hold an element: from `first` on, up to and without `last`.
template <class I>
struct Windows {
  I first, last;
};

template <class I>
QT_DEVICE Windows<I> windows_of(const Side<I>& side, I element) {
  const I at = element + side.padding, reach = (side.kernel - 1) * side.dilation;
  const I last = at / side.by_stride + 1;
  return {at > reach ? (at - reach - 1) / side.by_stride + 1 : I(0), last < side.results ? last : side.results};
}

template <class T>
QT_DEVICE uint32_t bits_of(T value) {
  uint32_t word;
  memcpy(&word, &value, sizeof(word));
  return word;
}

template <class T>
QT_DEVICE T as(uint32_t word) {
  T value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

// 255 in the bytes of a word that are equal to a number below 256.
QT_DEVICE uint32_t equal_bytes(uint32_t word, uint32_t number) {
  const uint32_t different = word ^ number * 0x01010101u;
  const uint32_t low = (different & 0x7f7f7f7fu) + 0x7f7f7f7fu;
  return (~(low | different) >> 7 & 0x01010101u) * 255;
}

// The sum of two words of elements, rounded to their type.
template <class T>
QT_DEVICE uint32_t add_word(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  if constexpr (sizeof(T) == 2) return bits_of(__hadd2_rn(as<Two>(a), as<Two>(b)));
#endif
  uint32_t sums = 0;
#pragma unroll
  for (int at = 0; at < 32; at += 8 * sizeof(T)) {
    T x, y;
    const uint32_t of_x = a >> at, of_y = b >> at;
    memcpy(&x, &of_x, sizeof(T));
    memcpy(&y, &of_y, sizeof(T));
    x = from_arithmetic<T>(to_arithmetic<float>(x) + to_arithmetic<float>(y));
    uint32_t bits = 0;
    memcpy(&bits, &x, sizeof(T));
    sums |= bits << at;
  }
  return sums;
}

// kWidth elements as one load or store.
template <class T, int kWidth>
struct alignas(kWidth == 1 ? sizeof(T) : alignof(Pack<T>)) Few {
  T v[kWidth];
};

template <class T, int kWidth, class I>
QT_DEVICE Few<T, kWidth> load_few(const T* from, I vector) {
  return reinterpret_cast<const Few<T, kWidth>*>(from)[vector];
}

template <class T, int kWidth, class I>
QT_DEVICE void store_few(T* to, I vector, const Few<T, kWidth>& few) {
  reinterpret_cast<Few<T, kWidth>*>(to)[vector] = few;
}

template <class A, int kWidth, class I>
__global__ void __launch_bounds__(kThreads, 4) pool_forward_kernel(const __grid_constant__ PoolPass<I> pass) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i >= pass.count) return;
  const Pixel<I> at = pixel_at(pass, static_cast<I>(i));
  const Side<I>&rows = pass.rows, &columns = pass.columns;
  const PoolWindow high = window_of(pass.of.rows, at.y), wide = window_of(pass.of.columns, at.x);
  with_type<A, Kind::values>(pass.of.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Largest<A> largest[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      largest[k] = {static_cast<A>(-INFINITY), static_cast<A>(high.first * pass.of.columns.kernel + wide.first)};
    }
    for (I r = static_cast<I>(high.first); r < static_cast<I>(high.last); ++r) {
      const I row = (at.image * rows.size + static_cast<I>(high.start + r * rows.dilation)) * columns.size;
      for (I c = static_cast<I>(wide.first); c < static_cast<I>(wide.last); ++c) {
        const I pixel = row + static_cast<I>(wide.start + c * columns.dilation);
        const auto x = load_few<T, kWidth>(static_cast<const T*>(pass.of.x), pixel * pass.vectors + at.vector);
        const A place = static_cast<A>(static_cast<int>(r * columns.kernel + c));
#pragma unroll
        for (int k = 0; k < kWidth; ++k) largest[k] = larger(largest[k], to_arithmetic<A>(x.v[k]), place);
      }
    }
    Few<T, kWidth> y;
    Few<uint8_t, kWidth> places;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      y.v[k] = from_arithmetic<T>(largest[k].value);
      places.v[k] = from_arithmetic<uint8_t>(largest[k].place);
    }
    store_few(static_cast<T*>(pass.of.y), static_cast<I>(i), y);
    store_few(pass.of.offsets, static_cast<I>(i), places);
  });
}

// The sum of the gradients of an element, rounded to T after each as on the CPU.
template <class A, class T, int kWidth>
class GradientSum {
 public:
  __device__ __forceinline__ void add(const Few<T, 1>& grad, const Few<uint8_t, 1>& places, uint32_t place) {
    const A term = places.v[0] == place ? to_arithmetic<A>(grad.v[0]) : A(0);
    sum_ = to_arithmetic<A>(from_arithmetic<T>(sum_ + term));
  }
  __device__ __forceinline__ Few<T, 1> result() const { return {{from_arithmetic<T>(sum_)}}; }

 private:
  A sum_ = 0;
};

// Of 8 elements: places are compared, and gradients of 16 bits are added, several to an instruction.
template <class A, class T>
class GradientSum<A, T, kVectorSize> {
 public:
  __device__ __forceinline__ void add(const Few<T, kVectorSize>& grad, const Few<uint8_t, kVectorSize>& places,
                                      uint32_t place) {
    uint32_t words[kWords], of_places[2];
    memcpy(words, &grad, sizeof(words));
    memcpy(of_places, &places, sizeof(of_places));
    const uint32_t equal[2] = {equal_bytes(of_places[0], place), equal_bytes(of_places[1], place)};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int byte = i * kPerWord % 4;
      const uint32_t selector = kPerWord == 2 ? byte * 0x1111 + 0x1100 : byte * 0x1111;
      sums_[i] = add_word<T>(sums_[i], words[i] & __byte_perm(equal[i * kPerWord / 4], 0, selector));
    }
  }
  __device__ __forceinline__ Few<T, kVectorSize> result() const {
    Few<T, kVectorSize> result;
    memcpy(&result, sums_, sizeof(result));
    return result;
  }

 private:
  static constexpr int kPerWord = 4 / sizeof(T), kWords = kVectorSize / kPerWord;
  uint32_t sums_[kWords] = {};
};

// The places of two neighbours along a dimension in a window; kNone where the window does not have one.
constexpr uint32_t kNone = UINT32_MAX;

template <class I>
QT_DEVICE void places_of(const Side<I>& side, I first, I window, uint32_t (&places)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const I from = first + i + side.padding - window * side.stride;  // large where it is negative
    const I place = from / side.by_dilation;
    const bool held = from <= (side.kernel - 1) * side.dilation && place * side.dilation == from;
    places[i] = held ? static_cast<uint32_t>(place) : kNone;
  }
}

// A thread has the elements of two rows and two columns, which share windows.
template <class A, int kWidth, class I>
__global__ void __launch_bounds__(kThreads) pool_backward_kernel(const __grid_constant__ PoolPass<I> pass) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i >= pass.count) return;
  const Pixel<I> at = pixel_at(pass, static_cast<I>(i));
  const Side<I>&rows = pass.rows, &columns = pass.columns;
  const I top = 2 * at.y, left = 2 * at.x;
  const I height = rows.size - top < 2 ? 1 : 2, width = columns.size - left < 2 ? 1 : 2;
  const I first = windows_of(columns, left).first, last = windows_of(columns, left + width - 1).last;
  with_type<A, Kind::values>(pass.of.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    GradientSum<A, T, kWidth> sums[2][2];
    const I end = windows_of(rows, top + height - 1).last;
    for (I y = windows_of(rows, top).first; y < end; ++y) {
      uint32_t down[2], right[2];
      places_of(rows, top, y, down);
      const I row = (at.image * rows.results + y) * columns.results;
      for (I x = first; x < last; ++x) {
        places_of(columns, left, x, right);
        const I from = (row + x) * pass.vectors + at.vector;
        const auto grad = load_few<T, kWidth>(static_cast<const T*>(pass.of.x), from);
        const auto places = load_few<uint8_t, kWidth>(pass.of.offsets, from);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (down[r] == kNone || right[c] == kNone) continue;
            sums[r][c].add(grad, places, down[r] * static_cast<uint32_t>(columns.kernel) + right[c]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const I pixel = (at.image * rows.size + top + r) * columns.size + left + c;
        if (r < height && c < width)
          store_few(static_cast<T*>(pass.of.y), pixel * pass.vectors + at.vector, sums[r][c].result());
      }
    }
  });
}

template <class I>
using Kernel = void (*)(PoolPass<I>);

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether 8 channels of a pixel are a vector of each tensor. In float64 they are not loaded at once.
bool is_wide(const PoolArgs& args) {
  const bool whole = args.channels_last && args.channels % kVectorSize == 0 && args.dtype != Dtype::f64;
  return whole && aligned(args.x) && aligned(args.y) && aligned(args.offsets);
}

// Elements of the larger of both tensors.
int64_t numel_of(const PoolArgs& args) {
  const int64_t pixels = args.rows.size * args.columns.size, results = args.rows.results * args.columns.results;
  return args.images * args.channels * (pixels > results ? pixels : results);
}

// Which kernels there are: 8 channels at once for indices of 32 bits in float32's arithmetic.
template <class I>
struct Kernels {
  Kernel<I> wide, f32, f64;
};

// `height` by `width` threads for each vector of an image.
template <class I>
void launch(const Kernels<I>& kernels, const PoolArgs& args, int64_t height, int64_t width, cudaStream_t stream) {
  const bool wide = kernels.wide != nullptr && is_wide(args);
  const int64_t images = args.channels_last ? args.images : args.images * args.channels;
  const int64_t vectors = !args.channels_last ? 1 : wide ? args.channels / kVectorSize : args.channels;
  const PoolPass<I> pass = {args,
                            Side<I>(args.rows),
                            Side<I>(args.columns),
                            images * height * width * vectors,
                            static_cast<I>(vectors),
                            DivisorOfIndex<I>(vectors),
                            DivisorOfIndex<I>(width),
                            DivisorOfIndex<I>(height)};
  launch_each(wide ? kernels.wide : args.dtype == Dtype::f64 ? kernels.f64 : kernels.f32, pass.count, stream, pass);
}

template <class I>
void pool_forward(const PoolArgs& args, cudaStream_t stream) {
  Kernels<I> kernels = {nullptr, pool_forward_kernel<float, 1, I>, pool_forward_kernel<double, 1, I>};
  if constexpr (std::is_same_v<I, uint32_t>) kernels.wide = pool_forward_kernel<float, kVectorSize, I>;
  launch(kernels, args, args.rows.results, args.columns.results, stream);
}

template <class I>
void pool_backward(const PoolArgs& args, cudaStream_t stream) {
  Kernels<I> kernels = {nullptr, pool_backward_kernel<float, 1, I>, pool_backward_kernel<double, 1, I>};
  if constexpr (std::is_same_v<I, uint32_t>) kernels.wide = pool_backward_kernel<float, kVectorSize, I>;
  launch(kernels, args, divide_up(args.rows.size, 2), divide_up(args.columns.size, 2), stream);
}

}  // namespace

void max_pool_forward(const PoolArgs& args, cudaStream_t stream) {
  with_index(numel_of(args), [&](auto index) { pool_forward<decltype(index)>(args, stream); });
}

void max_pool_backward(const PoolArgs& args, cudaStream_t stream) {
  with_index(numel_of(args), [&](auto index) { pool_backward<decltype(index)>(args, stream); });
}

}  // namespace cuda
}  // namespace qtoolkit
