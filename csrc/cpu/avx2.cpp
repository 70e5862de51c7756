#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#pragma GCC target("avx2,f16c,bmi,bmi2,popcnt")

#define QT_ISA avx2
#define QT_BYTES 32
#include "kernels-inl.h"
#endif
