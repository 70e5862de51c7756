// All CUDA kernels, with their launches replaced. Those with steps that no op takes alone are functions NAME_on_host
// too.
#include <signal.h>

#include <utility>

#include "cuda/attention.cu"
#include "cuda/batch_norm.cu"
#include "cuda/fake_quant.cu"
#include "cuda/flash_attention.cu"
#include "cuda/function_rows.cu"
#include "cuda/histogram.cu"
#include "cuda/learned_backward.cu"
#include "cuda/max_pool.cu"
#include "cuda/observe.cu"
#include "cuda/quantize.cu"
#include "cuda/unit_scales.cu"
#include "cuda/weight_rows.cu"

using namespace qtoolkit;

// The launches since the last call of this.
extern "C" int launches() { return std::exchange(device::launches, 0); }

extern "C" int64_t size_of_batch_norm_arguments() { return sizeof(BatchNormArgs); }
extern "C" int64_t size_of_pool_arguments() { return sizeof(PoolArgs); }
extern "C" int64_t size_of_tracked_statistics() { return sizeof(TrackedStatistics); }

static void run(void (*kernels)(const BatchNormArgs&, double*, cudaStream_t), BatchNormArgs args, int order) {
  std::vector<double> workspace(cuda::batch_norm_workspace(args), NAN);
  std::vector<unsigned> arrived(args.channels);
  if (args.grad == nullptr) args.arrived = arrived.data();
  device::order = static_cast<device::Order>(order);
  kernels(args, workspace.data(), nullptr);
}

extern "C" void batch_norm_forward_on_host(const BatchNormArgs* args, int order) {
  run(cuda::batch_norm_forward, *args, order);
}

extern "C" void batch_norm_backward_on_host(const BatchNormArgs* args, int order) {
  run(cuda::batch_norm_backward, *args, order);
}

extern "C" void batch_norm_track_on_host(const TrackedStatistics* statistics) {
  cuda::batch_norm_track(*statistics, nullptr);
}

extern "C" void max_pool_forward_on_host(const PoolArgs* args) { cuda::max_pool_forward(*args, nullptr); }
extern "C" void max_pool_backward_on_host(const PoolArgs* args) { cuda::max_pool_backward(*args, nullptr); }
// As for tensors whose indices need 64 bits.
extern "C" void long_max_pool_forward_on_host(const PoolArgs* args) { cuda::pool_forward<int64_t>(*args, nullptr); }
extern "C" void long_max_pool_backward_on_host(const PoolArgs* args) { cuda::pool_backward<int64_t>(*args, nullptr); }

extern "C" int64_t size_of_unit_scales() { return sizeof(UnitScales); }
extern "C" int64_t size_of_unit_gradients() { return sizeof(UnitGradients); }
extern "C" int64_t size_of_factor_change() { return sizeof(FactorChange); }
extern "C" int64_t size_of_held_variance() { return sizeof(HeldVariance); }
extern "C" void rescale_on_host(const HeldVariance* h, const FactorChange* u, int order) {
  device::order = static_cast<device::Order>(order);
  cuda::rescale(*h, *u, nullptr);
}
extern "C" void unit_scales_on_host(const UnitScales* u) { cuda::unit_scales(*u, nullptr); }
extern "C" void unit_gradients_on_host(const UnitGradients* u) { cuda::unit_gradients(*u, {}, nullptr); }

extern "C" int64_t size_of_weight_rows() { return sizeof(WeightRows); }
extern "C" void weight_forward_on_host(const WeightRows* args, const UnitScales* unit, int order) {
  device::order = static_cast<device::Order>(order);
  cuda::weight_forward(*args, unit, nullptr);
}
extern "C" void weight_backward_on_host(const WeightRows* args, int order) {
  device::order = static_cast<device::Order>(order);
  cuda::weight_backward(*args, {}, {}, nullptr);
}

extern "C" int64_t size_of_attention_weights() { return sizeof(AttentionWeights); }
extern "C" void attention_weights_on_host(const AttentionWeights* args, int order) {
  std::vector<double> workspace(cuda::attention_workspace(*args), NAN);
  device::order = static_cast<device::Order>(order);
  cuda::attention_weights(*args, workspace.data(), nullptr);
}

// What a signal for memory that nobody may touch calls (table.cpp).
extern "C" void on_fault(int number) {
  if (device::running != nullptr) device::fault("it reads or writes outside of a tensor");
  signal(number, SIG_DFL);  // of anything but a kernel: it happens again
}

// Kernels with an error each, which a GPU ends or a sanitizer of CUDA finds: what the device says to it.
extern "C" const char* message_of_error(const char* error, float* data) {
  static std::string message;
  const std::string of = error;
  const cudaStream_t other = &message;
  message.clear();
  try {
    device::launch(1, 32, 0, of == "stream" ? other : nullptr, [&] {
      if (of == "load") data[0] = cuda::pack_at(data + 1, cuda::whole_at(0)).v[0];
      if (of == "store") cuda::store_pack(reinterpret_cast<int16_t*>(data) + 1, cuda::Pack<int16_t>{});
      if (of == "behind") data[0] = data[16];
      if (of == "before") data[0] = data[-1];
      if (of == "barrier" && threadIdx.x > 0) __syncthreads();
    });
  } catch (const std::runtime_error& found) {
    message = found.what();
  }
  return message.c_str();
}
