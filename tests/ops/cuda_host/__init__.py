"""CUDA kernels on the CPU: their sources, compiled by the host's compiler, with each launch as a call of device::launch."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from qtoolkit._native import FILE

HOST = Path(__file__).parent
CSRC = HOST.parents[2] / "csrc"
BUILT = HOST.parents[2] / "build" / "cuda_host"
SOURCES = (".cpp", ".cu", ".cuh", ".h", ".py")
COMPILER = os.environ.get("CXX", "c++")
HEADERS = {
    **dict.fromkeys(("cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_pipeline_primitives.h"), "device.h"),
    **dict.fromkeys(
        ("cuda_runtime_api.h", *(f"c10/cuda/CUDA{part}.h" for part in ("Exception", "Guard", "Stream"))), "runtime.h"
    ),
}
LAUNCH = re.compile(r"([\w<>]+?)<<<(.+?), (\w+), (\w+), stream>>>\((.*?)\);", re.DOTALL)
ASM = re.compile(r"asm(?: volatile)?\((.*?)\);", re.DOTALL)
SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
ORDERS = {"forwards": 0, "backwards": 1, "shuffled": 2}
DTYPES = [  # in the order of Dtype in kernel_args.h
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32),
]


class TrackedStatistics(ctypes.Structure):
    """`TrackedStatistics` of batch_norm_args.h."""

    _fields_ = (
        *(("channels", ctypes.c_int64), ("dtype", ctypes.c_int8), ("f64", ctypes.c_bool)),
        *((name, ctypes.c_void_p) for name in ("running_mean", "running_variance", "mean", "variance")),
        *(("divisor", ctypes.c_void_p), ("offset", ctypes.c_void_p)),
        *(("momentum", ctypes.c_double), ("count", ctypes.c_double)),
        *(("counted", ctypes.c_void_p), ("batches", ctypes.c_void_p)),
    )


class BatchNormArguments(ctypes.Structure):
    """`BatchNormArgs` of batch_norm_args.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("outer", "channels", "inner")),
        ("dtype", ctypes.c_int8),
        *((name, ctypes.c_void_p) for name in ("x", "grad", "residual", "residual_codes")),
        ("residual_signed", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("residual_scale", "residual_zero_point", "y", "residual_grad", "codes")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "divisor", "mean", "variance")),
        *((name, ctypes.c_double) for name in ("eps", "low", "high", "slope")),
        *(("scale", ctypes.c_void_p), ("zero_point", ctypes.c_void_p), ("bounds", ctypes.c_double * 2)),
        *(("gradients", ctypes.c_void_p), ("learned", ctypes.c_bool), ("stream", ctypes.c_bool)),
        ("packed", ctypes.c_bool),
        *(("pass_low", ctypes.c_double), ("pass_high", ctypes.c_double)),
        *(("stage", ctypes.c_int), ("totals", ctypes.c_void_p), ("own", ctypes.c_void_p)),
        *(("tracked", TrackedStatistics), ("arrived", ctypes.c_void_p)),
    )


class PoolArguments(ctypes.Structure):
    """`PoolArgs` of max_pool.h; a dimension is size, results, kernel, stride, padding and dilation."""

    _fields_ = (
        *(("images", ctypes.c_int64), ("channels", ctypes.c_int64)),
        *(("rows", ctypes.c_int64 * 6), ("columns", ctypes.c_int64 * 6)),
        *(("channels_last", ctypes.c_bool), ("dtype", ctypes.c_int8)),
        *((name, ctypes.c_void_p) for name in ("x", "y", "offsets")),
    )


class TrainedScale(ctypes.Structure):
    """`TrainedScale` of unit_scales.h."""

    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("start", "ratio", "scale")),
        ("float16", ctypes.c_bool),
    )


class FollowedScale(ctypes.Structure):
    """`FollowedScale` of unit_scales.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "high", "start", "lo", "hi")),
        *(("qmin", ctypes.c_double), ("qmax", ctypes.c_double)),
        *(("symmetric", ctypes.c_bool), ("pow2_scale", ctypes.c_bool)),
    )


class UnitBias(ctypes.Structure):
    """`UnitBias` of unit_scales.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias", "mean", "beta", "x_scale", "result")),
        ("dtype", ctypes.c_int8),
    )


