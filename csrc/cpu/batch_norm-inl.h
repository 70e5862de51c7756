// The loops of batch norm: statistics, the forward, the sums of the gradients, the gradients. Included once per
// instruction set, inside namespace qtoolkit::QT_ISA.
#pragma once

#include "chunk-inl.h"
#include "learned_backward-inl.h"

// ---- the walk over a part: chunks of one channel (planes), or of consecutive channels (rows)

// Calls f(channel, index of the first element) for each plane of a part.
template <class F>
QT_FN void for_planes(const BatchNormArgs& args, const cpu::NormPart& part, F f) {
  for (int64_t n = part.begin; n < part.end; ++n) {
    for (int64_t c = part.first; c < part.last; ++c) f(c, (n * args.channels + c) * args.inner);
  }
}

// Calls f(index, n, position in the row of channels) for each chunk of n elements.
template <class F>
QT_FN void for_row_chunks(const BatchNormArgs& args, int64_t begin, int64_t end, F f) {
  int64_t position = begin % args.channels;
  for (int64_t i = begin; i < end; i += kChunk) {
    f(i, static_cast<int>(smaller(kChunk, end - i)), position);
    position += kChunk;
    if (position >= args.channels) position %= args.channels;
  }
}

// Calls f(i, n) for each chunk of elements [begin, end).
template <class F>
QT_FN void for_chunks(int64_t begin, int64_t end, F f) {
  for (; begin < end; begin += kChunk) f(begin, static_cast<int>(smaller(kChunk, end - begin)));
}

// ---- what belongs to a channel: the same for a whole chunk, or of consecutive channels

template <class A>
struct OneChannel {
  cpu::NormChannels<A> of;
  QT_FN Vector<A> mean(const OneChannel& c, int) { return broadcast<Vector<A>>(*c.of.mean); }
  QT_FN Vector<A> factor(const OneChannel& c, int) { return broadcast<Vector<A>>(*c.of.factor); }
  QT_FN Vector<A> bias(const OneChannel& c, int) { return broadcast<Vector<A>>(*c.of.bias); }
  QT_FN Vector<A> slope(const OneChannel& c, int) { return broadcast<Vector<A>>(*c.of.slope); }
  QT_FN Vector<A> offset(const OneChannel& c, int) { return broadcast<Vector<A>>(*c.of.offset); }
};

template <class A>
struct RowOfChannels {
  cpu::NormChannels<A> of;
  QT_FN Vector<A> mean(const RowOfChannels& c, int k) { return load(c.of.mean + k); }
  QT_FN Vector<A> factor(const RowOfChannels& c, int k) { return load(c.of.factor + k); }
  QT_FN Vector<A> bias(const RowOfChannels& c, int k) { return load(c.of.bias + k); }
  QT_FN Vector<A> slope(const RowOfChannels& c, int k) { return load(c.of.slope + k); }
  QT_FN Vector<A> offset(const RowOfChannels& c, int k) { return load(c.of.offset + k); }
};

// ---- chunks

// What all elements share.
template <class A>
struct NormSettings {
  using V = Vector<A>;
  Activation<V> ends;
  bool quantized;
  V scale, zero_point, lo, hi;
  V pass_low, pass_high;  // see BatchNormArgs
  bool residual_signed;
  V residual_scale, residual_zero_point;
};

template <class A>
QT_FN UniformGrid<A> usable_grid(const void* scale, const void* zero_point) {
  if (scale == nullptr) return {A(1), A(0)};
  return {usable_scale(*static_cast<const A*>(scale)),
          zero_point == nullptr ? A(0) : usable_zero_point(*static_cast<const A*>(zero_point))};
}

