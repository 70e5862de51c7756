"""The files of ExecuTorch that benchmarks/export.py times: float and int8, both with XNNPACK."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export_models import Subject

import qtoolkit as qt
from qtoolkit.export.runtimes import Layer
from qtoolkit.export.runtimes.executorch_xnnpack import lower


def write_float(subject: Subject, path: Path) -> tuple[Path, Sequence[Layer]]:
    """Write the float model; return the file and the ops that compute."""
    lowered = lower(torch.export.export(subject.model, (subject.example,)))
    path.write_bytes(lowered.file)
    return path, lowered.layers


def write_quantized(subject: Subject, path: Path) -> tuple[Path, Sequence[Layer]]:
    """Write the quantized model; return the file and the ops that compute."""
    prepared = qt.prepare(subject.model, (subject.example,), backend="xnnpack")
    qt.calibrate(prepared, subject.calibration, progress=False)
    result = qt.export.export_executorch(prepared, (subject.example,), path, verify=False)
    return path, result.layers


def in_executorch(path: Path, threads: int) -> Callable[[Any], Any]:
    """Return what runs a file on an array, sample by sample: the file has a batch of one."""
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
    from executorch.runtime import Runtime

    _unsafe_reset_threadpool(threads)
    method = Runtime.get().load_program(path.read_bytes()).load_method("forward")
    if method is None:
        raise RuntimeError(f"{path} has no forward.")

    def run(x: Any) -> Any:
        samples = torch.from_numpy(x).split(1)
        return np.concatenate([np.array(method.execute([sample])[0].numpy()) for sample in samples])

    return run
