"""qtoolkit: quantization-aware training for PyTorch, and ONNX models that compute the same quantized values as in training."""

import sys
from importlib import import_module
from types import ModuleType

# python -m qtoolkit, before its main module runs
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__:
    import qtoolkit_command

    qtoolkit_command.end_on_interrupt()
    qtoolkit_command.parser().parse_args(sys.argv[1:])  # help ends here, before torch is imported

# The first import: its tables have the names by which a QuantSpec checks itself.
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of

# isort: split
from qtoolkit import debug, export, graph, nn, ops, quant_modules, tuning
from qtoolkit.backends import Backend, backends
from qtoolkit.calibrate import CalibrationReport, calibrate, calibrating
from qtoolkit.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from qtoolkit.config import QConfig, QConfigMapping, QuantSpec
from qtoolkit.convert import convert
from qtoolkit.eager.fuse import _check_rows, fuse_modules
from qtoolkit.eager.record import EagerRecord
from qtoolkit.export import ExportResult, export_litert, export_onnx
from qtoolkit.extras import warn_of_other_project
from qtoolkit.graph.capture.untraceable import UntraceableError
from qtoolkit.instead import of_attribute
from qtoolkit.nn import freeze_batch_norm, unfreeze_batch_norm
from qtoolkit.parameter_groups import parameter_groups
from qtoolkit.parts import prepare_parts
from qtoolkit.prepare import prepare
from qtoolkit.public import publish
from qtoolkit.quantize import QuantizeResult, quantize
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.switches import (
    disable_quantization,
    enable_quantization,
    freeze_ranges,
    stop_on_nonfinite,
)
from qtoolkit.quantizers.synchronize import synchronize_ranges
from qtoolkit.report import QuantizationReport, quantization_report
from qtoolkit.version import __version__ as __version__

__all__ = [
    "Backend", "CalibrationReport", "Checkpoint", "ExportResult", "Grid", "QConfig", "QConfigMapping", "QuantSpec",
    "QuantizationReport", "QuantizeResult", "TensorQuantizer", "UntraceableError", "backends", "calibrate",
    "calibrating", "compat", "convert", "debug", "disable_quantization", "enable_quantization", "export",
    "export_litert", "export_onnx", "freeze_batch_norm", "freeze_ranges", "fuse_modules", "graph", "load_checkpoint",
    "nn", "ops", "parameter_groups", "prepare", "prepare_parts", "quant_modules", "quantization_report", "quantize",
    "quantizers_of", "save_checkpoint", "stop_on_nonfinite", "synchronize_ranges", "tuning", "unfreeze_batch_norm",
]  # fmt: skip
warn_of_other_project()
ObservingQuantizer = TensorQuantizer  # the name that pickles have
publish(__name__, Backend, Grid, QConfig, QConfigMapping, QuantSpec, TensorQuantizer, UntraceableError)
publish(__name__, CalibrationReport, Checkpoint, ExportResult, QuantizationReport, QuantizeResult)
publish(__name__, EagerRecord, _check_rows)  # what fuse_modules and replace leave on a model


def __getattr__(name: str) -> ModuleType:
    # Only scripts that come from other tools need it.
    if name == "compat":
        return import_module("qtoolkit.compat")
    raise AttributeError(of_attribute(name, sys.modules[__name__], ("export", "debug", "tuning", "nn", "graph", "ops")))


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
