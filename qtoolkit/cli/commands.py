"""What the commands on files find, as JSON and as tables."""

import argparse
import json
import platform
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from qtoolkit import _native
from qtoolkit.backends import backends
from qtoolkit.cli import tables
from qtoolkit.export.description import FileDescription, describe
from qtoolkit.export.lint import lint as lint_file
from qtoolkit.export.lint import rules_of
from qtoolkit.export.verification.between_runtimes import RuntimeComparison, compare_runtimes
from qtoolkit.export.verification.codes import CodeCount
from qtoolkit.runtimes.table import EXECUTES, RUNTIMES
from qtoolkit.version import __version__

PACKAGES = ("numpy", "onnx", "onnxscript", "onnxruntime", "openvino", "torchvision", "timm", "rich")


@dataclass(frozen=True)
class Answer:
    """What a command prints: data as JSON, or a table for people; and whether it found something."""

    data: dict[str, Any]
    table: Callable[[], str]
    found: bool = False

    def json(self) -> str:
        """Return the data as JSON, on several lines."""
        return json.dumps(self.data, indent=2)


def lint(arguments: argparse.Namespace) -> Answer:
    """Check a file against the rules of a target."""
    backend = backends[arguments.backend]
    findings = lint_file(arguments.file, backend, arguments.advice)
    rules = [rule.name for rule in rules_of(backend, arguments.advice)]
    listed = [
        {"node": each.where, "rule": each.name, "message": each.rule, "source": each.source, "remedy": each.remedy}
        for each in findings
    ]
    data = {"file": arguments.file, "backend": backend.name, "rules": rules, "findings": listed}
    return Answer(data, lambda: tables.findings(data), bool(findings))


def verify(arguments: argparse.Namespace) -> Answer:
    """Compare the codes that runtimes compute from a file."""
    if not 0 <= arguments.allow <= 1:
        raise ValueError(f"--allow must be a share between 0 and 1, got {arguments.allow}.")
    runtimes = tuple(arguments.runtime or (name for name in EXECUTES if RUNTIMES[name].is_installed))
    found = compare_runtimes(
        arguments.file, _arrays(arguments.inputs), runtimes, _program(arguments.model), arguments.seed
    )
    data = {"file": arguments.file, "allowed": arguments.allow, "runtimes": _codes(found)}
    return Answer(data, lambda: tables.codes(data), found.share > arguments.allow)


def info(arguments: argparse.Namespace) -> Answer:
    """Describe a file, or this installation."""
    if arguments.file is None:
        found = environment()
        return Answer(found, lambda: tables.environment(found))
    file = describe(arguments.file)
    return Answer(_description(file), lambda: tables.description(file))


def environment() -> dict[str, Any]:
    """Return the versions and the hardware that the package finds."""
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


def counted(count: CodeCount) -> dict[str, Any]:
    """Return how many codes were compared and differ, and by how many steps."""
    return {"compared": count.compared, "differing": count.differing, "steps": count.steps}


def _codes(found: RuntimeComparison) -> list[dict[str, Any]]:
    listed = []
    for name, codes in found.runtimes.items():
        first = codes.first_difference
        quantizers = [{"quantizer": quantizer, **counted(count)} for quantizer, count in codes.by_quantizer.items()]
        entry = {"runtime": name, "version": codes.runtime, **counted(codes.codes), "first_difference": first}
        entry |= {"output_difference": codes.output_difference, "not_compared": list(codes.not_compared)}
        entry |= {"program_difference": found.program.get(name), "quantizers": quantizers, "remark": codes.remark}
        entry["integer_layers"] = [{"layer": layer.name, "kernel": layer.kernel} for layer in codes.integer_layers]
        entry["float_layers"] = [{"layer": layer.name, "kernel": layer.kernel} for layer in codes.float_layers]
        listed.append(entry)
    return listed


def _description(found: FileDescription) -> dict[str, Any]:
    facts = asdict(found)
    layers = [{"layer": each.pop("name"), **each} for each in facts["layers"]]
    return {"file": facts.pop("path"), **facts, "layers": layers}


def _arrays(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays.items())
    except FileNotFoundError:
        raise ValueError(f"--inputs: {path!r} does not exist; write it with numpy.savez.") from None
    except (ValueError, OSError, EOFError, AttributeError, TypeError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"--inputs: {path!r} is no .npz file of arrays; write it with numpy.savez.") from error


def _program(path: str | None) -> Any:
    if path is None:
        return None
    refused = f"--model: {path!r} is no program of torch.export; write it with torch.export.save."
    if not zipfile.is_zipfile(path):
        raise ValueError(refused)
    try:
        return torch.export.load(path).module()
    except Exception as error:  # of any type, for an archive of something else
        raise ValueError(refused) from error
