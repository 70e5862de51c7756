#include "../search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../histogram.h"

namespace qtoolkit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// CodeBounds of a range in bins: `below` of them under zero, `above` over it.
struct Span {
  int64_t below, above;
};

// ---- the candidates ---------------------------------------------------------------------------------------------

struct Candidates {
  Span most;       // the widest range
  int64_t finest;  // the number of values of each bound in the first grid, at the most
};

int64_t step_of(int64_t most, int64_t finest) { return most / finest + 1; }

// Minimizes the cost: on a grid, then with ever smaller steps around the best candidate. `floor` is a lower bound of
// the cost; a candidate whose bound exceeds the least cost so far is skipped.
template <class Cost, class Floor>
Span minimise(const Candidates& candidates, Cost cost, Floor floor) {
  const Span most = candidates.most;
  Span step = {step_of(most.below, candidates.finest), step_of(most.above, candidates.finest)};
  Span best = most;
  double least = cost(most);
  const auto attempt = [&](Span ends) {
    if (ends.below < 0 || ends.above < 0 || ends.below > most.below || ends.above > most.above) return;
    if (ends.below + ends.above == 0 || floor(ends) > least) return;
    const double found = cost(ends);
    if (found < least) least = found, best = ends;
  };
  for (int64_t a = most.below; a >= 0; a -= step.below) {
    for (int64_t b = most.above; b >= 0; b -= step.above) attempt({a, b});
  }
  while (step.below > 1 || step.above > 1) {
    step = {(step.below + 1) / 2, (step.above + 1) / 2};
    for (int moves = 0; moves < 16; ++moves) {
      const Span center = best;
      for (int64_t a = 1; a >= -1; --a) {
        for (int64_t b = 1; b >= -1; --b) {
          if (a != 0 || b != 0) attempt({center.below + a * step.below, center.above + b * step.above});
        }
      }
      if (center.below == best.below && center.above == best.above) break;
    }
  }
  return best;
}

// The largest of the bounds with the least cost; costs that differ by rounding errors count as equal.
template <class Cost>
int64_t best_of(const std::vector<int64_t>& ends, Cost cost, double rounding) {
  std::vector<double> costs;
  for (const int64_t end : ends) costs.push_back(cost(end));
  const double limit = *std::min_element(costs.begin(), costs.end()) + rounding;
  int64_t best = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    if (costs[i] <= limit) best = std::max(best, ends[i]);
  }
  return best;
}

// ---- squared error ----------------------------------------------------------------------------------------------

// Codes [qmin, qmax] with a step, in bins, and a zero point.
struct CodesInBins {
  double step, zero_point;
  int64_t qmin, qmax;

  double at(int64_t q) const { return (static_cast<double>(q) - zero_point) * step; }
};

// The squared error of rounding to levels v_q, one step s apart, in O(levels) for any number of bins. Summing by
// parts over the boundaries b_q between levels, with F the cumulated counts and H(b) = integral of F up to b,
//   error = sum x^2 + v_last^2 * N - 2 * v_last * sum x - 2 * s * sum of H(b_q)
// where H is a quadratic within each bin (l2), or linear between the centers of bins (mse). Lengths are in bins.
class SquaredError {
 public:
  SquaredError(const int64_t* counts, int64_t n, int64_t zero, bool spread)
      : offset_(static_cast<double>(zero) + (spread ? 0 : 0.5)), zero_(zero), last_(n), knots_(n + 1), moments_(n + 1) {
    for (int64_t i = 0; i < n; ++i) {
      const double c = static_cast<double>(counts[i]), x = static_cast<double>(i - zero) + 0.5;
      const double curve = spread ? c / 2 : 0;
      knots_[i].curve = curve;
      knots_[i + 1] = {knots_[i].height + knots_[i].slope + curve, knots_[i].slope + c, 0};
      moments_[i + 1] = {moments_[i].first + c * x, moments_[i].second + c * (x * x + (spread ? 1.0 / 12 : 0))};
    }
  }

