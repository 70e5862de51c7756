"""The results of the commands, as JSON and as tables."""

import argparse
import contextlib
import json
import platform
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from qtoolkit import _native
from qtoolkit.backends import backends
from qtoolkit.cli import tables
from qtoolkit.errors import first_line, unknown
from qtoolkit.export import Verdict
from qtoolkit.export.description import FileDescription, describe
from qtoolkit.export.lint import EngineEstimate, estimate_ops, quantized_ops, rules_of
from qtoolkit.export.verification.between_runtimes import RuntimeComparison, compare_runtimes
from qtoolkit.export.verification.codes import CodeCount
from qtoolkit.export.verification.deployed import RuntimeCodes
from qtoolkit.lint.findings import Finding, broken
from qtoolkit.lint.slower import takes_types_as_they_are
from qtoolkit.quantize import QuantizeResult
from qtoolkit.quantize import quantize as quantize_model
from qtoolkit.runtimes.table import EXECUTES, RUNTIMES
from qtoolkit.version import __version__

PACKAGES = ("numpy", "onnx", "onnxscript", "onnxruntime", "openvino", "torchvision", "timm", "rich")


@dataclass(frozen=True)
class Answer:
    """The output of a command: JSON data and a text table; and whether there are findings."""

    data: tables.Data
    table: Callable[[], str]
    found: bool = False

    def json(self) -> str:
        """Return the data as indented JSON."""
        return json.dumps(self.data, indent=2)


def lint(arguments: argparse.Namespace) -> Answer:
    """Check a file against the rules of a target."""
    backend = backends[arguments.backend]
    estimated = takes_types_as_they_are(backend)
    ops, rules = quantized_ops(arguments.file, with_sizes=estimated), rules_of(backend, arguments.advice)
    findings, names = broken(rules, ops, backend), [rule.name for rule in rules]
    data = {"file": arguments.file, "backend": backend.name, "rules": names, "findings": _listed(findings)}
    if estimated:
        data["beside_float16"] = _beside_float16(estimate_ops(arguments.file, ops, backend, arguments.gpu))
    return Answer(data, lambda: tables.findings(data), bool(findings))


def _listed(findings: Iterable[Finding]) -> list[tables.Data]:
    return [
        {"node": each.where, "rule": each.name, "message": each.rule, "source": each.source, "remedy": each.remedy}
        for each in findings
    ]


def _beside_float16(found: EngineEstimate) -> tables.Data:
    facts = {
        "gpu": found.gpu,
        "headline": found.headline,
        "seconds": found.seconds,
        "float16_seconds": found.float16_seconds,
    }
    types = {name: asdict(cost) for name, cost in found.types.items()}
    return {**facts, "types": types, "unknown": found.unknown, "findings": _listed(found.findings)}


def verify(arguments: argparse.Namespace) -> Answer:
    """Compare the quantized values of runtimes for a file."""
    if not 0 <= arguments.allow <= 1:
        raise ValueError(f"--allow must be a share between 0 and 1, got {arguments.allow}.")
    runtimes = tuple(arguments.runtime or (name for name in EXECUTES if RUNTIMES[name].is_installed))
    found = compare_runtimes(
        arguments.file, _arrays(arguments.inputs), runtimes, _program(arguments.model), arguments.seed
    )
    data = {"file": arguments.file, "allowed": arguments.allow, "runtimes": _codes(found)}
    saturates = any(codes.saturating for codes in found.runtimes.values())
    return Answer(data, lambda: tables.codes(data), saturates or found.share > arguments.allow)


def info(arguments: argparse.Namespace) -> Answer:
    """Describe a file, or the installation."""
    if arguments.file is None:
        found = environment()
        return Answer(found, lambda: tables.environment(found))
    file = describe(arguments.file)
    return Answer(_description(file), lambda: tables.description(file))


