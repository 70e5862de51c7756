// Divides the elements between threads and runs the kernels of the instruction set that is selected at load time.
#include "launch.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "../fake_quant.h"
#include "../layout.h"
#include "../observe.h"
#include "kernels.h"

namespace qtoolkit {
namespace cpu {
namespace {

constexpr int64_t kGrain = 32768;          // elements per thread, at the least
constexpr int64_t kSegment = 16384;        // elements per partial sum, at the least
constexpr int64_t kSegments = 64;          // partial sums, at the most
constexpr int64_t kLargeResult = 4 << 20;  // elements of a result from which streaming stores pay off

struct InstructionSet {
  const char* name;
  const Kernels<float>& f32;
};

// The instruction sets of the processor, the widest first.
std::vector<InstructionSet> available() {
  std::vector<InstructionSet> sets;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back({"avx512", avx512::kFloat32});
  }
  if (has_avx2) sets.push_back({"avx2", avx2::kFloat32});
#endif
  sets.push_back({"plain", plain::kFloat32});
  return sets;
}

// The widest instruction set of the processor, or the one that QTOOLKIT_CPU names.
InstructionSet choose() {
  const std::vector<InstructionSet> sets = available();
  const char* wanted = std::getenv("QTOOLKIT_CPU");
  if (wanted == nullptr || *wanted == '\0') return sets.front();
  std::string names;
  for (const InstructionSet& set : sets) {
    if (std::string(wanted) == set.name) return set;
    names += std::string(names.empty() ? "" : ", ") + set.name;
  }
  TORCH_CHECK_VALUE(false, "QTOOLKIT_CPU must name an instruction set of this processor (", names, "), got '", wanted,
                    "'; unset it to use the widest.");
}

const InstructionSet& chosen() {
  static const InstructionSet set = choose();
  return set;
}

}  // namespace

template <>
const Kernels<float>& kernels<float>() {
  return chosen().f32;
}

template <>
const Kernels<double>& kernels<double>() {
  return plain::kFloat64;
}

namespace {

template <class A>
Kernel kernel_of(KernelId kernel) {
  return kernels<A>().kernels[static_cast<int>(kernel)];
}

// Expands short channels (kernel positions in the weight of a transposed convolution, for example) to rows with a
// channel per element, so that a chunk reads its scales with vector loads.
Channels expanded_to_rows(Channels c) {
  const int64_t row = c.size * c.inner;
  const bool repeats =
      c.count == c.size || c.group_span >= 4 * row;  // expansion pays off if a row is read several times
  if (c.count > 1 && c.inner > 1 && c.inner < kChunk && row <= kLongestRow && repeats) {
    c.count *= c.inner;
    c.size = row;
    c.inner = 1;
  }
  return c;
}

// Usable values of a scale or zero point: one per channel of `row`, each repeated `repeat` times, and followed by a
// copy of the first chunk where kernels.h requires it.
template <class A, class Usable>
std::vector<A> row_of(const at::Tensor* values, const Channels& row, int64_t repeat, Usable usable_value) {
  std::vector<A> out(row.count + (row.inner == 1 && row.count > 1 ? kChunk : 0), A(0));
  if (values == nullptr) return out;
  const at::Tensor typed = in_arithmetic(*values, std::is_same_v<A, double>);
  const A* from = typed.const_data_ptr<A>();
  for (int64_t i = 0; i < row.count; i += repeat) std::fill_n(out.begin() + i, repeat, usable_value(from[i / repeat]));
  for (size_t i = row.count; i < out.size(); ++i) out[i] = out[i % row.count];
  return out;
}

template <class F>
void in_chunks(const KernelArgs& args, F f) {
  const int64_t chunks = (args.numel + kChunk - 1) / kChunk;
  at::parallel_for(0, chunks, kGrain / kChunk,
                   [&](int64_t begin, int64_t end) { f(begin * kChunk, std::min(end * kChunk, args.numel)); });
}

// Reductions: partial sums over segments that depend on the size alone, joined in order, give the same bits for any
// number of threads.
struct Add {
  static constexpr double start = 0;
  QT_FN double of(double a, double b) { return a + b; }
};
struct Lowest {
  static constexpr double start = std::numeric_limits<double>::infinity();
  QT_FN double of(double a, double b) { return lower(a, b); }
};
struct Highest {
  static constexpr double start = -std::numeric_limits<double>::infinity();
  QT_FN double of(double a, double b) { return higher(a, b); }
};

// How a reduction is divided; `apart` if no two segments share a channel, so that one set of sums serves all of them.
struct Segments {
  int64_t length, count;
  bool apart;
};

// The number of elements, in whole chunks, after which no channel occurs again; 0 if channels recur throughout.
int64_t length_apart(const Channels& row, int64_t numel) {
  if (row.count == 1 || in_a_row(row)) return 0;
  if (row.count != row.size) return std::lcm(row.group_span, kChunk);
  return row.size * row.inner >= numel ? std::lcm(row.inner, kChunk) : 0;
}

Segments segments_of(const Channels& row, int64_t width, int64_t numel) {
  const int64_t unit = length_apart(row, numel);
  const bool apart = unit > 0 && unit <= std::max(kSegment, numel / kSegments);
  const int64_t affordable = numel / (32 * std::max<int64_t>(width, 1));  // many sums cost more than reading x
  const int64_t most = apart ? kSegments : std::clamp<int64_t>(affordable, 1, kSegments);
  const int64_t wanted = std::clamp<int64_t>((numel + kSegment - 1) / kSegment, 1, most);
  const int64_t step = apart ? unit : kSegment, steps = std::max<int64_t>((numel + step - 1) / step, 1);
  const int64_t length = (steps + wanted - 1) / wanted * step;
  return {length, std::max<int64_t>((numel + length - 1) / length, 1), apart};
}

// Joins the sums of the segments for each position of a row, and then the positions of each channel. Positions past the
// end of the row repeat its first ones.
template <class Join>
void join_sums(const double* sums, int64_t segments, int64_t step, int64_t width, const Channels& row, int64_t repeat,
               double* result) {
  std::vector<double> total(sums, sums + width);
  for (int64_t s = 1; s < segments; ++s) {
    for (int64_t i = 0; i < width; ++i) total[i] = Join::of(total[i], sums[s * step + i]);
  }
  for (int64_t i = row.count; i < width; ++i) total[i % row.count] = Join::of(total[i % row.count], total[i]);
  for (int64_t c = 0, i = 0; i < row.count; ++c) {
    result[c] = Join::start;
    for (const int64_t end = i + repeat; i < end; ++i) result[c] = Join::of(result[c], total[i]);
  }
}

// Runs a reduction with two results per channel; the second is skipped if args.sum_zero_point is null.
template <class First, class Second>
void reduce(Kernel kernel, const KernelArgs& args, const Channels& row, int64_t repeat) {
  const int64_t width = row.count + (in_a_row(row) ? kChunk : 0);
  const Segments cut = segments_of(row, width, args.numel);
  const int64_t parts = cut.apart ? 1 : cut.count, step = args.sum_zero_point == nullptr ? width : 2 * width;
  std::vector<double> sums(parts * step, First::start);
  for (int64_t i = width; i < parts * step; i += step) std::fill_n(sums.data() + i, width, Second::start);
  at::parallel_for(0, cut.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      KernelArgs part = args;
      part.channels = row;
      part.sum_scale = sums.data() + (cut.apart ? 0 : s * step);
      part.sum_zero_point = args.sum_zero_point == nullptr ? nullptr : part.sum_scale + width;
      const int64_t first = std::min(s * cut.length, args.numel);
      kernel(part, first, std::min(first + cut.length, args.numel));
    }
  });
  join_sums<First>(sums.data(), parts, step, width, row, repeat, args.sum_scale);
  if (args.sum_zero_point == nullptr) return;
  join_sums<Second>(sums.data() + width, parts, step, width, row, repeat, args.sum_zero_point);
}

