"""Size, latency and accuracy of exported files in onnxruntime, OpenVINO, ExecuTorch and LiteRT, beside other tools' files.

python -m benchmarks.pages.export                     all models, one thread
python -m benchmarks.pages.export --only fsrcnn vit   some of them
python -m benchmarks.pages.export --quick             small inputs and few images: a first impression
python -m benchmarks.pages.export --json FILE         writes the figures too

Each model is exported in float and in int8, prepared for the runtime that executes it; quantize_static quantizes the float file
with the same calibration batches (QDQ, uint8 activations, int8 weights per channel). ExecuTorch and LiteRT have files of their
own, with XNNPACK; for onnxruntime there are files with int8 weights too, of eight bits and of seven, whose sums are faster on
processors with VNNI; litert-quantizer, where it is installed, quantizes LiteRT's float file with the same images. All
files of one model and one runtime are timed in turn, and times are multiples of the float file's in that runtime.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import qtoolkit as qt
from benchmarks.export_models import SUBJECTS, Subject, bytes_of_file
from benchmarks.measure import ROOF, Case, Pace, measure
from benchmarks.pages import executorch_files, litert_files
from benchmarks.real_data import DATA
from benchmarks.report import facts
from qtoolkit.extras import install_command
from qtoolkit.runtimes.execution import ExecutedLayer
from qtoolkit.runtimes.table import EXECUTES

GOAL = "below 1, and no slower than quantize_static"
FLOAT, OURS, STATIC = "float", "qtoolkit", "quantize_static"
IN_INT8, OF_7_BITS = "qtoolkit, int8 weights", "qtoolkit, 7-bit weights"
EXECUTORCH, LITERT = "executorch", "litert"
PACKAGES = {LITERT: "ai_edge_litert"}  # where the package has another name than the runtime
Files = dict[str, tuple[Path, Sequence[ExecutedLayer]]]


@dataclass(frozen=True)
class Row:
    """One file in one runtime.

    Attributes:
        model: The model.
        runtime: The runtime.
        file: Who wrote it.
        bytes: Its size.
        milliseconds: Median time of a run.
        ratio: As a multiple of the float file's.
        spread: The widest interquartile range in the comparison, as a share of its median.
        in_integers: How many nodes of the runtime's graph compute in integers.
        in_float: How many compute in float.
        accuracy: On real data, in `unit`; None without data.
        unit: The unit of the accuracy.
    """

    model: str
    runtime: str
    file: str
    bytes: int
    milliseconds: float
    ratio: float
    spread: float
    in_integers: int
    in_float: int
    accuracy: float | None
    unit: str


def write_files(subject: Subject, folder: Path, runtime: str) -> Files:
    """Write the files of a model for a runtime; return them, with the ops that compute in the runtime, by who wrote them."""
    if runtime == EXECUTORCH:
        return {
            FLOAT: executorch_files.write_float(subject, folder / "float.pte"),
            OURS: executorch_files.write_quantized(subject, folder / "qtoolkit.pte"),
        }
    if runtime == LITERT:
        return files_of_litert(subject, folder)
    kinds = (FLOAT, OURS, STATIC, *((IN_INT8, OF_7_BITS) if runtime == "onnxruntime" else ()))
    paths = write_onnx_files(subject, folder, runtime, kinds)
    execute = EXECUTES[runtime]
    return {name: (path, execute(path, [subject.example], [], {}, True).layers) for name, path in paths.items()}


def write_onnx_files(subject: Subject, folder: Path, runtime: str, kinds: Collection[str]) -> dict[str, Path]:
    """Write the float file and other ONNX files of a model for a runtime; return them by who wrote them."""
    paths = {name: folder / f"{name}_{runtime}.onnx" for name in (FLOAT, *kinds)}
    dynamic: Any = ({0: "batch", **({2: "height", 3: "width"} if "Set5" in subject.unit else {})},)
    example = torch.cat([subject.example] * 2)  # a batch of one would fix the dimension
    torch.onnx.export(subject.model, (example,), paths[FLOAT], dynamo=True, dynamic_shapes=dynamic, verbose=False)
    own = qt.backends[runtime].qconfig
    export = partial(qt.export_onnx, example_inputs=(example,), dynamic_shapes=dynamic, verify=False)
    if OURS in paths or IN_INT8 in paths:
        prepared = calibrated(subject, example, runtime, own)
    if OURS in paths:
        export(prepared, path=paths[OURS])
    if IN_INT8 in paths:
        export(prepared, path=paths[IN_INT8], weight_codes="int8")
    if OF_7_BITS in paths:
        seven = replace(own, weight=replace(own.weight, bits=7))
        export(calibrated(subject, example, runtime, seven), path=paths[OF_7_BITS])
    if STATIC in paths:
        quantize_static(paths[FLOAT], paths[STATIC], subject.calibration)
    return paths


def calibrated(subject: Subject, example: Tensor, runtime: str, config: qt.QConfig) -> torch.nn.Module:
    """Prepare a model for a runtime with this config, and calibrate it."""
    prepared = qt.prepare(subject.model, (example,), runtime, qt.QConfigMapping().set_global(config))
    qt.calibrate(prepared, subject.calibration, progress=False)
    return prepared


def files_of_litert(subject: Subject, folder: Path) -> Files:
    """Write the files of a model for LiteRT. The float file has float ops alone; the other tool's are unknown."""
    paths, layers = litert_files.write_files(subject.model, subject.example[:1], subject.calibration, folder)
    of_file = {FLOAT: [replace(layer, integer=False) for layer in layers], OURS: layers}
    return {name: (path, of_file.get(name, ())) for name, path in paths.items()}