template <class A>
NormSettings<A> settings_of(const BatchNormArgs& args) {
  const auto all = [](auto value) { return broadcast<Vector<A>>(static_cast<A>(value)); };
  const UniformGrid<A> grid = usable_grid<A>(args.scale, args.zero_point),
                       residual = usable_grid<A>(args.residual_scale, args.residual_zero_point);
  return {activation<A, Vector<A>>(args.low, args.high, args.slope),
          args.scale != nullptr,
          all(grid.scale),
          all(grid.zero_point),
          all(args.bounds.lo),
          all(args.bounds.hi),
          all(args.pass_low),
          all(args.pass_high),
          args.residual_signed,
          all(residual.scale),
          all(residual.zero_point)};
}

// The operands of a chunk, in the type of the arithmetic.
template <class A>
struct NormChunk {
  const A *x, *grad, *residual;
  const uint8_t* residual_codes;
  Target y, residual_grad;
  CodesAt codes;
  Dtype dtype;  // of the operands in memory
};

template <class P>
QT_FN P* element(P* data, int64_t i) {
  return data == nullptr ? nullptr : data + i;
}

// The first n elements of a chunk in the type of the arithmetic, with zeros after them up to `end`.
template <class A>
QT_FN const A* first_values_of(Source from, int n, int end, Padded<A>& buffer) {
  if (is_native<A>(from.dtype)) return padded(static_cast<const A*>(from.data), n, buffer, end);
  Padded<uint16_t> halves;
  padded(static_cast<const uint16_t*>(from.data), n, halves);
  return values_of({halves.values, from.dtype}, buffer);
}

// Calls f with the operands of a chunk and its vectors; if it ends early, with padded copies. Padding is zero: it adds
// nothing to sums of gradients.
template <class A, class F>
QT_FN void with_chunk(const BatchNormArgs& args, int64_t i, int n, F f) {
  const auto source = [&](const void* data) { return at<A>(Source{data, args.dtype}, i); };
  const Source x = source(args.x), grad = source(args.grad), residual = source(args.residual);
  const uint8_t* codes_of_residual = element(args.residual_codes, i);
  const Target y = at<A>(Target{args.y, args.dtype}, i),
               residual_grad = at<A>(Target{args.residual_grad, args.dtype}, i);
  const CodesAt codes = codes_at({args.codes, args.packed}, i);
  Padded<A> x_buffer, grad_buffer, residual_buffer;
  if (n == kChunk) {
    const auto values = [](Source from, Padded<A>& buffer) {
      return from.data == nullptr ? nullptr : values_of(from, buffer);
    };
    return f(NormChunk<A>{values(x, x_buffer), values(grad, grad_buffer), values(residual, residual_buffer),
                          codes_of_residual, y, residual_grad, codes, args.dtype},
             AllVectors{});
  }
  const FirstVectors<A> vectors = FirstVectors<A>::of(n);
  const auto values = [&](Source from, Padded<A>& buffer) {
    return from.data == nullptr ? nullptr : first_values_of(from, n, vectors.elements, buffer);
  };
  Padded<A> y_buffer, residual_grad_buffer;
  Padded<uint8_t> residual_codes, new_codes;
  if (codes_of_residual != nullptr) padded(codes_of_residual, n, residual_codes, vectors.elements);
  const NormChunk<A> chunk = {values(x, x_buffer),
                              values(grad, grad_buffer),
                              values(residual, residual_buffer),
                              codes_of_residual == nullptr ? nullptr : residual_codes.values,
                              {y_buffer.values, args.dtype},
                              {residual_grad.data == nullptr ? nullptr : residual_grad_buffer.values, args.dtype},
                              {codes.data == nullptr ? nullptr : new_codes.values, codes.packed},
                              args.dtype};
  f(chunk, vectors);
  const int64_t bytes = bytes_of<A>(args.dtype, n);
  if (y.data != nullptr) put_bytes(y_buffer.values, bytes, y.data);
  if (residual_grad.data != nullptr) put_bytes(residual_grad_buffer.values, bytes, residual_grad.data);
  if (codes.data != nullptr) put_first(new_codes, bytes_of_codes(chunk.codes, n), codes.data);
}

