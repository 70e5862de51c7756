// Batch norm in training, with what is fused after it: the arithmetic of an element (V is a scalar or a vector), of a
// channel's statistics and of its gradients.
#pragma once

#include "../fake_quant.h"

namespace qtoolkit {

// ---- statistics of a channel, in float64

// The number of values, their mean, and the sum of their squared deviations from it.
struct Moments {
  double count = 0, mean = 0, squares = 0;
};

// From the sums of x - shift and of (x - shift)^2. They are accurate if the shift is near the mean.
QT_FN Moments moments_about(double shift, double count, double sum, double squares) {
  const double centred = squares - sum * sum / count;
  return {count, shift + sum / count, centred < 0 ? 0 : centred};
}

// Chan, Golub and LeVeque (1983): the moments of both sets of values.
QT_FN Moments join(const Moments& a, const Moments& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const double count = a.count + b.count, delta = b.mean - a.mean;
  return {count, a.mean + delta * (b.count / count),
          a.squares + b.squares + delta * delta * (a.count * b.count / count)};
}

// What ranks add up for a channel's statistics: the sums of x / f and of its square. They do not depend on f, which a
// rank may have another one of. Beside a far mean the squares lose less than x had by its own rounding to float32.
struct NormTotals {
  double sum, squares;
};

QT_FN NormTotals totals_of(const Moments& m, double divisor) {
  const double mean = m.mean / divisor;
  return {m.count * mean, m.squares / (divisor * divisor) + m.count * (mean * mean)};
}

struct Statistics {
  double mean, variance;
};

// The mean and the biased variance of x, from the totals of x / f.
QT_FN Statistics statistics_of(const NormTotals& totals, double count, double divisor) {
  const Moments all = moments_about(0, count, totals.sum, totals.squares);
  return {all.mean * divisor, all.squares / count * (divisor * divisor)};
}

// ---- per channel

// 1 / sqrt(variance + eps f^2), with the sign of the divisor f: the batch norm of x / f is (x - mean) times it.
QT_FN double inverse_deviation(double variance, double eps, double divisor) {
  const double inverse = 1 / ::sqrt(variance + eps * divisor * divisor);
  return divisor < 0 ? -inverse : inverse;
}

// The sums over a channel's elements that its gradients consist of.
struct NormSums {
  double grad = 0;                   // of the gradients g in the normalized value
  double product = 0;                // of g (x - mean)
  double scale = 0, zero_point = 0;  // of the gradients of the quantizer's scale and zero point
};

// dx = g factor + (x - mean) slope + offset
struct NormLine {
  double slope, offset;
};

// From the sums of the gradients of weight and bias over `count` elements.
QT_FN NormLine norm_line(double of_weight, double of_bias, double count, double inverse, double weight) {
  const double factor = weight * inverse;
  return {-factor * inverse * of_weight / count, -factor * of_bias / count};
}

// What backward knows of a channel.
struct NormChannel {
  double mean, inverse, weight, divisor;
};

// The gradient of the divisor f of a rank whose statistics are those of several: - sum(dx x) / f over its own values,
// whose totals these are. It is what the gradient of f is where the ops are called one by one, so that ranks may add up
// both.
QT_FN double divisor_gradient(const NormTotals& own, double count, double of_weight, double of_bias,
                              const NormLine& line, const NormChannel& c) {
  const double sum_x = own.sum * c.divisor, squares_x = own.squares * (c.divisor * c.divisor);
  const double sum = sum_x - count * c.mean;                                 // of x - mean
  const double squares = squares_x - c.mean * (2 * sum_x - count * c.mean);  // of its square
  const double of_dx = c.weight * c.inverse * of_bias + line.slope * sum + line.offset * count;
  const double of_product = c.weight * of_weight + line.slope * squares + line.offset * sum;  // dx (x - mean)
  return -(of_product + c.mean * of_dx) / c.divisor;
}

struct NormGradients {
  double weight, bias, divisor;
};

QT_FN NormGradients norm_gradients(const NormSums& sums, double inverse, double weight, double eps, double divisor) {
  const double of_weight = sums.product * inverse;
  return {of_weight, sums.grad, -(eps * divisor * inverse * inverse) * weight * of_weight};
}

// Running statistics after one more batch, of x / divisor + offset. Theirs is the unbiased variance.
QT_FN Statistics tracked(Statistics running, Statistics batch, double divisor, double offset, double momentum,
                         double count) {
  const double mean = batch.mean / divisor + offset;
  const double variance = batch.variance / (divisor * divisor) * (count / (count - 1));
  return {(1 - momentum) * running.mean + momentum * mean, (1 - momentum) * running.variance + momentum * variance};
}

// ---- per element

template <class V>
QT_FN V normalized(V centred, V factor, V bias) {
  return centred * factor + bias;
}

template <class V>
QT_FN V input_gradient(V grad, V centred, V factor, V slope, V offset) {
  return grad * factor + (centred * slope + offset);
}

// v up to `low` continues with a slope below it, and `high` is not exceeded. An infinite bound is none: it is NaN here,
// which no value reaches.
template <class V>
struct Activation {
  V low, high, slope;
  bool sloped;  // whether the slope is not 0: then the value below is `low`, for -infinity too
};

template <class A, class V>
QT_FN Activation<V> activation(double low, double high, double slope) {
  const A none = static_cast<A>(NAN);
  return {broadcast<V>(low == -INFINITY ? none : static_cast<A>(low)),
          broadcast<V>(high == INFINITY ? none : static_cast<A>(high)), broadcast<V>(static_cast<A>(slope)),
          slope != 0};
}

template <class V>
QT_FN V activate(const Activation<V>& a, V v) {
  const V capped = v >= a.high ? a.high : v;
  if (!a.sloped) return v <= a.low ? a.low : capped;
  const V below = a.low + a.slope * (v - a.low);
  return v <= a.low ? below : capped;
}

template <class V>
QT_FN V activation_gradient(const Activation<V>& a, V v, V grad) {
  const V capped = v >= a.high ? V{} : grad;
  if (!a.sloped) return v <= a.low ? V{} : capped;
  const V below = grad * a.slope;
  return v <= a.low ? below : capped;
}

}  // namespace qtoolkit
