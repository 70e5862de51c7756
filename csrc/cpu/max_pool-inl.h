// Max pooling. Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "chunk-inl.h"

// The largest of a chunk of windows: `from(k)` is a pointer to an element of each.
template <class A>
struct LargestOfChunk {
  Largest<Vector<A>> of[kVectors<A>];
};

template <class A, class T>
QT_FN void take_chunk(LargestOfChunk<A>& largest, int vectors, const T* x, int64_t place) {
  const Vector<A> places = broadcast<Vector<A>>(static_cast<A>(place));
  for (int i = 0; i < vectors; ++i) largest.of[i] = larger(largest.of[i], load_as<A>(x + i * kLanes<A>), places);
}

// Writes the first n elements of a chunk.
template <class A, class T>
QT_FN void put_largest(const LargestOfChunk<A>& largest, int n, T* y, uint8_t* offsets) {
  Padded<T> values;
  Padded<uint8_t> places;
  Vector<A> found[kVectors<A>];
  for (int i = 0; i < kVectors<A>; ++i) found[i] = largest.of[i].value;
  store_chunk<A>(n == kChunk ? y : values.values, found, false);
  for (int i = 0; i < kVectors<A>; ++i) {
    store_codes<A>((n == kChunk ? offsets : places.values) + i * kLanes<A>, largest.of[i].place);
  }
  if (n == kChunk) return;
  put_first(values, n, y);
  put_first(places, n, offsets);
}

// ---- channels_last: a chunk of channels. begin and end count rows of results.

template <class A, class T>
void pool_channels_last(const PoolArgs& args, int64_t begin, int64_t end) {
  const PoolDimension &rows = args.rows, &columns = args.columns;
  const T* x = static_cast<const T*>(args.x);
  Padded<T> buffer;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t image = row / rows.results * rows.size;
    const PoolWindow high = window_of(rows, row % rows.results);
    for (int64_t column = 0; column < columns.results; ++column) {
      const PoolWindow wide = window_of(columns, column);
      for (int64_t c = 0; c < args.channels; c += kChunk) {
        const int n = static_cast<int>(smaller(kChunk, args.channels - c));
        const int vectors = (n + kLanes<A> - 1) / kLanes<A>;
        const int64_t first = high.first * columns.kernel + wide.first;
        LargestOfChunk<A> largest;
        for (auto& each : largest.of) {
          each = {broadcast<Vector<A>>(-static_cast<A>(INFINITY)), broadcast<Vector<A>>(static_cast<A>(first))};
        }
        for (int64_t i = high.first; i < high.last; ++i) {
          const int64_t line = (image + high.start + i * rows.dilation) * columns.size + wide.start;
          for (int64_t j = wide.first; j < wide.last; ++j) {
            const T* from = x + (line + j * columns.dilation) * args.channels + c;
            take_chunk(largest, vectors, n < kChunk ? padded(from, n, buffer) : from, i * columns.kernel + j);
          }
        }
        const int64_t to = (row * columns.results + column) * args.channels + c;
        put_largest(largest, n, static_cast<T*>(args.y) + to, args.offsets + to);
      }
    }
  }
}

// The windows that hold an element of x along a dimension, and its number in each: of results [first, last), those
// whose distance is a multiple of the dilation.
struct HoldingWindows {
  int64_t first, last;
};

QT_FN HoldingWindows windows_of(const PoolDimension& d, int64_t element) {
  const int64_t at = element + d.padding, before = at - (d.kernel - 1) * d.dilation;
  const int64_t first = before <= 0 ? 0 : (before + d.stride - 1) / d.stride;
  return {first, smaller(at / d.stride + 1, d.results)};
}

// -1 where the window of a result does not hold the element.
QT_FN int64_t number_in_window(const PoolDimension& d, int64_t element, int64_t result) {
  const int64_t distance = element + d.padding - result * d.stride;
  return distance % d.dilation == 0 ? distance / d.dilation : -1;
}

// The gradients of rows [begin, end) of x: each element is written once, with the gradients of the windows whose
// largest it is, added in the order of the windows, as in torch.
template <class A>
void max_pool_backward(const PoolArgs& args, int64_t begin, int64_t end) {
  const PoolDimension &rows = args.rows, &columns = args.columns;
  const A* grad = static_cast<const A*>(args.x);
  Padded<A> values;
  Padded<uint8_t> places;
  for (int64_t line = begin; line < end; ++line) {
    const int64_t image = line / rows.size, y = line % rows.size;
    const HoldingWindows high = windows_of(rows, y);
    for (int64_t x = 0; x < columns.size; ++x) {
      const HoldingWindows wide = windows_of(columns, x);
      A* dx = static_cast<A*>(args.y) + (line * columns.size + x) * args.channels;
      for (int64_t c = 0; c < args.channels; c += kChunk) {
        const int n = static_cast<int>(smaller(kChunk, args.channels - c));
        Vector<A> sums[kVectors<A>] = {};
        for (int64_t row = high.first; row < high.last; ++row) {
          const int64_t i = number_in_window(rows, y, row);
          for (int64_t column = wide.first; i >= 0 && column < wide.last; ++column) {
            const int64_t j = number_in_window(columns, x, column);
            if (j < 0) continue;
            const Vector<A> place = broadcast<Vector<A>>(static_cast<A>(i * columns.kernel + j));
            const int64_t at = ((image * rows.results + row) * columns.results + column) * args.channels + c;
            const A* from = n < kChunk ? padded(grad + at, n, values) : grad + at;
            const uint8_t* offsets = n < kChunk ? padded(args.offsets + at, n, places) : args.offsets + at;
            for (int k = 0; k < kVectors<A>; ++k) {
              const Vector<A> found = load_codes<A>(offsets + k * kLanes<A>, false);
              sums[k] += found == place ? load(from + k * kLanes<A>) : Vector<A>{};
            }
          }
        }
        Padded<A> out;
        A* to = n < kChunk ? out.values : dx + c;
        for (int k = 0; k < kVectors<A>; ++k) store(to + k * kLanes<A>, sums[k]);
        if (n < kChunk) put_first(out, n, dx + c);
      }
    }
  }
}

