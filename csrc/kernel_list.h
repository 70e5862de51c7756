// The list of all kernels, from which the enum below and the dispatch tables of both devices are made.
#pragma once

// Elementwise kernels: name, functor of fake_quant.h, shaped.h, prelu.h or requantize.h. A line here makes the kernels
// for the CPU and for CUDA.
#define QT_ELEMENTWISE_KERNELS(X)                  \
  X(fake_quant, IntegerFunctor)                    \
  X(scale_terms, ScaleTermsFunctor)                \
  X(fake_quant_float, FloatFunctor)                \
  X(fake_quant_log, LogFunctor)                    \
  X(prelu_fake_quant, PreluFunctor)                \
  X(to_levels, LevelsFunctor)                      \
  X(to_interval, IntervalFunctor)                  \
  X(tensor_quant, LegacyCodeFunctor)               \
  X(fake_tensor_quant, LegacyValueFunctor)         \
  X(fake_affine_tensor_quant, LegacyAffineFunctor) \
  X(scaled_e4m3, LegacyFloatFunctor)               \
  X(requantize, RequantizeFunctor)                 \
  X(requantize_quotient, QuotientFunctor)          \
  X(requantize_fixed_point, FixedPointFunctor)     \
  X(fake_quant_by_factor, ByFactorFunctor)         \
  X(centred_codes, CentredFunctor)

// The backward of learned grids: name, functor of fake_quant.h, shaped.h or prelu.h. They write dx and sum the
// gradients of the two values of each channel.
#define QT_LEARNED_KERNELS(X)                     \
  X(fake_quant_learned_backward, LearnedGradient) \
  X(prelu_fake_quant_backward, PreluGradient)     \
  X(clipped_backward, ClippedGradient)            \
  X(soft_backward, SoftGradient)                  \
  X(levels_backward, LevelsGradient)              \
  X(interval_backward, IntervalGradient)

// Kernels with a loop of their own: function templates of that name in cpu/, functions of that name in cuda/.
#define QT_OTHER_KERNELS(X) \
  X(block_scale)            \
  X(add_codes)              \
  X(fake_quant_backward)    \
  X(quantize)               \
  X(dequantize)             \
  X(minmax)                 \
  X(histogram)

namespace qtoolkit {

#define QT_ENUMERATOR(name, ...) name,
enum class KernelId {
  QT_ELEMENTWISE_KERNELS(QT_ENUMERATOR) QT_LEARNED_KERNELS(QT_ENUMERATOR) QT_OTHER_KERNELS(QT_ENUMERATOR)
};
#undef QT_ENUMERATOR

#define QT_IS(name, ...) || kernel == KernelId::name
constexpr bool is_learned(KernelId kernel) { return false QT_LEARNED_KERNELS(QT_IS); }
#undef QT_IS

// Reductions have a result for each channel, also for an empty tensor.
constexpr bool is_reduction(KernelId kernel) { return is_learned(kernel) || kernel == KernelId::minmax; }

}  // namespace qtoolkit