// A residual that is rebuilt from its codes is rounded to x's dtype, as the residual itself was.
template <class A>
QT_FN Vector<A> rounded_to(Dtype dtype, Vector<A> v) {
  if constexpr (std::is_same<A, float>::value) {
    typedef uint32_t U __attribute__((vector_size(QT_BYTES)));
    if (dtype == Dtype::bf16) return widen_bits<Vector<A>>(narrow_bits<U>(v, bf16{}), bf16{});
#if QT_BYTES == 64
    if (dtype == Dtype::f16) return (Vector<A>)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
    if (dtype == Dtype::f16) return widen_bits<Vector<A>>(narrow_bits<U>(v, f16{}), f16{});
#endif
  }
  return v;
}

template <class A>
QT_FN Vector<A> with_residual(const NormSettings<A>& s, const NormChunk<A>& chunk, int k, Vector<A> v) {
  if (chunk.residual_codes != nullptr) {
    const Vector<A> code = load_codes<A>(chunk.residual_codes + k, s.residual_signed);
    return v + rounded_to<A>(chunk.dtype, value_of(code, s.residual_scale, s.residual_zero_point));
  }
  return chunk.residual == nullptr ? v : v + load(chunk.residual + k);
}

// The value before the activation, and x - mean. Forward and backward compute it here, with the same bits.
template <class A, class Of>
QT_FN Vector<A> value_at(const NormSettings<A>& s, const NormChunk<A>& chunk, int k, const Of& of, Vector<A>& centred) {
  centred = load(chunk.x + k) - Of::mean(of, k);
  return with_residual<A>(s, chunk, k, normalized(centred, Of::factor(of, k), Of::bias(of, k)));
}

template <class A, class Of, class Vectors>
QT_FN void forward_chunk(const NormSettings<A>& s, const NormChunk<A>& chunk, const Of& of, Vectors vectors,
                         bool stream) {
  Vector<A> y[kVectors<A>] = {}, centred;
  for_vectors<A>(vectors, [&](int i) { y[i] = activate(s.ends, value_at(s, chunk, i * kLanes<A>, of, centred)); });
  if (s.quantized) {
    for_vectors<A>(vectors, [&](int i) {
      const Vector<A> code = snap(y[i], s.scale, s.zero_point, s.lo, s.hi).code;
      y[i] = value_of(code, s.scale, s.zero_point);
      if (chunk.codes.data != nullptr) {
        store_codes<A>(codes_at(chunk.codes, i * kLanes<A>), code == code ? code : s.lo);
      }
    });
  }
  store_chunk<A>(chunk.y, y, stream);
}

// The gradient of the value before the activation, from that of the result. No division: the values whose gradient the
// quantizer passes are an interval.
template <class A>
QT_FN Vector<A> gradient_before(const NormSettings<A>& s, Vector<A> before, Vector<A> grad) {
  if (!s.quantized) return activation_gradient(s.ends, before, grad);
  const Vector<A> seen = s.ends.sloped ? activate(s.ends, before) : before;
  const Vector<A> passed = (seen > s.pass_low) & (seen < s.pass_high) ? grad : Vector<A>{};
  return s.ends.sloped ? activation_gradient(s.ends, before, passed) : passed;
}

template <class A, class Of, class Vectors>
QT_FN void backward_chunk(const NormSettings<A>& s, const NormChunk<A>& chunk, const Of& of, Vectors vectors,
                          bool stream) {
  Vector<A> dx[kVectors<A>] = {}, grads[kVectors<A>] = {}, centred;
  for_vectors<A>(vectors, [&](int i) {
    const int k = i * kLanes<A>;
    const Vector<A> before = value_at(s, chunk, k, of, centred);
    grads[i] = gradient_before<A>(s, before, load(chunk.grad + k));
    dx[i] = input_gradient(grads[i], centred, Of::factor(of, k), Of::slope(of, k), Of::offset(of, k));
  });
  store_chunk<A>(chunk.y, dx, stream);
  if (chunk.residual_grad.data != nullptr) store_chunk<A>(chunk.residual_grad, grads, stream);
}

