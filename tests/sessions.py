"""Files in onnxruntime at its default optimizations, with exact sums on processors without VNNI too."""

from pathlib import Path

import onnxruntime

from qtoolkit.export.verification.runtimes.onnxruntime_cpu import EXACT_SUMS


def exact_session(path: Path) -> onnxruntime.InferenceSession:
    """Return a session of a file."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(*EXACT_SUMS)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
