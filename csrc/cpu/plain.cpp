#include <cmath>
#include <cstdint>
#include <type_traits>

#define QT_ISA plain
#define QT_BYTES 16
#include "kernels-inl.h"
