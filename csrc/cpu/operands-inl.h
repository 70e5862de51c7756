// Loads operands as contiguous float32 or float64 in whole chunks, for any layout and dtype; stores results and the
// packed mask. Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "convert-inl.h"

constexpr int kChunk = cpu::kChunk;
constexpr int kBlock = 1024;
constexpr int kAhead = 1024;  // elements to prefetch ahead if the arithmetic is too short to hide the latency of reads

template <class A>
struct Block {
  alignas(64) A values[kBlock];
};

QT_FN int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
QT_FN int round_up(int n) { return (n + kChunk - 1) / kChunk * kChunk; }

template <class A, class T>
void gather(const Operand& from, int64_t begin, int n, A* to) {
  const T* data = static_cast<const T*>(from.data);
  int64_t index[kMaxDims];
  int64_t offset = 0;
  for (int d = from.dims - 1; d >= 0; --d) {
    index[d] = begin % from.size[d];
    begin /= from.size[d];
    offset += index[d] * from.stride[d];
  }
  const int last = from.dims - 1;
  for (int done = 0; done < n;) {
    const int run = static_cast<int>(smaller(from.size[last] - index[last], n - done));
    const int64_t stride = from.stride[last];
    for (int i = 0; i < run; ++i) to[done + i] = to_arithmetic<A>(data[offset + i * stride]);
    done += run;
    index[last] += run;
    offset += run * stride;
    for (int d = last; d > 0 && index[d] == from.size[d]; --d) {
      offset += from.stride[d - 1] - from.size[d] * from.stride[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

template <class A, class T>
void read(const Operand& from, int64_t begin, int n, A* to) {
  if (!from.dense) return gather<A, T>(from, begin, n, to);
  const T* data = static_cast<const T*>(from.data) + begin;
  for (int i = 0; i < n; ++i) to[i] = to_arithmetic<A>(data[i]);
}

// Elements [begin, begin + n) in the arithmetic type, in whole chunks: the last chunk is padded. Returns a pointer into
// the operand if no conversion or padding is needed.
enum class Pad { last, zero };

template <class A>
const A* fetch(const Operand& from, int64_t begin, int n, Block<A>& buffer, Pad pad = Pad::last) {
  if (from.dense && from.dtype == kNative<A> && n % kChunk == 0) return static_cast<const A*>(from.data) + begin;
  with_storage<A>(from.dtype, [&](auto* type) {
    read<A, typename std::remove_pointer<decltype(type)>::type>(from, begin, n, buffer.values);
  });
  const A fill = pad == Pad::last ? buffer.values[n - 1] : A(0);
  for (int i = n; i < round_up(n); ++i) buffer.values[i] = fill;
  return buffer.values;
}

template <class A, class T>
void write(const A* from, int n, T* to) {
  for (int i = 0; i < n; ++i) from_arithmetic(from[i], &to[i]);
}

template <class A>
A* result_buffer(const KernelArgs& args, int64_t begin, int n, Block<A>& buffer) {
  return args.y_dtype == kNative<A> && n % kChunk == 0 ? static_cast<A*>(args.y) + begin : buffer.values;
}

template <class A>
void commit(const KernelArgs& args, int64_t begin, int n, const A* from) {
  with_storage<A>(args.y_dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(args.y) + begin;
    if (static_cast<const void*>(to) != from) write(from, n, to);
  });
}

// Calls f with where the elements [begin, begin + n) of operands and of the result lie: in memory if all are of the
// result's storage type, dense and in whole chunks, else in buffers of the arithmetic's type. With kTyped as pointers
// to the storage type, so that f is compiled for each; else as Source and Target. Padding of the last chunk repeats the
// last element, or is zero.
template <bool kTyped, class A, class F, class... Operands>
QT_FN void with_elements(const KernelArgs& args, int64_t begin, int n, Pad pad, Block<A>* buffers, F f,
                         const Operands&... operands) {
  const Dtype dtype = args.y_dtype;
  if (n % kChunk == 0 && (... && (operands.dense && operands.dtype == dtype))) {
    if constexpr (kTyped) {
      return with_storage<A>(dtype, [&](auto* type) {
        using T = typename std::remove_pointer<decltype(type)>::type;
        f(static_cast<T*>(args.y) + begin, static_cast<const T*>(operands.data) + begin...);
      });
    } else {
      return f(at<A>(Target{args.y, dtype}, begin), at<A>(Source{operands.data, dtype}, begin)...);
    }
  }
  A* y = result_buffer(args, begin, n, buffers[0]);
  int used = 0;
  const A* values[] = {fetch(operands, begin, n, buffers[++used], pad)...};
  const auto call = [&](auto... each) {
    if constexpr (kTyped) {
      f(y, each...);
    } else {
      f(Target{y, kNative<A>}, Source{each, kNative<A>}...);
    }
  };
  if constexpr (sizeof...(operands) == 1) {
    call(values[0]);
  } else {
    call(values[0], values[1]);
  }
  commit(args, begin, n, y);
}

template <class F>
QT_FN void for_blocks(int64_t begin, int64_t end, F f) {
  for (; begin < end; begin += kBlock) f(begin, static_cast<int>(smaller(kBlock, end - begin)));
}

QT_FN void write_mask(uint8_t* mask, int64_t begin, int n, const uint64_t* words) {
  if (n % kChunk == 0) {
    __builtin_memcpy(mask + begin / 8, words, n / 8);
    return;
  }
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(words);
  for (int i = 0; i < (n + 7) / 8; ++i) mask[begin / 8 + i] = bytes[i];
  if (n % 8 != 0) mask[begin / 8 + n / 8] &= static_cast<uint8_t>((1u << n % 8) - 1);
}