def environment() -> tables.Data:
    """Return the versions of packages, and the hardware."""
    devices = range(torch.cuda.device_count())
    return {
        "qtoolkit": __version__,
        "python": platform.python_version(),
        "torch": {"version": str(torch.__version__), "library_built_for": _native.built_for(_native.FILE)},
        "instruction_set": _native.library.instruction_set(),
        "threads": torch.get_num_threads(),
        "cuda": {"torch": torch.version.cuda, "devices": [torch.cuda.get_device_name(i) for i in devices]},
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def counted(count: CodeCount) -> dict[str, int | None]:
    """Return the numbers of compared and of differing values, and the largest difference in steps."""
    return {"compared": count.compared, "differing": count.differing, "steps": count.steps}


def _codes(found: RuntimeComparison) -> list[tables.Data]:
    listed = []
    for name, codes in found.runtimes.items():
        first = codes.first_difference
        quantizers = [{"quantizer": quantizer, **counted(count)} for quantizer, count in codes.by_quantizer.items()]
        entry: tables.Data = {
            "runtime": name,
            "version": codes.runtime,
            **counted(codes.codes),
            "first_difference": first,
        }
        entry |= {"output_difference": codes.output_difference, "not_compared": list(codes.not_compared)}
        entry |= {"program_difference": found.program.get(name), "quantizers": quantizers, "remark": codes.remark}
        entry["saturating"] = list(codes.saturating)
        entry["integer_layers"] = [{"layer": layer.name, "kernel": layer.kernel} for layer in codes.integer_layers]
        entry["float_layers"] = [{"layer": layer.name, "kernel": layer.kernel} for layer in codes.float_layers]
        listed.append(entry)
    return listed


def _description(found: FileDescription) -> tables.Data:
    facts = asdict(found)
    layers = [{"layer": each.pop("name"), **each} for each in facts["layers"]]
    return {"file": facts.pop("path"), **facts, "layers": layers}


def _arrays(path: str | None) -> dict[str, np.ndarray] | None:
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays.items())
    except FileNotFoundError:
        raise ValueError(f"--inputs: {path!r} does not exist; write it with numpy.savez.") from None
    except (ValueError, OSError, EOFError, AttributeError, TypeError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"--inputs: {path!r} is not a .npz file of arrays; write it with numpy.savez.") from error


def _program(path: str | None) -> nn.Module | None:
    if path is None:
        return None
    refused = f"--model: {path!r} is not a torch.export program; write it with torch.export.save."
    if not zipfile.is_zipfile(path):
        raise ValueError(refused)
    try:
        return torch.export.load(path).module()
    except Exception as error:  # of any type, for an archive of something else
        raise ValueError(refused) from error


# ---- `quantize`: a model and batches from Python files


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
    return Answer(data, lambda: tables.quantized(data), result.verdict in (Verdict.SATURATES, Verdict.DIFFERENT))


def load(option: str, reference: str) -> Any:
    """Return an object of a module or a file ("path/file.py:name"); a function or a class is called first.

    Python first searches the folder of the file, or the working folder, for modules. Raises ValueError, which begins with the
    option: the file, module or name does not exist, or the user's code raises an error, which is printed with its traceback.
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
            f"{option}: {place!r} has the name of a module that is already imported, {module.__file__}; rename the file."
        )
    return module


def _raised(option: str, what: str, error: BaseException) -> ValueError:
    """Print the traceback of an error in the user's code, and return the error that ends the command."""
    traceback.print_exception(error)
    return ValueError(f"{option}: {what!r} raised {type(error).__name__}: {first_line(error)}.")


def _data(backend: str, result: QuantizeResult) -> tables.Data:
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
        "in_float": list(export.in_float),
        "verdict": None if result.verdict is None else str(result.verdict),
        "notes": [*result.notes, *(codes.remark for codes in _runtimes(result).values() if codes.remark)],
    }


def _counts(result: QuantizeResult) -> dict[str, CodeCount]:
    """Return the comparisons of quantized values, by name."""
    layers = result.export.verification
    counts = {}
    if layers is not None:
        counts = {
            "weights": layers.weight_codes,
            "quantizers": layers.quantizer_codes,
            "layer by layer": layers.layer_codes,
        }
    return counts | {f"end to end in {runtime}": codes.codes for runtime, codes in _runtimes(result).items()}


def _runtimes(result: QuantizeResult) -> Mapping[str, RuntimeCodes]:
    """Return the comparison with each runtime."""
    return {} if result.verification is None else result.verification.runtimes
