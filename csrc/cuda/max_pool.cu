// Max pooling and its backward on CUDA: a thread for each element that is written.
#include "../max_pool.h"
#include "kernels.h"
#include "loops.cuh"

namespace qtoolkit {
namespace cuda {
namespace {

// The place of an element of a tensor of `rows` by `columns` images, and of elements of its channel.
struct PixelIterator {
  int64_t base, step;  // element (y, x) of the channel is at base + (y * columns + x) * step
  int64_t y, x;
};

QT_DEVICE PixelIterator pixel_at(const PoolArgs& args, int64_t rows, int64_t columns, int64_t i) {
  if (args.channels_last) {
    const int64_t pixel = i / args.channels, within = pixel % (rows * columns);
    return {i - within * args.channels, args.channels, within / columns, within % columns};
  }
  const int64_t within = i % (rows * columns);
  return {i - within, 1, within / columns, within % columns};
}

// The same channel's first element in a tensor of images of another size.
QT_DEVICE int64_t base_in(const PoolArgs& args, int64_t base, int64_t pixels, int64_t other_pixels) {
  if (!args.channels_last) return base / pixels * other_pixels;
  const int64_t image = base / (pixels * args.channels);
  return base + image * (other_pixels - pixels) * args.channels;
}

template <class A>
__global__ void __launch_bounds__(kThreads) pool_forward_kernel(const PoolArgs args, int64_t numel) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i >= numel) return;
  const PoolDimension &rows = args.rows, &columns = args.columns;
  const PixelIterator at = pixel_at(args, rows.results, columns.results, i);
  const int64_t base = base_in(args, at.base, rows.results * columns.results, rows.size * columns.size);
  const PoolWindow high = window_of(rows, at.y), wide = window_of(columns, at.x);
  with_type<A, Kind::values>(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* x = static_cast<const T*>(args.x);
    Largest<A> largest = {static_cast<A>(-INFINITY), static_cast<A>(high.first * columns.kernel + wide.first)};
    for (int64_t r = high.first; r < high.last; ++r) {
      for (int64_t c = wide.first; c < wide.last; ++c) {
        const int64_t pixel = (high.start + r * rows.dilation) * columns.size + wide.start + c * columns.dilation;
        largest = larger(largest, to_arithmetic<A>(x[base + pixel * at.step]), static_cast<A>(r * columns.kernel + c));
      }
    }
    static_cast<T*>(args.y)[i] = from_arithmetic<T>(largest.value);
    args.offsets[i] = static_cast<uint8_t>(largest.place);
  });
}

// The result whose window has an element of x at place k of a dimension; -1 if there is none.
QT_DEVICE int64_t result_at(const PoolDimension& d, int64_t element, int64_t k) {
  const int64_t from = element + d.padding - k * d.dilation;
  return from >= 0 && from % d.stride == 0 && from / d.stride < d.results ? from / d.stride : -1;
}

// Sums the windows of an element in their order, rounded as on the CPU.
template <class A>
__global__ void __launch_bounds__(kThreads) pool_backward_kernel(const PoolArgs args, int64_t numel) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i >= numel) return;
  const PoolDimension &rows = args.rows, &columns = args.columns;
  const PixelIterator at = pixel_at(args, rows.size, columns.size, i);
  const int64_t base = base_in(args, at.base, rows.size * columns.size, rows.results * columns.results);
  with_type<A, Kind::values>(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* grad = static_cast<const T*>(args.x);
    A sum = 0;
    for (int64_t r = rows.kernel - 1; r >= 0; --r) {
      const int64_t y = result_at(rows, at.y, r);
      for (int64_t c = columns.kernel - 1; y >= 0 && c >= 0; --c) {
        const int64_t x = result_at(columns, at.x, c);
        const int64_t from = base + (y * columns.results + x) * at.step;
        if (x < 0 || args.offsets[from] != r * columns.kernel + c) continue;
        sum = to_arithmetic<A>(from_arithmetic<T>(sum + to_arithmetic<A>(grad[from])));
      }
    }
    static_cast<T*>(args.y)[i] = from_arithmetic<T>(sum);
  });
}

void launch_pool(void (*f32)(PoolArgs, int64_t), void (*f64)(PoolArgs, int64_t), const PoolArgs& args, int64_t pixels,
                 cudaStream_t stream) {
  const int64_t numel = args.images * args.channels * pixels;
  launch_each(args.dtype == Dtype::f64 ? f64 : f32, numel, stream, args, numel);
}

}  // namespace

void max_pool_forward(const PoolArgs& args, cudaStream_t stream) {
  launch_pool(pool_forward_kernel<float>, pool_forward_kernel<double>, args, args.rows.results * args.columns.results,
              stream);
}

void max_pool_backward(const PoolArgs& args, cudaStream_t stream) {
  launch_pool(pool_backward_kernel<float>, pool_backward_kernel<double>, args, args.rows.size * args.columns.size,
              stream);
}

}  // namespace cuda
}  // namespace qtoolkit
