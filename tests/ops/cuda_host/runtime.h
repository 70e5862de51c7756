// What csrc/cuda/launch.cpp needs of CUDA and of torch's c10/cuda: a stream for each device, which is the current one
// while a guard is there. It stands for their headers.
#pragma once

#include <stdexcept>

using cudaStream_t = void*;

namespace device {

inline int stream_of_guard = 0;         // its address is the stream
inline cudaStream_t current = nullptr;  // of the guard, if there is one
inline int launches = 0;                // since they were last asked for
inline int unchecked = 0;               // launches since the last look for an error
inline void (*around)(bool) = nullptr;  // called before (true) and after a launch

enum class Order : int { forwards, backwards, shuffled };
inline Order order = Order::forwards;  // of the threads of a block, and of blocks
inline bool only_ends = false;         // the first and the last block alone: for tensors of which no more is in memory

}  // namespace device

enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaDevAttrComputeCapabilityMajor, cudaSuccess };
template <class Kernel>
void cudaFuncSetAttribute(Kernel, int, int) {}
inline int cudaDeviceGetAttribute(int* value, int, int) {
  *value = 9;
  return cudaSuccess;
}

#ifdef C10_CUDA_KERNEL_LAUNCH_CHECK
#error "torch's own headers of CUDA were found first"
#endif
#define C10_CUDA_KERNEL_LAUNCH_CHECK() device::unchecked = 0

namespace c10::cuda {

struct CUDAGuard {
  template <class Device>
  explicit CUDAGuard(const Device&) {
    device::current = &device::stream_of_guard;
  }
  ~CUDAGuard() { device::current = nullptr; }
  CUDAGuard(const CUDAGuard&) = delete;
};

struct CUDAStream {
  cudaStream_t stream() const { return device::current; }
};
inline CUDAStream getCurrentCUDAStream(int) { return {}; }

}  // namespace c10::cuda
