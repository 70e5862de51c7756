// Every op of the library: the table of contents of the native side.
//
// Common arguments. x: float32, float64, bfloat16 or float16; arithmetic is float32 (float64 for float64). scale: one
// element, or one per channel of axis (group times as many where group > 1: dimension 0 is split into groups with
// channels of their own, as in the weight of a grouped transposed convolution). block_size > 0 cuts axis into blocks,
// each with a scale of its own: scale has x's shape with dimension axis divided by block_size, or as many elements in a
// row (ONNX's blocked quantization). zero_point: as many, or absent (symmetric). A result lies in memory as its input
// does.
#include <Python.h>
#include <torch/library.h>
#include <torch/version.h>

#include "cpu/launch.h"

TORCH_LIBRARY(qtoolkit, m) {
  // Values on the grid, and the packed in-range mask (empty unless mask, or x needs it for its gradient).
  // Differentiable in x, and in scale and zero_point where they require grad; their gradients are multiplied by
  // grad_factor.
  m.def(
      "fake_quant(Tensor x, Tensor scale, Tensor? zero_point, int qmin, int qmax, int? axis=None, int group=1, "
      "int block_size=0, float grad_factor=1.0, bool mask=False) -> (Tensor, Tensor)");

  // The same, written over x; gives the mask. Differentiable in x alone, of which nothing but the mask is kept.
  m.def(
      "fake_quant_(Tensor(a!) x, Tensor scale, Tensor? zero_point, int qmin, int qmax, int? axis=None, int group=1, "
      "int block_size=0, bool mask=False) -> Tensor");

  // observe_minmax_, then the grid of the ranges as they are now (grid_of_range; without a zero point a symmetric one),
  // written to scale and zero_point, then fake_quant on it. Differentiable in x.
  m.def(
      "observe_fake_quant(Tensor x, Tensor(a!) lo, Tensor(b!) hi, Tensor(c!) scale, Tensor(d!)? zero_point, int qmin, "
      "int qmax, float? momentum=None, bool pow2_scale=False, int? axis=None, int group=1, int block_size=0, "
      "bool mask=False) -> (Tensor, Tensor)");

  // Values on the grid of a small float format ("e4m3", "e5m2" or "e2m1"): x / scale rounded half to even, saturated at
  // the format's largest number, times scale; or on the logarithmic grid "nnie", of which scale is the largest number.
  // And the packed mask of what was not saturated. Differentiable in x.
  m.def(
      "fake_quant_float(Tensor x, Tensor scale, str format, int? axis=None, int group=1, int block_size=0, "
      "bool mask=False) -> (Tensor, Tensor)");

  // fake_quant_float with a scale for each block of block_size neighbours along the last dimension, by their largest
  // magnitude: values, scales, mask. scale_format "e8m0" is OCP MX v1.0; "e4m3" is NVFP4's, with a scale of the tensor
  // on top. The result is row-major.
  m.def(
      "fake_quant_block(Tensor x, str format, int block_size, str scale_format, Tensor? tensor_scale=None, "
      "bool mask=False) -> (Tensor, Tensor, Tensor)");

  // The numerics of pytorch-quantization: codes stored as floats, the multiplier maxb / amax (1 where amax <= 2^-24),
  // and the packed mask of |x| <= amax. amax: one element, or broadcast along one dimension. Differentiable in x.
  m.def(
      "tensor_quant(Tensor x, Tensor amax, int num_bits=8, bool unsigned=False, bool narrow_range=True, "
      "bool mask=False) -> (Tensor, Tensor, Tensor)");

  // The same, divided by the multiplier again: values and mask.
  m.def(
      "fake_tensor_quant(Tensor x, Tensor amax, int num_bits=8, bool unsigned=False, bool narrow_range=True, "
      "bool mask=False) -> (Tensor, Tensor)");

  // dx: grad where the mask's bit is set, else 0. order: x's dimensions from the slowest to the fastest in memory,
  // empty for row-major.
  m.def("fake_quant_backward(Tensor grad, Tensor mask, int[] order) -> Tensor");

  // dx, dscale, dzero_point (empty where there is none) of a learned grid, from x itself.
  m.def(
      "fake_quant_learned_backward(Tensor grad, Tensor x, Tensor scale, Tensor? zero_point, int qmin, int qmax, "
      "int? axis=None, int group=1, int block_size=0, float grad_factor=1.0) -> (Tensor, Tensor, Tensor)");

  // A copy of x as it is now. Compilers keep its result for backward and never compute it again: they would do so from
  // a buffer that was updated in place since, as batch norm's statistics are.
  m.def("snapshot(Tensor x) -> Tensor");

  // Integer codes of x: int8, uint8, int16, uint16 or int32. NaN becomes qmin.
  m.def(
      "quantize(Tensor x, Tensor scale, Tensor? zero_point, int qmin, int qmax, int? axis=None, int group=1, "
      "int block_size=0, *, ScalarType dtype) -> Tensor");

  // Values of integer codes.
  m.def(
      "dequantize(Tensor codes, Tensor scale, Tensor? zero_point, int? axis=None, int group=1, int block_size=0, *, "
      "ScalarType dtype) -> Tensor");

  // Codes of 4 bits, two a byte: uint8 of one dimension, x's elements in row-major order, the first in the low half of
  // a byte, an odd number filled up with 0 (ONNX's INT4 and UINT4). Signed where qmin is negative. NaN becomes qmin.
  m.def(
      "quantize_int4(Tensor x, Tensor scale, Tensor? zero_point, int qmin=-8, int qmax=7, int? axis=None, "
      "int group=1, int block_size=0) -> Tensor");

  // Values of such codes, row-major of that size.
  m.def(
      "dequantize_int4(Tensor packed, SymInt[] size, Tensor scale, Tensor? zero_point, bool signed=True, "
      "int? axis=None, int group=1, int block_size=0, *, ScalarType dtype) -> Tensor");

  // Lowest and highest value, per tensor, per channel or (with the shape of a scale) per block. NaN spreads.
  m.def("minmax(Tensor x, int? axis=None, int group=1, int block_size=0) -> (Tensor, Tensor)");

  // Widens the running ranges lo and hi by those of x; with a momentum, moves them towards those of x. A range that
  // has seen nothing is [inf, -inf].
  m.def(
      "observe_minmax_(Tensor x, Tensor(a!) lo, Tensor(b!) hi, float? momentum=None, int? axis=None, int group=1, "
      "int block_size=0) -> ()");

  // The scale and zero point (empty where symmetric) whose codes cover the ranges [lo, hi]: range_grid.h has the rule.
  m.def(
      "grid_of_range(Tensor lo, Tensor hi, int qmin, int qmax, bool symmetric=True, bool pow2_scale=False) "
      "-> (Tensor, Tensor)");

  // Adds x to the running histogram counts (int64, an even number of equal bins) of the range [lo, hi], which grows as
  // x asks for: histogram.h has the rule. hi <= lo: nothing seen yet. NaN, an infinity or a magnitude of 2^126 or more
  // makes lo and hi NaN, and nothing more is counted.
  m.def("observe_histogram_(Tensor x, Tensor(a!) counts, Tensor(b!) lo, Tensor(c!) hi) -> ()");

  // The range that a method ("percentile", "mse", "l2", "entropy") chooses to quantize for codes [qmin, qmax]: search.h
  // has the formulas. counts: (bins) or (channels, bins). An empty histogram gives [inf, -inf], a broken one NaN.
  m.def(
      "search_range(Tensor counts, Tensor lo, Tensor hi, int qmin, int qmax, str method, float percentile=99.99, "
      "bool symmetric=True) -> (Tensor, Tensor)");
}

// Read by qtoolkit/_native.py from the file, since a library built for another torch does not load.
extern "C" __attribute__((used, visibility("default"))) const char qtoolkit_built_for[] =
    "qtoolkit was built for torch " TORCH_VERSION;

// The module that Python imports: loading it registers the ops; it tells which kernels they use.
static PyObject* instruction_set(PyObject*, PyObject*) {
  try {
    return PyUnicode_FromString(qtoolkit::cpu::instruction_set());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
}

static PyMethodDef methods[] = {{"instruction_set", instruction_set, METH_NOARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
