// Divides the rows of a weight between threads.
#include "../layer/weight_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace qtoolkit {
namespace cpu {
namespace {

constexpr int64_t kRowWork = 32768;  // elements of a thread, at the least

template <class A>
void run(const WeightRows& args, WeightKernel<A> kernel) {
  const int64_t grain = std::max<int64_t>(kRowWork / std::max<int64_t>(args.length(), 1), 1);
  at::parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(args.other_format ? args.length() : 0);
    kernel(args, begin, end, scratch.data());
  });
}

}  // namespace

void weight_forward(const WeightRows& args) {
  args.f64 ? run(args, kernels<double>().weights.forward) : run(args, kernels<float>().weights.forward);
}

void weight_backward(const WeightRows& args) {
  args.f64 ? run(args, kernels<double>().weights.backward) : run(args, kernels<float>().weights.backward);
}

}  // namespace cpu
}  // namespace qtoolkit
