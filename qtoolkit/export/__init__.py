"""Export to deployment formats. Needs the extra: pip install qtoolkit[onnx]."""

from qtoolkit.export.between_runtimes import RuntimeComparison, compare_runtimes
from qtoolkit.export.deployed import DeployedVerification, RuntimeCodes
from qtoolkit.export.description import FileDescription, describe
from qtoolkit.export.lint import lint
from qtoolkit.export.onnx import ExportResult, export_onnx
from qtoolkit.export.reading import UnreadableFileError
from qtoolkit.export.verify import Verification, verify, verify_onnx

__all__ = [
    "DeployedVerification",
    "ExportResult",
    "FileDescription",
    "RuntimeCodes",
    "RuntimeComparison",
    "UnreadableFileError",
    "Verification",
    "compare_runtimes",
    "describe",
    "export_onnx",
    "lint",
    "verify",
    "verify_onnx",
]