  double operator()(const CodesInBins& levels) const {
    const double lowest = levels.at(levels.qmin) + levels.step / 2 + offset_;
    const int64_t skipped = lowest < 0 ? static_cast<int64_t>(-lowest / levels.step) : 0;  // H is 0 there
    const int64_t boundaries = levels.qmax - levels.qmin;
    double sum = 0;
    for (int64_t q = std::min(skipped, boundaries); q < boundaries; ++q) {
      const double t = std::max(lowest + static_cast<double>(q) * levels.step, 0.0);
      const int64_t i = std::min(static_cast<int64_t>(t), last_);
      const double f = t - static_cast<double>(i);
      const Knot& knot = knots_[i];
      sum += knot.height + f * (knot.slope + f * knot.curve);
    }
    const double top = levels.at(levels.qmax);
    return squares_about(top, 0, last_) - 2 * levels.step * sum;
  }

  // A lower bound: the cost of clipping the bins beyond the range, less a margin for rounding errors.
  double floor(const CodesInBins& levels) const {
    const double top = levels.at(levels.qmax), bottom = levels.at(levels.qmin);
    const int64_t over = std::clamp(static_cast<int64_t>(std::ceil(top)) + zero_, int64_t{0}, last_);
    const int64_t under = std::clamp(static_cast<int64_t>(std::floor(bottom)) + zero_, int64_t{0}, last_);
    constexpr double kRounding = 1e-9;
    const double clipped = squares_about(top, over, last_) + squares_about(bottom, 0, under);
    return clipped * (1 - kRounding) - kRounding * moments_[last_].second;
  }

 private:
  struct Knot {
    double height = 0, slope = 0, curve = 0;
  };
  struct Moments {
    double first = 0, second = 0;
  };

  // The sum of (x - v)^2 over bins [begin, end).
  double squares_about(double v, int64_t begin, int64_t end) const {
    const double count = knots_[end].slope - knots_[begin].slope;
    const double first = moments_[end].first - moments_[begin].first;
    return moments_[end].second - moments_[begin].second + v * (v * count - 2 * first);
  }

  double offset_;
  int64_t zero_, last_;
  std::vector<Knot> knots_;
  std::vector<Moments> moments_;  // moments_[i]: of the bins before i
};

// ---- KL divergence ----------------------------------------------------------------------------------------------

double times_log(double c) { return c > 0 ? c * std::log(c) : 0; }

class Divergence {
 public:
  explicit Divergence(std::vector<double> counts)
      : counts_(std::move(counts)), total_(size() + 1), filled_(size() + 1), entropy_(size() + 1), log_(size() + 1) {
    for (int64_t i = 0; i < size(); ++i) {
      total_[i + 1] = total_[i] + counts_[i];
      filled_[i + 1] = filled_[i] + (counts_[i] > 0 ? 1 : 0);
      entropy_[i + 1] = entropy_[i] + times_log(counts_[i]);
      log_[i + 1] = std::log(static_cast<double>(i + 1));
    }
  }

  int64_t size() const { return static_cast<int64_t>(counts_.size()); }

  // The number of bins in [begin, end) that are not empty.
  int64_t filled(int64_t begin, int64_t end) const { return filled_[end] - filled_[begin]; }

  // The divergence of bins [begin, end) in that many levels.
  double operator()(int64_t begin, int64_t end, int64_t levels) const {
    const double all = total_.back(), inside = total_[end] - total_[begin];
    const double under = total_[begin], over = all - total_[end];
    if (inside == 0) return kInfinity;
    if ((under > 0 && counts_[begin] == 0) || (over > 0 && counts_[end - 1] == 0)) return kInfinity;
    double own = entropy_[end] - entropy_[begin];
    own += times_log(counts_[begin] + under) - times_log(counts_[begin]);
    own += times_log(counts_[end - 1] + over) - times_log(counts_[end - 1]);
    return (own - cross(begin, end, levels, under, over)) / all + std::log(inside / all);
  }