def quantize_static(source: Path, target: Path, batches: Sequence[Tensor], **options: Any) -> None:
    """Quantize a float file by onnxruntime's own tool, after the preparation that it asks for; options are the tool's."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter(batches)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {name: batch.numpy()}

    prepared = target.with_suffix(".prepared.onnx")
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    (name,) = (value.name for value in onnxruntime_session(prepared, 1).get_inputs())
    types = {"activation_type": quantization.QuantType.QUInt8, "weight_type": quantization.QuantType.QInt8}
    quantization.quantize_static(str(prepared), str(target), Reader(), per_channel=True, **{**types, **options})


def onnxruntime_session(path: Path, threads: int) -> Any:
    """Return a session at default optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def in_onnxruntime(path: Path, threads: int) -> Callable[[Any], Any]:
    """Return what runs a file in onnxruntime on an array."""
    session = onnxruntime_session(path, threads)
    (name,) = (value.name for value in session.get_inputs())
    return lambda x: session.run(None, {name: x})[0]


def in_openvino(path: Path, threads: int) -> Callable[[Any], Any]:
    """Return what runs a file in OpenVINO on an array."""
    import openvino

    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_NUM_THREADS": threads})
    return lambda x: compiled([x])[0]


RUN: Mapping[str, Callable[[Path, int], Callable[[Any], Any]]] = {
    "onnxruntime": in_onnxruntime,
    "openvino": in_openvino,
    EXECUTORCH: executorch_files.in_executorch,
    LITERT: litert_files.in_litert,
}


def rows_of(subject: Subject, runtime: str, folder: Path, pace: Pace, threads: int) -> Iterator[Row]:
    """Write the files of a model for a runtime, time them in turn, and measure their accuracy."""
    files = write_files(subject, folder, runtime)
    runs = {name: RUN[runtime](path, threads) for name, (path, _) in files.items()}
    x = subject.example.numpy()
    work = {ROOF if name == FLOAT else name: _timed(run, x) for name, run in runs.items()}
    timed = measure(Case(runtime, subject.name, work, GOAL), threads, pace)
    for name, run in runs.items():
        ratio = timed.ratios.get(name, 1.0)
        layers = files[name][1]
        integer = sum(layer.integer for layer in layers)
        has_one_size = runtime in (EXECUTORCH, LITERT) and "Set5" in subject.unit
        accuracy = None if subject.measure is None or has_one_size else subject.measure(on_tensors(run))
        figures = (1e-3 * timed.roof_us * ratio, ratio, timed.spread, integer, len(layers) - integer, accuracy)
        yield Row(subject.name, runtime, name, bytes_of_file(files[name][0]), *figures, subject.unit)


def _timed(run: Callable[[Any], Any], x: "np.ndarray[Any, Any]") -> Callable[[], object]:
    return lambda: run(x)


def on_tensors(run: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """Return what runs a function of arrays on tensors."""
    return lambda x: torch.from_numpy(np.array(run(x.numpy())))


def show(rows: Sequence[Row], console: Console) -> None:
    """Print a table."""
    table = Table(title=f"int8 files; goal: {GOAL}")
    for column in ("model", "runtime", "file", "KiB", "ms", "x float", "in integers", "in float", "accuracy"):
        table.add_column(column, justify="left" if column in ("model", "runtime", "file") else "right")
    for row in rows:
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.2f} {row.unit}"
        times = (f"{row.milliseconds:.2f}", f"{row.ratio:.2f}{' ~' if row.spread > 0.3 else ''}")
        size = f"{row.bytes / 1024:.0f}"
        table.add_row(row.model, row.runtime, row.file, size, *times, str(row.in_integers), str(row.in_float), accuracy)
    console.print(table)


def _is_installed(runtime: str) -> bool:
    found = find_spec(PACKAGES.get(runtime, runtime)) is not None
    if not found:
        print(f"{runtime} is not installed, and left out; run: {install_command(runtime)}.")
    return found


def main() -> None:
    """Run, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--runtimes", nargs="+", choices=RUN, default=list(RUN))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pace = Pace(10 if args.quick else 200, 2 if args.quick else 10, lambda: None)
    rows: list[Row] = []
    for name in args.only:
        torch.manual_seed(0)
        subject = SUBJECTS[name](DATA, args.quick)
        for runtime in filter(_is_installed, args.runtimes):
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows += rows_of(subject, runtime, Path(folder), pace, args.threads)
    show(rows, Console())
    if args.json is not None:
        figures = {**facts("cpu"), "threads": args.threads, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
