// The ops of CPU tensors take the kernels of CUDA, as csrc/cuda/launch.cpp launches them. An op's body takes its
// kernels from a table of its device (csrc/launch.h): here the CPU's is written over with CUDA's, and later with its
// own again.
#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "cuda/launch.cpp"

using namespace qtoolkit;

static void write_over(const DeviceKernels& table) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(&cpu::kDeviceKernels);
  const uintptr_t first = begin / page * page;
  // It is a constant: the pages that hold it can only be read.
  TORCH_CHECK(mprotect(reinterpret_cast<void*>(first), begin + sizeof(table) - first, PROT_READ | PROT_WRITE) == 0);
  std::memcpy(reinterpret_cast<void*>(begin), &table, sizeof(table));
}

static const DeviceKernels of_cpu = cpu::kDeviceKernels;

extern "C" void take_ops(int order, bool only_ends) {
  device::order = static_cast<device::Order>(order), device::only_ends = only_ends;
  device::unchecked = 0;
  write_over(cuda::kDeviceKernels);
}

// The launches without a look for an error.
extern "C" int give_ops_back() {
  write_over(of_cpu);
  device::order = device::Order::forwards, device::only_ends = false;
  return std::exchange(device::unchecked, 0);
}
