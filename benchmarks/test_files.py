"""Files in onnxruntime: float, ours, and onnxruntime's own quantization: `pytest benchmarks/test_files.py`.

benchmarks/pages/export.py measures more models in more runtimes, with their accuracy on real data.
"""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.export_models import SUBJECTS, bytes_of_file
from benchmarks.measure import PAUSE, Case
from benchmarks.pages.export import FLOAT, IN_INT8, OURS, RUN, STATIC, write_onnx_files
from benchmarks.rows import Group, Settings

RUNTIME = "onnxruntime"
ROWS = {"float": FLOAT, "quantize_static": STATIC, "ours": OURS, "ours, int8 weights": IN_INT8}
SHOWN = {"resnet18": "ResNet-18", "mobilenet_v2": "MobileNetV2"}
QUICK = "resnet18"


def files(name: str, settings: Settings, chosen: Sequence[str]) -> Case:
    """Write the files of a model, and return their runs for one image."""
    subject = SUBJECTS[name](None, not settings.full)
    folder = tempfile.TemporaryDirectory()
    with warnings.catch_warnings(action="ignore"):  # of torch's exporter, and of random weights
        written = write_onnx_files(subject, Path(folder.name), RUNTIME, chosen)
    x = subject.example.numpy()
    work = {name: partial(RUN[RUNTIME](path, settings.threads), x) for name, path in written.items()}
    sizes = {name: partial(bytes_of_file, path) for name, path in written.items()}
    return Case("a file in onnxruntime", subject.name, work, pause=PAUSE, bytes=sizes, end=folder.cleanup)


GROUPS = {
    f"file: {title}": Group(
        partial(files, name), ROWS, on_cpu_alone="onnxruntime is installed for it.", slow=() if name == QUICK else ROWS
    )
    for name, title in SHOWN.items()
}


def test_file(group: str, row: str, side_by_side: Callable[[str, str], None]) -> None:
    side_by_side(group, row)
