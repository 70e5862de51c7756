"""Batch norm with what follows it, and max pooling, against torch's ops one after the other."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import ROOF, Case, bytes_kept
from qtoolkit import ops

SHAPES = ((8, 64, 112, 112), (8, 64, 56, 56), (8, 96, 56, 56), (8, 512, 7, 7))
GRID = {"qmin": 0, "qmax": 255}
NORM_GOAL = (
    "2 forward, 3.5 backward where a tensor exceeds the caches (reads and writes of the sums and of the results)"
)


def _images(device: str, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    for shape in shapes:
        x = torch.randn(shape, device=device)
        name = "x".join(map(str, shape))
        yield f"{name}, NCHW", x
        yield f"{name}, channels_last", x.contiguous(memory_format=torch.channels_last)


def fused(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return ops.batch_norm_fake_quant(x, weight, bias, low=0.0, scale=scale, **GRID)[0]


def in_turn(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    y = functional.relu(functional.batch_norm(x, None, None, weight, bias, True), inplace=True)
    return ops.fake_quant(y, scale, **GRID)


def without_scale(x: Tensor, weight: Tensor, bias: Tensor, _scale: Tensor) -> Tensor:
    return functional.relu(functional.batch_norm(x, None, None, weight, bias, True), inplace=True)


def _backward(forward: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], object]:
    """The backward of a graph that is built by the first call and stays."""

    @cache
    def graph() -> tuple[Tensor, list[Tensor], Tensor]:
        leaves = _leaves(forward, *tensors)
        y = forward(*leaves, *tensors[len(leaves) :])
        return y, leaves, torch.randn_like(y)

    return lambda: torch.autograd.grad(*graph(), retain_graph=True)


def _leaves(forward: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    return leaves if forward is not without_scale else leaves[:3]


def _kept(forward: Callable[..., Tensor], *tensors: Tensor) -> int:
    leaves = _leaves(forward, *tensors)
    return bytes_kept(forward, *leaves, *tensors[len(leaves) :])


def batch_norm_cases(device: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Iterator[Case]:
    pieces = {
        "ours": fused,
        "torch batch_norm, relu; our fake_quant": in_turn,
        "torch batch_norm, relu": without_scale,
    }
    for name, x in _images(device, shapes):
        channels = x.size(1)
        t = (x, torch.ones(channels, device=device), torch.zeros(channels, device=device))
        t = (*t, torch.full((1,), 0.02, device=device))
        work = {ROOF: x.clone, **{piece: partial(f, *t) for piece, f in pieces.items()}}
        yield Case("batch norm + relu + learned fake-quant, forward", name, work, NORM_GOAL)
        work = {ROOF: x.clone, **{piece: _backward(f, *t) for piece, f in pieces.items()}}
        kept = {piece: partial(_kept, f, *t) for piece, f in pieces.items()}
        yield Case("batch norm + relu + learned fake-quant, backward", name, work, NORM_GOAL, kept=kept)


def max_pool_cases(device: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Iterator[Case]:
    pieces = {
        "ours": lambda x: ops.max_pool(x, 3, 2, 1),
        "torch": lambda x: functional.max_pool2d(x, 3, 2, 1),
    }
    for name, x in _images(device, shapes):
        work = {ROOF: x.clone, **{piece: partial(f, x) for piece, f in pieces.items()}}
        yield Case("max pool 3x3, stride 2, forward", name, work, "below torch's")
        work = {ROOF: x.clone, **{piece: _backward(f, x) for piece, f in pieces.items()}}
        kept = {piece: partial(_kept, f, x) for piece, f in pieces.items()}
        yield Case("max pool 3x3, stride 2, backward", name, work, "below torch's", kept=kept)
