"""Integer codes and small float formats."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import ROOF, Case
from benchmarks.op_cases.subjects import QMAX, QMIN, Subject, image, weight
from benchmarks.tools import compiled
from qtoolkit import ops

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCKS = {
    "MXFP8 e4m3, blocks of 32": ("e4m3", 32, "e8m0"),
    "MXFP4, blocks of 32": ("e2m1", 32, "e8m0"),
    "NVFP4, blocks of 16": ("e2m1", 16, "e4m3"),
}


def _subjects(device: str) -> dict[str, Subject]:
    x = image(device)
    return {
        "12.8M NCHW, per tensor": Subject(x),
        "12.8M NCHW, axis 1": Subject(x, 1),
        "12.8M bfloat16, per tensor": Subject(x.bfloat16()),
        "weight 2.4M, axis 0": Subject(weight(device), 0),
    }


def codes(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / scale), QMIN, QMAX).to(torch.int8)


def values(q: Tensor, scale: Tensor) -> Tensor:
    return q.to(scale.dtype) * scale


def _torch_quantized(t: Subject) -> Callable[[], Tensor]:
    zeros = torch.zeros(t.scale.numel(), dtype=torch.int64, device=t.x.device)
    if t.axis is None:
        return partial(torch.quantize_per_tensor, t.x, t.scale[0], zeros[0], torch.qint8)
    return partial(torch.quantize_per_channel, t.x, t.scale, zeros, t.axis, torch.qint8)


def quantize_cases(device: str, with_compiled: bool) -> Iterator[Case]:
    for name, t in _subjects(device).items():
        scale = t.shaped.to(t.x.dtype)
        work = {ROOF: t.x.clone, "ours": partial(ops.quantize, t.x, t.scale, axis=t.axis)}
        if t.x.dtype == torch.float32:
            work["torch"] = _torch_quantized(t)
        work["eager formula"] = partial(codes, t.x, scale)
        if with_compiled:
            work["compiled"] = partial(compiled(codes), t.x, scale)
        yield Case("quantize to int8", name, work, "none set; 5 of a float32 copy's 8 bytes are moved")


def dequantize_cases(device: str, with_compiled: bool) -> Iterator[Case]:
    for name, t in _subjects(device).items():
        q, scale = ops.quantize(t.x, t.scale, axis=t.axis), t.shaped.to(t.x.dtype)
        work = {ROOF: t.x.clone, "ours": partial(ops.dequantize, q, t.scale, axis=t.axis, dtype=t.x.dtype)}
        if t.x.dtype == torch.float32:
            work["torch"] = _torch_quantized(t)().dequantize
        work["eager formula"] = partial(values, q, scale)
        if with_compiled:
            work["compiled"] = partial(compiled(values), q, scale)
        yield Case("dequantize from int8", name, work, "none set; 5 of a float32 copy's 8 bytes are moved")


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return torch.clamp(x / scale, -largest, largest).to(dtype).to(x.dtype) * scale


def float_cases(device: str, with_compiled: bool) -> Iterator[Case]:
    for name, t in _subjects(device).items():
        scale = t.shaped.to(t.x.dtype)
        for format in ("e4m3", "e5m2", "e2m1"):
            work = {ROOF: t.x.clone, "ours": partial(ops.fake_quant_float, t.x, t.scale, format, axis=t.axis)}
            if format in FLOAT8:
                arguments = (t.x, scale, FLOAT8[format])
                work["torch's cast"] = partial(cast, *arguments)
                if with_compiled:
                    work["compiled"] = partial(compiled(cast), *arguments)
            yield Case("small float formats, forward", f"{format}, {name}", work, "none set")


def block_cases(device: str) -> Iterator[Case]:
    w = weight(device)
    for name, x in (("weight 2.4M", w.flatten(1)), ("weight 2.4M bfloat16", w.flatten(1).bfloat16())):
        for blocks, arguments in BLOCKS.items():
            work = {ROOF: x.clone, "ours": partial(ops.fake_quant_block, x, *arguments)}
            yield Case("block scales, forward", f"{blocks}, {name}", work, "none set")
