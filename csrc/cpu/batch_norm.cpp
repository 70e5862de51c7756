// Divides batch norm between threads. The parts depend on the shape alone and their sums are joined in order, so the
// number of threads does not change a bit.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <vector>

#include "../passed_interval.h"
#include "kernels.h"
#include "launch.h"

namespace qtoolkit {
namespace cpu {
namespace {

constexpr int64_t kPart = 32768;  // elements of a part, at the least
constexpr int64_t kParts = 64;    // parts that a tensor is worth dividing into
constexpr int64_t kGroup = 2048;  // elements of a channel and its neighbours in one plane, at the least
// Elements from which streaming stores pay off: fewer than for an op alone, whose result stays in a cache, since what a
// training step reads until it comes back to this one replaces it.
constexpr int64_t kLargeNormResult = 1 << 20;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Parts of rows, or groups of channels times parts of the planes. Element c of set `s` of the results belongs to
// channel c in the parts s of all groups.
struct Division {
  int64_t groups, group, sets, length;

  NormPart part(const BatchNormArgs& args, int64_t i) const {
    const int64_t first = i % groups * group, begin = i / groups * length;
    return {first, std::min(first + group, args.channels), begin, std::min(begin + length, args.outer)};
  }
  int64_t count() const { return groups * sets; }
};

Division division_of(const BatchNormArgs& args) {
  const int64_t numel = args.outer * args.channels * args.inner;
  const bool rows = args.inner == 1;
  Division d;
  d.group = rows ? args.channels : std::clamp<int64_t>(divide_up(kGroup, args.inner), 1, kNormGroup);
  d.groups = divide_up(args.channels, d.group);
  const int64_t wanted = std::clamp<int64_t>(numel / kPart, 1, std::max<int64_t>(kParts / d.groups, 1));
  d.length = std::max<int64_t>(divide_up(args.outer, wanted), 1);
  if (rows) d.length = divide_up(d.length, kChunk) * kChunk;  // whole chunks
  d.sets = divide_up(args.outer, d.length);
  return d;
}

template <class A>
double at(const void* values, int64_t c, double absent) {
  return values == nullptr ? absent : static_cast<const A*>(values)[c];
}

template <class A>
void set_passed(BatchNormArgs& args) {
  if (args.scale == nullptr) return;
  const A scale = usable_scale(*static_cast<const A*>(args.scale));
  const A zero_point = usable_zero_point(static_cast<A>(at<A>(args.zero_point, 0, 0)));
  const A lo = static_cast<A>(args.bounds.lo), hi = static_cast<A>(args.bounds.hi);
  args.pass_low = passed_above(scale, zero_point, lo, hi);
  args.pass_high = passed_below(scale, zero_point, lo, hi);
  if (args.slope != 0) return;
  args.pass_low = std::max(args.pass_low, static_cast<double>(static_cast<A>(args.low)));
  args.pass_high = std::min(args.pass_high, static_cast<double>(static_cast<A>(args.high)));
}

template <class A>
class BatchNorm {
 public:
  explicit BatchNorm(BatchNormArgs& args)
      : args_(args),
        division_(division_of(args)),
        width_(args.channels + (args.inner == 1 ? kChunk : 0)),
        memory_(5 * width_) {
    args_.stream = args.outer * args.channels * args.inner >= kLargeNormResult;
  }

  void forward() {
    std::vector<Moments> moments(division_.sets * args_.channels);
    run([&](const NormPart& part, int64_t set,
            A* places) { kernels<A>().norm.moments(args_, part, places, moments.data() + set * args_.channels); },
        [&](int64_t c) { set_statistics(c, joined(moments, c)); },
        [&](const NormPart& part) { kernels<A>().norm.forward(args_, row(), part); });
  }

  void backward() {
    std::vector<NormSums> sums(division_.sets * args_.channels);
    set_passed<A>(args_);
    for (int64_t c = 0; c < args_.channels; ++c) set_factor(c);
    repeat();
    run([&](const NormPart& part, int64_t set,
            A* places) { kernels<A>().norm.sums(args_, row(), part, places, sums.data() + set * args_.channels); },
        [&](int64_t c) { set_gradients(c, joined(sums, c)); },
        [&](const NormPart& part) { kernels<A>().norm.backward(args_, row(), part); });
    if (!args_.learned || args_.stage == NormStage::rest) return;
    double* totals = args_.gradients + 3 * args_.channels;
    totals[0] = totals[1] = 0;
    for (const NormSums& each : sums) {
      totals[0] += each.scale;
      totals[1] += each.zero_point;
    }
  }

 private:
  NormChannels<A> row() {
    A* memory = memory_.data();
    return {memory, memory + width_, memory + 2 * width_, memory + 3 * width_, memory + 4 * width_};
  }

  // Reduces all parts, finishes all channels, and writes all parts. A part that has its channels to itself does all of
  // this at once, while its elements are in a cache.
  template <class Reduce, class Finish, class Write>
  void run(Reduce reduce, Finish finish, Write write) {
    const bool at_once = division_.sets == 1 && args_.stage == NormStage::all;
    if (args_.stage != NormStage::rest) {
      for_parts([&](const NormPart& part, int64_t set, A* places) {
        reduce(part, set, places);
        if (!at_once) return;
        for (int64_t c = part.first; c < part.last; ++c) finish(c);
        if (args_.inner == 1) repeat();
        write(part);
      });
    }
    if (at_once) return;
    for (int64_t c = 0; c < args_.channels; ++c) finish(c);
    if (args_.stage == NormStage::totals) return;
    repeat();
    for_parts([&](const NormPart& part, int64_t, A*) { write(part); });
  }