 private:
  // The sum of P * log(Q): Q is the same in all filled bins of a level.
  double cross(int64_t begin, int64_t end, int64_t levels, double under, double over) const {
    const int64_t length = end - begin, whole = length / levels, part = length % levels;
    double sum = 0, before = under;
    int64_t from = begin, rest = 0;
    for (int64_t level = 0; level < levels; ++level) {
      int64_t to = from + whole;  // begin + ceil((level + 1) * length / levels)
      if (rest < part) rest += levels, ++to;
      rest -= part;
      const double inside = total_[to] - total_[from];
      const int64_t filled = filled_[to] - filled_[from];
      from = to;
      if (filled == 0) continue;
      double weight = inside + before;
      before = 0;
      if (to == end) weight += over, over = 0;
      sum += weight * (std::log(inside) - log_[filled]);
    }
    return sum;
  }

  std::vector<double> counts_, total_;
  std::vector<int64_t> filled_;
  std::vector<double> entropy_, log_;
};

// ---- percentile -------------------------------------------------------------------------------------------------

// The number of bins, from the first on, that hold `wanted` counts. The tolerance hides rounding errors: 99 % of 100
// values are 99.
double quantile(const std::vector<double>& counts, double wanted) {
  constexpr double kRounding = 1 - 1e-12;
  double before = 0, edge = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] <= 0) continue;
    if (before + counts[i] >= wanted * kRounding) {
      return static_cast<double>(i) + std::clamp((wanted - before) / counts[i], 0.0, 1.0);
    }
    before += counts[i];
    edge = static_cast<double>(i + 1);
  }
  return edge;
}

// ---- one histogram ----------------------------------------------------------------------------------------------

struct Histogram {
  const int64_t* counts;
  int64_t n, zero;  // bins, and the index of the first bin above zero
  Span most;        // the extent of the bins that are not empty

  double at(int64_t bin) const {
    const int64_t i = bin + zero;
    return i < 0 || i >= n ? 0 : static_cast<double>(counts[i]);
  }

  std::vector<double> row(int64_t begin, int64_t end) const {
    std::vector<double> row;
    for (int64_t bin = begin; bin < end; ++bin) row.push_back(at(bin));
    return row;
  }

  // Counts by magnitude; for codes from 0 up, those of positive values only.
  std::vector<double> folded(bool both) const {
    const int64_t size = both ? std::max(most.below, most.above) : most.above;
    std::vector<double> row;
    for (int64_t bin = 0; bin < size; ++bin) row.push_back(at(bin) + (both ? at(-1 - bin) : 0));
    return row;
  }
};

Histogram histogram_of(const int64_t* counts, int64_t n, int64_t zero) {
  int64_t first = 0, last = n;
  while (first < n && counts[first] == 0) ++first;
  while (last > first && counts[last - 1] == 0) --last;
  return {counts, n, zero, {std::max<int64_t>(zero - first, 0), std::max<int64_t>(last - zero, 0)}};
}

struct Found {
  double below, above;  // the bounds, in bins from zero
};

Found percentile(const Histogram& h, const Search& how, bool is_signed) {
  double all = 0;
  for (int64_t i = 0; i < h.n; ++i) all += static_cast<double>(h.counts[i]);
  const double share = how.percentile / 100;
  if (how.symmetric) {
    std::vector<double> row = h.folded(is_signed);
    double under = 0;
    for (int64_t bin = -h.most.below; bin < 0 && !is_signed; ++bin) under += h.at(bin);
    const double t = quantile(row, all * share - under);
    return {t, t};
  }
  const double wanted = all - all * (1 - share) / 2;
  const int64_t a = h.most.below, b = h.most.above;
  std::vector<double> row = h.row(-a, b);
  const double above = quantile(row, wanted) - static_cast<double>(a);
  std::reverse(row.begin(), row.end());
  const double below = quantile(row, wanted) - static_cast<double>(b);
  return {std::max(below, 0.0), std::max(above, 0.0)};
}

Found squared_error(const Histogram& h, const Search& how, const Candidates& candidates) {
  const SquaredError error(h.counts, h.n, h.zero, how.method == Method::l2);
  const double codes = static_cast<double>(how.qmax - how.qmin), top = static_cast<double>(how.qmax);
  const double bottom = static_cast<double>(how.qmin);
  const auto levels_of = [&](Span ends) -> CodesInBins {
    const double below = static_cast<double>(ends.below), above = static_cast<double>(ends.above);
    if (how.symmetric) return {above / top, 0, how.qmin, how.qmax};
    const double scale = (below + above) / codes;
    return {scale, std::min(bottom + std::rint(below / scale), top), how.qmin, how.qmax};
  };
  const Span best = minimise(
      candidates, [&](Span ends) { return error(levels_of(ends)); },
      [&](Span ends) { return error.floor(levels_of(ends)); });
  return {static_cast<double>(how.symmetric ? best.above : best.below), static_cast<double>(best.above)};
}

