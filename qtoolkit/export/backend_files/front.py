"""encodings() and read_encodings(): write a model for a vendor's own compiler, and read the files again."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn

from qtoolkit.backends import Backend, backend_of
from qtoolkit.errors import check_flags
from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.export.backend_files.target import BackendFiles, Target
from qtoolkit.export.inputs import ONE_AT_A_TIME, ExportSource, Inputs
from qtoolkit.export.onnx import require_extra, written
from qtoolkit.lint.ops import AXIS_OPSET
from qtoolkit.progress import progress_bar, step


def encodings(
    model: nn.Module,
    backend: str | Backend,
    example_inputs: object,
    path: str | os.PathLike[str],
    opset: int = AXIS_OPSET,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = False,
    progress: bool = True,
) -> BackendFiles:
    """Write a model for a target's own compiler: a float model, and a file with the grids of its tensors.

    docs/backend_files.md lists the files of each backend and their limits. If the target accepts Q/DQ nodes, prefer
    `export_onnx`, whose file holds every grid. Each file is parsed again before it is written, to check that it gives the same
    scales and zero points. Weights are clipped to the ranges of their grids.

    Args:
        model: A calibrated or converted model, as `export_onnx` takes it. It is not changed.
        backend: A name of `qtoolkit.backends`, or a Backend; it determines the files. A model prepared for another backend is
            accepted if the files can hold its grids.
        example_inputs: A tuple of inputs, a mapping of keyword inputs, or one tensor.
        path: Folder and base name. Each file adds its own suffix: "out/net" gives "out/net_deploy_model.onnx".
        opset: ONNX opset of the float model.
        input_names: Names of the file's inputs, as in `export_onnx`.
        output_names: Names of its outputs.
        dynamic_batch: Make dimension 0 of all inputs dynamic.
        progress: Show a progress bar.

    Returns:
        The paths of the files, and the encodings in them.

    Raises:
        ValueError: The file cannot hold the grid of a tensor (the message names it), a tensor has two grids, or the backend has
            no files of its own.
        RuntimeError: A quantizer saw no data, or torch's exporter cannot export the model.
        TypeError: The model has no quantizers.
        ImportError: The extra [onnx], or [openvino] for its files, is not installed.

    Example:
        >>> import tempfile
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), backend="snpe")
        >>> report = qt.calibrate(prepared, [torch.ones(8, 4)], progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = qt.export.encodings(prepared, "snpe", (torch.rand(8, 4),), folder + "/net", input_names=["x"])
        ...     read = qt.export.read_encodings("snpe", folder + "/net")
        >>> [file.name for file in (files.model, *files.files)]
        ['net_deploy_model.onnx', 'net_clip_ranges.json']
        >>> read[0].tensor, round(read[0].scale[0] * 255, 6), read[0].zero_point
        ('x', 1.0, (0,))
    """
    check_flags("encodings", dynamic_batch=dynamic_batch, progress=progress)
    target = _target(backend, "encodings")
    from qtoolkit.export.exporters.torch_exporters import ExportRequest
    from qtoolkit.export.pairs.opsets import check_opset, native

    check_opset("encodings", opset)
    source = ExportSource.of(model, example_inputs, "encodings")
    bar = progress_bar("encodings", "steps", progress, total=1, after=0)
    with ONE_AT_A_TIME, bar:
        request = ExportRequest(
            source.model, Inputs.of(source, input_names), native(opset, "dynamo"), output_names, None
        )
        step(bar, "torch's exporter, and the files")
        export = partial(written, request, opset, "dynamo", dynamic_batch=dynamic_batch)
        return target.write(export, opset, Path(path))


def read_encodings(backend: str | Backend, path: str | os.PathLike[str]) -> tuple[Encoding, ...]:
    """Read the files for a backend, written by `encodings` or by another tool in the same format.

    Args:
        backend: The backend.
        path: Folder and base name of the files, without suffixes.

    Returns:
        The encoding of each tensor. The files do not hold names of quantizers and axes.

    Raises:
        ValueError: A file does not have the backend's format; the error names the place.
        FileNotFoundError: There is no such file.
        ImportError: The extra [onnx] is not installed.

    Example:
        >>> import tempfile
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), backend="snpe")
        >>> _ = qt.calibrate(prepared, [torch.ones(8, 4)], progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = qt.export.encodings(prepared, "snpe", torch.rand(8, 4), folder + "/net", input_names=["x"])
        ...     read = qt.export.read_encodings("snpe", folder + "/net")
        >>> "x" in [encoding.tensor for encoding in read]
        True
    """
    return tuple(_target(backend, "read_encodings").read(Path(path)))


def _target(backend: str | Backend, what: str) -> Target:
    require_extra(what)
    from qtoolkit.export.backend_files.targets import TARGETS

    name = backend_of(backend).name
    if name not in TARGETS:
        raise ValueError(
            f"{what}: the backend {name!r} has no files of its own, it takes the Q/DQ file of export_onnx; backends with such "
            f"files: {', '.join(map(repr, TARGETS))}."
        )
    return TARGETS[name]
