// The rows of a weight. Included once per instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "chunk-inl.h"
#include "learned_backward-inl.h"

// What the elements of a row share.
template <class A>
struct WeightRow {
  Vector<A> factor, scale, lo, hi;

  QT_FN WeightRow of(const WeightRows& args, int64_t row) {
    return {broadcast<Vector<A>>(args.factor == nullptr ? A(1) : static_cast<const A*>(args.factor)[row]),
            broadcast<Vector<A>>(usable_scale(static_cast<const A*>(args.scale)[row * args.scale_step])),
            broadcast<Vector<A>>(static_cast<A>(args.bounds.lo)), broadcast<Vector<A>>(static_cast<A>(args.bounds.hi))};
  }
  QT_FN GridPoint<Vector<A>> snapped(const WeightRow& row, Vector<A> product) {
    return snap(product, row.scale, Vector<A>{}, row.lo, row.hi);
  }
};

// A row in its other memory format.
template <class A>
void turn_row(const A* from, int64_t major, int64_t minor, A* to) {
  for (int64_t j = 0; j < minor; ++j) {
    for (int64_t i = 0; i < major; ++i) *to++ = from[i * minor + j];
  }
}

// Calls f(i, vectors) for the whole chunks of a row, and end(i, n, vectors) for the elements that are left.
template <class A, class F, class End>
QT_FN void for_chunks_of_row(const WeightRows& args, F f, End end) {
  int64_t i = 0;
  for (; i + kChunk <= args.length(); i += kChunk) f(i, AllVectors{});
  const int n = static_cast<int>(args.length() - i);
  if (n > 0) end(i, n, FirstVectors<A>::of(n));
}

template <class A>
void weight_values(const WeightRows& args, int64_t at, A* to) {
  const auto row = WeightRow<A>::of(args, at);
  const A* weight = static_cast<const A*>(args.weight) + at * args.length();
  const auto quantize = [&](const A* from, A* values, auto vectors) {
    for_vectors<A>(vectors, [&](int v) {
      const int k = v * kLanes<A>;
      const auto point = WeightRow<A>::snapped(row, load(from + k) * row.factor);
      store(values + k, value_of(point.code, row.scale, Vector<A>{}));
    });
  };
  for_chunks_of_row<A>(
      args, [&](int64_t i, auto all) { quantize(weight + i, to + i, all); },
      [&](int64_t i, int n, auto vectors) {
        Padded<A> in, out;
        quantize(padded(weight + i, n, in, vectors.elements), out.values, vectors);
        put_first(out, n, to + i);
      });
}

template <class A>
A weight_codes(const WeightRows& args, int64_t at) {
  const auto row = WeightRow<A>::of(args, at);
  const A* weight = static_cast<const A*>(args.weight) + at * args.length();
  uint8_t* codes = args.codes + at * args.length();
  Vector<A> poison = {};
  const auto quantize = [&](const A* from, uint8_t* to, auto vectors) {
    for_vectors<A>(vectors, [&](int v) {
      const int k = v * kLanes<A>;
      const Vector<A> product = load(from + k) * row.factor;
      poison += product * Vector<A>{};
      store_codes<A>(to + k, WeightRow<A>::snapped(row, product).code);
    });
  };
  for_chunks_of_row<A>(
      args, [&](int64_t i, auto all) { quantize(weight + i, codes + i, all); },
      [&](int64_t i, int n, auto vectors) {
        Padded<A> in;
        Padded<uint8_t> out;
        quantize(padded(weight + i, n, in, vectors.elements), out.values, vectors);
        put_first(out, n, codes + i);
      });
  A result = 0;
  for (int k = 0; k < kLanes<A>; ++k) result += poison[k];
  return result;
}

// `scratch` holds a row.
template <class A>
void weight_forward(const WeightRows& args, int64_t begin, int64_t end, A* scratch) {
  for (int64_t at = begin; at < end; ++at) {
    if (args.codes != nullptr) {
      static_cast<A*>(args.poison)[at] = weight_codes<A>(args, at);
      continue;
    }
    A* y = static_cast<A*>(args.y) + at * args.length();
    weight_values<A>(args, at, args.other_format ? scratch : y);
    if (args.other_format) turn_row(scratch, args.major, args.minor, y);
  }
}

template <class A>
void weight_row_backward(const WeightRows& args, int64_t at, const A* grad) {
  constexpr int64_t kFlush = 16 * kChunk;  // elements whose terms are summed in the type of the arithmetic
  const auto row = WeightRow<A>::of(args, at);
  const A* weight = static_cast<const A*>(args.weight) + at * args.length();
  A* dweight = static_cast<A*>(args.dweight) + at * args.length();
  double of_scale = 0, of_factor = 0;
  Lanes<A> ds, df;
  const auto flush = [&] {
    of_scale += total_of(ds);
    of_factor += total_of(df);
    ds = df = {};
  };
  const auto differentiate = [&](const A* weights, const A* grads, A* to, auto vectors) {
    for_vectors<A>(vectors, [&](int v) {
      const int k = v * kLanes<A>;
      const Vector<A> w = load(weights + k), g = load(grads + k);
      const auto point = WeightRow<A>::snapped(row, w * row.factor);
      const Vector<A> passed = keep(g, inside_bits(point));
      ds.sum[v] += scale_gradient(point, g, Vector<A>{});
      df.sum[v] += passed * w;
      store(to + k, passed * row.factor);
    });
  };
  for_chunks_of_row<A>(
      args,
      [&](int64_t i, auto all) {
        differentiate(weight + i, grad + i, dweight + i, all);
        if ((i + kChunk) % kFlush == 0) flush();
      },
      [&](int64_t i, int n, auto vectors) {
        Padded<A> w, g, out;
        const int end = vectors.elements;
        differentiate(padded(weight + i, n, w, end), padded(grad + i, n, g, end), out.values, vectors);
        put_first(out, n, dweight + i);
      });
  flush();
  args.sum_scale[at] = of_scale;
  args.sum_factor[at] = of_factor;
}

template <class A>
void weight_backward(const WeightRows& args, int64_t begin, int64_t end, A* scratch) {
  for (int64_t at = begin; at < end; ++at) {
    const A* grad = static_cast<const A*>(args.grad) + at * args.length();
    if (args.other_format) turn_row(grad, args.minor, args.major, scratch);
    weight_row_backward(args, at, args.other_format ? scratch : grad);
  }
}
