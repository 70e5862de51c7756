"""The quantizer after an op, as the op computes it: whether it may, and with which scale and grid."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from qtoolkit._native import library
from qtoolkit.nn.fusion import Unit, fusion
from qtoolkit.nn.hooks import all_watched, is_ordinary, is_watched
from qtoolkit.nn.on_codes import TrainingArithmetic
from qtoolkit.quantizers.codes import TensorCodes, codes_by, codes_on, rounded, version_of
from qtoolkit.quantizers.in_ops import raw_input
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.spec_ops import with_factor
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.running import Run

_function_fake_quant = library.function_fake_quant.default

Quantized = tuple[Tensor, TensorCodes | None]
"""The output of a quantizer, and its integers, if it has some."""

Function = tuple[str, tuple[int, ...], Tensor | None, Tensor | None, float]
"""The op's name of a function, and the arguments of a layer norm; the weight may be a PReLU's."""

NO_FUNCTION: Function = ("none", (), None, None, 0.0)
"""The arguments of that op for a quantizer without a function before it."""


class OutputGrid(NamedTuple):
    """The arguments of an op for the scale and the grid of an output; without a start it is not quantized."""

    start: Tensor | None = None
    ratio: Tensor | None = None
    rate: Tensor | None = None
    zero_point: Tensor | None = None
    qmin: int = -128
    qmax: int = 127
    grad_factor: float = 1.0
    float16: bool = False  # whether the op rounds the scale to a number of float16

    @property
    def is_learned(self) -> bool:
        """Whether the grid has a gradient."""
        return any(t is not None and t.requires_grad for t in (self.start, self.ratio, self.zero_point))


GridNow = OutputGrid | Callable[[], OutputGrid]
"""The same, or a function that returns them at each call."""


def grid_now(quantizer: TensorQuantizer, x: Tensor) -> dict[str, Any]:
    """Return the arguments of an op for a quantizer of a tensor of x's shape, that `fusion` puts into the op."""
    kind, spec = quantizer.kind, quantizer.spec
    scale, zero_point, grad_factor = with_factor(*quantizer.grid(), kind.grad_factor(quantizer, x))
    codes = {"qmin": spec.qmin, "qmax": spec.qmax, "grad_factor": grad_factor}
    return {"scale": scale, "zero_point": zero_point, **codes}


def output_grid(run: Run, quantizer: TensorQuantizer | None, like: Tensor) -> GridNow:
    """Return the scale and the grid of an output like a tensor: a function where its quantizer makes them at each call."""
    if quantizer is None:
        return OutputGrid()
    start = None if run.compiled else quantizer.kind.start(quantizer)  # see `with_factor`
    if start is None:
        return grid_at_each_call(quantizer, like)
    spec, factor = quantizer.spec, quantizer.kind.grad_factor(quantizer, like)
    return OutputGrid(*start, quantizer._zero_point, spec.qmin, spec.qmax, factor, quantizer.float16)


def grid_at_each_call(quantizer: TensorQuantizer, like: Tensor) -> Callable[[], OutputGrid]:
    """Return the function that makes the scale and the grid of an output like a tensor."""

    def grid() -> OutputGrid:
        found = grid_now(quantizer, like)
        return OutputGrid(found.pop("scale"), **found)

    return grid


def grid_of(output: GridNow) -> OutputGrid:
    """Return the scale and the grid of an output in this call."""
    return output if isinstance(output, OutputGrid) else output()


def gives_codes(quantizer: Any) -> bool:
    """Return whether an op gives the integers of a quantizer's output, a byte or half a byte each."""
    return quantizer is not None and quantizer.capability.codes


def codes_by_op(
    run: Run, y: Tensor, codes: Tensor | None, scale: Tensor, zero_point: Tensor | None, quantizer: Quantizer | None
) -> TensorCodes | None:
    """Return the integers of an output on a grid of which an op was told; None without a quantizer that has some."""
    if quantizer is None or not gives_codes(quantizer):
        return None
    return codes_on(run, scale.detach().abs(), rounded(zero_point), quantizer, y, codes)


def quantized_by(run: Run, quantizer: nn.Module | None, x: Tensor, with_codes: bool = False) -> Quantized:
    """Return the output of a quantizer that is called, and its integers, if it has some; x itself without one.

    Where its integers are wanted, a compiled forward has both from one op if that computes the quantizer, with one read.
    """
    if quantizer is None:
        return x, None
    if with_codes and run.compiled and (found := quantized_in_op(run, quantizer, x)) is not None:
        return found
    y = quantizer(x)
    in_training = torch.is_grad_enabled() and not run.recorded
    if not (isinstance(quantizer, Quantizer) and in_training) or all_watched() or is_watched(quantizer):
        return y, None
    output_codes = codes_by(run, quantizer, y)
    if output_codes is not None and isinstance(quantizer, TensorQuantizer):
        output_codes.raw, output_codes.raw_version = raw_input(quantizer, x), version_of(run, x)
    return y, output_codes


def quantized_for(run: Run, arithmetic: TrainingArithmetic, quantizer: Quantizer | None, x: Tensor) -> Quantized:
    """Return x quantized, or x itself without a quantizer, for a module that trains so, and its integers, if it has some.

    If the module keeps integers, one op gives both where it can.
    """
    if quantizer is None or arithmetic.save == "float" or not gives_codes(quantizer):
        return quantized_by(run, quantizer, x)
    return quantized_in_op(run, quantizer, x) or quantized_by(run, quantizer, x)


def quantized_in_op(
    run: Run, quantizer: nn.Module, x: Tensor, function: Function = NO_FUNCTION, with_codes: bool = True
) -> Quantized | None:
    """Return a function of x quantized by one op, and its integers if it has some; None where only a call may."""
    trains = is_ordinary(run, x) and torch.is_grad_enabled() and x.requires_grad and x.is_floating_point()
    if not trains or not may_be_in_op(quantizer, run):
        return None
    grid = grid_of(output_grid(run, quantizer, x.detach()))
    learned = grid.is_learned
    keeps_x = learned or function[0] != NO_FUNCTION[0]  # compiled code may have a copy of the tuple
    coded = with_codes and gives_codes(quantizer)
    y, codes, scale, *_ = _function_fake_quant(x, *function, keeps_x, *grid, learned, coded)
    return y, codes_by_op(run, y, codes, scale, grid.zero_point, quantizer)


def may_be_in_op(quantizer: nn.Module, run: Run) -> TypeGuard[TensorQuantizer]:
    """Return whether an op may compute a quantizer as it is now."""
    return not run.recorded and isinstance(fusion(run, quantizer=quantizer), Unit)
