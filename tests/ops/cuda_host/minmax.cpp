// The CUDA kernel of minmax for a dense tensor, to be called from Python; `observe.cu` has its launches replaced.
#include "cuda/observe.cu"

using namespace qtoolkit;

extern "C" void minmax_on_host(const void* x, int dtype, int64_t numel, const int64_t* channels, int order,
                               double* workspace, double* ranges) {
  device::order = static_cast<device::Order>(order);
  KernelArgs args;
  args.numel = numel;
  args.channels = {channels[0], channels[1], channels[2], channels[3]};
  args.x.data = x;
  args.x.dtype = static_cast<Dtype>(dtype);
  args.sum_scale = ranges;
  args.sum_zero_point = ranges + args.channels.count;
  cuda::minmax(args, workspace, nullptr);
}
