// All CPU kernels, for one instruction set. A kernel iterates over its range in blocks: operands that are strided or
// of another dtype are copied to a buffer in the L1 cache, so the arithmetic reads contiguous float32 or float64 in
// whole chunks.
//
// Headers named -inl.h (Highway's convention) are compiled once per instruction set: plain.cpp, avx2.cpp and avx512.cpp
// each set QT_ISA (a namespace), QT_TABLE and QT_BYTES (the width of a vector) and include this file. They include the
// standard headers before they set the target, so that no inline function of the standard library is compiled for an
// instruction set and then shared with code that runs without it.
#pragma GCC diagnostic ignored "-Wpsabi"

#include "../batch_norm.h"
#include "../fake_quant.h"
#include "../max_pool.h"
#include "../observe.h"
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

}  // namespace QT_ISA

namespace cpu {

#define QT_NAME_(x) #x
#define QT_NAME(x) QT_NAME_(x)

#define QT_ELEMENTWISE_ENTRY(name, Functor)                           \
  {QT_ISA::elementwise<float, Functor<float, QT_ISA::Vector<float>>>, \
   QT_ISA::elementwise<double, Functor<double, QT_ISA::Vector<double>>>},
#define QT_LEARNED_ENTRY(name, Functor)                                    \
  {QT_ISA::learned_backward<float, Functor<float, QT_ISA::Vector<float>>>, \
   QT_ISA::learned_backward<double, Functor<double, QT_ISA::Vector<double>>>},
#define QT_ENTRY(name) {QT_ISA::name<float>, QT_ISA::name<double>},

static const TypedKernel kKernels[] = {QT_ELEMENTWISE_KERNELS(QT_ELEMENTWISE_ENTRY) QT_LEARNED_KERNELS(QT_LEARNED_ENTRY)
                                           QT_OTHER_KERNELS(QT_ENTRY)};
#define QT_NORM(A) {QT_ISA::norm_moments<A>, QT_ISA::norm_forward<A>, QT_ISA::norm_sums<A>, QT_ISA::norm_backward<A>}
#define QT_WEIGHTS(A) {QT_ISA::weight_forward<A>, QT_ISA::weight_backward<A>}

const Kernels QT_TABLE = {QT_NAME(QT_ISA),
                          kKernels,
                          QT_NORM(float),
                          QT_NORM(double),
                          QT_ISA::max_pool<float>,
                          QT_ISA::max_pool<double>,
                          QT_ISA::max_pool_backward<float>,
                          QT_ISA::max_pool_backward<double>,
                          QT_WEIGHTS(float),
                          QT_WEIGHTS(double)};

}  // namespace cpu
}  // namespace qtoolkit
