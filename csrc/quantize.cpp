// The deployed pair, for CPU and CUDA: float to integer codes, and back.
#include <torch/library.h>

#include "checks.h"
#include "launch.h"
#include "layout.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

Tensor quantize(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                optional<int64_t> axis, int64_t group, c10::ScalarType dtype) {
  check_storage("quantize", "x", x);
  check_range("quantize", qmin, qmax);
  check_codes("quantize", dtype, qmin, qmax);
  const int64_t a = check_grid("quantize", x, scale, zero_point, axis, group);
  Tensor in = x, codes = empty_result(x, x.options().dtype(dtype), group);
  Job job;
  job.numel = x.numel();
  job.channels = channels_of(codes, a, group, scale.numel());
  job.x = operand_of(in, codes);
  job.y = codes.mutable_data_ptr();
  job.y_dtype = dtype_of(codes);
  job.ends = representable(qmin, qmax, x);
  launch(Op::quantize, job, {&scale, zero_point.has_value() ? &*zero_point : nullptr}, x.device());
  return codes;
}

Tensor dequantize(const Tensor& codes, const Tensor& scale, const optional<Tensor>& zero_point, optional<int64_t> axis,
                  int64_t group, c10::ScalarType dtype) {
  check_code_input("dequantize", codes);
  check_storage_dtype("dequantize", dtype);
  const int64_t a = check_grid("dequantize", codes, scale, zero_point, axis, group);
  Tensor in = codes, y = empty_result(codes, codes.options().dtype(dtype), group);
  Job job;
  job.numel = codes.numel();
  job.channels = channels_of(y, a, group, scale.numel());
  job.x = operand_of(in, y);
  job.y = y.mutable_data_ptr();
  job.y_dtype = dtype_of(y);
  launch(Op::dequantize, job, {&scale, zero_point.has_value() ? &*zero_point : nullptr}, codes.device());
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(qtoolkit, CPU, m) {
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
}

#ifdef QTOOLKIT_CUDA
TORCH_LIBRARY_IMPL(qtoolkit, CUDA, m) {
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
}
#endif

}  // namespace qtoolkit
