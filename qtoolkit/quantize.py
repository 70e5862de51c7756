"""quantize(): from a float model to a verified file in one call, by the public steps alone."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Never, cast

from torch import nn

from qtoolkit import quant_modules
from qtoolkit.backends import REQUIRED, Backend, backend_of
from qtoolkit.batches import Caller, check_batches, no_batch, recorded_inputs
from qtoolkit.calibrate import CalibrationReport, calibrate
from qtoolkit.config import QConfigMapping
from qtoolkit.config.mapping import Exclude, with_excluded
from qtoolkit.convert import QUANTIZED, convert
from qtoolkit.errors import check_flags, some, warn
from qtoolkit.export import DeployedVerification, ExportResult, Verdict, export_onnx, verify
from qtoolkit.export.onnx import Exporter, require_extra
from qtoolkit.files import check_format
from qtoolkit.graph.capture import trace
from qtoolkit.graph.capture.untraceable import UntraceableError
from qtoolkit.instead import refuse_others
from qtoolkit.model_state import check_module, evaluating
from qtoolkit.prepare import prepare
from qtoolkit.quantizers.tensor_quantizer import quantizers_of
from qtoolkit.report import QuantizationReport, quantization_report
from qtoolkit.runtimes.table import EXECUTES, RUNTIMES, ExecutingRuntime


@dataclass(frozen=True)
class QuantizeResult:
    """The result of `quantize`. It prints as a summary; its parts print in full.

    Attributes:
        prepared: The calibrated model, in eval mode: the result of `prepare`, or of `quant_modules.replace`.
        converted: Its reference form, which the file was written from.
        report: How each op is quantized, or why it is in float.
        calibration: The range of each quantizer.
        export: The file, and the layer-by-layer comparison of its quantized values.
        verification: The end-to-end comparison of all quantized values, in the runtime of the backend (for float16
            files, in onnxruntime). None where there is none.
        notes: Sentences on steps that differ from the usual ones, and on steps that were left out.
    """

    prepared: nn.Module
    converted: nn.Module
    report: QuantizationReport
    calibration: CalibrationReport
    export: ExportResult
    verification: DeployedVerification | None
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict | None:
        """What the end-to-end comparison found; None without one."""
        if self.verification is None:
            return None
        (codes,) = self.verification.runtimes.values()
        return codes.verdict

    def __str__(self) -> str:
        floats = [line.name for line in self.report.left_float]
        lines = [
            str(self.export),
            f"{len(self.report.quantized)} layers and ops quantized, {len(floats)} left in float"
            + (f": {some(floats)}" if floats else ""),
            f"ranges of {len(self.calibration.ranges)} quantizers from {self.calibration.batches} batches",
            "verdict: none" if self.verification is None else str(self.verification),
        ]
        return "\n".join([*lines, *self.notes])


def quantize(
    model: nn.Module,
    batches: Iterable[object],
    backend: str | Backend = REQUIRED,
    path: str | os.PathLike[str] = "model.onnx",
    *,
    exclude: Exclude | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    forward: Callable[[nn.Module, Any], object] | None = None,
    max_batches: int | None = None,
    method: str | None = None,
    exporter: Exporter = "dynamo",
    dynamic_batch: bool = True,
    progress: bool = True,
    **other: Never,
) -> QuantizeResult:
    """Quantize a float model without training, and write it as an ONNX file: all steps in one call.

    The steps are `prepare`, `calibrate`, `convert`, `export_onnx` and, where the runtime of the backend is installed or the
    file is in float16, `qtoolkit.export.verify`. Call them yourself for other options, and to train between them.

    The model is quantized as it computes in eval mode, whichever mode it is in, and is not changed. A submodule that cannot be
    traced becomes a leaf module. If the model's own forward cannot be traced, its layers are replaced, as
    `quant_modules.replace` does. A warning and `notes` say so.

    If a step raises an error, no file is written, and one that was there is unchanged.

    Args:
        model: The float model.
        batches: Any iterable of batches, as `calibrate` takes it: a few hundred samples like the inputs in deployment. The
            first batch gives the shapes, and quantized values are compared on it.
        backend: The target, which must be given: a name from `qtoolkit.backends`, or a Backend.
        path: The file to write.
        exclude: The layers that stay in float: names, regular expressions, types, as `prepare` takes it.
        qconfig_mapping: Which layers and ops get which config, as `prepare` takes it.
        forward: forward(model, batch), for batches of another form, as `calibrate` takes it.
        max_batches: The number of batches to run; None runs all.
        method: How the ranges of all activations are chosen, as `calibrate` takes it.
        exporter: As `export_onnx` takes it: "torchscript" for a forward that branches on values.
        dynamic_batch: Make dimension 0 of all inputs dynamic. False fixes the size of the first batch.
        progress: Show progress bars.
        other: Must be empty. An argument name of another tool raises TypeError, which says what to write.

    Returns:
        The models, the reports, the file and the verdict; print it.

    Warns:
        UserWarning: The model, or a part of it, cannot be traced; or the runtime's quantized values differ from the
            model's, and why. The steps have warnings of their own.

    Raises:
        TypeError: `backend` is left out, an argument is of a wrong type, or the batches do not match the signature of the
            model's forward.
        ValueError: A name is unknown, there is no batch, the path is a folder, or a step refuses the model or the data.
        RuntimeError: The model cannot be exported, or no data reached a quantizer. As `UntraceableError`: the model is wrapped
            or compiled, or has lazy parameters.
        ImportError: The extra [onnx] is not installed.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))
        >>> images = torch.rand(32, 3, 8, 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.quantize(model, images.split(8), backend="onnxruntime", path=folder + "/model.onnx")
        >>> str(result.verdict), len(result.report.left_float), result.calibration.batches
        ('equal', 0, 4)
    """
    refuse_others(quantize, other)
    check_flags("quantize", dynamic_batch=dynamic_batch, progress=progress)
    check_module(model, "quantize")
    trace.check_model(model, "quantize")
    if any(isinstance(part, QUANTIZED) for part in model.modules()):
        raise ValueError(
            "quantize: the model must be a float model, and this one has quantizers already; pass the float model, or call "
            "qtoolkit.calibrate, convert and export_onnx on this one."
        )
    target = backend_of(backend)
    check_batches("quantize", batches, forward)
    _check_path(path)
    require_extra("quantize")
    notes: list[str] = []
    call = forward or Caller("quantize")
    with evaluating(model):
        inputs, batches = _first_inputs(model, batches, call)
        prepared = _prepared(model, inputs, target, with_excluded(qconfig_mapping, exclude), notes)
    if not quantizers_of(prepared):
        raise ValueError(
            f"quantize: nothing in this {type(model).__name__} is quantized for {target.name!r}; "
            f"print(qt.quantization_report(qt.prepare(model, backend={target.name!r}))) gives the reasons."
        )
    calibration = calibrate(prepared, batches, max_batches, call, progress, method=method)
    converted = convert(prepared)
    export = export_onnx(converted, inputs, path, exporter=exporter, dynamic_batch=dynamic_batch, progress=progress)
    verification = _verified(prepared, target, export, inputs, progress, notes)
    report = quantization_report(prepared)
    return QuantizeResult(prepared, converted, report, calibration, export, verification, tuple(notes))


def _check_path(path: object) -> None:
    """Raise an error for a path that no file can be written to, before anything runs."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"quantize: path must be the name of the file to write, got {path!r}.")
    if Path(path).is_dir():
        raise ValueError(f"quantize: path must be the name of the file to write, but {str(path)!r} is a folder.")
    check_format(path, "quantize", "model.onnx")


def _first_inputs(
    model: nn.Module, batches: Iterable[Any], call: Callable[[nn.Module, Any], object]
) -> tuple[object, Iterable[object]]:
    """Return the model's inputs from the first batch, as example inputs, and all batches."""
    iterator = iter(batches)
    try:
        first = next(iterator)
    except StopIteration:
        raise no_batch("quantize") from None
    whole = chain([first], iterator) if iterator is batches else batches
    return recorded_inputs(model, first, call, "quantize"), whole


def _prepared(
    model: nn.Module, inputs: object, backend: Backend, mapping: QConfigMapping | None, notes: list[str]
) -> nn.Module:
    """Prepare a model; a submodule that cannot be traced becomes a leaf module, or its layers are replaced, with a warning."""
    untraced: list[str] = []
    while True:
        try:
            return prepare(model, inputs, backend, mapping, untraced=untraced)
        except UntraceableError as error:
            if not error.untraced or error.untraced in untraced:
                note = (
                    f"{type(model).__name__} cannot be traced: its layers quantize their own inputs "
                    f"(qtoolkit.quant_modules.replace), and all else stays in float."
                )
                _note(notes, note, f" {error}")
                return quant_modules.replace(model, mapping, backend=backend)
            untraced.append(error.untraced)
            note = (
                f"{error.untraced!r} cannot be traced: it is a leaf module, whose layers quantize their own inputs, and all "
                f"else in it stays in float."
            )
            _note(notes, note, f" {error}")


def _note(notes: list[str], note: str, reason: str = "") -> None:
    """Add a note to the result, and warn of it, for `quantize`'s caller, with the reason."""
    notes.append(note)
    warn(f"quantize: {note}{reason}")


def _verified(
    prepared: nn.Module, backend: Backend, export: ExportResult, inputs: object, progress: bool, notes: list[str]
) -> DeployedVerification | None:
    """Compare all quantized values end to end in the runtime of a backend; where that cannot be done, a note says why."""
    try:
        integer, runtime = _reference(prepared, backend)
    except (ValueError, ImportError) as error:
        notes.append(f"Quantized values were compared layer by layer, not end to end: {error}")
        return None
    found = None
    try:
        found = verify(integer, inputs, export.path, (runtime,), progress=progress)
        found.check()
    except Exception as error:  # runtimes' errors have no base class of their own
        note = (
            f"{str(export.path)!r} computes the model's values layer by layer, but not end to end in {runtime}: {error}"
        )
        _note(notes, note)
    return found


def _reference(prepared: nn.Module, backend: Backend) -> tuple[nn.Module, ExecutingRuntime]:
    """Return the model that computes in integers as the runtime of a backend does, and the runtime.

    A file in float16 computes in float wherever it runs here: onnxruntime stands for its target's runtime. Raises ValueError
    where none of the backend's takes ONNX files, ImportError where it is not installed.
    """
    runtime = backend.runtime
    if runtime not in EXECUTES and backend.float_type == "float16":
        RUNTIMES["onnxruntime"].check_installed("a comparison end to end")
        return convert(prepared), "onnxruntime"
    if runtime is None or runtime not in EXECUTES:
        raise ValueError(f"no runtime of the backend {backend.name!r} runs ONNX files here.")
    RUNTIMES[runtime].check_installed("a comparison end to end")
    return convert(prepared, arithmetic="integer"), cast("ExecutingRuntime", runtime)