Found entropy(const Histogram& h, const Search& how, const Candidates& candidates, bool is_signed) {
  const int64_t zero = how.symmetric ? 0 : candidates.most.below;
  std::vector<double> row = how.symmetric ? h.folded(is_signed) : h.row(-zero, candidates.most.above);
  for (const int64_t end : how.candidates) row.resize(std::max(row.size(), static_cast<size_t>(end)));
  const int64_t size = static_cast<int64_t>(row.size());
  if (zero + 1 < size) row[zero] = row[zero + 1];
  const int64_t levels = how.symmetric ? how.qmax + 1 : how.qmax - how.qmin + 1;
  const Divergence divergence(std::move(row));
  const double rounding = 1e-15 * static_cast<double>(size);  // of prefix sums
  if (!how.candidates.empty()) {
    const auto score = [&](int64_t end) { return divergence(0, end, levels); };
    const double end = static_cast<double>(best_of(how.candidates, score, rounding));
    return {end, end};
  }
  // With fewer bins that hold values than levels, no level merges two of them: the divergence is zero however much is
  // clipped.
  const int64_t fewest = std::min(levels, divergence.filled(0, size));
  const auto cost = [&](Span ends) {
    const int64_t begin = zero - ends.below, end = zero + ends.above;
    if (divergence.filled(begin, end) < fewest) return kInfinity;
    const double found = divergence(begin, end, levels);
    return found <= rounding ? 0 : found;  // of equal ranges the widest
  };
  const Span best = minimise(candidates, cost, [](Span) { return -kInfinity; });
  return {static_cast<double>(how.symmetric ? best.above : best.below), static_cast<double>(best.above)};
}

Candidates candidates_of(const Histogram& h, const Search& how, bool is_signed) {
  const int64_t levels = how.qmax - how.qmin + 1;
  if (how.symmetric) {
    const int64_t most = is_signed ? std::max(h.most.below, h.most.above) : h.most.above;
    return {{0, most}, std::max<int64_t>((1 << 20) / levels, 64)};
  }
  const int64_t finest = static_cast<int64_t>(std::sqrt(static_cast<double>((1 << 18) / levels)));
  return {h.most, std::clamp<int64_t>(finest, 8, 64)};
}

Found find(const Histogram& h, const Search& how) {
  const bool is_signed = how.qmin < 0;
  const Candidates candidates = candidates_of(h, how, is_signed);
  if (candidates.most.below + candidates.most.above == 0) return {0, 0};
  switch (how.method) {
    case Method::percentile: return percentile(h, how, is_signed);
    case Method::entropy: return entropy(h, how, candidates, is_signed);
    default: return squared_error(h, how, candidates);
  }
}

}  // namespace

Clip search(const int64_t* counts, float lo, float hi, int64_t n, const Search& how) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kEnd = std::numeric_limits<float>::infinity();
  const Bins bins = bins_of(lo, hi, n);
  if (bins.exponent == kBroken) return {kNaN, kNaN};
  const bool none = std::all_of(counts, counts + n, [](int64_t c) { return c == 0; });
  if (bins.exponent == kEmpty || none) return {kEnd, -kEnd};
  if (bins.exponent == kSmallestExponent + (bins.two_sided ? 1 : 0))
    return {0, 0};  // all values are zero or as good as zero
  const Histogram h = histogram_of(counts, n, -first_bin(bins, n));
  const Found found = find(h, how);
  const double width = power_of_two(bins.exponent);
  const bool one_end = how.symmetric && how.qmin >= 0;
  return {one_end ? 0 : static_cast<float>(0 - found.below * width), static_cast<float>(found.above * width)};
}

}  // namespace qtoolkit