// ---- contiguous: a chunk of a row of results. Rows of x are copied such that neighbouring windows read neighbours: by
// the remainder of the (padded) column divided by the stride, with -infinity as padding, which is never taken.

template <class A>
struct PoolRows {
  A *first_places, *rows;
  int64_t *held, slots, length;  // the row of x in each of the slots; length: of a row for one remainder
  const PoolDimension& columns;

  PoolRows(const PoolArgs& args, A* scratch, int64_t* numbers) : held(numbers), columns(args.columns) {
    const cpu::PoolScratch size = cpu::scratch_of(args);
    first_places = scratch;
    rows = first_places + size.places;
    slots = size.slots;
    length = size.length;
    for (int64_t i = 0; i < size.places; ++i) {
      first_places[i] = i < columns.results ? static_cast<A>(window_of(columns, i).first) : A(0);
    }
    const int64_t all = slots * columns.stride * length;
    for (int64_t i = 0; i < all; ++i) rows[i] = -static_cast<A>(INFINITY);
    forget();
  }

  void forget() {
    for (int64_t i = 0; i < slots; ++i) held[i] = -1;
  }

  template <class T>
  const A* row(const T* plane, int64_t number) {
    const int64_t slot = number % slots;
    A* to = rows + slot * columns.stride * length;
    if (held[slot] == number) return to;
    held[slot] = number;
    const T* from = plane + number * columns.size;
    for (int64_t remainder = 0; remainder < columns.stride; ++remainder) {
      const int64_t shift = remainder - columns.padding;  // of the column of element 0
      const int64_t first = shift < 0 ? (-shift + columns.stride - 1) / columns.stride : 0;
      const int64_t last = shift < columns.size ? (columns.size - shift + columns.stride - 1) / columns.stride : 0;
      copy(from + shift, to + remainder * length, first, smaller(last, length));
    }
    return to;
  }

  template <class T>
  void copy(const T* from, A* to, int64_t first, int64_t last) {
    if (columns.stride == 1) {
      for (int64_t i = first; i < last; ++i) to[i] = to_arithmetic<A>(from[i]);
    } else if (columns.stride == 2) {
      for (int64_t i = first; i < last; ++i) to[i] = to_arithmetic<A>(from[2 * i]);
    } else {
      for (int64_t i = first; i < last; ++i) to[i] = to_arithmetic<A>(from[columns.stride * i]);
    }
  }
};

// begin and end count planes.
template <class A, class T>
void pool_planes(const PoolArgs& args, int64_t begin, int64_t end, A* scratch, int64_t* held) {
  const PoolDimension &rows = args.rows, &columns = args.columns;
  PoolRows<A> copies(args, scratch, held);
  for (int64_t plane = begin; plane < end; ++plane) {
    const T* x = static_cast<const T*>(args.x) + plane * rows.size * columns.size;
    copies.forget();
    for (int64_t row = 0; row < rows.results; ++row) {
      const PoolWindow high = window_of(rows, row);
      const A first = static_cast<A>(high.first * columns.kernel);
      for (int64_t column = 0; column < columns.results; column += kChunk) {
        const int n = static_cast<int>(smaller(kChunk, columns.results - column));
        const int vectors = (n + kLanes<A> - 1) / kLanes<A>;
        LargestOfChunk<A> largest;
        for (int i = 0; i < kVectors<A>; ++i) {
          largest.of[i] = {broadcast<Vector<A>>(-static_cast<A>(INFINITY)),
                           load(copies.first_places + column + i * kLanes<A>) + first};
        }
        for (int64_t i = high.first; i < high.last; ++i) {
          const A* line = copies.row(x, high.start + i * rows.dilation);
          for (int64_t j = 0; j < columns.kernel; ++j) {
            const int64_t at = j * columns.dilation;
            const A* from = line + at % columns.stride * copies.length + at / columns.stride;
            take_chunk(largest, vectors, from + column, i * columns.kernel + j);
          }
        }
        const int64_t to = (plane * rows.results + row) * columns.results + column;
        put_largest(largest, n, static_cast<T*>(args.y) + to, args.offsets + to);
      }
    }
  }
}

template <class A>
void max_pool(const PoolArgs& args, int64_t begin, int64_t end, A* scratch, int64_t* held) {
  with_storage<A>(args.dtype, [&](auto* type) {
    using T = typename std::remove_pointer<decltype(type)>::type;
    if (args.channels_last) return pool_channels_last<A, T>(args, begin, end);
    pool_planes<A, T>(args, begin, end, scratch, held);
  });
}
