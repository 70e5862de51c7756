"""The files of ExecuTorch that benchmarks/pages/export.py times: float and int8, both with XNNPACK."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import qtoolkit as qt
from benchmarks.export_models import Subject
from qtoolkit.export.verification.runtimes.executorch_xnnpack import load, lower
from qtoolkit.runtimes.execution import ExecutedLayer


def write_float(subject: Subject, path: Path) -> tuple[Path, Sequence[ExecutedLayer]]:
    """Write the float model; return the file and the ops that compute."""
    lowered = lower(torch.export.export(subject.model, (subject.example,)))
    path.write_bytes(lowered.file)
    return path, lowered.layers


def write_quantized(subject: Subject, path: Path) -> tuple[Path, Sequence[ExecutedLayer]]:
    """Write the quantized model; return the file and the ops that compute."""
    prepared = qt.prepare(subject.model, (subject.example,), backend="xnnpack")
    qt.calibrate(prepared, subject.calibration, progress=False)
    result = qt.export.export_executorch(prepared, (subject.example,), path, verify=False)
    return path, result.layers


def in_executorch(path: Path, threads: int) -> Callable[[Any], Any]:
    """Return what runs a file on an array, sample by sample: the file has a batch of one."""
    from executorch.extension.pybindings import portable_lib

    if portable_lib._threadpool_get_thread_count() != threads:
        portable_lib._unsafe_reset_threadpool(threads)  # unsafe once a file is loaded: all runs have the same number
    execute = load(path.read_bytes())
    return lambda x: np.concatenate([execute([sample])[0] for sample in torch.from_numpy(x).split(1)])
