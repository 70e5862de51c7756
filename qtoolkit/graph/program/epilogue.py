"""A batch norm in training with the ops after it, in one op: a residual add, an activation and a quantizer.

The ops that a graph has are called one by one wherever that can make a difference: in eval mode, for other kinds of batch norms
and strategies, where hooks watch a module, while a quantizer observes. The forward of a prepared model asks at each call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit import ops
from qtoolkit.graph.module_calls import numbered
from qtoolkit.nn import QuantMultiheadAttention
from qtoolkit.nn.attention import InputCodes
from qtoolkit.nn.batch_norm import QuantSyncBatchNorm, is_folded, process_group_of, track, unscaled
from qtoolkit.nn.fusion import DIMENSIONS, Unit, fusion
from qtoolkit.nn.hooks import all_watched, is_ordinary, is_watched
from qtoolkit.nn.output_grid import codes_by_op, grid_now, quantized_by
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.kind import Bounds
from qtoolkit.quantizers.codes import TensorCodes, codes_of
from qtoolkit.running import Run

NO_CODES = (None, None, None)
LARGEST_WINDOW = 256  # elements whose places fit in one byte

# Of a layer: its output scaled by the batch norm's factor of each channel, and the factor; or its output, and None.
Output = tuple[Tensor, Tensor | None]


# ---- the calls that the code of a prepared model makes


def layer_output(
    run: Run, layer: Any, bn: Any, input: Any, input_codes: TensorCodes | None = None, call: int = 0
) -> Output:
    """Return the output of a call of a layer for its linked batch norm: scaled by its factor where the op may take it."""
    found = fusion(run, layer, bn) if is_ordinary(run, input) else None
    if not isinstance(found, Unit) or found.folded or found.layer is not None:
        return called_with(layer, input_codes, input, **numbered(call)), None
    output: Output = layer.bn_scaled_output(run, bn, input, input_codes, call)
    return output


def called_with(module: Any, input_codes: TensorCodes | InputCodes | None, *args: Any, **kwargs: Any) -> Any:
    """Call a layer or an attention, with its inputs as integers, if it takes them."""
    takes = input_codes is not None and type(module).forward in (QuantWeighted.forward, QuantMultiheadAttention.forward)
    return module(*args, **kwargs, input_codes=input_codes) if takes else module(*args, **kwargs)


def epilogue_of(
    add: Callable[[Tensor, Tensor], Tensor] | None = None,
    activate: Callable[[Tensor], Tensor] | None = None,
    bounds: Bounds | None = None,
) -> Callable[..., tuple[Tensor, TensorCodes | None]]:
    """Return the function that computes a batch norm with the ops after it.

    `add` adds the residual to the batch norm's output; `activate` is the activation where that is a function, `bounds`
    are its bounds. The result is a function of the run, the batch norm's input (the result of `layer_output`, if there
    is a layer), the residual, its integers, the layer, the batch norm, the module of the activation and the quantizer,
    each None where it is missing. It returns the output and its integers.
    """

    def epilogue(
        run: Run,
        value: Any,
        residual: Any,
        residual_codes: TensorCodes | None,
        layer: Any,
        bn: Any,
        activation: Any,
        quantizer: Any,
    ) -> tuple[Tensor, TensorCodes | None]:
        """Compute the ops by one op as far as it can, and the others one by one."""
        output_codes: TensorCodes | None = None
        x, factor = (value, None) if layer is None else value
        adds = residual is None or is_added(run, residual, x.shape, x.dtype, x.device)
        may_be_one = is_ordinary(run, x) and fits(bn, x.shape)
        found = fusion(run, None, bn, adds, activation or bounds, quantizer) if may_be_one else None
        # A batch norm that is not linked gives torch's bits where nothing is quantized.
        if not isinstance(found, Unit) or found.folded or (layer is None and found.quantizer is None):
            adds, found = residual is None, Unit(bounds=None)
            y: Tensor = bn(x if factor is None else unscaled(layer, x, factor))
        else:
            joined = (residual, residual_codes) if adds else (None, None)
            y, output_codes = _compute(run, x, factor, layer, bn, joined, found.bounds or Bounds(), found.quantizer)
        if add is not None and not adds:
            y = add(y, residual)
        if found.bounds is None:
            y = activation(y) if activation is not None else y if activate is None else activate(y)
        quantizes = found.quantizer is not None
        return (y, output_codes) if quantizer is None or quantizes else quantized_by(run, quantizer, y)

    return epilogue


def max_pool(run: Run, pool: Any, x: Tensor, input_codes: TensorCodes | None) -> tuple[Any, TensorCodes | None]:
    """Call an nn.MaxPool2d, by an op that keeps places instead of the input where it trains; `input_codes` are x's integers."""
    by_torch = type(pool) is not nn.MaxPool2d or not pool.training or pool.return_indices or is_watched(pool)
    if by_torch or all_watched():
        return pool(x), None
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
    return max_pool2d(run, x, *sizes, input_codes=input_codes)


