"""Where CUDA's kernels are compared with the CPU's: on a GPU where there is one, and everywhere on the host (cuda_host)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import assert_laid_out_as, assert_same
from tests.ops.cuda_host import ORDERS, on_host

Results = Callable[..., Tensor | tuple[Tensor, ...] | list[Tensor]]


def copied(t: Any, device: str) -> Any:
    """A tensor in memory of its own, in the same order and as far from an aligned address; the others as they are."""
    if not isinstance(t, Tensor):
        return t
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.to(device, copy=True).as_strided(t.shape, t.stride(), t.storage_offset())


def listed(found: Tensor | tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


@dataclass(frozen=True)
class Gpu:
    """A GPU, the current one."""

    name: str = "gpu"

    def results(self, f: Results, *given: Any) -> list[Tensor]:
        """What f returns for copies of its arguments, on the CPU."""
        found = listed(f(*(copied(t, "cuda") for t in given)))
        assert all(t.is_cuda or t.numel() == 0 for t in found)
        return [t.cpu() for t in found]


@dataclass(frozen=True)
class Host:
    """The host, which gives the same bits in each order of threads."""

    name: str = "host"

    def results(self, f: Results, *given: Any) -> list[Tensor]:
        """What f returns for copies of its arguments."""
        runs = []
        for order in ORDERS:
            with on_host(order):
                runs.append(listed(f(*(copied(t, "cpu") for t in given))))
        for run in runs[1:]:
            for got, first in zip(run, runs[0], strict=True):
                assert_same(got, first)
        return runs[0]


Device = Gpu | Host
DEVICES = [
    pytest.param(Host(), marks=pytest.mark.slow),  # its first test compiles the kernels
    *([pytest.param(Gpu(), marks=pytest.mark.cuda)] if torch.cuda.is_available() else []),
]
devices = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)


def check(device: Device, f: Results, *given: Any) -> None:
    """The bits of the CPU, in its memory order."""
    for got, want in zip(device.results(f, *given), listed(f(*given)), strict=True):
        assert_same(got, want)
        assert_laid_out_as(got, want)
