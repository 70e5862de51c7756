"""Run backward of layers of many geometries, each in a process of its own: python -m tests.nn.fenced, with cases as JSON."""

import json
import os
import sys
from collections.abc import Callable

import torch

import qtoolkit as qt

WEIGHT = qt.QuantSpec(axis=0, narrow=True)
LAYOUTS = {"channels_last": torch.channels_last, "rows": torch.contiguous_format}


def backward(
    transposed: bool,
    kernel: int,
    stride: int,
    channels: list[int],
    side: int,
    groups: int,
    layout: str,
    forward: str,
    save: str,
) -> None:
    """One step of a layer on 2 images in a layout; the output of a transposed one ends with rows that it does not reach."""
    extra = {"output_padding": stride - 1} if transposed else {}
    cls = qt.nn.QuantConvTranspose2d if transposed else qt.nn.QuantConv2d
    layer = cls(
        *channels, kernel, stride, groups=groups, input_spec=qt.QuantSpec(), weight_spec=qt.QuantSpec(), **extra
    )
    layer.input_quantizer.amax = 4.0
    qt.nn.set_training_arithmetic(layer, forward, save)
    x = torch.randn(2, channels[0], side, side).contiguous(memory_format=LAYOUTS[layout]).requires_grad_()
    y = layer(x)
    y.backward(torch.randn_like(y))
    assert all(torch.isfinite(gradient).all() for gradient in (x.grad, layer.weight.grad, layer.bias.grad))


def write_behind_a_block(bytes_behind: int) -> None:
    """Write behind a tensor of 64 KiB."""
    import ctypes

    block = torch.empty(65536, dtype=torch.uint8)
    ctypes.memset(block.data_ptr() + block.numel(), 0, bytes_behind)


RUNS: dict[str, Callable[..., None]] = {"backward": backward, "write_behind_a_block": write_behind_a_block}


def status_of(run: str, case: dict) -> int:
    """The exit status of a process that runs a case; a signal is not 0."""
    process = os.fork()
    if process == 0:
        torch.manual_seed(0)
        RUNS[run](**case)
        os._exit(0)
    return os.waitpid(process, 0)[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(sys.stdin.read())
    print(json.dumps({run: [case for case in cases if status_of(run, case) != 0] for run, cases in given.items()}))
