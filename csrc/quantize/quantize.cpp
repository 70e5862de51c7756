// The bodies of the deployed ops: values to integer codes, and back.
#include <ATen/ops/empty.h>

#include "../checks.h"
#include "../launch.h"
#include "../layout.h"
#include "../registration.h"

namespace qtoolkit {
namespace {

using at::Tensor;
using std::optional;

// `order` is a dense tensor of the sizes of the values, whose memory order the kernel follows.
void run(KernelId kernel, KernelArgs args, const Tensor& y, const Tensor& order, const Tensor& scale,
         const optional<Tensor>& zero_point, const Axis& axis) {
  const OrderedGrid grid(scale, zero_point, order, axis);
  args.numel = order.numel();
  args.channels = channels_of(order, axis, scale.numel());
  args.y = y.mutable_data_ptr();
  on(scale.device()).launch(kernel, args, grid.tensors(), scale.device());
}

Tensor quantize(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin, int64_t qmax,
                optional<int64_t> axis, int64_t group, int64_t block_size, c10::ScalarType dtype) {
  check_float("quantize", "x", x);
  check_code_range("quantize", qmin, qmax);
  check_codes("quantize", dtype, qmin, qmax);
  const Axis a = check_grid("quantize", x, scale, zero_point, axis, group, block_size);
  const Tensor codes = empty_result(x, x.options().dtype(dtype), group);
  if (codes.is_meta()) return codes;
  Tensor in = x;
  KernelArgs args;
  args.x = operand_of(in, codes);
  args.y_dtype = dtype_of(codes);
  args.bounds = representable(qmin, qmax, x);
  run(KernelId::quantize, args, codes, codes, scale, zero_point, a);
  return codes;
}

Tensor dequantize(const Tensor& codes, const Tensor& scale, const optional<Tensor>& zero_point, optional<int64_t> axis,
                  int64_t group, int64_t block_size, c10::ScalarType dtype) {
  check_code_input("dequantize", codes);
  check_float_dtype("dequantize", dtype);
  const Axis a = check_grid("dequantize", codes, scale, zero_point, axis, group, block_size);
  const Tensor y = empty_result(codes, codes.options().dtype(dtype), group);
  if (y.is_meta()) return y;
  Tensor in = codes;
  KernelArgs args;
  args.x = operand_of(in, y);
  args.y_dtype = dtype_of(y);
  run(KernelId::dequantize, args, y, y, scale, zero_point, a);
  return y;
}

Tensor quantize_int4(const Tensor& x, const Tensor& scale, const optional<Tensor>& zero_point, int64_t qmin,
                     int64_t qmax, optional<int64_t> axis, int64_t group, int64_t block_size, bool in_memory_order) {
  constexpr const char* kOp = "quantize_int4";
  check_float(kOp, "x", x);
  check_code_range(kOp, qmin, qmax);
  const bool is_signed = check_int4(kOp, qmin, qmax);
  const Axis a = check_grid(kOp, x, scale, zero_point, axis, group, block_size);
  Tensor packed;
  if (in_memory_order) packed = empty_codes(x, is_signed, /*packed=*/true);
  if (!packed.defined() || packed.sym_numel() == 0) {
    packed = at::empty_symint({(x.sym_numel() + 1) / 2}, x.options().dtype(at::kByte));
  }
  if (packed.is_meta()) return packed;
  Tensor in = x;
  const Tensor rows = at::empty(x.sizes(), x.options().device(at::kMeta));  // row-major, without memory
  const Tensor& order = packed.dim() == 4 ? x : rows;
  KernelArgs args;
  args.x = operand_of(in, order);
  args.y_dtype = is_signed ? Dtype::i4 : Dtype::u4;
  args.bounds = representable(qmin, qmax, x);
  run(KernelId::quantize, args, packed, order, scale, zero_point, a);
  return packed;
}

Tensor dequantize_int4(const Tensor& packed, c10::SymIntArrayRef size, const Tensor& scale,
                       const optional<Tensor>& zero_point, bool is_signed, optional<int64_t> axis, int64_t group,
                       int64_t block_size, c10::ScalarType dtype) {
  constexpr const char* kOp = "dequantize_int4";
  check_packed(kOp, packed, size);
  check_float_dtype(kOp, dtype);
  const Tensor y = at::empty_symint(size, packed.options().dtype(dtype));
  const Axis a = check_grid(kOp, y, scale, zero_point, axis, group, block_size);
  if (y.is_meta()) return y;
  const Tensor bytes = packed.contiguous();
  KernelArgs args;
  args.x.data = bytes.const_data_ptr();
  args.x.dtype = is_signed ? Dtype::i4 : Dtype::u4;
  args.y_dtype = dtype_of(y);
  run(KernelId::dequantize, args, y, y, scale, zero_point, a);
  return y;
}

}  // namespace

QT_REGISTER_BODIES(m) {
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
  m.impl("quantize_int4", quantize_int4);
  m.impl("dequantize_int4", dequantize_int4);
}

}  // namespace qtoolkit
