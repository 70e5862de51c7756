// All CPU kernels, for one instruction set. A kernel iterates over its range in blocks: operands that are strided or
// of another dtype are copied to a buffer in the L1 cache, so the arithmetic reads contiguous float32 or float64 in
// whole chunks.
//
// Headers named -inl.h (Highway's convention) are compiled once per instruction set: plain.cpp, avx2.cpp and avx512.cpp
// each set QT_ISA (a namespace) and QT_BYTES (the width of a vector) and include this file. They include the
// standard headers before they set the target, so that no inline function of the standard library is compiled for an
// instruction set and then shared with code that runs without it.
#pragma GCC diagnostic ignored "-Wpsabi"

#include "../batch_norm/batch_norm.h"
#include "../fake_quant.h"
#include "../observe.h"
#include "../pool/max_pool.h"
#include "../prelu.h"
#include "../requantize.h"
#include "../shaped.h"
#include "kernels.h"
#include "simd-inl.h"

namespace qtoolkit {
namespace QT_ISA {

#include "batch_norm-inl.h"
#include "elementwise-inl.h"
#include "learned_backward-inl.h"
#include "max_pool-inl.h"
#include "observe-inl.h"
#include "quantize-inl.h"
#include "weight_rows-inl.h"

#define QT_FUNCTOR_ENTRY(name, Functor) elementwise<A, Functor<A, Vector<A>>>,
#define QT_LEARNED_ENTRY(name, Functor) learned_backward<A, Functor<A, Vector<A>>>,
#define QT_ENTRY(name) name<A>,

template <class A>
constexpr cpu::Kernel kTable[] = {QT_ELEMENTWISE_KERNELS(QT_FUNCTOR_ENTRY) QT_LEARNED_KERNELS(QT_LEARNED_ENTRY)
                                      QT_OTHER_KERNELS(QT_ENTRY)};

template <class A>
constexpr cpu::Kernels<A> kKernels = {kTable<A>,
                                      {norm_moments<A>, norm_forward<A>, norm_sums<A>, norm_backward<A>},
                                      max_pool<A>,
                                      max_pool_backward<A>,
                                      {weight_forward<A>, weight_backward<A>}};

const cpu::Kernels<float> kFloat32 = kKernels<float>;
#if QT_BYTES == 16
const cpu::Kernels<double> kFloat64 = kKernels<double>;
#endif

}  // namespace QT_ISA
}  // namespace qtoolkit
