// The deployed pair, for CPU and CUDA: float to integer codes, and back.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "launch.h"
#include "layout.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

// What is read of x, and how it lies: `order` is a dense tensor of x's sizes.
Job job_of(Tensor& x, const Tensor& order, const Axis& axis, const Tensor& scale) {
  Job job;
  job.numel = x.numel();
  job.channels = channels_of(order, axis, scale.numel());
  job.x = operand_of(x, order);
  return job;
}

void run(Op op, Job& job, const Tensor& scale, const optional<Tensor>& zero_point, const Tensor& order,
         const Axis& axis) {
  const OrderedGrid grid(scale, zero_point, order, axis);
  launch(op, job, grid.tensors(), scale.device());
}

Tensor quantize(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                optional<int64_t> axis, int64_t group, int64_t block_size, c10::ScalarType dtype) {
  check_storage("quantize", "x", x);
  check_range("quantize", qmin, qmax);
  check_codes("quantize", dtype, qmin, qmax);
  const Axis a = check_grid("quantize", x, scale, zero_point, axis, group, block_size);
  Tensor in = x, codes = empty_result(x, x.options().dtype(dtype), group);
  Job job = job_of(in, codes, a, scale);
  job.y = codes.mutable_data_ptr();
  job.y_dtype = dtype_of(codes);
  job.ends = representable(qmin, qmax, x);
  run(Op::quantize, job, scale, zero_point, codes, a);
  return codes;
}

Tensor dequantize(const Tensor& codes, const Tensor& scale, const optional<Tensor>& zero_point, optional<int64_t> axis,
                  int64_t group, int64_t block_size, c10::ScalarType dtype) {
  check_code_input("dequantize", codes);
  check_storage_dtype("dequantize", dtype);
  const Axis a = check_grid("dequantize", codes, scale, zero_point, axis, group, block_size);
  Tensor in = codes, y = empty_result(codes, codes.options().dtype(dtype), group);
  Job job = job_of(in, y, a, scale);
  job.y = y.mutable_data_ptr();
  job.y_dtype = dtype_of(y);
  run(Op::dequantize, job, scale, zero_point, y, a);
  return y;
}

Tensor quantize_int4(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin,
                     int64_t qmax, optional<int64_t> axis, int64_t group, int64_t block_size) {
  constexpr const char* kOp = "quantize_int4";
  check_storage(kOp, "x", x);
  check_range(kOp, qmin, qmax);
  const bool is_signed = check_int4(kOp, qmin, qmax);
  const Axis a = check_grid(kOp, x, scale, zero_point, axis, group, block_size);
  Tensor in = x;
  const Tensor packed = at::empty({(x.numel() + 1) / 2}, x.options().dtype(at::kByte));
  const Tensor order = at::empty(x.sizes(), x.options().device(at::kMeta));  // no memory: only strides are asked for
  Job job = job_of(in, order, a, scale);
  job.y = packed.mutable_data_ptr();
  job.y_dtype = is_signed ? Dtype::i4 : Dtype::u4;
  job.ends = representable(qmin, qmax, x);
  run(Op::quantize, job, scale, zero_point, order, a);
  return packed;
}

Tensor dequantize_int4(const Tensor& packed, at::IntArrayRef size, const Tensor& scale,
                       const optional<Tensor>& zero_point, bool is_signed, optional<int64_t> axis, int64_t group,
                       int64_t block_size, c10::ScalarType dtype) {
  constexpr const char* kOp = "dequantize_int4";
  check_packed(kOp, packed, c10::fromIntArrayRefSlow(size));
  check_storage_dtype(kOp, dtype);
  const Tensor bytes = packed.contiguous(), y = at::empty(size, packed.options().dtype(dtype));
  const Axis a = check_grid(kOp, y, scale, zero_point, axis, group, block_size);
  Job job;
  job.numel = y.numel();
  job.channels = channels_of(y, a, scale.numel());
  job.x.data = bytes.const_data_ptr();
  job.x.dtype = is_signed ? Dtype::i4 : Dtype::u4;
  job.y = y.mutable_data_ptr();
  job.y_dtype = dtype_of(y);
  run(Op::dequantize, job, scale, zero_point, y, a);
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, CPU, m) {
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
  m.impl("quantize_int4", quantize_int4);
  m.impl("dequantize_int4", dequantize_int4);
}

#ifdef QTOOLKIT_CUDA
TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) {
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
  m.impl("quantize_int4", quantize_int4);
  m.impl("dequantize_int4", dequantize_int4);
}
#endif

}  // namespace qtoolkit
