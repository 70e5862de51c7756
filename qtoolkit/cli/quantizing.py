"""`qtoolkit quantize`: a model and batches that Python files have, by `qtoolkit.quantize`."""

import argparse
import contextlib
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from qtoolkit.cli import tables
from qtoolkit.cli.commands import Answer, counted
from qtoolkit.errors import first_line, unknown
from qtoolkit.export import Verdict
from qtoolkit.export.verification.codes import CodeCount
from qtoolkit.quantize import QuantizeResult
from qtoolkit.quantize import quantize as quantize_model


def quantize(arguments: argparse.Namespace) -> Answer:
    """Quantize a model, and write it."""
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
        result = quantize_model(
            load("model", arguments.model),
            load("--data", arguments.data),
            arguments.backend,
            arguments.out,
            exclude=arguments.exclude,
            max_batches=arguments.max_batches,
            method=arguments.method,
            exporter=arguments.exporter,
            dynamic_batch=not arguments.constant_batch,
        )
    data = _data(arguments.backend, result)
    return Answer(data, lambda: tables.quantized(data), result.verdict is Verdict.DIFFERENT)


def load(option: str, reference: str) -> Any:
    """Return what a module or a file ("path/file.py:name") has under a name; of a function or a class, what a call returns.

    Python looks for modules in the folder of the file, or in the working folder, first. Raises ValueError, which begins with
    the option, for a file, module or name that is not there, and for an error of the user's code, whose traceback is printed.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ValueError(f"{option}: {reference!r} must be MODULE:NAME or path/file.py:NAME.")
    module = _module(option, place)
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise ValueError(f"{option}: {unknown(f'name in {place!r}:', name, public)}")
    value = getattr(module, name)
    if not callable(value) or isinstance(value, nn.Module | Iterable):
        return value
    try:
        return value()
    except (Exception, SystemExit) as error:
        raise _raised(option, reference, error) from error


def _module(option: str, place: str) -> ModuleType:
    file = Path(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"{option}: {place!r} does not exist.")
    folder, name = (Path.cwd(), place) if file is None else (file.parent, file.stem)
    sys.path.insert(0, str(folder))
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{option}: {place!r}: no module {error.name!r} is in {str(folder)!r} or installed.") from None
    except (Exception, SystemExit) as error:
        raise _raised(option, place, error) from error
    if file is not None and Path(module.__file__ or "").resolve() != file:
        raise ValueError(
            f"{option}: {place!r} has the name of a module that is imported already, {module.__file__}; rename the file."
        )
    return module


def _raised(option: str, what: str, error: BaseException) -> ValueError:
    """Print the traceback of an error in the user's own code, and return the error that ends the command."""
    traceback.print_exception(error)
    return ValueError(f"{option}: {what!r} raised {type(error).__name__}: {first_line(error)}.")


def _data(backend: str, result: QuantizeResult) -> dict[str, Any]:
    export, calibration = result.export, result.calibration
    return {
        "file": str(export.path),
        "backend": backend,
        "bytes": export.bytes,
        "opset": export.opset,
        "layers": [
            {"layer": line.name, "kind": line.kind, "status": str(line.status), "reason": line.reason}
            for line in result.report.layers
        ],
        "ranges": {
            "quantizers": len(calibration.ranges),
            "batches": calibration.batches,
            "unreached": list(calibration.unreached),
        },
        "codes": {name: counted(count) for name, count in _counts(result).items()},
        "verdict": None if result.verdict is None else str(result.verdict),
        "notes": list(result.notes),
    }


def _counts(result: QuantizeResult) -> dict[str, CodeCount]:
    """Return the codes that were compared, by what they are of."""
    layers, runtimes = result.export.verification, result.verification
    counts = {}
    if layers is not None:
        counts = {
            "weights": layers.weight_codes,
            "quantizers": layers.quantizer_codes,
            "layer by layer": layers.layer_codes,
        }
    end_to_end = {} if runtimes is None else runtimes.runtimes
    return counts | {f"end to end in {runtime}": codes.codes for runtime, codes in end_to_end.items()}
