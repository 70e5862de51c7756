"""Export to deployment formats. Needs the extra: pip install qtoolkit[onnx]."""

from qtoolkit.export.onnx import ExportResult, export_onnx
from qtoolkit.export.verify import Verification, verify_onnx

__all__ = ["ExportResult", "Verification", "export_onnx", "verify_onnx"]
