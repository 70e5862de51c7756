"""Quantizers in compiled code: our ops beside the formula that Inductor fuses with what stands before. Multiples of a copy.

python -m benchmarks.pages.decomposed --rounds 15

Each row is forward and backward of a function and a quantizer of its result, with int8 codes; the columns are
- two ops: the function by Inductor, `fake_quant`, then `quantize` for the codes;
- one op: the function by Inductor, and one op for values and codes;
- with function: one op that computes the function too;
- formula: division, rounding and clamping as aten ops, and their gradients, all left to Inductor.
Values, codes and gradients of x have the same bits in all columns but "with function", whose function is torch's. In brackets:
bytes that are kept for backward, for each element. Processor time.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import Pace, bytes_kept, keep_memory, sample, take_turns
from benchmarks.report import show
from qtoolkit import ops
from qtoolkit._native import library

SHAPE = (6304, 1024)
LOW, HIGH = -128, 127
LAYER_NORM = ((SHAPE[-1],), torch.ones(SHAPE[-1]), torch.zeros(SHAPE[-1]), 1e-5)
NOTHING = ((), None, None, 0.0)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "layer_norm": lambda x: F.layer_norm(x, *LAYER_NORM),
}

Result = tuple[Tensor, Tensor]


class Formula(torch.autograd.Function):
    """The quantizer as aten ops. The mask of a fixed scale is kept as it is decided: a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Result:
        """Return values and codes."""
        level = torch.round(x / scale) + 0.0
        code = level.clamp(LOW, HIGH)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else level == code, scale)
        return code * scale, torch.where(code == code, code, LOW).to(torch.int8)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the straight-through gradient, and LSQ's of the scale."""
        kept, scale = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return torch.where(kept, grad, 0.0), None
        quotient = kept / scale
        level = torch.round(quotient) + 0.0
        code = level.clamp(LOW, HIGH)
        inside = level == code
        return torch.where(inside, grad, 0.0), (grad * torch.where(inside, code - quotient, code)).sum()


def two_ops(x: Tensor, scale: Tensor) -> Result:
    """Return values and codes by two ops."""
    y = ops.fake_quant(x, scale, None, LOW, HIGH)
    return y, ops.quantize(y.detach(), scale.detach(), None, LOW, HIGH, dtype=torch.int8)


def one_op(name: str, x: Tensor, scale: Tensor) -> Result:
    """Return values and codes by the op of a function and a quantizer."""
    learned, more = scale.requires_grad, LAYER_NORM if name == "layer_norm" else NOTHING
    grid = (scale, None, None, None, LOW, HIGH, 1.0, False)
    y, codes, *_ = library.function_fake_quant.default(x, name, *more, learned or name != "none", *grid, learned, True)
    return y, codes


def ways(name: str, scale: Tensor) -> dict[str, Callable[[Tensor], Result]]:
    """Return the compiled columns of a function."""
    f = FUNCTIONS[name]
    found: dict[str, Callable[[Tensor], Result]] = {
        "two ops": lambda x: two_ops(f(x), scale),
        "one op": lambda x: one_op("none", f(x), scale),
        "with function": lambda x: one_op(name, x, scale),
        "formula": lambda x: Formula.apply(f(x), scale),
    }
    return {way: torch.compile(run, fullgraph=True, dynamic=False) for way, run in found.items()}


def step(run: Callable[[Tensor], Result], x: Tensor, grad: Tensor) -> float:
    """Return the processor time of forward and backward."""
    x = x.detach().requires_grad_()
    return sample(lambda: run(x)[0].backward(grad), clock=time.process_time)


def values_of(run: Callable[[Tensor], Result], x: Tensor) -> Tensor:
    """Return the values of a column, for a tensor that requires a gradient."""
    return run(x.detach().requires_grad_())[0]


def row(name: str, learned: bool, rounds: int) -> list[str]:
    """Return the cells of a function with a fixed or a learned scale."""
    torch._dynamo.reset()
    x, grad, scale = torch.randn(SHAPE), torch.randn(SHAPE), torch.tensor(0.02, requires_grad=learned)
    runs, copied = ways(name, scale), torch.empty_like(x)
    samples = {way: partial(step, run, x, grad) for way, run in runs.items()}
    samples["copy"] = partial(sample, partial(copied.copy_, x), clock=time.process_time)
    times = {way: taken[2:] for way, taken in take_turns(samples, Pace(rounds + 2, math.inf)).items()}
    roof = statistics.median(times["copy"])
    cells = [name, "learned" if learned else "fixed"]
    for way, run in runs.items():
        kept = bytes_kept(values_of, run, x) / x.numel()
        cells.append(f"{statistics.median(times[way]) / roof:.2f} ({kept:.1f})")
    return cells


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    keep_memory()
    torch.set_num_threads(args.threads)
    rows = [row(name, learned, args.rounds) for name in FUNCTIONS for learned in (False, True)]
    names = ["function", "scale", "two ops", "one op", "with function", "formula"]
    show(Console(width=120), f"float32 {SHAPE}, threads: {args.threads}", names, rows)


if __name__ == "__main__":
    main()
