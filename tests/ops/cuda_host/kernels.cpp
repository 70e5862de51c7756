// The CUDA kernels of minmax and fake_quant for dense tensors, to be called from Python; their launches are replaced.
#include "cuda/fake_quant.cu"
#include "cuda/observe.cu"

using namespace qtoolkit;

static KernelArgs arguments(const void* x, int dtype, int64_t numel, const int64_t* channels, int order) {
  device::order = static_cast<device::Order>(order);
  KernelArgs args;
  args.numel = numel;
  args.channels = {channels[0], channels[1], channels[2], channels[3]};
  args.x.data = x;
  args.x.dtype = args.y_dtype = static_cast<Dtype>(dtype);
  return args;
}

extern "C" void minmax_on_host(const void* x, int dtype, int64_t numel, const int64_t* channels, int order,
                               double* workspace, double* ranges) {
  KernelArgs args = arguments(x, dtype, numel, channels, order);
  args.sum_scale = ranges;
  args.sum_zero_point = ranges + args.channels.count;
  cuda::minmax(args, workspace, nullptr);
}

// Codes are those of int8.
extern "C" void fake_quant_on_host(const void* x, int dtype, int64_t numel, const int64_t* channels, int order,
                                   const void* scale, const void* zero_point, void* y, uint8_t* mask) {
  KernelArgs args = arguments(x, dtype, numel, channels, order);
  args.bounds = {-128, 127};
  args.scale = scale;
  args.zero_point = zero_point;
  args.y = y;
  args.mask = mask;
  cuda::fake_quant(args, nullptr, nullptr);
}
