// Whole vectors on their way from memory to the threads of a block.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "memory.cuh"

namespace qtoolkit {
namespace cuda {

// Vectors of a thread that are `step` apart, in vectors of 8 elements.
struct Walk {
  uint32_t vector, step;
  int left;

  __device__ __forceinline__ bool has() const { return left > 0; }
  __device__ __forceinline__ Contiguous at() const { return whole_at(int64_t{vector} * kVectorSize); }
  __device__ __forceinline__ void advance() {
    vector += step;
    --left;
  }
};

constexpr int kStreamBytes = 49152;  // of a block: as much as it may have without asking

// Copies the vectors of a walk from kOperands tensors to shared memory, a few of them ahead. Each thread has slots of
// its own, so that none waits for another. In registers as many bytes would leave room for half of the threads.
template <class T, int kOperands, class W>
class Stream {
 public:
  static constexpr int kFit = kStreamBytes / (kOperands * kThreads * static_cast<int>(sizeof(Pack<T>)));
  static constexpr int kSlots = kFit < 8 ? kFit : 8;  // more only delay the start

  __device__ __forceinline__ Stream(void* memory, const W& walk, const T* first, const T* second = nullptr)
      : slots_(static_cast<Pack<T>*>(memory) + threadIdx.x), of_{first, second}, ahead_(walk) {
#pragma unroll
    for (int slot = 0; slot < kSlots - 1; ++slot) fetch(slot);
  }

  // The next vector of the walk, which has one.
  __device__ __forceinline__ void take(Pack<T> (&packs)[kOperands]) {
    __pipeline_wait_prior(kSlots - 2);
#pragma unroll
    for (int o = 0; o < kOperands; ++o) packs[o] = slots_[(slot_ * kOperands + o) * kThreads];
    fetch((slot_ + kSlots - 1) % kSlots);  // that of the vector before, which has been used
    slot_ = (slot_ + 1) % kSlots;
  }

 private:
  __device__ __forceinline__ void fetch(int slot) {
    if (ahead_.has()) {
      const int64_t first = ahead_.at().first;
#pragma unroll
      for (int o = 0; o < kOperands; ++o) {
        char* to = reinterpret_cast<char*>(slots_ + (slot * kOperands + o) * kThreads);
        const char* from = reinterpret_cast<const char*>(of_[o] + first);
#pragma unroll
        for (size_t i = 0; i < sizeof(Pack<T>); i += 16) __pipeline_memcpy_async(to + i, from + i, 16);
      }
      ahead_.advance();
    }
    __pipeline_commit();  // where there is none, too: waiting counts the commits
  }

  Pack<T>* slots_;
  const T* of_[2];
  W ahead_;
  int slot_ = 0;
};

}  // namespace cuda
}  // namespace qtoolkit
