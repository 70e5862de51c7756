"""Runtimes that execute an exported file as users run it, with the codes that they compute on the way."""

from collections.abc import Mapping

from qtoolkit.export.runtimes import onnxruntime_cpu, openvino_cpu
from qtoolkit.export.runtimes.execution import Execute, Executed, Layer

# Each runtime by its name, which is that of its package and of the extra that installs it too, onnxruntime's apart ([onnx]).
RUNTIMES: Mapping[str, Execute] = {"onnxruntime": onnxruntime_cpu.execute, "openvino": openvino_cpu.execute}

__all__ = ["RUNTIMES", "Execute", "Executed", "Layer"]
