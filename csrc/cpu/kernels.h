// The CPU kernels of one instruction set, as a table of functions. kernels-inl.h is compiled once per instruction set;
// launch.cpp selects a table when the library loads.
#pragma once

#include "../histogram.h"
#include "../kernel_args.h"
#include "../kernel_list.h"

namespace qtoolkit {
namespace cpu {

// Masks are written in 64-bit words, and sums are kept in 64 lanes for any vector width: so ranges of work begin at
// multiples of 64 elements, and all instruction sets give the same bits.
constexpr int kChunk = 64;

constexpr int64_t kLongestRow = 8192;  // the longest row of channels whose sums the kernels keep in the caches

// A kernel works on elements [begin, end) of the result; begin is a multiple of kChunk. The reductions add into
// args.sum_scale and args.sum_zero_point (minmax lowers and raises them).
//
// On the CPU, args.scale and args.zero_point hold usable values in the type of the arithmetic (launch.cpp makes them).
// If channels.inner is 1, kChunk more entries follow that repeat the first ones, so that a chunk reads whole vectors
// at any position. The sums have such entries if all channels form one row; args.zero_point is null there if all zero
// points are 0.
using Kernel = void (*)(const KernelArgs& args, int64_t begin, int64_t end);

struct TypedKernel {
  Kernel f32, f64;  // by the type of the arithmetic
};

// The histogram of one thread. Neighbouring elements are counted in separate tables, so that equal ones do not wait for
// each other; the sum of the tables must stay below 2^31. One more table is scratch memory.
constexpr int kTables = 4;
struct ThreadHistogram {
  int32_t* tables = nullptr;  // kTables + 1 tables of n bins each, zero at the start
  int64_t n = 0;
  Bins bins = {kEmpty, false};
};

struct Kernels {
  const char* name;
  const TypedKernel* kernels;  // indexed by KernelId
};

extern const Kernels kPlain;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace cpu
}  // namespace qtoolkit
