"""encodings() and read_encodings(): write a model in the form of a vendor's own compiler, and read it again."""

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
    """Write a model for a target's own compiler: in float, with the grids of its tensors in a file beside it.

    docs/backend_files.md has the files of each backend, and what they cannot hold. For a target that takes Q/DQ nodes,
    `export_onnx` is better: its file holds everything. Each file is read again before it is written: it gives the same scales
    and zero points. Weights are clipped to the ranges of their grids.

    Args:
        model: A calibrated or converted model, as `export_onnx` takes it. It is not changed.
        backend: A name of `qtoolkit.backends`, or a Backend: whose files. The model may have been prepared for another one
            whose grids the files hold.
        example_inputs: A tuple of inputs, a mapping of keyword inputs, or one tensor.
        path: Folder and name, to which each file adds its own ending: "out/net" gives "out/net_deploy_model.onnx".
        opset: ONNX opset of the float model.
        input_names: Names of the file's inputs, as in `export_onnx`.
        output_names: Names of its outputs.
        dynamic_batch: Make dimension 0 of all inputs dynamic.
        progress: Show a progress bar.

    Returns:
        The paths, and the encodings that are in the files.

    Raises:
        ValueError: A grid that the file cannot hold, with its tensor; a tensor with two grids; a backend that has no files
            of its own.
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
    """Read the files that `encodings`, or another tool in the same form, wrote for a backend.

    Args:
        backend: The backend.
        path: Folder and name of the files, without their endings.

    Returns:
        The encoding of each tensor. Names of quantizers are not in the files, nor are axes.

    Raises:
        ValueError: A file is not of the backend's form; the error names the place.
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
