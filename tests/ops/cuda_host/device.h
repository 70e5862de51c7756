// A device for CUDA kernels without a GPU: the threads of a block are fibers of one host thread, and blocks run one
// after the other. It stands for all headers of CUDA that the kernels include.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime.h"

#define __CUDA_ARCH__ 900  // the branches of a GPU; device::max_NaN_f32 and others are their instructions
#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

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

inline void __threadfence() {}

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline float rsqrt(float v) { return 1 / std::sqrt(v); }
inline double rsqrt(double v) { return 1 / std::sqrt(v); }

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

// Two in a word. A float holds the sum of two of them well enough that to round it again changes nothing.
struct __half2 {
  __half x, y;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __half2 __hadd2_rn(__half2 a, __half2 b) {
  return {__float2half_rn(__half2float(a.x) + __half2float(b.x)),
          __float2half_rn(__half2float(a.y) + __half2float(b.y))};
}
inline __nv_bfloat162 __hadd2_rn(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__float2bfloat16_rn(__bfloat162float(a.x) + __bfloat162float(b.x)),
          __float2bfloat16_rn(__bfloat162float(a.y) + __bfloat162float(b.y))};
}

namespace device {

struct Fiber {
  std::unique_ptr<char[]> stack;
  jmp_buf place;  // where it goes on
  unsigned thread = 0;
};
inline constexpr size_t kStack = 1 << 16;
inline jmp_buf scheduler;
inline Fiber* running = nullptr;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<Fiber*> idle, waiting;  // without a thread, and at a barrier
inline std::vector<unsigned> threads;      // of the block, in the order in which they start
inline size_t started = 0, ended = 0;
inline const std::function<void()>* kernel = nullptr;
inline std::string failure;
inline std::vector<char> shared;  // of a block, in the size that the launch names

// Lets the scheduler go on until it resumes this fiber.
inline void park(std::vector<Fiber*>& among) {
  among.push_back(running);
  if (_setjmp(running->place) == 0) _longjmp(scheduler, 1);
}

// A kernel that does what a GPU ends it for.
[[noreturn]] inline void fault(std::string what) {
  failure = std::move(what);
  _longjmp(scheduler, 1);
}

// A fiber takes thread after thread, and keeps one that comes to a barrier.
inline void work() {
  while (true) {
    while (started < threads.size()) {
      threadIdx.x = running->thread = threads[started++];
      (*kernel)();
      ++ended;
    }
    park(idle);
  }
}

inline void resume(Fiber* fiber) {
  running = fiber;
  threadIdx.x = fiber->thread;
  if (_setjmp(scheduler) == 0) _longjmp(fiber->place, 1);
}

inline void start_fiber() {
  running = fibers.emplace_back(std::make_unique<Fiber>()).get();
  running->stack = std::make_unique<char[]>(kStack);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = running->stack.get();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, work, 0);
  if (_setjmp(scheduler) == 0) setcontext(&context);
}

// Forgets the threads of a block that did not come to its end.
[[noreturn]] inline void stop(std::string what) {
  fibers.clear(), idle.clear(), waiting.clear(), failure.clear(), running = nullptr;
  throw std::runtime_error("CUDA kernel on the host: " + what);
}

template <class T>
void put_in_order(std::vector<T>& all) {
  static std::mt19937 random;
  if (order == Order::backwards) std::reverse(all.begin(), all.end());
  if (order == Order::shuffled) std::shuffle(all.begin(), all.end(), random);
}

// Copies that a thread has asked for, in the groups of its commits: they happen when it waits for them.
struct Copies {
  std::vector<std::function<void()>> uncommitted;
  std::deque<std::vector<std::function<void()>>> groups;
};
inline std::vector<Copies> copies;  // of each thread of the block

inline void run_block(unsigned count) {
  copies.assign(count, {});
  threads.resize(count);
  std::iota(threads.begin(), threads.end(), 0u);
  put_in_order(threads);
  started = ended = 0;
  while (started < count) {
    if (idle.empty()) {
      start_fiber();
    } else {
      Fiber* next = idle.back();
      idle.pop_back();
      resume(next);
    }
    if (!failure.empty()) stop(failure);
  }
  while (!waiting.empty()) {
    if (ended != 0) stop("some threads of a block ended before a barrier");
    std::vector<Fiber*> all = std::exchange(waiting, {});
    if (order == Order::shuffled) put_in_order(all);  // else they wait in their order
    for (Fiber* each : all) {
      resume(each);
      if (!failure.empty()) stop(failure);
    }
  }
  running = nullptr;
}

inline void launch(unsigned blocks, unsigned threads_of_block, size_t bytes, cudaStream_t stream,
                   const std::function<void()>& body) {
  if (stream != current) stop("it was launched on another stream than the current one of its device");
  if (blocks == 0 || threads_of_block == 0 || threads_of_block > 1024) stop("no such launch is possible");
  ++launches, ++unchecked;
  kernel = &body;
  gridDim = {blocks}, blockDim = {threads_of_block};
  std::vector<unsigned> all(only_ends ? std::min(blocks, 2u) : blocks);
  std::iota(all.begin(), all.end(), 0u);
  if (only_ends) all.back() = blocks - 1;
  put_in_order(all);
  if (around != nullptr) around(true);
  for (const unsigned block : all) {
    blockIdx = {block};
    shared.assign(bytes, char{85});  // not zero: a kernel must write what it reads
    run_block(threads_of_block);
  }
  if (around != nullptr) around(false);
}

