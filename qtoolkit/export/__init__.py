"""Export to deployment formats. Needs the extra: pip install qtoolkit[onnx]."""

from qtoolkit.export.deployed import DeployedVerification, RuntimeCodes
from qtoolkit.export.onnx import ExportResult, export_onnx
from qtoolkit.export.verify import Verification, verify, verify_onnx

__all__ = [
    "DeployedVerification",
    "ExportResult",
    "RuntimeCodes",
    "Verification",
    "export_onnx",
    "verify",
    "verify_onnx",
]