// The histogram of a batch: threads add their counts in any order.
class BatchHistogram {
 public:
  BatchHistogram(int64_t n) : n_(n), counts_(n) {}

  void add(const ThreadHistogram& local) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Bins bins = join(bins_, local.bins);
    if (bins != bins_) grow(bins);
    for (int t = 0; t < kTables && is_counting(bins); ++t) {
      add_counts(counts_.data(), bins, local.tables + t * n_, local.bins, n_);
    }
  }

  // After the first value that has no bin, nothing more is counted.
  void add_to(const RunningHistogram& running) {
    const Bins old = bins_of(*running.lo, *running.hi, n_), bins = join(old, bins_);
    if (bins.exponent == kBroken) {
      *running.lo = *running.hi = std::numeric_limits<float>::quiet_NaN();
    } else if (is_counting(bins)) {
      grow(bins);
      add_counts(counts_.data(), bins, running.counts, old, n_);
      std::copy(counts_.begin(), counts_.end(), running.counts);
      *running.lo = static_cast<float>(low_edge(bins, n_));
      *running.hi = static_cast<float>(high_edge(bins, n_));
    }
  }

 private:
  void grow(Bins bins) {
    std::vector<int64_t> before(n_);
    before.swap(counts_);
    if (is_counting(bins)) add_counts(counts_.data(), bins, before.data(), bins_, n_);
    bins_ = bins;
  }

  int64_t n_;
  Bins bins_ = {kEmpty, false};
  std::vector<int64_t> counts_;
  std::mutex mutex_;
};

