// Deliberate faults, compiled into the sanitized library alone: a sanitizer that lets them pass has checked nothing.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <limits>
#include <vector>

namespace {

using at::Tensor;

// One element beyond the tensor's memory.
void overrun(const Tensor& x) { x.mutable_data_ptr<float>()[x.numel()] = 1; }

// Of memory that was given back.
void use_after_free(const Tensor& x) {
  const float* gone;
  {
    const std::vector<float> copy(x.const_data_ptr<float>(), x.const_data_ptr<float>() + x.numel());
    gone = copy.data();
  }
  x.mutable_data_ptr<float>()[0] = *gone;
}

void signed_overflow(const Tensor& x) {
  const int most = std::numeric_limits<int>::max() - 1;
  x.mutable_data_ptr<float>()[0] = static_cast<float>(most + static_cast<int>(x.numel()));
}

// An infinity has no integer.
void cast_overflow(const Tensor& x) {
  float* data = x.mutable_data_ptr<float>();
  data[0] = static_cast<float>(static_cast<int>(data[0] / 0.0f));
}

// Every thread counts in the same place, which no lock guards.
void race(const Tensor& x) {
  float* sum = x.mutable_data_ptr<float>();
  at::parallel_for(0, 4, 1, [&](int64_t begin, int64_t end) { *sum += static_cast<float>(end - begin); });
}

// The same, each in a place of its own.
void no_race(const Tensor& x) {
  float* sums = x.mutable_data_ptr<float>();
  at::parallel_for(0, 4, 1, [&](int64_t begin, int64_t end) { sums[begin] += static_cast<float>(end - begin); });
}

}  // namespace

TORCH_LIBRARY(qtoolkit_faults, m) {
  m.def("overrun(Tensor x) -> ()", overrun);
  m.def("use_after_free(Tensor x) -> ()", use_after_free);
  m.def("signed_overflow(Tensor x) -> ()", signed_overflow);
  m.def("cast_overflow(Tensor x) -> ()", cast_overflow);
  m.def("race(Tensor x) -> ()", race);
  m.def("no_race(Tensor x) -> ()", no_race);
}
