"""Symbolic functions with which the TorchScript exporter writes quantizing ops."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Value

from qtoolkit.ops.recording import are_ops_taken

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

Results = tuple[Value, Value]  # the values and the mask
Arguments = tuple[str, tuple[int, int], int | None, int, int]  # of `qtoolkit.export.pairs.storage.Rounding`
OPSETS = range(7, 24)  # of torch.onnx.export


@functools.cache
def register_symbolics() -> None:
    """Register the functions for all opsets, in torch's table of the process."""
    for opset in OPSETS:
        for symbolic in _symbolics(opset):
            name = f"qtoolkit::{symbolic.__name__}"
            torch.onnx.register_custom_op_symbolic(name, symbolic, opset)  # type: ignore[attr-defined]


def _symbolics(opset: int) -> Sequence[Callable[..., Results]]:
    from torch.onnx import symbolic_helper

    @symbolic_helper.parse_args("v", "v", "v", "i", "i", "i", "i", "i", "f", "b")
    def fake_quant(
        g: "GraphContext",
        x: Value,
        scale: Value,
        zero_point: Value,
        qmin: int,
        qmax: int,
        axis: int | None,
        group: int,
        block_size: int,
        factor: float,
        mask: bool,
    ) -> Results:
        """Write one call. The exporter passes the op's arguments by position, so all are listed."""
        inputs = (x, scale) if zero_point.node().mustBeNone() else (x, scale, zero_point)
        return _write(g, opset, inputs, ("int", (qmin, qmax), axis, group, block_size))

    @symbolic_helper.parse_args("v", "v", "s", "i", "i", "i", "b")
    def fake_quant_float(
        g: "GraphContext",
        x: Value,
        scale: Value,
        format: str,
        axis: int | None,
        group: int,
        block_size: int,
        mask: bool,
    ) -> Results:
        return _write(g, opset, (x, scale), (format, (0, 0), axis, group, block_size))

    return fake_quant, fake_quant_float


def _write(g: "GraphContext", opset: int, inputs: Sequence[Value], rounding: Arguments) -> Results:
    from qtoolkit.export.onnx import require_extra

    require_extra("torch.onnx.export of a quantized model")
    from qtoolkit.export.exporters.plain import written_by_torchscript
    from qtoolkit.export.exporters.translation import placeholder_in_torchscript
    from qtoolkit.export.pairs.storage import Rounding

    how = Rounding(*rounding)
    y = placeholder_in_torchscript(g, inputs, how) if are_ops_taken() else written_by_torchscript(g, opset, inputs, how)
    return y.setType(inputs[0].type()), g.op("Constant", value_t=torch.zeros(0, dtype=torch.uint8))
