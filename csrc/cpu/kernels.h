// The CPU kernels of one instruction set, as tables of functions, one for each type of the arithmetic. kernels-inl.h is
// compiled once per instruction set; launch.cpp selects the tables when the library loads.
#pragma once

#include "../batch_norm/batch_norm.h"
#include "../batch_norm/batch_norm_args.h"
#include "../histogram.h"
#include "../kernel_args.h"
#include "../kernel_list.h"
#include "../layer/weight_rows.h"
#include "../pool/max_pool.h"

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

// The histogram of one thread. Neighbouring elements are counted in separate tables, so that equal ones do not wait for
// each other; the sum of the tables must stay below 2^31. One more table is scratch memory.
constexpr int kTables = 4;
struct ThreadHistogram {
  int32_t* tables = nullptr;  // kTables + 1 tables of n bins each, zero at the start
  int64_t n = 0;
  Bins bins = {kEmpty, false};
};

// The values of each channel that batch norm computes with. If inner is 1, the first kChunk of a row are repeated
// after its end (as often as it takes), so that a chunk reads whole vectors at any position.
template <class A>
struct NormChannels {
  A *mean, *factor, *bias;  // the value of x is (x - mean) factor + bias
  A *slope, *offset;        // backward; see input_gradient
};

constexpr int64_t kNormGroup = 32;  // channels of a part, at the most, whose sums the kernels keep in the caches

// A part of a tensor that is outer x channels x inner: all rows [begin, end) of outer if inner is 1; else channels
// [first, last) of the planes in [begin, end).
struct NormPart {
  int64_t first, last, begin, end;
};

// Results are written to (norm_moments) or added to (norm_sums) element c of `result` for channel c. `places` is
// scratch memory of 3 (channels + kChunk) elements if inner is 1. norm_sums adds the sums of scale and zero point to
// any channel.
template <class A>
struct NormKernels {
  void (*moments)(const BatchNormArgs&, const NormPart&, A* places, Moments* result);
  void (*forward)(const BatchNormArgs&, const NormChannels<A>&, const NormPart&);
  void (*sums)(const BatchNormArgs&, const NormChannels<A>&, const NormPart&, A* places, NormSums* result);
  void (*backward)(const BatchNormArgs&, const NormChannels<A>&, const NormPart&);
};

// Scratch memory of a thread that pools planes, in elements: the first place of each result of a row, and slots for as
// many rows of x as a window spans, each of stride * length elements.
struct PoolScratch {
  int64_t places, slots, length, total;
};

inline PoolScratch scratch_of(const PoolArgs& args) {
  const PoolDimension& columns = args.columns;
  const int64_t places = (columns.results + kChunk - 1) / kChunk * kChunk;
  const int64_t slots = (args.rows.kernel - 1) * args.rows.dilation + 1;
  const int64_t length = places + (columns.kernel - 1) * columns.dilation / columns.stride;
  return {places, slots, length, places + slots * columns.stride * length};
}

// begin and end count planes; with channels_last rows of results, and there is no scratch memory. held: a number for
// each slot, the row of x in it.
template <class A>
using PoolKernel = void (*)(const PoolArgs&, int64_t begin, int64_t end, A* scratch, int64_t* held);

// The gradient in channels_last; begin and end count rows of x.
using PoolBackwardKernel = void (*)(const PoolArgs&, int64_t begin, int64_t end);

// begin and end count rows; `scratch` has space for one.
template <class A>
using WeightKernel = void (*)(const WeightRows&, int64_t begin, int64_t end, A* scratch);

template <class A>
struct WeightKernels {
  WeightKernel<A> forward, backward;
};

template <class A>
struct Kernels {
  const Kernel* kernels;  // indexed by KernelId
  NormKernels<A> norm;
  PoolKernel<A> max_pool;
  PoolBackwardKernel max_pool_backward;
  WeightKernels<A> weights;
};

// The kernels of the instruction set in use, for float or double.
template <class A>
const Kernels<A>& kernels();

}  // namespace cpu

// float64 is for checks of gradients: all processors take the plain kernels.
namespace plain {
extern const cpu::Kernels<float> kFloat32;
extern const cpu::Kernels<double> kFloat64;
}  // namespace plain

#if defined(__x86_64__)
namespace avx2 {
extern const cpu::Kernels<float> kFloat32;
}  // namespace avx2

namespace avx512 {
extern const cpu::Kernels<float> kFloat32;
}  // namespace avx512
#endif

}  // namespace qtoolkit
