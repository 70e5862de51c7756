#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the compiler's own avx512fintrin.h
#pragma GCC diagnostic ignored "-Wuninitialized"        // the same header uses undefined vectors on purpose
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,bmi,bmi2,popcnt,prefer-vector-width=512")

#define QT_ISA avx512
#define QT_BYTES 64
#include "kernels-inl.h"
#endif