template <class A>
void observe_histogram(const KernelArgs& args) {
  constexpr int64_t kMost = int64_t{1} << 30;  // a thread's tables count in 32 bits
  const RunningHistogram& running = args.histogram;
  const Bins start = bins_of(*running.lo, *running.hi, running.bins);
  const Kernel kernel = kernel_of<A>(KernelId::histogram);
  BatchHistogram total(running.bins);
  in_chunks(args, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kMost) {
      std::vector<int32_t> tables((kTables + 1) * running.bins);
      ThreadHistogram local = {tables.data(), running.bins, start};  // most batches need no wider bins than the last
      KernelArgs part = args;
      part.thread_histogram = &local;
      kernel(part, begin, std::min(begin + kMost, end));
      total.add(local);
    }
  });
  total.add_to(running);
}

template <class A>
void run(KernelId id, KernelArgs& args, const GridTensors& grid) {
  if (id == KernelId::histogram) return observe_histogram<A>(args);
  const Channels row = expanded_to_rows(args.channels);
  const int64_t repeat = args.channels.count == 0 ? 1 : row.count / args.channels.count;
  std::vector<A> scale, zero_point;
  if (grid.scale != nullptr) {
    scale = row_of<A>(grid.scale, row, repeat, [](A s) { return usable_scale(s); });
    zero_point =
        row_of<A>(grid.zero_point, row, repeat, [&](A z) { return args.fractional ? z : usable_zero_point(z); });
    args.scale = scale.data();
    args.zero_point = grid.zero_point == nullptr && in_a_row(row) ? nullptr : zero_point.data();
  }
  // Streaming stores need direct access to y: operands that are not dense go through a buffer.
  args.stream =
      args.numel >= kLargeResult && args.x.dense && args.grad.dense && reinterpret_cast<uintptr_t>(args.y) % 64 == 0;
  const Kernel kernel = kernel_of<A>(id);
  if (is_learned(id)) return reduce<Add, Add>(kernel, args, row, repeat);
  if (id == KernelId::minmax) return reduce<Lowest, Highest>(kernel, args, row, repeat);
  args.channels = row;
  in_chunks(args, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace

const char* instruction_set() { return chosen().name; }

namespace {

void launch(KernelId kernel, KernelArgs& args, const GridTensors& grid, c10::Device) {
  if (args.numel == 0 && !is_reduction(kernel)) return;
  args.is_f64() ? run<double>(kernel, args, grid) : run<float>(kernel, args, grid);
}

template <class A>
void blend(at::Tensor lo, at::Tensor hi, const at::Tensor& batch, std::optional<double> momentum,
           const at::Tensor* skipped) {
  A* lows = lo.mutable_data_ptr<A>();
  A* highs = hi.mutable_data_ptr<A>();
  const double* news = batch.const_data_ptr<double>();
  int64_t* skips = skipped == nullptr ? nullptr : skipped->mutable_data_ptr<int64_t>();
  const int64_t count = lo.numel();
  for (int64_t c = 0; c < count; ++c) {
    const Range<A> now = {lows[c], highs[c]}, seen = {static_cast<A>(news[c]), static_cast<A>(news[count + c])};
    const Range<A> next = next_range(now, seen, momentum.has_value(), static_cast<A>(momentum.value_or(0)),
                                     skips == nullptr ? nullptr : skips + c);
    lows[c] = next.lo;
    highs[c] = next.hi;
  }
}

void blend_ranges(const at::Tensor& lo, const at::Tensor& hi, const at::Tensor& batch, std::optional<double> momentum,
                  const at::Tensor* skipped) {
  return lo.scalar_type() == at::kDouble ? blend<double>(lo, hi, batch, momentum, skipped)
                                         : blend<float>(lo, hi, batch, momentum, skipped);
}

// The grids of all channels, or of those that have a range.
template <class A>
void grids(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes, bool of_all) {
  const Ends<A> ranges = {lo.const_data_ptr<A>(), hi.const_data_ptr<A>()};
  A* scale = grid.scale->mutable_data_ptr<A>();
  A* zero_point = grid.zero_point == nullptr ? nullptr : grid.zero_point->mutable_data_ptr<A>();
  const int64_t count = lo.numel();
  const A of_zeros = scale_of_zeros<A>(ranges, count, codes);
  for (int64_t c = 0; c < count; ++c) {
    if (of_all || has_range(ranges, c)) write_covering_grid(ranges, c, count, codes, scale, zero_point, of_zeros);
  }
}

void grid_of_ranges(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes) {
  (lo.scalar_type() == at::kDouble ? grids<double> : grids<float>)(lo, hi, grid, codes, /*of_all=*/true);
}

void take_ranges(const at::Tensor& lo, const at::Tensor& hi, const GridTensors& grid, const CodeRange& codes,
                 const StepsSeen& seen) {
  const auto take = lo.scalar_type() == at::kDouble ? grids<double> : grids<float>;
  if (seen.takes()) take(lo, hi, grid, codes, /*of_all=*/false);
  seen.note();
}

void learned_gradients(at::ArrayRef<GradientOfSums> gradients) {
  for (const GradientOfSums& g : gradients) {
    if (g.gradient.numel() == 0) continue;
    const at::Tensor values = g.scale.defined() ? g.scale.contiguous() : at::Tensor();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, g.gradient.scalar_type(), "learned_gradients", [&] {
      using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
      const scalar_t* of = values.defined() ? values.const_data_ptr<scalar_t>() : nullptr;
      scalar_t* to = g.gradient.mutable_data_ptr<scalar_t>();
      for (int64_t c = 0; c < g.gradient.numel(); ++c) {
        to[c] = learned_gradient(g.sums[c], g.factor, of == nullptr ? A(1) : static_cast<A>(of[c]));
      }
    });
  }
}

template <class A>
void scales_of_unit(const UnitScales& u) {
  for (int64_t i = 0; i < largest_count(u); ++i) unit_scales_at<A>(u, i);
  if (u.bias.result == nullptr) return;
  const auto write = [&](auto type) {
    auto* bias = static_cast<decltype(type)*>(u.bias.result);
    for (int64_t i = 0; i < u.channels; ++i) bias[i] = unit_bias<A>(u, i);
  };
  u.bias.dtype == Dtype::bf16 ? write(c10::BFloat16()) : u.bias.dtype == Dtype::f16 ? write(c10::Half()) : write(A());
}

void unit_gradients(const UnitGradients& u, at::ArrayRef<GradientOfSums> before) {
  learned_gradients(before);
  for (int64_t i = 0; i < largest_count(u); ++i) {
    u.f64 ? unit_gradients_at<double>(u, i) : unit_gradients_at<float>(u, i);
  }
}

void unit_scales(const UnitScales& u) { u.f64 ? scales_of_unit<double>(u) : scales_of_unit<float>(u); }

// The magnitude of the factor of all channels together.
template <class A>
A magnitude_of_all(const FactorChange& u) {
  std::array<double, kSquares> squares;
  for (int i = 0; i < kSquares; ++i) squares[i] = squares_of<A>(u, i);
  for (int half = kSquares / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) squares[i] += squares[i + half];
  }
  return shared_magnitude<A>(u, squares[0]);
}

template <class A>
void take_factors(const FactorChange& u) {
  if (u.scales == u.channels) {
    for (int64_t i = 0; i < u.scales; ++i) take_own_factor<A>(u, i);
    return;
  }
  take_factor(u, 0, magnitude_of_all<A>(u), is_first<A>(u, 0) ? magnitude_of_all<A>(as_set(u)) : A(0));
}

}  // namespace

