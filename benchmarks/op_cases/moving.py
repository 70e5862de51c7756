"""Observing and quantizing in one op, and quantizing in place."""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.measure import ROOF, Case
from benchmarks.op_cases.subjects import Subject
from qtoolkit import ops


def moving_range_cases(named: dict[str, Subject]) -> Iterator[Case]:
    for name, t in named.items():
        if t.axis is not None or t.x.dtype != torch.float32:
            continue
        device = t.x.device
        lo, hi, scale = (torch.full((1,), v, device=device) for v in (torch.inf, -torch.inf, 1.0))
        on = torch.ones(1, dtype=torch.int64, device=device)
        theirs = [torch.full((), v, device=device) for v in (torch.inf, -torch.inf)]
        theirs += [torch.ones(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)]

        def in_turn(x: Tensor = t.x, lo: Tensor = lo, hi: Tensor = hi) -> Tensor:
            ops.observe_minmax_(x, lo, hi, 0.1)
            return ops.fake_quant(x, ops.grid_of_range(lo, hi)[0])

        work = {
            ROOF: t.x.clone,
            "ours": lambda x=t.x, state=(lo, hi, scale): ops.observe_fake_quant(x, *state, momentum=0.1),
            "ours, in turn": in_turn,
            "torch, fused": lambda x=t.x, on=on, state=theirs: torch.fused_moving_avg_obs_fake_quant(
                x, on, on, *state, 0.1, -128, 127, -1
            ),
        }
        yield Case("fused observe + fake-quant", name, work, "1.3")


def in_place_cases(named: dict[str, Subject]) -> Iterator[Case]:
    for name, t in named.items():
        mine = t.x.clone()
        work = {
            ROOF: t.x.clone,
            "fake_quant": lambda t=t: ops.fake_quant(t.x, t.scale, axis=t.axis, group=t.group),
            "fake_quant_": lambda t=t, mine=mine: ops.fake_quant_(mine, t.scale, axis=t.axis, group=t.group),
        }
        yield Case("in place", name, work, "below fake_quant")