// ---- kernels that write each element

template <class A>
QT_FN cpu::NormChannels<A> channel_at(const cpu::NormChannels<A>& row, int64_t c) {
  return {row.mean + c, row.factor + c, row.bias + c, row.slope + c, row.offset + c};
}

// Calls f(operands, channels, vectors) for each chunk of a part.
template <class A, class F>
QT_FN void for_norm_chunks(const BatchNormArgs& args, const cpu::NormChannels<A>& row, const cpu::NormPart& part, F f) {
  if (args.inner == 1) {
    return for_row_chunks(args, part.begin * args.channels, part.end * args.channels,
                          [&](int64_t i, int n, int64_t position) {
                            const RowOfChannels<A> of = {channel_at(row, position)};
                            with_chunk<A>(args, i, n, [&](const auto& chunk, auto some) { f(chunk, of, some); });
                          });
  }
  for_planes(args, part, [&](int64_t c, int64_t begin) {
    const OneChannel<A> of = {channel_at(row, c)};
    for_chunks(begin, begin + args.inner, [&](int64_t i, int n) {
      with_chunk<A>(args, i, n, [&](const auto& chunk, auto some) { f(chunk, of, some); });
    });
  });
}

// Streaming stores need addresses that are multiples of a line.
template <class A>
QT_FN bool may_stream(const BatchNormArgs& args, const void* to) {
  const bool whole = args.inner == 1 || bytes_of<A>(args.dtype, args.inner) % 64 == 0;
  return args.stream && whole && reinterpret_cast<uintptr_t>(to) % 64 == 0;
}

template <class A>
void norm_forward(const BatchNormArgs& args, const cpu::NormChannels<A>& row, const cpu::NormPart& part) {
  const NormSettings<A> settings = settings_of<A>(args);
  const bool stream = may_stream<A>(args, args.y);
  for_norm_chunks<A>(args, row, part, [&](const NormChunk<A>& chunk, const auto& of, auto vectors) {
    forward_chunk(settings, chunk, of, vectors, stream);
  });
  end_stores(stream);
}

template <class A>
void norm_backward(const BatchNormArgs& args, const cpu::NormChannels<A>& row, const cpu::NormPart& part) {
  const NormSettings<A> settings = settings_of<A>(args);
  const bool stream = may_stream<A>(args, args.y) && may_stream<A>(args, args.residual_grad);
  for_norm_chunks<A>(args, row, part, [&](const NormChunk<A>& chunk, const auto& of, auto vectors) {
    backward_chunk(settings, chunk, of, vectors, stream);
  });
  end_stores(stream);
}

// ---- reductions. Lanes of the arithmetic's type take a limited number of terms and are then added in float64.

constexpr int kTerms = 32;  // chunks

// The sums of x - shift and of its square, of one channel.
template <class A>
struct ChannelMoments {
  Lanes<A> sum, squares;
  A shift = 0;
  int64_t count = 0;
  Moments total;

  // The first shift is an element, the next ones are the mean so far: near the mean of what comes, or the differences
  // are a large part of the variance.
  QT_FN void flush(ChannelMoments& m) {
    if (m.count == 0) return;
    m.total = qtoolkit::join(
        m.total, moments_about(m.shift, static_cast<double>(m.count), total_of(m.sum), total_of(m.squares)));
    m.shift = static_cast<A>(m.total.mean);
    m.count = 0;
    m.sum = m.squares = {};
  }
  QT_FN int64_t limit(const ChannelMoments& m) { return m.total.count == 0 ? kChunk : kTerms * kChunk; }
};