const DeviceKernels kDeviceKernels = {
    /*on_gpu=*/false,
    launch,
    blend_ranges,
    grid_of_ranges,
    take_ranges,
    learned_gradients,
    [](BatchNormArgs& args, c10::Device) { batch_norm_forward(args); },
    [](BatchNormArgs& args, c10::Device) { batch_norm_backward(args); },
    [](const TrackedStatistics& statistics, c10::Device) { batch_norm_track(statistics); },
    [](const PoolArgs& args, c10::Device) { max_pool_forward(args); },
    [](const PoolArgs& args, c10::Device) { max_pool_backward(args); },
    [](const WeightRows& args, const UnitScales* unit, c10::Device) {
      if (unit != nullptr) unit_scales(*unit);
      weight_forward(args);
    },
    [](const WeightRows& args, const UnitGradients& unit, at::ArrayRef<GradientOfSums> before, c10::Device) {
      weight_backward(args);
      unit_gradients(unit, before);
    },
    [](const UnitScales& u, c10::Device) { unit_scales(u); },
    [](const UnitGradients& u, at::ArrayRef<GradientOfSums> before, c10::Device) { unit_gradients(u, before); },
    [](const HeldVariance& h, const FactorChange& u, c10::Device) {
      if (h.taken != nullptr) {
        const bool moved = *h.taken != *h.clock;
        for (int64_t i = 0; i < h.channels; ++i) hold_variance(h, moved, i);
        *h.taken = *h.clock;
      }
      u.f64 ? take_factors<double>(u) : take_factors<float>(u);
    },
    /*attention_weights=*/nullptr,
    /*function_rows=*/nullptr,
    [](c10::Device) { return false; },
    /*flash_attention=*/nullptr};

}  // namespace cpu
}  // namespace qtoolkit