class UnitScales(ctypes.Structure):
    """`UnitScales` of unit_scales.h."""

    _fields_ = (
        *((name, ctypes.c_bool) for name in ("f64", "frozen")),
        *(("channels", ctypes.c_int64), ("eps", ctypes.c_double)),
        *((name, ctypes.c_void_p) for name in ("variance", "gamma", "factor", "arrived")),
        *(("weight", TrainedScale), ("output", TrainedScale), ("followed", FollowedScale), ("bias", UnitBias)),
    )


class FactorChange(ctypes.Structure):
    """`FactorChange` of unit_scales.h."""

    _fields_ = (
        ("f64", ctypes.c_bool),
        *(("scales", ctypes.c_int64), ("channels", ctypes.c_int64), ("eps", ctypes.c_double)),
        *((name, ctypes.c_void_p) for name in ("variance", "gamma", "present", "start", "rate", "known")),
    )


class HeldVariance(ctypes.Structure):
    """`HeldVariance` of unit_scales.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("channels", "size")),
        *((name, ctypes.c_void_p) for name in ("variance", "held", "copy", "taken", "clock")),
    )


class RatioGradient(ctypes.Structure):
    """`RatioGradient` of unit_scales.h."""

    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("grad", "start", "ratio", "rate", "result")),
    )


class UnitGradients(ctypes.Structure):
    """`UnitGradients` of unit_scales.h."""

    _fields_ = (
        *((name, ctypes.c_bool) for name in ("f64", "frozen")),
        *(("channels", ctypes.c_int64), ("eps", ctypes.c_double)),
        *((name, ctypes.c_void_p) for name in ("variance", "gamma", "bias", "mean")),
        *((name, ctypes.c_void_p) for name in ("of_gamma", "of_divisor", "of_factor", "of_bias")),
        *((name, ctypes.c_void_p) for name in ("result", "bias_result")),
        *(("weight", RatioGradient), ("output", RatioGradient)),
    )


class WeightRows(ctypes.Structure):
    """`WeightRows` of weight_rows.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "major", "minor")),
        ("f64", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("weight", "factor", "scale")),
        ("scale_step", ctypes.c_int64),
        *(("bounds", ctypes.c_double * 2), ("other_format", ctypes.c_bool)),
        *(("y", ctypes.c_void_p), ("y_dtype", ctypes.c_int8), ("codes", ctypes.c_void_p), ("poison", ctypes.c_void_p)),
        *(("grad", ctypes.c_void_p), ("grad_dtype", ctypes.c_int8)),
        *((name, ctypes.c_void_p) for name in ("dweight", "sum_scale", "sum_factor")),
    )


class ScoreRows(ctypes.Structure):
    """`ScoreRows` of attention_weights.h."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("dtype", ctypes.c_int8))


class AttentionWeights(ctypes.Structure):
    """`AttentionWeights` of attention_weights.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length")),
        *((name, ScoreRows) for name in ("scores", "weights", "grad")),
        *(("scale", ctypes.c_void_p), ("zero_point", ctypes.c_void_p), ("bounds", ctypes.c_double * 2)),
        ("sums", ctypes.c_void_p),
    )


def filled(structure: type[ctypes.Structure], **fields: Any) -> ctypes.Structure:
    """A structure with tensors as their pointers, tuples as arrays, and absent fields zero."""
    args, types = structure(), dict(structure._fields_)
    for name, value in fields.items():
        if isinstance(value, Tensor):
            setattr(args, name, value.data_ptr())
        elif value is not None:
            setattr(args, name, types[name](*value) if isinstance(value, tuple) else value)
    return args


@cache
def compiled() -> ctypes.CDLL:
    """Return the kernels, compiled where no library of the same sources and compiler is there yet."""
    library = BUILT / f"{_digest()}.so"
    if not library.exists():
        with TemporaryDirectory() as folder:
            _compile(Path(folder))
            BUILT.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder, "kernels.so"), own := library.with_suffix(f".{os.getpid()}"))
        own.replace(library)  # another process may load it
    kernels = ctypes.CDLL(str(library))
    assert kernels.size_of_batch_norm_arguments() == ctypes.sizeof(BatchNormArguments)
    assert kernels.size_of_pool_arguments() == ctypes.sizeof(PoolArguments)
    assert kernels.size_of_tracked_statistics() == ctypes.sizeof(TrackedStatistics)
    assert kernels.size_of_weight_rows() == ctypes.sizeof(WeightRows)
    assert kernels.size_of_unit_scales() == ctypes.sizeof(UnitScales)
    assert kernels.size_of_unit_gradients() == ctypes.sizeof(UnitGradients)
    assert kernels.size_of_factor_change() == ctypes.sizeof(FactorChange)
    assert kernels.size_of_held_variance() == ctypes.sizeof(HeldVariance)
    assert kernels.size_of_attention_weights() == ctypes.sizeof(AttentionWeights)
    return kernels


