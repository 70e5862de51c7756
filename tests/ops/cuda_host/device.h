// A device for CUDA kernels without a GPU: the threads of a block are fibers of one host thread, and blocks run one
// after the other. It stands for all headers of CUDA that the kernels include.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

using cudaStream_t = void*;

struct Extent {
  unsigned x;
};
inline Extent threadIdx, blockIdx, blockDim, gridDim;

template <class T>
T __ldg(const T* p) {
  return *p;
}

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

// Threads of a block take turns only at barriers, and blocks do not overlap.
template <class T>
T atomicAdd(T* p, T value) {
  const T before = *p;
  *p += value;
  return before;
}

// The storage types of half precision.
using __half = _Float16;
inline float __half2float(__half v) { return static_cast<float>(v); }
inline __half __float2half_rn(float v) { return static_cast<__half>(v); }

struct __nv_bfloat16 {
  uint16_t upper;
};
inline float __bfloat162float(__nv_bfloat16 v) {
  const uint32_t bits = uint32_t{v.upper} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  if (v != v) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const uint32_t odd = bits >> 16 & 1;
  return {static_cast<uint16_t>((bits + 0x7fff + odd) >> 16)};
}

namespace device {

enum class Order : int { forwards, backwards, shuffled };
inline Order order = Order::forwards;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool ended = false;
};
inline ucontext_t scheduler;
inline Fiber* running = nullptr;
inline const std::function<void()>* kernel = nullptr;
inline int launches = 0;
inline std::vector<char> shared;  // of a block, in the size that the launch names

// A fiber never returns: the scheduler does not resume one that has ended.
inline void run_fiber() {
  (*kernel)();
  running->ended = true;
  swapcontext(&running->context, &scheduler);
}

inline std::vector<unsigned> ordered(unsigned count) {
  static std::mt19937 random;
  std::vector<unsigned> indices(count);
  std::iota(indices.begin(), indices.end(), 0u);
  if (order == Order::backwards) std::reverse(indices.begin(), indices.end());
  if (order == Order::shuffled) std::shuffle(indices.begin(), indices.end(), random);
  return indices;
}

// Runs every thread up to its next barrier, until all have ended. Returns whether any waits at a barrier.
inline bool run_to_barrier(std::vector<Fiber>& fibers) {
  size_t ended = 0;
  for (const unsigned thread : ordered(static_cast<unsigned>(fibers.size()))) {
    running = &fibers[thread];
    threadIdx = {thread};
    swapcontext(&scheduler, &running->context);
    ended += running->ended;
  }
  if (ended != 0 && ended != fibers.size()) throw std::logic_error("some threads of a block ended before a barrier");
  return ended == 0;
}

inline void launch(unsigned blocks, unsigned threads, size_t bytes, const std::function<void()>& body) {
  static std::map<unsigned, std::vector<Fiber>> pool;  // a fiber's stack is expensive
  std::vector<Fiber>& fibers = pool[threads];
  ++launches;
  fibers.resize(threads);
  kernel = &body;
  gridDim = {blocks}, blockDim = {threads};
  for (const unsigned block : ordered(blocks)) {
    blockIdx = {block};
    shared.assign(bytes, char{85});  // not zero: a kernel must write what it reads
    for (Fiber& fiber : fibers) {
      fiber.ended = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
      makecontext(&fiber.context, run_fiber, 0);
    }
    while (run_to_barrier(fibers)) {
    }
  }
}

}  // namespace device

inline void __syncthreads() { swapcontext(&device::running->context, &device::scheduler); }

// Of a warp: all threads of a block must call it equally often.
template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  static T values[1024];
  values[threadIdx.x] = value;
  __syncthreads();
  const T other = values[threadIdx.x ^ static_cast<unsigned>(lanes)];
  __syncthreads();
  return other;
}
