// Divides max pooling between threads, and its backward, which adds each gradient to the element that its offset names.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "launch.h"

namespace qtoolkit {
namespace cpu {
namespace {

constexpr int64_t kPoolWork = 32768;  // elements of x that a thread reads, at the least

template <class A>
void forward(const PoolArgs& args) {
  const PoolKernel<A> kernel = kernels<A>().max_pool;
  const int64_t units = args.images * (args.channels_last ? args.rows.results : args.channels);
  const int64_t numel = args.images * args.channels * args.rows.size * args.columns.size;
  const int64_t grain = std::max<int64_t>(units * kPoolWork / std::max<int64_t>(numel, 1), 1);
  at::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    const PoolScratch size = args.channels_last ? PoolScratch{} : scratch_of(args);
    std::vector<A> scratch(size.total);
    std::vector<int64_t> held(size.slots);
    kernel(args, begin, end, scratch.data(), held.data());
  });
}

// An element of a window relative to its first, which may be padding.
using Places = std::array<int64_t, 256>;

// The gradients of planes [begin, end). Gradients of one element are added in the order of the windows, as in torch.
template <class T>
void planes_backward(const PoolArgs& args, int64_t begin, int64_t end) {
  const PoolDimension &rows = args.rows, &columns = args.columns;
  const uint64_t places = rows.kernel * columns.kernel, height = rows.size, width = columns.size;
  Places down, right;
  for (uint64_t place = 0; place < places; ++place) {
    down[place] = static_cast<int64_t>(place) / columns.kernel * rows.dilation;
    right[place] = static_cast<int64_t>(place) % columns.kernel * columns.dilation;
  }
  for (int64_t plane = begin; plane < end; ++plane) {
    T* dx = static_cast<T*>(args.y) + plane * rows.size * columns.size;
    std::memset(static_cast<void*>(dx), 0, height * width * sizeof(T));
    int64_t at = plane * rows.results * columns.results;
    for (int64_t row = 0; row < rows.results; ++row) {
      const int64_t top = row * rows.stride - rows.padding;
      for (int64_t column = 0; column < columns.results; ++column, ++at) {
        const uint8_t place = args.offsets[at];
        if (place >= places) continue;
        const uint64_t y = top + down[place], x = column * columns.stride - columns.padding + right[place];
        if (y < height && x < width) dx[y * width + x] += static_cast<const T*>(args.x)[at];
      }
    }
  }
}

// The gradients of channels [first, last) of an image.
template <class T>
void image_backward(const PoolArgs& args, int64_t image, int64_t first, int64_t last) {
  const PoolDimension &rows = args.rows, &columns = args.columns;
  const int64_t places = rows.kernel * columns.kernel;
  Places element;  // of each place of a window, or -1
  T* dx = static_cast<T*>(args.y) + image * rows.size * columns.size * args.channels;
  for (int64_t i = 0; i < rows.size * columns.size; ++i) {
    std::memset(static_cast<void*>(dx + i * args.channels + first), 0, (last - first) * sizeof(T));
  }
  for (int64_t row = 0; row < rows.results; ++row) {
    const PoolWindow high = window_of(rows, row);
    for (int64_t column = 0; column < columns.results; ++column) {
      const PoolWindow wide = window_of(columns, column);
      std::fill_n(element.begin(), places, -1);
      for (int64_t i = high.first; i < high.last; ++i) {
        for (int64_t j = wide.first; j < wide.last; ++j) {
          const int64_t y = high.start + i * rows.dilation, x = wide.start + j * columns.dilation;
          element[i * columns.kernel + j] = (y * columns.size + x) * args.channels;
        }
      }
      const int64_t at = ((image * rows.results + row) * columns.results + column) * args.channels;
      for (int64_t c = first; c < last; ++c) {
        const int64_t place = args.offsets[at + c], to = place < places ? element[place] : -1;
        if (to >= 0) dx[to + c] += static_cast<const T*>(args.x)[at + c];
      }
    }
  }
}

template <class T>
void backward(const PoolArgs& args) {
  const int64_t plane = args.rows.size * args.columns.size;
  if (!args.channels_last) {
    return at::parallel_for(0, args.images * args.channels,
                            std::max<int64_t>(kPoolWork / std::max<int64_t>(plane, 1), 1),
                            [&](int64_t begin, int64_t end) { planes_backward<T>(args, begin, end); });
  }
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    const PoolBackwardKernel kernel = kernels<T>().max_pool_backward;
    const int64_t grain = std::max<int64_t>(kPoolWork / std::max<int64_t>(args.columns.size * args.channels, 1), 1);
    return at::parallel_for(0, args.images * args.rows.size, grain,
                            [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  }
  // Each sum is rounded to the type, as in torch.
  const int64_t groups = (args.channels + kChunk - 1) / kChunk;
  at::parallel_for(0, args.images * groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % groups * kChunk;
      image_backward<T>(args, i / groups, first, std::min<int64_t>(first + kChunk, args.channels));
    }
  });
}

}  // namespace

void max_pool_forward(const PoolArgs& args) { args.dtype == Dtype::f64 ? forward<double>(args) : forward<float>(args); }

void max_pool_backward(const PoolArgs& args) {
  switch (args.dtype) {
    case Dtype::f32: return backward<float>(args);
    case Dtype::f64: return backward<double>(args);
    case Dtype::bf16: return backward<c10::BFloat16>(args);
    default: return backward<c10::Half>(args);
  }
}

}  // namespace cpu
}  // namespace qtoolkit
