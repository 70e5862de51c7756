"""The first hour with an engine of TensorRT 11: int8 beside float16, from qtoolkit's files and Model Optimizer's.

python -m benchmarks.pages.tensorrt --write       all networks; writes results/tensorrt.json and the table of docs/tensorrt.md
python -m benchmarks.pages.tensorrt rows.json     adds rows that another machine has measured, and writes the table
python -m benchmarks.pages.tensorrt --quick --networks ResNet-50     whether the program runs, on a small network

Of each network it builds the engines of four files, and prints what each layer computes in, the median time of a run, the error
of the outputs, and how many quantized values are others than in PyTorch, end to end and layer by layer. Weights are random: the
errors compare a file with its model, and say nothing of accuracy on images. It needs a GPU, and the packages tensorrt (11 or
newer), onnx, onnxruntime and onnxscript. The file of Model Optimizer is there where nvidia-modelopt[onnx] is installed.
"""

import argparse
import copy
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtoolkit as qt
from benchmarks.export_models import random_weights
from benchmarks.pages.gpu import cell, where
from benchmarks.pages.gpu_networks import FUSED, NETWORKS, Detector, Network
from benchmarks.pages.stored import write_part, write_rows
from benchmarks.pages.tensorrt_engine import Engine, executed, what_is_missing
from qtoolkit.config.formats import FloatType
from qtoolkit.export.files.files import OpenedFile
from qtoolkit.export.float16 import casting_ends, in_type
from qtoolkit.export.inputs import ExportSource
from qtoolkit.export.verification.codes import CodeCount, relative_difference
from qtoolkit.export.verification.deployed import RuntimeCodes, compare_execution
from qtoolkit.export.verification.follower import Follower
from qtoolkit.export.verification.verify import OnnxFile
from qtoolkit.model_inputs import tensors_of

Row = dict[str, Any]
OUT = Path(__file__).parents[1] / "results" / "tensorrt.json"
PAGE = Path(__file__).parents[2] / "docs" / "tensorrt.md"
BEGIN, END = (
    "<!-- Written by benchmarks/pages/tensorrt.py: change nothing up to the next mark. -->",
    "<!-- End of its table. -->",
)
NOT_RUN = "Not run: `make tensorrt` has not been run on a machine with a GPU and TensorRT 11."
NANO = "YOLO, n"
ENGINES = {name: NETWORKS[name] for name in ("ResNet-50", "MobileNetV2", FUSED)} | {
    NANO: Network(partial(Detector, width=16), 640)
}


class Float16(nn.Module):
    """A model in float16 that takes and returns float32, as the files of quantized models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half()

    def forward(self, x: Tensor) -> Any:
        """Return the model's outputs."""
        y = self.model(x.half())
        return y.float() if isinstance(y, Tensor) else tuple(each.float() for each in y)


@dataclass(frozen=True)
class Case:
    """A float network with random weights, and a batch."""

    model: nn.Module
    x: Tensor

    @classmethod
    def of(cls, network: Network, count: int, quick: bool) -> "Case":
        """Return a network with a batch of so many images."""
        torch.manual_seed(0)
        size, most = (64, 1) if quick else (network.size, 99)
        return cls(random_weights("", network.build(size, most), size).model, torch.randn(count, 3, size, size))

    @cached_property
    def outputs(self) -> list[Tensor]:
        """What the model returns in float32."""
        with torch.no_grad():
            return tensors_of(self.model(self.x))

    @cached_property
    def converted(self) -> nn.Module:
        """The model quantized for TensorRT 11."""
        prepared = qt.prepare(self.model, self.x, backend="tensorrt")
        qt.calibrate(prepared, [self.x], progress=False)
        return qt.convert(prepared)


def write_float(case: Case, path: Path) -> None:
    """Write the model in float16 by torch's exporter; inputs and outputs are float32."""
    _write(Float16(copy.deepcopy(case.model)), case.x, path)


def _write(model: nn.Module, x: Tensor, path: Path) -> None:
    names = {"input_names": ["x"], "opset_version": 19, "external_data": False, "verbose": False}
    torch.onnx.export(model.eval(), (x,), str(path), **names)


def write_quantized(case: Case, path: Path, float_type: FloatType = "float16") -> None:
    """Write the quantized model. Its values are compared on the engine, not in onnxruntime."""
    qt.export_onnx(case.converted, case.x, path, float_type=float_type, verify=False, progress=False)


def write_theirs(case: Case, path: Path) -> None:
    """Let Model Optimizer quantize the float model's file on the same images: int8, and float16 elsewhere."""
    from modelopt.onnx.quantization import quantize

    source = path.with_name("float32.onnx")
    _write(case.model, case.x, source)
    images = {"x": case.x.numpy()}
    chosen = {"calibration_data": images, "calibration_eps": ["cpu"], "high_precision_dtype": "fp16"}
    quantize(str(source), "int8", output_path=str(path), log_level="ERROR", **chosen)