template <class A>
QT_FN void add_chunk(Lanes<A>& sum, Lanes<A>& squares, Vector<A> shift, Source from, int n) {
  const auto add = [&](int i, Vector<A> centred) {
    sum.sum[i] += centred;
    squares.sum[i] += centred * centred;
  };
  Padded<A> buffer;
  if (n == kChunk) {
    const A* x = values_of(from, buffer);
    return for_vectors<A>(AllVectors{}, [&](int i) { add(i, load(x + i * kLanes<A>) - shift); });
  }
  const FirstVectors<A> vectors = FirstVectors<A>::of(n);
  const uint64_t exist = (uint64_t{1} << n) - 1;
  const A* x = first_values_of(from, n, vectors.elements, buffer);
  for_vectors<A>(vectors, [&](int i) {
    const int k = i * kLanes<A>;
    add(i, keep(load(x + k) - shift, static_cast<unsigned>(exist >> k)));
  });
}

template <class A>
QT_FN void moments_of_plane(ChannelMoments<A>& m, Source x, int64_t inner) {
  if (m.total.count == 0 && m.count == 0) m.shift = first_value_of<A>(x);
  for (int64_t done = 0; done < inner;) {
    const int64_t n = smaller(inner - done, ChannelMoments<A>::limit(m));
    const Vector<A> shift = broadcast<Vector<A>>(m.shift);
    if (n < kChunk) {
      add_chunk(m.sum, m.squares, shift, at<A>(x, done), static_cast<int>(n));
    } else {
      Lanes<A> sum = m.sum, squares = m.squares;  // in registers
      for_chunks(done, done + n, [&](int64_t i, int length) { add_chunk(sum, squares, shift, at<A>(x, i), length); });
      m.sum = sum;
      m.squares = squares;
    }
    m.count += n;
    done += n;
    if (m.count + kChunk > ChannelMoments<A>::limit(m)) ChannelMoments<A>::flush(m);
  }
}

template <class A>
void moments_of_planes(const BatchNormArgs& args, const cpu::NormPart& part, Moments* result) {
  ChannelMoments<A> moments[cpu::kNormGroup];
  const Source x = {args.x, args.dtype};
  for_planes(args, part,
             [&](int64_t c, int64_t begin) { moments_of_plane(moments[c - part.first], at<A>(x, begin), args.inner); });
  for (int64_t c = part.first; c < part.last; ++c) {
    ChannelMoments<A>::flush(moments[c - part.first]);
    result[c] = moments[c - part.first].total;
  }
}

// Rows of channels are added in blocks of rows that consist of whole chunks. Each place of a row has a sum; places past
// the end of a row repeat its first ones.
QT_FN int64_t rows_of_block(const BatchNormArgs& args) {
  return kChunk * (args.channels < kChunk / 2 ? kChunk / args.channels : 2);
}

template <class A>
QT_FN void clear_places(A* places, int64_t channels) {
  __builtin_memset(places, 0, (channels + kChunk) * sizeof(A));
}

template <class A>
QT_FN void fold_places(A* places, int64_t channels) {
  for (int64_t k = channels; k < channels + kChunk; ++k) places[k % channels] += places[k];
}

template <class A>
QT_FN void add_row_chunk(Source from, int n, const A* shift, A* sum, A* squares) {
  Padded<A> buffer;
  const uint64_t exist = n == kChunk ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
  const A* x = n < kChunk ? first_values_of(from, n, kChunk, buffer) : values_of(from, buffer);
  for (int k = 0; k < kChunk; k += kLanes<A>) {
    Vector<A> centred = load(x + k) - load(shift + k);
    if (n < kChunk) centred = keep(centred, static_cast<unsigned>(exist >> k));
    store(sum + k, load(sum + k) + centred);
    store(squares + k, load(squares + k) + centred * centred);
  }
}