  template <class F>
  void for_parts(F f) {
    at::parallel_for(0, division_.count(), 1, [&](int64_t begin, int64_t end) {
      std::vector<A> places(args_.inner == 1 ? 3 * (args_.channels + kChunk) : 0);
      for (int64_t i = begin; i < end; ++i) f(division_.part(args_, i), i / division_.groups, places.data());
    });
  }

  Moments joined(const std::vector<Moments>& moments, int64_t c) const {
    Moments total;
    for (size_t i = c; i < moments.size(); i += args_.channels) total = join(total, moments[i]);
    return total;
  }

  NormSums joined(const std::vector<NormSums>& sums, int64_t c) const {
    NormSums total;
    for (size_t i = c; i < sums.size(); i += args_.channels) {
      total.grad += sums[i].grad;
      total.product += sums[i].product;
    }
    return total;
  }

  double inverse(int64_t c) const {
    return inverse_deviation(static_cast<const A*>(args_.variance)[c], args_.eps, divisor(c));
  }

  double divisor(int64_t c) const { return at<A>(args_.divisor, c, 1); }

  void set_statistics(int64_t c, const Moments& moments) {
    if (args_.stage == NormStage::totals) {
      const NormTotals totals = totals_of(moments, divisor(c));
      return args_.set_totals(c, totals.sum, totals.squares);
    }
    Statistics found = {moments.mean, moments.squares / moments.count};
    if (args_.stage == NormStage::rest) {
      found = statistics_of({args_.totals[c], args_.totals[args_.channels + c]}, args_.total_count(), divisor(c));
    }
    static_cast<A*>(args_.mean)[c] = static_cast<A>(found.mean);
    static_cast<A*>(args_.variance)[c] = static_cast<A>(found.variance);
    set_factor(c);
  }

  void set_factor(int64_t c) {
    const NormChannels<A> to = row();
    to.mean[c] = static_cast<const A*>(args_.mean)[c];
    to.factor[c] = static_cast<A>(at<A>(args_.weight, c, 1) * inverse(c));
    to.bias[c] = at<A>(args_.bias, c, 0);
  }

  void set_gradients(int64_t c, const NormSums& sums) {
    double *of_weight = args_.gradients + c, *of_bias = of_weight + args_.channels,
           *of_divisor = of_bias + args_.channels;
    const NormChannel channel = {static_cast<const A*>(args_.mean)[c], inverse(c), at<A>(args_.weight, c, 1),
                                 divisor(c)};
    if (args_.stage == NormStage::rest) {
      const int64_t bias = args_.channels + c;
      const NormLine line =
          norm_line(args_.totals[c], args_.totals[bias], args_.total_count(), channel.inverse, channel.weight);
      set_line(c, line);
      *of_divisor = divisor_gradient({args_.own[c], args_.own[bias]}, static_cast<double>(args_.count()), *of_weight,
                                     *of_bias, line, channel);
      return;
    }
    const NormGradients found = norm_gradients(sums, channel.inverse, channel.weight, args_.eps, channel.divisor);
    *of_weight = found.weight;
    *of_bias = found.bias;
    *of_divisor = found.divisor;
    if (args_.stage == NormStage::totals) return args_.set_totals(c, found.weight, found.bias);
    set_line(c,
             norm_line(found.weight, found.bias, static_cast<double>(args_.count()), channel.inverse, channel.weight));
  }

  void set_line(int64_t c, const NormLine& line) {
    row().slope[c] = static_cast<A>(line.slope);
    row().offset[c] = static_cast<A>(line.offset);
  }

  void repeat() {
    for (int64_t i = args_.channels; i < width_; ++i) {
      for (A* values = memory_.data(); values < memory_.data() + memory_.size(); values += width_) {
        values[i] = values[i % args_.channels];
      }
    }
  }

  BatchNormArgs& args_;
  const Division division_;
  const int64_t width_;
  std::vector<A> memory_;
};

template <class A, class T>
void track(const TrackedStatistics& s) {
  T *means = static_cast<T*>(s.running_mean), *variances = static_cast<T*>(s.running_variance);
  const double count = s.counted == nullptr ? s.count : *s.counted;
  for (int64_t c = 0; c < s.channels; ++c) {
    const Statistics running = {static_cast<double>(means[c]), static_cast<double>(variances[c])};
    const Statistics batch = {at<A>(s.mean, c, 0), at<A>(s.variance, c, 0)};
    const Statistics next = tracked(running, batch, at<A>(s.divisor, c, 1), at<A>(s.offset, c, 0), s.momentum, count);
    means[c] = static_cast<T>(next.mean);
    variances[c] = static_cast<T>(next.variance);
  }
}

template <class A>
void track(const TrackedStatistics& s) {
  switch (s.dtype) {
    case Dtype::f32: return track<A, float>(s);
    case Dtype::f64: return track<A, double>(s);
    case Dtype::bf16: return track<A, c10::BFloat16>(s);
    default: return track<A, c10::Half>(s);
  }
}

}  // namespace

void batch_norm_track(const TrackedStatistics& s) {
  if (s.batches != nullptr) ++*s.batches;
  s.f64 ? track<double>(s) : track<float>(s);
}

void batch_norm_forward(BatchNormArgs& args) {
  args.is_f64() ? BatchNorm<double>(args).forward() : BatchNorm<float>(args).forward();
}

void batch_norm_backward(BatchNormArgs& args) {
  args.is_f64() ? BatchNorm<double>(args).backward() : BatchNorm<float>(args).backward();
}

}  // namespace cpu
}  // namespace qtoolkit
