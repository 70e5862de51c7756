"""The node tests of the onnx package for its integer ops, against the kernels of `qtoolkit.integer`: every code is the same.

The data is what the package's own cases export. Weights with a zero point, which no target here takes, are centred codes of
more bits: the sums are the same integers.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.integer.kernels import FloatOutput, LayerKernel
from qtoolkit.integer.onnxruntime import QLinearConv, QLinearMatMulOfTwo
from qtoolkit.nn.layer_call import LayerCall
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.kinds.dynamic import of_tokens

OPS = ("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "DynamicQuantizeLinear")


class Case(NamedTuple):
    """A node, and what it computes of its inputs."""

    node: onnx.NodeProto
    inputs: list[np.ndarray[Any, Any]]
    outputs: list[np.ndarray[Any, Any]]
    name: str

    def attribute(self, name: str, default: Any) -> Any:
        found = [onnx.helper.get_attribute_value(each) for each in self.node.attribute if each.name == name]
        return found[0] if found else default


def cases_of(op: str) -> Iterator[Case]:
    """Yield the cases that the package exports for an op."""
    module = import_module(f"onnx.backend.test.case.node.{op.lower()}")
    found: list[Case] = []
    before = module.expect
    module.expect = lambda node, inputs, outputs, name, **_: found.append(Case(node, inputs, outputs, name))
    try:
        exporter = getattr(module, op)
        for export in [value for name, value in vars(exporter).items() if name.startswith("export")]:
            export.__func__()
    finally:
        module.expect = before
    yield from found


def cases(*ops: str) -> list[Any]:
    return [pytest.param(case, id=case.name.removeprefix("test_")) for op in ops for case in cases_of(op)]


def grid_of(scale: Any, zero_point: Any, **spec: Any) -> Grid:
    """Return the quantizer of codes in 8 bits, of the type of the zero point."""
    signed = np.asarray(zero_point).dtype == np.int8
    spec = {"signed": signed, "symmetric": False, **spec}
    return Grid(torch.tensor(float(scale)), torch.tensor(float(zero_point)), qt.QuantSpec(**spec))


def centred(codes: np.ndarray[Any, Any], zero_point: Any = 0) -> Tensor:
    """Return codes minus their zero point, one for all or one for each row."""
    zero = np.asarray(zero_point, np.int64)
    return torch.from_numpy(
        codes.astype(np.int64) - zero.reshape(-1, *[1] * (codes.ndim - 1) if zero.ndim else ())
    ).float()


def convolution(
    kind: type[LayerKernel], case: Case, x: Grid, w: Tensor, w_scale: Any, y: Grid | None, bias: Tensor | None = None
) -> LayerKernel:
    """Return the kernel of a convolution with these centred codes of its weight."""
    scale = torch.as_tensor(np.asarray(w_scale, np.float32)).reshape(-1)
    padding = case.attribute("pads", [0, 0, 0, 0])
    assert padding[:2] == padding[2:]
    layer = nn.Conv2d(w.shape[1], len(w), tuple(w.shape[2:]), padding=tuple(padding[:2]), bias=bias is not None)
    quantized = qt.nn.QuantConv2d.from_float(layer, None)
    step = scale.reshape(-1, 1, 1, 1) if len(scale) > 1 else scale
    quantized.weight = nn.Parameter(w * step)
    if bias is not None:
        quantized.bias = nn.Parameter(bias * float(x.scale) * scale)
    spec = qt.QuantSpec(bits=10, axis=0 if len(scale) > 1 else None)
    quantized.weight_quantizer = Grid(scale if len(scale) > 1 else scale[0], None, spec, of_weight=True)
    return kind(quantized, x, y, LayerCall())


@pytest.mark.parametrize("case", cases("ConvInteger"))
def test_sums_of_convolutions(case: Case) -> None:
    x, w, x_zero, *w_zero = case.inputs
    w_values = centred(w, *w_zero)
    source = grid_of(1, x_zero)
    kernel = convolution(FloatOutput, case, source, w_values, 1, None)
    assert torch.equal(kernel(centred(x, x_zero)).to(torch.int32), torch.from_numpy(case.outputs[0]))


@pytest.mark.parametrize("case", cases("MatMulInteger"))
def test_sums_of_matrix_products(case: Case) -> None:
    a, b, a_zero, b_zero = case.inputs
    sides = [grid_of(1, a_zero.reshape(()).astype(a.dtype)), grid_of(1, b_zero.reshape(()).astype(b.dtype))]
    kernel = QLinearMatMulOfTwo(torch.matmul, sides, None, "matmul", "matmul")
    assert torch.equal(
        kernel(centred(a, a_zero.item()), centred(b, b_zero.item())).to(torch.int32), torch.from_numpy(case.outputs[0])
    )


@pytest.mark.parametrize("case", cases("QLinearConv"))
def test_convolutions_with_requantized_sums(case: Case) -> None:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = case.inputs
    source, output = grid_of(x_scale, x_zero), grid_of(y_scale, y_zero)
    kernel = convolution(
        QLinearConv,
        case,
        source,
        centred(w, w_zero),
        w_scale,
        output,
        *(torch.from_numpy(each).float() for each in bias),
    )
    y = kernel(centred(x, x_zero) * source.scale)
    assert torch.equal(output.codes(y), torch.from_numpy(case.outputs[0]))


@pytest.mark.parametrize("case", cases("QLinearMatMul"))
def test_matrix_products_with_requantized_sums(case: Case) -> None:
    """Scales of float16 are taken as float32, the only type that onnxruntime's kernel has."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = case.inputs
    sides = [
        grid_of(np.asarray(s, np.float32).item(), z.reshape(())) for s, z in ((a_scale, a_zero), (b_scale, b_zero))
    ]
    output = grid_of(np.asarray(y_scale, np.float32).item(), y_zero.reshape(()))
    kernel = QLinearMatMulOfTwo(torch.matmul, sides, output, "matmul", "matmul")
    y = kernel(
        *(centred(codes, z.item()) * side.scale for codes, z, side in zip((a, b), (a_zero, b_zero), sides, strict=True))
    )
    assert torch.equal(output.codes(y), torch.from_numpy(case.outputs[0]))


@pytest.mark.parametrize("case", cases("DynamicQuantizeLinear"))
def test_grids_of_the_range_of_a_tensor(case: Case) -> None:
    (x,), (codes, scale, zero_point) = case.inputs, case.outputs
    values, spec = torch.from_numpy(x), qt.QuantSpec(signed=False, symmetric=False, dynamic=True)
    found_scale, found_zero = qt.ops.grid_of_range(values.min(), values.max(), 0, 255, symmetric=False)
    assert float(found_scale) == float(scale)
    assert int(found_zero) == int(zero_point)
    found = qt.ops.quantize(values, found_scale, found_zero, 0, 255, dtype=torch.uint8)
    assert torch.equal(found, torch.from_numpy(codes))
    expected = centred(codes, zero_point.item()) * float(scale)
    assert torch.equal(of_tokens(spec, values.reshape(1, -1)).reshape(expected.shape), expected)


def test_each_op_has_cases() -> None:
    counts = {op: len(list(cases_of(op))) for op in OPS}
    assert all(counts.values()), counts
