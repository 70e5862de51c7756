"""Ways to fake-quantize to int8, beside each other: ours, torch's ops, the formula in eager mode and compiled."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_cases.subjects import QMAX, QMIN, Subject
from qtoolkit import ops

Forward = Callable[[Tensor], Tensor]
Learned = tuple[Forward, list[Tensor]]


@dataclass(frozen=True)
class Tool:
    """A way to fake-quantize; its builders return None for what it does not offer.

    `fixed` makes a forward with a straight-through gradient, `learned` one with a gradient in the scale as well, and the
    parameters that get it.
    """

    name: str
    fixed: Callable[[Subject], Forward | None]
    learned: Callable[[Subject], Learned | None]
    grouped: bool = False  # whether it takes groups of dimension 0


def _ours_fixed(t: Subject) -> Forward:
    return lambda x: ops.fake_quant(x, t.scale, axis=t.axis, group=t.group)


def _ours_learned(t: Subject) -> Learned:
    scale = t.scale.clone().requires_grad_()
    return lambda x: ops.fake_quant(x, scale, axis=t.axis, group=t.group), [scale]


def _torch_fixed(t: Subject) -> Forward:
    zeros = torch.zeros_like(t.scale, dtype=torch.int32)
    if t.axis is None:
        return lambda x: torch.fake_quantize_per_tensor_affine(x, t.scale[0], zeros[0], QMIN, QMAX)
    axis = t.axis
    return lambda x: torch.fake_quantize_per_channel_affine(x, t.scale, zeros, axis, QMIN, QMAX)


def _torch_learned(t: Subject) -> Learned | None:
    if t.x.dtype != torch.float32:
        return None
    scale, zeros = t.scale.clone().requires_grad_(), torch.zeros_like(t.scale)
    if t.axis is None:
        op = torch._fake_quantize_learnable_per_tensor_affine
        return lambda x: op(x, scale, zeros, QMIN, QMAX, 1.0), [scale]
    per_channel = torch._fake_quantize_learnable_per_channel_affine
    return lambda x: per_channel(x, scale, zeros, t.axis, QMIN, QMAX, 1.0), [scale]


def formula(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / scale), QMIN, QMAX) * scale


def formula_with_gradients(x: Tensor, scale: Tensor) -> Tensor:
    quotient = torch.clamp(x / scale, QMIN, QMAX)
    return (quotient + (torch.round(quotient) - quotient).detach()) * scale


def _formula_tool(name: str, prepare: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Tool:
    plain, with_gradients = prepare(formula), prepare(formula_with_gradients)

    def fixed(t: Subject) -> Forward:
        # The straight-through detour costs two more passes in eager mode: only where a gradient is asked for.
        return lambda x: t.whole((with_gradients if x.requires_grad else plain)(t.split(x), t.shaped))

    def learned(t: Subject) -> Learned:
        scale = t.shaped.clone().requires_grad_()
        return lambda x: t.whole(with_gradients(t.split(x), scale)), [scale]

    return Tool(name, fixed, learned, grouped=True)


def compiled(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(f, fullgraph=True, dynamic=False)


OURS = Tool("ours", _ours_fixed, _ours_learned, grouped=True)
TORCH = Tool("torch", _torch_fixed, _torch_learned)
EAGER = _formula_tool("eager formula", lambda f: f)
COMPILED = _formula_tool("compiled", compiled)


def check_agreement(tool: Tool) -> None:
    """Raise where a tool's result is more than a step away from ours: it would be timed at other work."""
    for axis in (None, 1):
        t = Subject(torch.randn(4, 8, 6, 6), axis)
        learned = tool.learned(t)
        for forward in (tool.fixed(t), learned[0] if learned else None):
            if forward is None:
                continue
            steps = float(((forward(t.x).detach() - ops.fake_quant(t.x, t.scale, axis=axis)) / t.shaped).abs().max())
            if not steps < 1.01:
                raise RuntimeError(
                    f"{tool.name} is {steps} steps away from qtoolkit on axis {axis}: look at how it is set up."
                )