def _digest() -> str:
    """A name for all that a library is made of: sources, torch, what compiles them, and the library that it is linked with."""
    found = hashlib.sha256(subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout)
    found.update(f"{torch.__version__} {FILE}".encode())
    for path in sorted(path for folder in (CSRC, HOST) for path in folder.rglob("*") if path.suffix in SOURCES):
        found.update(str(path.relative_to(HOST.parents[2])).encode() + path.read_bytes())
    return found.hexdigest()[:32]


def _compile(folder: Path) -> None:
    shutil.copytree(CSRC, folder / "csrc")
    for name, header in HEADERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'#include "{HOST / header}"\n')
    for source in [*(folder / "csrc/cuda").glob("*.cu"), *(folder / "csrc").rglob("*.*h")]:
        text = LAUNCH.sub(r"device::launch(\2, \3, \4, stream, [&] { \1(\5); });", source.read_text())
        text = SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(device::shared.data());", text)
        text = ASM.sub(_instructions, text)
        assert not re.search(r"<<<|extern __shared__|\basm\b", text), source
        source.write_text(text)
    flags = [
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        "-fPIC",
        "-U_FORTIFY_SOURCE",
        f"-I{folder}",
        f"-I{folder / 'csrc'}",
    ]
    # Vectors that are not aligned are faults: device.h says what is called then, so no sanitizer is linked.
    torchs = Path(torch.__file__).parent
    parts = {"kernels": ["-fsanitize=alignment"], "table": [f"-isystem{torchs / 'include'}"]}
    commands = [
        [COMPILER, *flags, *extra, "-c", str(HOST / f"{name}.cpp"), "-o", str(folder / f"{name}.o")]
        for name, extra in parts.items()
    ]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in started:
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
    objects = [str(folder / f"{name}.o") for name in parts]
    libraries = [str(FILE), f"-L{torchs / 'lib'}", "-lc10", "-ltorch_cpu"]
    # A library with CUDA has functions of the same names.
    command = [COMPILER, "-shared", "-Wl,-Bsymbolic", *objects, *libraries, "-o", str(folder / "kernels.so")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def _instructions(asm: re.Match[str]) -> str:
    """Calls of the functions in device.h that stand for instructions of PTX."""
    operands = re.findall(r'"[=+]?[a-z]"\((.*?)\)', asm[1])
    text = "".join(re.findall(r'"(.*?)"', asm[1].partition(":")[0]))
    code = re.sub(r"\\n\\t|[][{}]", "", text)
    calls = re.sub(r"(\S+) (.*?);", lambda call: f"device::{call[1].replace('.', '_')}({call[2]});", code)
    return re.sub(r"%(\d+)", lambda number: operands[int(number[1])], calls)


@contextmanager
def guarded(begins: bool = False) -> Iterator[None]:
    """Tensors have memory that ends at a page which no kernel may touch, or begins behind one."""
    kernels = compiled()
    kernels.guard_memory(True, begins)
    try:
        yield
    finally:
        kernels.guard_memory(False, False)


@contextmanager
def on_host(order: str, only_ends: bool = False) -> Iterator[None]:
    """Ops of CPU tensors run as those of CUDA tensors: csrc/cuda/launch.cpp with these kernels.

    Memory that an op allocates holds NaN or the largest integer, but with `only_ends`: then of each kernel the first and the
    last block run alone. It is guarded, and begins behind a guard where threads run backwards.
    """
    kernels, deterministic = compiled(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not only_ends)
    kernels.take_ops(ORDERS[order], only_ends)
    try:
        with guarded(begins=order == "backwards"):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        unchecked = kernels.give_ops_back()
    assert unchecked == 0, "a launch was not followed by C10_CUDA_KERNEL_LAUNCH_CHECK"


def dtype_number(t: Tensor) -> int:
    return DTYPES.index(t.dtype)