@dataclass(frozen=True)
class File:
    """A file of a network.

    Attributes:
        write: Writes it.
        references: The types of PyTorch's model with which values are compared. In float16 a layer rounds its result before it
            is quantized, which an int8 kernel need not do.
    """

    write: Callable[[Case, Path], None]
    references: tuple[FloatType, ...] = ()


FLOAT = "float16"
FILES = {
    FLOAT: File(write_float),
    "int8, float16 file": File(write_quantized, ("float16", "float32")),
    "int8, float32 file": File(partial(write_quantized, float_type="float32"), ("float32",)),
}
if find_spec("modelopt"):
    FILES["int8, Model Optimizer"] = File(write_theirs)


def compared(
    engine: Engine, path: Path, case: Case, references: Sequence[FloatType], device: str
) -> dict[str, RuntimeCodes]:
    """Compare an engine's quantized values with PyTorch's models of some types, as `qtoolkit.export.verify` does."""
    file, found = OnnxFile(path, OpenedFile.of(path), case.converted, [case.x], optimized=True), {}
    execution, nodes = file.executed_by(lambda path, x, nodes, *_: executed(engine, path, x, nodes, device))
    for float_type in references:
        model = in_type(float_type, ExportSource.of(case.converted, (case.x,), "benchmarks.pages.tensorrt")).model
        with casting_ends(model) if float_type == "float16" else nullcontext():
            follower = Follower(model, (case.x,), {})
            names = [name for name in follower.codes if name not in file.constants]
            of = (follower, execution, nodes, names, file.smooth_outputs, file.compare_weights(follower))
            found[float_type] = compare_execution(*of)
    return found


def measured(case: Case, of: File, device: str, repeats: int) -> Row:
    """Return the figures of a file's engine.

    Returns:
        milliseconds: The median of the runs of a batch.
        layers: How many layers compute in each type.
        every_layer: Type, kernel and name of each; those that convert are in it, and not in `layers`.
        output_error: The largest difference from the float32 model, as a share of the largest output.
        codes: The comparison of quantized values with PyTorch's model in each type (`codes_of`).
        not_compared: Why there is none, though the file asks for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        of.write(case, path)
        engine = Engine(path, device)
        outputs = engine.run([case.x])
        layers = engine.layers()
        pairs = zip(case.outputs, outputs.values(), strict=True)
        row: Row = {
            "milliseconds": engine.milliseconds(repeats),
            "engine_bytes": engine.bytes,
            "layers": dict(Counter(layer.precision for layer in layers if not layer.converts)),
            "conversions": sum(layer.converts for layer in layers),
            "every_layer": list(map(str, layers)),
            "output_error": max(relative_difference(ours, theirs.numpy()) for ours, theirs in pairs),
            "codes": {},
        }
        try:
            found = compared(engine, path, case, of.references, device) if of.references else {}
            row["codes"] = {float_type: codes_of(each) for float_type, each in found.items()}
        except Exception as error:  # such as an engine that does not return codes: the times hold all the same
            row["not_compared"] = why(error)
        return row


def why(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def codes_of(found: RuntimeCodes) -> Row:
    """Return the counts of a comparison: how many values were compared, how many differ, and by how many steps at most.

    Returns:
        end_to_end: Each as PyTorch's model computes it by itself.
        layer_by_layer: Each as it computes it from the engine's values before: no difference spreads.
        by_quantizer: Both at each quantizer.
        changed_by_reading: What returning the values changes in the engine's outputs (`tensorrt_engine.executed`).
    """
    layers = found.layer_by_layer or {}
    by_quantizer = {name: [_counts(n), _counts(layers.get(name, n))] for name, n in found.by_quantizer.items()}
    return {
        "end_to_end": _counts(found.codes),
        "layer_by_layer": _counts(found.layer_codes),
        "by_quantizer": by_quantizer,
        "not_compared": list(found.not_compared),
        "changed_by_reading": found.changed_by_reading,
    }


def _counts(count: CodeCount) -> list[int]:
    return [count.compared, count.differing, count.steps]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the figures of each network's files, or why there are none."""
    for network in args.networks or ENGINES:
        case = Case.of(ENGINES[network], args.batch, args.quick)
        base = None
        for name in [each for each in FILES if each == FLOAT or each in (args.files or FILES)]:
            row: Row = {"network": network, "batch": args.batch, "file": name}
            try:
                row |= measured(case, FILES[name], args.device, 3 if args.quick else 200)
            except Exception as error:  # a file of which there is no engine is a result
                row["failed"] = why(error)
            base = row.get("milliseconds") if name == FLOAT else base
            row["of_float16"] = row["milliseconds"] / base if base and "milliseconds" in row else None
            show(row)
            yield row


