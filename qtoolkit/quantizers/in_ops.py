"""Arguments of ops that compute a quantizer and more."""

from collections.abc import Callable

import torch
from torch import Tensor

from qtoolkit.ops.layer import RawInput, WeightGrid
from qtoolkit.quantizers.checks import check_finite, check_not_transformed
from qtoolkit.quantizers.spec_ops import fake_quant
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.running import Run, running


def raw_input(quantizer: TensorQuantizer, x: Tensor) -> RawInput | None:
    """Return an input with the tensors that a layer needs to train its scale; None where a gradient goes elsewhere too."""
    kind = quantizer.kind
    if x.requires_grad or not (kind.LEARNED and quantizer.capability.plain):
        return None
    scale, zero_point = quantizer.grid()
    if not scale.requires_grad or (zero_point is not None and zero_point.requires_grad):
        return None
    return RawInput(x, scale, kind.grad_factor(quantizer, x))


def weight_grid(run: Run, quantizer: TensorQuantizer, like: Tensor, values: Callable[[], Tensor]) -> WeightGrid:
    """Return the grid on which a quantizer would put a weight, for an op that does it (see `on_codes.gives_grid`).

    `like` has the weight's shape. `values` returns the weight, and is called only where the grid depends on it. Raises
    RuntimeError without a range, ValueError if `stopping` is set, and the weight has NaN or infinities.
    """
    kind, spec = quantizer.kind, quantizer.spec
    if quantizer.stopping:
        check_finite(quantizer, values())
    if quantizer.takes_range(run):
        check_not_transformed(run, quantizer.name)
        quantizer.follow(values())
    quantizer.check_ready()
    factor = kind.grad_factor(quantizer, like)
    return WeightGrid(*quantizer.grid(), spec.qmin, spec.qmax, spec.axis, quantizer.group, spec.block_size, factor)


def quantize_rows(quantizer: TensorQuantizer, x: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """Return `quantizer(table)[index]`, computed from the indexed rows alone.

    Args:
        quantizer: The quantizer of a table of rows.
        x: The rows `table[index]`, (n, features), to which gradients flow.
        index: The rows' numbers, (n,).
        table: The table, (rows, features). An observer, or a range that follows it, sees all of it.
    """
    kind, spec = quantizer.kind, quantizer.spec
    with torch.no_grad():
        check_finite(quantizer, table)
        if quantizer.observing:
            quantizer.fit_channels(table)
            kind.observe(quantizer, table) if quantizer.quantizing else quantizer.observer(table)
        elif quantizer.takes_range(running()):
            kind.follow(quantizer, table)
    if not quantizer.quantizing:
        return x
    quantizer.check_ready()
    if not kind.PLAIN:
        return kind.quantize(quantizer, table)[index]
    scale, zero_point = quantizer.grid()
    block_size, rows = spec.block_size, spec.rows_per_scale(2)
    if rows > 1:  # blocks of rows: here of one row each
        index, block_size = index // rows, 1
    if rows > 0:
        scale, zero_point = scale[index], None if zero_point is None else zero_point[index]
    return fake_quant(spec, x, scale, zero_point, 1, block_size, kind.grad_factor(quantizer, table))
