#include <cmath>
#include <cstdint>
#include <type_traits>

// On x86-64, only processors without AVX2 take these kernels: they are compiled for size, to the same bits.
#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC optimize("Os")
#endif

#define QT_ISA plain
#define QT_BYTES 16
#include "kernels-inl.h"
