"""Export to deployment formats. Needs the extra [onnx]."""

from qtoolkit.export.backend_files import BackendFiles, Encoding, encodings, read_encodings
from qtoolkit.export.description import FileDescription, describe
from qtoolkit.export.executorch import ExecutorchResult, export_executorch
from qtoolkit.export.files.reading import UnreadableFileError
from qtoolkit.export.lint import EngineEstimate, estimate_engine, lint
from qtoolkit.export.litert import LitertResult, export_litert
from qtoolkit.export.onnx import ExportResult, export_onnx
from qtoolkit.export.pairs.stored_weights import StoredWeights
from qtoolkit.export.program import export_program
from qtoolkit.export.verification.between_runtimes import RuntimeComparison, compare_runtimes
from qtoolkit.export.verification.deployed import DeployedVerification, RuntimeCodes, Verdict
from qtoolkit.export.verification.verify import Verification, verify, verify_onnx
from qtoolkit.instead import say_when_called

__all__ = [
    "BackendFiles", "DeployedVerification", "Encoding", "EngineEstimate", "ExecutorchResult", "ExportResult",
    "FileDescription",
    "LitertResult", "RuntimeCodes", "RuntimeComparison", "StoredWeights", "UnreadableFileError", "Verdict",
    "Verification", "compare_runtimes", "describe", "encodings", "estimate_engine", "export_executorch", "export_litert",
    "export_onnx", "export_program", "lint", "read_encodings", "verify", "verify_onnx",
]  # fmt: skip
say_when_called(
    __name__,
    "qtoolkit.export_onnx(model, example_inputs, path) for an ONNX file, or a function of qtoolkit.export for another one",
)