template <class A>
void moments_of_rows(const BatchNormArgs& args, const cpu::NormPart& part, A* places, Moments* result) {
  const int64_t channels = args.channels, width = channels + kChunk;
  const Source x = {args.x, args.dtype};
  A *shift = places, *sum = shift + width, *squares = sum + width;
  for (int64_t k = 0; k < width; ++k) shift[k] = first_value_of<A>(at<A>(x, part.begin * channels + k % channels));
  for (int64_t row = part.begin, rows = 0; row < part.end; row += rows) {
    rows = smaller(row == part.begin ? kChunk : rows_of_block(args), part.end - row);
    clear_places(sum, channels);
    clear_places(squares, channels);
    for_row_chunks(args, row * channels, (row + rows) * channels, [&](int64_t i, int n, int64_t position) {
      add_row_chunk(at<A>(x, i), n, shift + position, sum + position, squares + position);
    });
    fold_places(sum, channels);
    fold_places(squares, channels);
    const double before = static_cast<double>(row - part.begin), count = static_cast<double>(rows);
    for (int64_t c = 0; c < channels; ++c) {
      const Moments so_far = {before, result[c].mean, result[c].squares};
      result[c] = qtoolkit::join(so_far, moments_about(shift[c], count, sum[c], squares[c]));
      shift[c] = static_cast<A>(result[c].mean);
    }
    for (int64_t k = channels; k < width; ++k) shift[k] = shift[k % channels];
  }
}

template <class A>
void norm_moments(const BatchNormArgs& args, const cpu::NormPart& part, A* places, Moments* result) {
  if (args.inner == 1) return moments_of_rows(args, part, places, result);
  moments_of_planes<A>(args, part, result);
}

// The terms of the four sums of a vector of elements; the last two only if kLearned is set.
template <class A>
struct GradientTerms {
  Vector<A> grad, product, scale, zero_point;
};

template <bool kLearned, class A, class Of>
QT_FN GradientTerms<A> gradient_terms(const NormSettings<A>& s, const NormChunk<A>& chunk, int k, const Of& of) {
  Vector<A> centred;
  const Vector<A> before = value_at(s, chunk, k, of, centred), grad = load(chunk.grad + k);
  GradientTerms<A> terms = {gradient_before<A>(s, before, grad), {}, {}, {}};
  terms.product = terms.grad * centred;
  if constexpr (kLearned) {
    const auto point = snap(activate(s.ends, before), s.scale, s.zero_point, s.lo, s.hi);
    terms.scale = scale_gradient(point, grad, s.zero_point);
    terms.zero_point = zero_point_gradient(point, grad, s.scale);
  }
  return terms;
}

template <class A>
struct GradientLanes {
  Lanes<A> grad, product, scale, zero_point;
};

template <bool kLearned, class A>
QT_FN void add_terms(GradientLanes<A>& lanes, int i, const GradientTerms<A>& terms) {
  lanes.grad.sum[i] += terms.grad;
  lanes.product.sum[i] += terms.product;
  if (!kLearned) return;
  lanes.scale.sum[i] += terms.scale;
  lanes.zero_point.sum[i] += terms.zero_point;
}

template <class A>
QT_FN void flush(GradientLanes<A>& lanes, NormSums& sums) {
  sums.grad += total_of(lanes.grad);
  sums.product += total_of(lanes.product);
  sums.scale += total_of(lanes.scale);
  sums.zero_point += total_of(lanes.zero_point);
  lanes = {};
}

template <class A>
struct ChannelGradients {
  GradientLanes<A> lanes;
  int64_t count = 0;
};

