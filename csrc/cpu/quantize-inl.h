// Kernels between values and integer codes. Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "scales-inl.h"

// 4-bit codes, two a byte.
template <class A>
void pack(const A* from, int n, uint8_t* to) {
  alignas(64) int8_t codes[kBlock + 1];
  write(from, n, codes);
  codes[n] = 0;
  for (int i = 0; i < (n + 1) / 2; ++i)
    to[i] = static_cast<uint8_t>((codes[2 * i] & 15) | (codes[2 * i + 1] & 15) << 4);
}

template <class A>
void unpack(const uint8_t* from, bool is_signed, int n, A* to) {
  alignas(64) int8_t codes[kBlock];
  const int sign = is_signed ? 8 : 0;
  for (int i = 0; i < (n + 1) / 2; ++i) {
    codes[2 * i] = static_cast<int8_t>(((from[i] & 15) ^ sign) - sign);
    codes[2 * i + 1] = static_cast<int8_t>((from[i] >> 4 ^ sign) - sign);
  }
  for (int i = 0; i < n; ++i) to[i] = codes[i];
}

// NaN has no code: it becomes the lowest one, as in onnxruntime.
template <class A>
void quantize(const KernelArgs& args, int64_t begin, int64_t end) {
  Block<A> in, out;
  const Vector<A> lo = broadcast<Vector<A>>(static_cast<A>(args.bounds.lo)),
                  hi = broadcast<Vector<A>>(static_cast<A>(args.bounds.hi));
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t at, int n) {
    const A* x = fetch(args.x, at, n, in);
    for_grids<A>(args, position, n, [&](int from, int chunks, auto grid) {
      for (int i = from; i < from + chunks * kChunk; i += kChunk) {
        for (int k = 0; k < kChunk; k += kLanes<A>) {
          const auto point = snap(load(x + i + k), decltype(grid)::scales(grid, i - from + k),
                                  decltype(grid)::zero_points(grid, i - from + k), lo, hi);
          store(out.values + i + k, point.code == point.code ? point.code : lo);
        }
      }
    });
    if (is_packed(args.y_dtype)) {
      pack(out.values, n, static_cast<uint8_t*>(args.y) + at / 2);
    } else {
      with_codes(args.y_dtype, [&](auto* type) { write(out.values, n, static_cast<decltype(type)>(args.y) + at); });
    }
  });
}

template <class A>
void dequantize(const KernelArgs& args, int64_t begin, int64_t end) {
  const bool stream = args.stream && args.y_dtype == kNative<A>;  // other types go through a buffer
  Block<A> in, out;
  Position position = position_at(args.channels, begin);
  for_blocks(begin, end, [&](int64_t at, int n) {
    if (is_packed(args.x.dtype)) {
      unpack(static_cast<const uint8_t*>(args.x.data) + at / 2, args.x.dtype == Dtype::i4, n, in.values);
    } else {
      with_codes(args.x.dtype, [&](auto* type) {
        read<A, typename std::remove_pointer<decltype(type)>::type>(args.x, at, n, in.values);
      });
    }
    for (int i = n; i < round_up(n); ++i) in.values[i] = 0;
    A* y = result_buffer(args, at, n, out);
    for_grids<A>(args, position, n, [&](int from, int chunks, auto grid) {
      for (int i = from; i < from + chunks * kChunk; i += kChunk) {
        for (int k = 0; k < kChunk; k += kLanes<A>) {
          const auto value = value_of(load(in.values + i + k), decltype(grid)::scales(grid, i - from + k),
                                      decltype(grid)::zero_points(grid, i - from + k));
          put(y + i + k, value, stream);
        }
      }
    });
    commit(args, at, n, y);
  });
  end_stores(stream);
}
