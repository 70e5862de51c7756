// Every CPU kernel, for one instruction set. A kernel walks its range a block at a time: operands that are strided
// or stored in another type pass through a buffer that stays in the first cache, so the arithmetic only ever sees
// contiguous float32 or float64, in whole chunks.
//
// The including file brings the standard headers and then sets the target: an inline function of theirs compiled
// for this processor must not be shared with code that runs on another.
#pragma GCC diagnostic ignored "-Wpsabi"

#include "../fake_quant.h"
#include "../observe.h"
#include "kernels.h"
#include "simd-inl.h"

namespace qtoolkit {
namespace QT_ISA {

#include "quantize-inl.h"
#include "learned_backward-inl.h"
#include "elementwise-inl.h"
#include "observe-inl.h"

template <class A, class Rule>
void map_typed(const Job& job, int64_t begin, int64_t end) {
  if (job.mask == nullptr) {
    return kStreams && job.stream ? map<A, false, kStreams, Rule>(job, begin, end)
                                  : map<A, false, false, Rule>(job, begin, end);
  }
  return kStreams && job.stream ? map<A, true, kStreams, Rule>(job, begin, end)
                                : map<A, true, false, Rule>(job, begin, end);
}

template <template <class, class> class Rule>
void map_any(const Job& job, int64_t begin, int64_t end) {
  return job.x.dtype == Dtype::f64 ? map_typed<double, Rule<double, Vector<double>>>(job, begin, end)
                                   : map_typed<float, Rule<float, Vector<float>>>(job, begin, end);
}

void block_scale_any(const Job& job, int64_t begin, int64_t end) {
  return job.x.dtype == Dtype::f64 ? block_scale<double>(job, begin, end) : block_scale<float>(job, begin, end);
}

template <class A>
void fake_quant_backward_typed(const Job& job, int64_t begin, int64_t end) {
  return kStreams && job.stream ? fake_quant_backward<A, kStreams>(job, begin, end)
                                : fake_quant_backward<A, false>(job, begin, end);
}

void fake_quant_backward_any(const Job& job, int64_t begin, int64_t end) {
  return job.grad.dtype == Dtype::f64 ? fake_quant_backward_typed<double>(job, begin, end)
                                      : fake_quant_backward_typed<float>(job, begin, end);
}

template <class A>
void learned_backward_typed(const Job& job, int64_t begin, int64_t end) {
  if (job.sum_zero_point != nullptr) {
    return kStreams && job.stream ? learned_backward<A, true, kStreams>(job, begin, end)
                                  : learned_backward<A, true, false>(job, begin, end);
  }
  return kStreams && job.stream ? learned_backward<A, false, kStreams>(job, begin, end)
                                : learned_backward<A, false, false>(job, begin, end);
}

void fake_quant_learned_backward_any(const Job& job, int64_t begin, int64_t end) {
  return job.x.dtype == Dtype::f64 ? learned_backward_typed<double>(job, begin, end)
                                   : learned_backward_typed<float>(job, begin, end);
}

void quantize_any(const Job& job, int64_t begin, int64_t end) {
  return job.x.dtype == Dtype::f64 ? quantize<double>(job, begin, end) : quantize<float>(job, begin, end);
}

void dequantize_any(const Job& job, int64_t begin, int64_t end) {
  return job.y_dtype == Dtype::f64 ? dequantize<double>(job, begin, end) : dequantize<float>(job, begin, end);
}

void minmax_any(const Job& job, int64_t begin, int64_t end) {
  return job.x.dtype == Dtype::f64 ? minmax<double>(job, begin, end) : minmax<float>(job, begin, end);
}

void histogram_any(const Job& job, int64_t begin, int64_t end, cpu::Tally& tally) {
  return job.x.dtype == Dtype::f64 ? histogram<double>(job, begin, end, tally)
                                   : histogram<float>(job, begin, end, tally);
}

}  // namespace QT_ISA

namespace cpu {

#define QT_NAME_(x) #x
#define QT_NAME(x) QT_NAME_(x)

const Kernels QT_TABLE = {QT_NAME(QT_ISA),
                          QT_ISA::map_any<IntegerRule>,
                          QT_ISA::map_any<FloatRule>,
                          QT_ISA::map_any<LogRule>,
                          QT_ISA::block_scale_any,
                          QT_ISA::map_any<LegacyCodeRule>,
                          QT_ISA::map_any<LegacyValueRule>,
                          QT_ISA::fake_quant_backward_any,
                          QT_ISA::fake_quant_learned_backward_any,
                          QT_ISA::quantize_any,
                          QT_ISA::dequantize_any,
                          QT_ISA::minmax_any,
                          QT_ISA::histogram_any};

}  // namespace cpu
}  // namespace qtoolkit