// ---- instructions of PTX that the kernels write themselves

// NaN is the canonical one, and +0 is larger than -0.
inline void max_NaN_f32(float& to, float a, float b) {
  to = a != a || b != b ? __builtin_bit_cast(float, 0x7fffffff) : a == b && std::signbit(a) ? b : a < b ? b : a;
}
inline void min_NaN_f32(float& to, float a, float b) {
  to = a != a || b != b ? __builtin_bit_cast(float, 0x7fffffff) : a == b && std::signbit(b) ? b : b < a ? b : a;
}
inline void ex2_approx_ftz_f32(float& to, float a) {
  const float power = std::exp2(a);
  to = power < 0x1p-126f ? 0.0f : power;
}
inline void st_global_v4_b32(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) fault("misaligned address");
  const char* const place = static_cast<const char*>(to);
  if (place >= shared.data() && place < shared.data() + shared.size()) fault("a store to global memory writes shared");
  const uint32_t words[] = {a, b, c, d};
  std::memcpy(to, words, sizeof words);
}

}  // namespace device

// Called where a load or a store is not aligned for its type (-fsanitize=alignment).
extern "C" inline __attribute__((used)) void __ubsan_handle_type_mismatch_v1(const void*, const void*) {
  device::fault("misaligned address");
}

inline void __pipeline_memcpy_async(void* to, const void* from, size_t size) {
  const auto at = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  if (size != 16 || at(to) % size != 0 || at(from) % size != 0) device::fault("misaligned address");
  device::copies[threadIdx.x].uncommitted.emplace_back([=] { std::memcpy(to, from, size); });
}
inline void __pipeline_commit() {
  auto& of = device::copies[threadIdx.x];
  of.groups.push_back(std::exchange(of.uncommitted, {}));
}
inline void __pipeline_wait_prior(size_t last) {
  auto& groups = device::copies[threadIdx.x].groups;
  for (; groups.size() > last; groups.pop_front()) {
    for (const auto& copy : groups.front()) copy();
  }
}

inline void __syncthreads() { device::park(device::waiting); }

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

// ---- instructions of PTX with matrices in the registers of a warp: likewise

inline size_t __cvta_generic_to_shared(const void* p) { return static_cast<const char*>(p) - device::shared.data(); }

namespace device {

// Each thread gives a value, and gets those of its warp, until the next exchange.
template <class T>
const T* exchange(const T& value) {
  static T values[2][1024];
  static int turn[1024];
  T* const all = values[turn[threadIdx.x] ^= 1];  // others may still read what the last one gave
  all[threadIdx.x] = value;
  __syncthreads();
  return all + threadIdx.x / 32 * 32;
}

template <bool transposed>
void ldmatrix(uint32_t* to, uint32_t address) {
  if (address % 16 != 0) fault("misaligned address");
  if (address + size_t{16} > shared.size()) fault("it reads outside of its shared memory");
  const uint32_t* rows = exchange(address);
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int i = 0; i < 2; ++i) {
      const int of = matrix * 8 + (transposed ? column + i : row), place = transposed ? row : column + i;
      std::memcpy(reinterpret_cast<uint16_t*>(to + matrix) + i, shared.data() + rows[of] + 2 * place, 2);
    }
  }
  __syncthreads();  // before somebody writes the memory
}

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                                     uint32_t address) {
  uint32_t to[4];
  ldmatrix<false>(to, address);
  a = to[0], b = to[1], c = to[2], d = to[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                                           uint32_t address) {
  uint32_t to[4];
  ldmatrix<true>(to, address);
  a = to[0], b = to[1], c = to[2], d = to[3];
}

inline float to_float(__half v) { return __half2float(v); }
inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

struct Operands {
  uint32_t left[4], right[2];
};

// The sum of 16 products and an addend, rounded once.
template <class T>
void mma(const Operands& of, float* sum) {
  const Operands* all = exchange(of);
  const auto at = [](const uint32_t& word, int i) { return to_float(reinterpret_cast<const T*>(&word)[i]); };
  for (int e = 0; e < 4; ++e) {
    const int row = threadIdx.x % 32 / 4, below = e / 2, column = threadIdx.x % 4 * 2 + e % 2;
    double total = sum[e];
    for (int k = 0; k < 16; ++k) {
      const uint32_t& left = all[row * 4 + k % 8 / 2].left[below + k / 8 * 2];
      total += static_cast<double>(at(left, k % 2)) * at(all[column * 4 + k % 8 / 2].right[k / 8], k % 2);
    }
    sum[e] = static_cast<float>(total);
  }
}

#define QT_MMA(name, T)                                                                                     \
  inline void mma_sync_aligned_m16n8k16_row_col_##name(float& a, float& b, float& c, float& d, uint32_t a0, \
                                                       uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,  \
                                                       uint32_t b1, float, float, float, float) {           \
    float sum[] = {a, b, c, d};                                                                             \
    mma<T>({{a0, a1, a2, a3}, {b0, b1}}, sum);                                                              \
    a = sum[0], b = sum[1], c = sum[2], d = sum[3];                                                         \
  }
QT_MMA(f32_bf16_bf16_f32, __nv_bfloat16)
QT_MMA(f32_f16_f16_f32, __half)
#undef QT_MMA

}  // namespace device