def max_pool2d(
    run: Run,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    input_codes: TensorCodes | None = None,
) -> tuple[Tensor, TensorCodes | None]:
    """Compute torch.nn.functional.max_pool2d, by an op that keeps one byte for each output where a gradient is needed.

    The values and gradients are torch's. The output is on the grid of the input, if that has `input_codes`.
    """
    sizes = (kernel_size, stride, padding, dilation, ceil_mode)
    by_torch = run.compiled or not _keeps_places(run, input, kernel_size)
    y = F.max_pool2d(input, *sizes) if by_torch else ops.max_pool(input, *sizes)
    return y, None if run.compiled or input_codes is None else input_codes.without_codes(run, y)


class Rearrangement:
    """A function of a tensor, and of sizes, that returns its values in another shape or order."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def codes_of(self, run: Run, x: Tensor, codes: TensorCodes | None, y: Tensor, *sizes: object) -> TensorCodes | None:
        """Return the integers of y, the function's result of x, from the integers of x."""
        if run.compiled:
            return None
        if codes is None or y is x or not codes.hold_for(x):
            return codes  # of y too, or of neither
        found = codes.without_codes(run, y)
        if codes.codes is not None and not codes.packed:
            found.codes = self.function(codes.codes, *sizes)
        return found


def _keeps_places(run: Run, input: Tensor, kernel_size: Any) -> bool:
    if not (is_ordinary(run, input) and torch.is_grad_enabled() and input.requires_grad):
        return False
    return input.dim() == 4 and _window(kernel_size) <= LARGEST_WINDOW and not _is_faster_in_torch(input)


def _is_faster_in_torch(input: Tensor) -> bool:
    """Return whether the op is slow: on CUDA, its backward of a contiguous tensor waits for instructions, not for memory."""
    return input.is_cuda and not input.is_contiguous(memory_format=torch.channels_last)


# ---- their parts


def fits(bn: Any, size: torch.Size) -> bool:
    """Return whether the op takes inputs of a size; the batch norm has the errors for sizes that it does not take either."""
    has_values = size.numel() > size[1] or type(bn) is QuantSyncBatchNorm  # other ranks may have them
    is_taken = is_folded(bn) or (size[1] == bn.num_features and has_values)
    return len(size) in DIMENSIONS.get(type(bn), ()) and is_taken


def is_added(run: Run, residual: Any, size: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the op adds a residual to an output of this size and type."""
    return is_ordinary(run, residual) and (residual.shape, residual.dtype, residual.device) == (size, dtype, device)


def _compute(
    run: Run,
    x: Tensor,
    factor: Tensor | None,
    layer: Any,
    bn: Any,
    added: tuple[Tensor | None, TensorCodes | None],
    bounds: Bounds,
    quantizer: Any,
) -> tuple[Tensor, TensorCodes | None]:
    bias = None if factor is None else layer.bias
    divisor = factor
    if bias is not None and factor is not None and bias.requires_grad:
        divisor = factor + 0 * bias  # the batch norm subtracts the bias, whose gradient is zero, not absent
    residual, residual_codes = added
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    coded = NO_CODES if residual is None else codes_added(run, residual, residual_codes, is_last)
    grid = {} if quantizer is None else grid_now(quantizer, x)
    # x is the output without its bias, scaled by the factor.
    undone = {"divisor": None if factor is None else factor.detach(), "offset": None if bias is None else bias.detach()}
    process_group = process_group_of(bn)
    totals = None if process_group is None else ops.batch_norm_totals(x, process_group, **undone)
    y, codes, mean, variance = ops.batch_norm_fake_quant(
        x,
        bn.weight,
        bn.bias,
        bn.eps,
        divisor=divisor,
        residual=residual,
        residual_codes=coded[0],
        residual_scale=coded[1],
        residual_zero_point=coded[2],
        totals=totals,
        process_group=process_group,
        packs_codes=True,
        **bounds._asdict(),
        **grid,
    )
    track(run, bn, mean, variance, x.numel() // x.size(1), **undone, totals=totals)
    if not grid:
        return y, None
    return y, codes_by_op(run, y, codes, grid["scale"], grid["zero_point"], quantizer)


def codes_added(run: Run, residual: Tensor, codes: TensorCodes | None, last: bool) -> tuple[Tensor | None, ...]:
    """Return the integers of a residual, one a byte, with scale and zero point; `codes` are the integers that it has.

    `last` is whether the integers of an image are wanted in channels_last.
    """
    wanted = codes is not None and not codes.packed and torch.is_grad_enabled()
    found = codes_of(run, residual, None, last, codes) if wanted else None
    return NO_CODES if found is None else (found.codes, found.scale, found.zero_point)


def _window(kernel_size: Any) -> int:
    height, width = kernel_size if isinstance(kernel_size, tuple | list) else (kernel_size, kernel_size)
    return int(height) * int(width)
