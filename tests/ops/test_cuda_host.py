"""CUDA kernels executed on the CPU (see cuda_host/device.h), in three orders of their threads, against the CPU's kernels."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests.cases import assert_same, floats, name_of, scales, zero_points

HOST = Path(__file__).parent / "cuda_host"
CSRC = Path(__file__).parents[2] / "csrc"
HEADERS = ("cuda_runtime.h", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h")
LAUNCH = re.compile(r"([\w<>]+?)<<<(.+?), (\w+), 0, stream>>>\((.*?)\);")
ORDERS = {"forwards": 0, "backwards": 1, "shuffled": 2}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of Dtype in kernel_args.h
SHAPES = {  # shape, axis
    "one": ((1,), None),
    "per_tensor": ((20011,), None),
    "one_row": ((1, 64), 1),
    "rows": ((37, 100), 1),
    "a_thread_a_channel": ((3, 300), 1),
    "columns": ((5, 1000), 0),
    "planes": ((4, 6, 49), 1),
    "whole_vectors": ((4, 6, 64), 1),
    "slices": ((200, 3, 25), 1),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels, compiled by the host's compiler with each launch as a call of device::launch."""
    folder = tmp_path_factory.mktemp("cuda_host")
    shutil.copytree(CSRC, folder / "csrc")
    for name in HEADERS:
        (folder / name).write_text(f'#include "{HOST / "device.h"}"\n')
    for source in (folder / "csrc/cuda" / name for name in ("fake_quant.cu", "observe.cu", "loops.cuh")):
        text, launches = LAUNCH.subn(r"device::launch(\2, \3, [&] { \1(\4); });", source.read_text())
        assert launches > 0
        assert "<<<" not in text
        source.write_text(text)
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{folder}", f"-I{folder / 'csrc'}"]
    command = [os.environ.get("CXX", "c++"), *flags, str(HOST / "kernels.cpp"), "-o", str(folder / "kernels.so")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(folder / "kernels.so"))


def run(kernel: Callable, x: Tensor, axis: int | None, order: str, *others: Tensor) -> None:
    size, inner = (1, 1) if axis is None else (x.size(axis), x.stride(axis))
    channels = (ctypes.c_int64 * 4)(size, inner, x.numel(), size)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, *others)]
    kernel(pointers[0], DTYPES.index(x.dtype), ctypes.c_int64(x.numel()), channels, ORDERS[order], *pointers[1:])


VALUES = {
    "floats": lambda x: x,
    "negative_zeros": lambda x: torch.zeros_like(x).neg(),
    "both_zeros": lambda x: torch.zeros_like(x).copysign(x),
    "a_nan": lambda x: x.reshape(-1).index_fill(0, torch.tensor([x.numel() // 2]), torch.nan).view_as(x),
    "infinities": lambda x: torch.full_like(x, torch.inf).copysign(x),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES)
def test_minmax(kernels, shape, dtype, values):
    sizes, axis = SHAPES[shape]
    x = VALUES[values](floats(dtype)(*sizes)).contiguous()
    wanted = ops.minmax(x, axis)
    for order in ORDERS:
        ranges = torch.full((2, wanted[0].numel()), torch.nan, dtype=torch.float64)
        run(kernels.minmax_on_host, x, axis, order, torch.empty(1 << 18, dtype=torch.float64), ranges)
        assert_same(ranges.to(dtype), torch.stack([t.view(-1) for t in wanted]))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES)
def test_fake_quant(kernels, shape, dtype, values):
    sizes, axis = SHAPES[shape]
    x = VALUES[values](floats(dtype)(*sizes)).contiguous()
    count = 1 if axis is None else x.size(axis)
    grid = [t(count).to(torch.float64 if dtype == torch.float64 else torch.float32) for t in (scales, zero_points)]
    wanted = torch.ops.qtoolkit.fake_quant(x, *grid, -128, 127, axis, mask=True)
    for order in ORDERS:
        got = [torch.full_like(t, 7) for t in wanted]
        run(kernels.fake_quant_on_host, x, axis, order, *grid, *got)
        for g, w in zip(got, wanted, strict=True):
            assert_same(g, w)