template <bool kLearned, class A>
QT_FN void sums_of_plane(const BatchNormArgs& args, const NormSettings<A>& settings, const OneChannel<A>& of,
                         int64_t begin, ChannelGradients<A>& gradients, NormSums& sums) {
  constexpr int64_t kLimit = kTerms * kChunk;
  const auto add = [&](int64_t i, int length, GradientLanes<A>& lanes) {
    with_chunk<A>(args, i, length, [&](const NormChunk<A>& chunk, auto vectors) {
      for_vectors<A>(vectors, [&](int v) {
        add_terms<kLearned>(lanes, v, gradient_terms<kLearned>(settings, chunk, v * kLanes<A>, of));
      });
    });
  };
  for (int64_t at = 0; at < args.inner;) {
    const int64_t n = smaller(args.inner - at, kLimit);
    if (n < kChunk) {
      add(begin + at, static_cast<int>(n), gradients.lanes);
    } else {
      GradientLanes<A> lanes = gradients.lanes;  // in registers
      for_chunks(begin + at, begin + at + n, [&](int64_t i, int length) { add(i, length, lanes); });
      gradients.lanes = lanes;
    }
    gradients.count += n;
    at += n;
    if (gradients.count + kChunk <= kLimit) continue;
    flush(gradients.lanes, sums);
    gradients.count = 0;
  }
}

template <bool kLearned, class A>
void sums_of_planes(const BatchNormArgs& args, const cpu::NormChannels<A>& row, const cpu::NormPart& part,
                    NormSums* result) {
  const NormSettings<A> settings = settings_of<A>(args);
  ChannelGradients<A> gradients[cpu::kNormGroup];
  for_planes(args, part, [&](int64_t c, int64_t begin) {
    sums_of_plane<kLearned, A>(args, settings, {channel_at(row, c)}, begin, gradients[c - part.first], result[c]);
  });
  for (int64_t c = part.first; c < part.last; ++c) flush(gradients[c - part.first].lanes, result[c]);
}

// The sums of the whole tensor are added to those of the first channel.
template <bool kLearned, class A>
void sums_of_rows(const BatchNormArgs& args, const cpu::NormChannels<A>& row, const cpu::NormPart& part, A* places,
                  NormSums* result) {
  const NormSettings<A> settings = settings_of<A>(args);
  const int64_t channels = args.channels;
  A *grads = places, *products = grads + channels + kChunk;
  for (int64_t first = part.begin, rows = 0; first < part.end; first += rows) {
    rows = smaller(rows_of_block(args), part.end - first);
    clear_places(grads, channels);
    clear_places(products, channels);
    GradientLanes<A> lanes;
    int chunks = 0;
    for_row_chunks(args, first * channels, (first + rows) * channels, [&](int64_t i, int n, int64_t position) {
      const RowOfChannels<A> of = {channel_at(row, position)};
      with_chunk<A>(args, i, n, [&](const NormChunk<A>& chunk, auto vectors) {
        for_vectors<A>(vectors, [&](int v) {
          const int k = v * kLanes<A>;
          const GradientTerms<A> terms = gradient_terms<kLearned>(settings, chunk, k, of);
          A *grad = grads + position + k, *product = products + position + k;
          store(grad, load(grad) + terms.grad);
          store(product, load(product) + terms.product);
          if (!kLearned) return;
          lanes.scale.sum[v] += terms.scale;
          lanes.zero_point.sum[v] += terms.zero_point;
        });
      });
      if (kLearned && ++chunks % kTerms == 0) flush(lanes, result[0]);
    });
    flush(lanes, result[0]);
    fold_places(grads, channels);
    fold_places(products, channels);
    for (int64_t c = 0; c < channels; ++c) {
      result[c].grad += grads[c];
      result[c].product += products[c];
    }
  }
}

template <class A>
void norm_sums(const BatchNormArgs& args, const cpu::NormChannels<A>& row, const cpu::NormPart& part, A* places,
               NormSums* result) {
  const auto run = [&](auto learned) {
    if (args.inner == 1) return sums_of_rows<learned.value, A>(args, row, part, places, result);
    sums_of_planes<learned.value, A>(args, row, part, result);
  };
  args.learned ? run(std::true_type{}) : run(std::false_type{});
}
