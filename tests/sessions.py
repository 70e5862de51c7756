"""Files in onnxruntime, in the session that users get: without any option."""

from pathlib import Path

import onnxruntime

from qtoolkit.export.files.files import OpenedFile
from qtoolkit.export.verification.runtimes.saturating_sums import has_wide_weights, processor_saturates


def default_session(path: str | Path) -> onnxruntime.InferenceSession:
    """Return a session of a file."""
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def has_wide_weights_in(path: str | Path) -> bool:
    """Return whether a file has int8 codes of weights whose sums of products may saturate."""
    return has_wide_weights(OpenedFile.of(Path(path)))


def saturates_here(path: str | Path) -> bool:
    """Return whether integer sums of a file may be wrong in onnxruntime on this processor."""
    return processor_saturates() and has_wide_weights_in(path)
