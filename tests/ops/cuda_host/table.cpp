// The ops of CPU tensors take the kernels of CUDA, as csrc/cuda/launch.cpp launches them. An op's body takes its
// kernels from a table of its device (csrc/launch.h): here the CPU's is written over with CUDA's, and later with its
// own again.
#include <c10/core/CPUAllocator.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
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

static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// Torch's memory, or while `guards` is set memory between two pages that nobody may touch. It ends at the second, but
// for what 16 bytes, the largest access of a kernel, leave over; or it begins behind the first.
struct Guarded final : c10::Allocator {
  static inline c10::Allocator* const torchs = c10::GetCPUAllocator();
  bool guards = false, begins = false;

  struct Mapping {
    char* all;
    size_t size;  // with both guards
    char* data;
    size_t count;  // of the bytes that were asked for
  };
  // By the address of the data.
  static std::map<void*, Mapping>& mapped() {
    static std::map<void*, Mapping> all;
    return all;
  }

  c10::DataPtr allocate(size_t n) override {
    if (!guards || n == 0) return torchs->allocate(n);
    const size_t size = (n + page - 1) / page * page;
    char* all = static_cast<char*>(
        mmap(nullptr, size + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    TORCH_CHECK(all != MAP_FAILED && mprotect(all, page, PROT_NONE) == 0);
    TORCH_CHECK(mprotect(all + page + size, page, PROT_NONE) == 0);
    char* data = all + page + (begins ? 0 : size - (n + 15) / 16 * 16);
    mapped()[data] = {all, size + 2 * page, data, n};
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }  // a library keeps memory for later calls
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

 private:
  static void release(void* data) {
    const auto found = mapped().extract(data);
    if (found.empty()) return torchs->raw_deleter()(data);
    munmap(found.mapped().all, found.mapped().size);
  }
};

// ---- the bytes that a launch reads and writes

// During a launch nobody may touch the pages of tensors, until a kernel does: its first read of a page makes the page
// readable, and its first write writable. So each launch counts a byte of a tensor once, however often it reads it.
static int64_t bytes_moved = 0;
static bool launching = false;

static void protect_tensors(bool before) {
  launching = before;
  for (const auto& [data, mapping] : Guarded::mapped()) {
    mprotect(mapping.all + page, mapping.size - 2 * page, before ? PROT_NONE : PROT_READ | PROT_WRITE);
  }
}

// Whether an access that was refused is the first one to a page of a tensor, which now may happen.
static bool is_counted(char* address, bool writes) {
  if (!launching) return false;
  char* const first = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(address) / page * page);
  auto found = Guarded::mapped().upper_bound(first + page - 1);
  if (found == Guarded::mapped().begin()) return false;
  const Guarded::Mapping& of = std::prev(found)->second;
  if (first < of.all + page || first >= of.all + of.size - page) return false;
  mprotect(first, page, writes ? PROT_READ | PROT_WRITE : PROT_READ);
  bytes_moved += std::min(first + page, of.data + of.count) - std::max(first, of.data);
  return true;
}

// Counts the bytes of launches from here on, or no more; returns what was counted.
extern "C" int64_t count_bytes(bool on) {
  device::around = on ? &protect_tensors : nullptr;
  return std::exchange(bytes_moved, 0);
}

extern "C" void on_fault(int);  // kernels.cpp

static void on_access(int number, siginfo_t* what, void* context) {
#if defined(__x86_64__)
  const bool writes = (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
  if (is_counted(static_cast<char*>(what->si_addr), writes)) return;
#endif
  on_fault(number);
}

// From here on, or no more, tensors have guarded memory. It ends at a guard, or begins behind one.
extern "C" void guard_memory(bool on, bool begins) {
  static Guarded allocator;
  static struct sigaction before = {};
  if (c10::GetCPUAllocator() != &allocator) c10::SetCPUAllocator(&allocator);
  allocator.guards = on, allocator.begins = begins;
  struct sigaction action = {};
  action.sa_sigaction = on_access;
  action.sa_flags = SA_NODEFER | SA_ONSTACK | SA_SIGINFO;
  on ? sigaction(SIGSEGV, &action, &before) : sigaction(SIGSEGV, &before, nullptr);
}

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
