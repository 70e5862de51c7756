#pragma once

#include "../batch_norm/batch_norm_args.h"
#include "../launch.h"

namespace qtoolkit {
namespace cpu {

// The instruction set in use: "avx512", "avx2" or "plain".
const char* instruction_set();

void batch_norm_forward(BatchNormArgs& args);
void batch_norm_backward(BatchNormArgs& args);
void batch_norm_track(const TrackedStatistics& statistics);
void max_pool_forward(const PoolArgs& args);
void max_pool_backward(const PoolArgs& args);

}  // namespace cpu
}  // namespace qtoolkit