def show(row: Row) -> None:
    """Print the figures of an engine, and the layers that compute in float32."""
    head = f"{row['network']:17} {row['batch']:4} {row['file']:23}"
    if "failed" in row:
        print(f"{head} no engine: {row['failed']}", flush=True)
        return
    types = ", ".join(f"{count} {name}" for name, count in row["layers"].items())
    print(f"{head} {row['milliseconds']:.3f} ms, {cell(row['of_float16'], '.2f')} of float16's; layers: {types}; "
          f"{row['conversions']} conversions; output error {row['output_error']:.1e}", flush=True)  # fmt: skip
    if "not_compared" in row:
        print(f"  quantized values are not compared: {row['not_compared']}")
    for float_type, of in row["codes"].items():
        shares = [_share(of[how]) for how in ("end_to_end", "layer_by_layer")]
        print(f"  values other than the {float_type} model's: {shares[0]}; layer by layer {shares[1]}")
        for name, (_, layer) in sorted(of["by_quantizer"].items(), key=lambda item: -item[1][1][1])[:5]:
            if layer[1]:
                print(f"    {name}: {_share(layer)}")
    print(*(f"    {layer}" for layer in row["every_layer"]), sep="\n", flush=True)


def _share(counts: Sequence[int]) -> str:
    compared, differing, steps = counts
    return f"{differing:,} of {compared:,}, by at most {steps}"


def add(rows: Sequence[Row], out: Path) -> list[Row]:
    """Merge rows into a file, where they replace earlier ones of the same engine; return all rows in the table's order."""
    before = json.loads(out.read_text())["rows"] if out.exists() else []
    every = {_place(row): row for row in (*before, *rows)}
    found = [every[place] for place in sorted(every)]
    write_rows(out, {}, found)
    return found


def _place(row: Row) -> tuple[Any, ...]:
    names = [*FILES, "int8, Model Optimizer", row["file"]]
    return row["card"], row["tensorrt"], [*ENGINES].index(row["network"]), row["batch"], names.index(row["file"])


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield ""
    if not rows:
        yield from (NOT_RUN, "")
    for card, release in dict.fromkeys((row["card"], row["tensorrt"]) for row in rows):
        of = [row for row in rows if (row["card"], row["tensorrt"]) == (card, release)]
        torches, commits = (", ".join(sorted({row[name] for row in of})) for name in ("torch", "commit"))
        yield f"Measured on one {card} with TensorRT {release}, torch {torches}, at {commits}."
        yield from ("", "| network | batch | file | ms | of float16's | layers: int8 | float16 | float32 | other | conversions "
                    "| output error | values other than the float16 model's | layer by layer | than the float32 model's "
                    "| layer by layer |", "|---" * 15 + "|")  # fmt: skip
        yield from (_line(row) for row in of if "failed" not in row)
        yield ""
        missing = {"failed": "No engine", "not_compared": "Values not compared"}
        notes = [
            f"- {what}: {row['network']}, {row['file']}: {row[key]}."
            for key, what in missing.items()
            for row in of
            if key in row
        ]
        yield from (*notes, *[""] * bool(notes))


def _line(row: Row) -> str:
    known = ("int8", "float16", "float32")
    layers = [row["layers"].get(name, 0) for name in known]
    layers.append(sum(row["layers"].values()) - sum(layers))
    places = [(type_, how) for type_ in ("float16", "float32") for how in ("end_to_end", "layer_by_layer")]
    counts = [row["codes"].get(type_, {}).get(how) for type_, how in places]
    shares = ["-" if count is None else f"{count[1] / max(count[0], 1):.2%}" for count in counts]
    cells = [row["network"], row["batch"], row["file"], f"{row['milliseconds']:.3f}", cell(row["of_float16"], ".2f"), *layers,
             row["conversions"], f"{row['output_error']:.1e}", *shares]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measure and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path, help="files of rows that are added, and nothing is measured")
    parser.add_argument("--networks", nargs="+", choices=ENGINES)
    parser.add_argument("--files", nargs="+", choices=FILES, help="beside float16's")
    parser.add_argument("--batch", type=int, default=8, help="its images, which PyTorch computes on the processor")
    parser.add_argument("--device", default="cuda", help="cpu is for the stand-in of tensorrt in tests/")
    parser.add_argument("--quick", action="store_true", help="small images, short networks")
    parser.add_argument("--out", type=Path, help="a file that each row is added to as it is measured")
    parser.add_argument("--commit", help="for rows, where the folder is not git's")
    parser.add_argument("--write", action="store_true", help="results/tensorrt.json, and at the end the table")
    args = parser.parse_args()
    if args.rows:
        found = [row for file in args.rows for row in json.loads(file.read_text())["rows"]]
        write_part(PAGE, BEGIN, END, [*table(add(found, OUT))])
        return
    missing = what_is_missing(args.device)
    if missing:
        raise SystemExit(" ".join(["No engine was built, and nothing was written.", *missing]))
    import tensorrt

    of = {**where(args), "tensorrt": tensorrt.__version__}
    outs = [out for out in (args.out, args.write and OUT) if out]
    for row in measure(args):
        for out in outs:
            add([row | of], out)
    if args.write:
        write_part(PAGE, BEGIN, END, [*table(add([], OUT))])


if __name__ == "__main__":
    main()
