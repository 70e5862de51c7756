"""Export to deployment formats. Needs the extra: pip install qtoolkit[onnx]."""

from qtoolkit.export.backend_files import BackendFiles, Encoding, encodings, read_encodings
from qtoolkit.export.deployed import DeployedVerification, RuntimeCodes
from qtoolkit.export.onnx import ExportResult, export_onnx
from qtoolkit.export.verify import Verification, verify, verify_onnx

__all__ = [
    "BackendFiles",
    "DeployedVerification",
    "Encoding",
    "ExportResult",
    "RuntimeCodes",
    "Verification",
    "encodings",
    "export_onnx",
    "read_encodings",
    "verify",
    "verify_onnx",
]
