// The CPU kernels of one instruction set, as a table of functions. kernels-inl.h is compiled once per instruction
// set; cpu/launch.cpp picks a table when the library loads.
#pragma once

#include "../histogram.h"
#include "../kernel_args.h"

namespace qtoolkit {
namespace cpu {

// Masks are written a word at a time, and sums are kept in 64 lanes whatever the vector's width: so ranges of work
// begin at multiples of 64 elements, and results are the same bits for every instruction set.
constexpr int kChunk = 64;

constexpr int64_t kLongestRow = 8192;  // places of a row of channels, up to which kernels keep sums in the caches

// Each works on elements [begin, end) of the result; begin is a multiple of kChunk. The reductions add into
// job.sum_scale and job.sum_zero_point (for minmax: lower and raise them).
//
// On the CPU, job.scale and job.zero_point hold usable values in the type of the arithmetic (launch.cpp sees to
// it); where channels.inner is 1, they have kChunk more entries, which repeat the first ones, so that a chunk reads
// whole vectors of them wherever it begins. So have the sums, where all channels are in a row; there job.zero_point is
// null if every one is zero.
using Kernel = void (*)(const Job& job, int64_t begin, int64_t end);

// The counts of one thread. Neighbours count in tables of their own, so that equal ones need not wait for each other;
// what they add up to must stay below 2^31. A further table is room to move in.
constexpr int kTables = 4;
struct Tally {
  int32_t* tables = nullptr;  // kTables + 1 of n places each, zero at the start
  int64_t n = 0;
  Bins bins = {kEmpty, false};
};
using TallyKernel = void (*)(const Job& job, int64_t begin, int64_t end, Tally& tally);

struct Kernels {
  const char* name;
  Kernel fake_quant;
  Kernel fake_quant_float;
  Kernel fake_quant_log;
  Kernel block_scale;
  Kernel tensor_quant;
  Kernel fake_tensor_quant;
  Kernel fake_quant_backward;
  Kernel fake_quant_learned_backward;
  Kernel quantize;
  Kernel dequantize;
  Kernel minmax;
  TallyKernel histogram;
};

extern const Kernels kPlain;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace cpu
}  // namespace qtoolkit
