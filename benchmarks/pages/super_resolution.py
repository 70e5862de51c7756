"""The PSNR of a quantized super-resolution network with a deconvolution: FSRCNN x2 on Set5, after calibration and training.

python -m benchmarks.pages.super_resolution            measures what is missing, writes results/super_resolution.json, prints it
python -m benchmarks.pages.super_resolution --bits W8A8 --only "minmax" "lsq" --seeds 0
python -m benchmarks.pages.super_resolution --quick    few steps and one test image
python -m benchmarks.pages.super_resolution --page docs/accuracy.md  writes the tables of the results into the page

Every line starts from the float weights of shared/data; the first and the last layer have eight bits. Ranges come from 128
training patches. Trainings minimize the squared error on random crops of the patches; "float" is the float model trained by
the same schedule, from which the cost of quantization follows. Seeds take turns, so that an early end leaves as many of each.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn
from tqdm import tqdm

import qtoolkit as qt
from benchmarks.pages.stored import commands_of, made_by, rows_before, write_part, write_rows
from benchmarks.real_data import DATA, MISSING
from benchmarks.report import facts, markdown_lines, show
from benchmarks.training.super_resolution import Data, Schedule, float_model, load, psnr, quantized, train

RESULTS = Path(__file__).parents[1] / "results" / "super_resolution.json"
BEGIN, END = "<!-- begin: benchmarks/pages/super_resolution.py -->", "<!-- end -->"
SEEDS = (0, 1, 2)
FULL, QUICK = Schedule(2000, 4, 32, 5e-4, 1e-4), Schedule(2, 2, 16, 5e-4, 1e-4)
TEST_IMAGES, QUICK_TEST_IMAGES = 5, 1
ROUNDING_STEPS, QUICK_ROUNDING_STEPS = 200, 2


class Bits(NamedTuple):
    """The bits of weights and activations; those of the first and the last layer are at least eight."""

    weight: int
    activation: int

    def __str__(self) -> str:
        return f"W{self.weight}A{self.activation}"


ALL_BITS = tuple(Bits(*bits) for bits in ((8, 8), (4, 8), (4, 4), (8, 16), (16, 8)))
TRAINED_BITS = ALL_BITS[:3]
AFFINE = {"signed": False, "symmetric": False}
HISTOGRAM = {"observer": "histogram"}


@dataclass(frozen=True)
class Method:
    """How a line is made: the specs of activations and weights without their bits, and what follows calibration.

    Attributes:
        activation: Fields of the QuantSpec of activations; None for the float model.
        weight: Fields of that of weights.
        finish: Takes the calibrated model and the data, and improves the model; None for nothing.
        before: Changes the float model before it is prepared.
        trained: Whether it is trained.
        share: Of the output channels of each weight, which a step of the training updates.
        backend: The backend for which the model is prepared.
    """

    activation: Mapping[str, Any] | None
    weight: Mapping[str, Any]
    finish: Callable[[nn.Module, Data, bool], object] | None = None
    before: Callable[[nn.Module, Data], nn.Module] | None = None
    trained: bool = False
    share: float = 1.0
    backend: str = "academic"

    def qconfig(self, bits: Bits) -> qt.QConfig:
        """Return the config of all layers.

        Raises:
            ValueError: The quantizer does not take these bits.
        """
        activation = qt.QuantSpec(bits=bits.activation, **(self.activation or {}))
        return qt.QConfig(activation, qt.QuantSpec(bits=bits.weight, axis=0, **self.weight))


def _equalized(model: nn.Module, data: Data) -> nn.Module:
    return qt.tuning.equalize(model, data.low[:4]).model


def _balanced(model: nn.Module, data: Data, backend: str = "academic") -> nn.Module:
    return qt.tuning.equalize(model, data.low[:64], activations=0.5, backend=backend).model


def _biases(model: nn.Module, data: Data, quick: bool) -> None:
    qt.tuning.bias_correction(model, data.calibration, progress=False)


def _adaround(model: nn.Module, data: Data, quick: bool) -> None:
    steps = QUICK_ROUNDING_STEPS if quick else ROUNDING_STEPS
    qt.tuning.reconstruct(model, data.calibration, method="adaround", steps=steps, progress=False)


def _observed(method: str) -> Mapping[str, Any]:
    return {**AFFINE, **HISTOGRAM, "observer_args": {"method": method}}


def _learned(activation: str, weight: str, **more: Any) -> Method:
    return Method({"quantizer": activation, **HISTOGRAM, **more}, {"quantizer": weight, **HISTOGRAM}, trained=True)


MSE = _observed("mse")
CALIBRATED: Mapping[str, Method] = {
    "minmax": Method(AFFINE, {}),
    "minmax, symmetric": Method({}, {}),
    "clip_std": Method({**AFFINE, "observer": "clip_std"}, {}),
    **{method: Method(_observed(method), {}) for method in ("mse", "l2", "entropy", "percentile")},
    "mse, weights too": Method(MSE, HISTOGRAM),
    "mse, equalized": Method(MSE, HISTOGRAM, before=_equalized),
    "mse, balanced": Method(MSE, HISTOGRAM, before=_balanced),
    "mse, corrected biases": Method(MSE, HISTOGRAM, _biases),
    "mse, adaround": Method(MSE, {}, _adaround),
    "mse, weights too, onnxruntime": Method(MSE, HISTOGRAM, backend="onnxruntime"),
    "mse, balanced, onnxruntime": Method(
        MSE, HISTOGRAM, before=partial(_balanced, backend="onnxruntime"), backend="onnxruntime"
    ),
}
# Quantizers of activations; those of weights are "lsq" where the first is for activations alone.
TRAINED: Mapping[str, Method] = {
    "fixed": Method(MSE, {}, trained=True),
    "lsq": _learned("lsq", "lsq"),
    "lsq, a quarter of the channels": replace(_learned("lsq", "lsq"), share=0.25),
    "lsq, no weights": replace(_learned("lsq", "lsq"), share=0),
    "lsq_plus": _learned("lsq_plus", "lsq", **AFFINE),
    "learned_range": _learned("learned_range", "lsq", **AFFINE),
    "pact": _learned("pact", "lsq"),
    "fixed, balanced": Method(MSE, HISTOGRAM, before=_balanced, trained=True),
    "lsq_plus, balanced": replace(_learned("lsq_plus", "lsq", **AFFINE), before=_balanced),
}
FLOAT = "float"
METHODS: Mapping[str, Method] = {FLOAT: Method(None, {}, trained=True), **CALIBRATED, **TRAINED}


@dataclass(frozen=True)
class Row:
    """What a method gave.

    Attributes:
        method: A name of METHODS.
        bits: The name of its bits; "" for the float model.
        seed: That of the training, 0 without one.
        calibrated: PSNR of the Y plane before the training, in dB; that of the method where it does not train.
        y: The same at the end.
        planes: PSNR of all planes at the end.
        minutes: How long it took.
        failure: Why there is no figure.
    """

    method: str
    bits: str
    seed: int
    calibrated: float | None = None
    y: float | None = None
    planes: float | None = None
    minutes: float = 0.0
    failure: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is a figure of."""
        return self.method, self.bits, self.seed


def wanted(methods: Sequence[str], bits: Sequence[str], seeds: Sequence[int]) -> Iterator[Row]:
    """Yield the rows to measure, without figures: calibrated ones once, trained ones with each seed."""
    for seed in seeds:
        for name in methods:
            if METHODS[name].trained or seed == seeds[0]:
                yield from (Row(name, each, seed) for each in _bits_of(name, bits))


def _bits_of(name: str, bits: Sequence[str]) -> list[str]:
    if name == FLOAT:
        return [""]
    return [str(each) for each in (TRAINED_BITS if METHODS[name].trained else ALL_BITS) if str(each) in bits]


def measure(row: Row, folder: Path, data: Data, schedule: Schedule, quick: bool) -> Row:
    """Quantize, train and test, or say why that cannot be."""
    method, model, start = METHODS[row.method], float_model(folder), time.perf_counter()
    torch.manual_seed(row.seed)
    try:
        if method.before is not None:
            model = method.before(model, data)
        if method.activation is not None:
            bits = next(bits for bits in ALL_BITS if str(bits) == row.bits)
            model = quantized(model.train(method.trained), data, method.qconfig(bits), method.backend)
    except ValueError as error:
        return replace(row, failure=str(error))
    before = psnr(model.eval(), data)["y"]
    if method.finish is not None:
        method.finish(model, data, quick)
    if method.trained:
        with tqdm(total=schedule.steps, desc=" ".join(map(str, row.key)), mininterval=5, leave=False) as bar:
            model = train(model, data, schedule, row.seed, bar.update, method.share)
    return replace(row, calibrated=before, minutes=(time.perf_counter() - start) / 60, **psnr(model, data))


def tables(results: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the title, the names of columns and the lines of both tables."""
    rows, of_float = [Row(**row) for row in results["rows"]], results["float_model"]
    columns = [str(bits) for bits in ALL_BITS if any(row.bits == str(bits) for row in rows)]
    lines = []
    for name in CALIBRATED:
        found = {row.bits: row for row in rows if row.method == name and row.y is not None}
        if found:
            lines.append([name, *(_difference(found.get(bits), of_float) for bits in columns)])
    title = f"FSRCNN x2, Set5, calibrated: PSNR of Y less the float model's {of_float['y']:.3f}, dB"
    yield title, ["method", *columns], lines
    names = [
        "bits",
        "quantizer",
        "seeds",
        "calibrated",
        "mean",
        "spread",
        "to float",
        "to float, trained",
        "all planes",
    ]
    schedule = results["schedule"]
    title = (
        f"FSRCNN x2, Set5, trained: PSNR of Y, dB; {schedule['steps']:,} steps of {schedule['batch']} crops of "
        f"{schedule['crop']}x{schedule['crop']}; float model {of_float['y']:.3f}"
    )
    yield title, [*names, "remark"], list(_trained_lines(rows, of_float["y"]))


def _difference(row: Row | None, of_float: Mapping[str, float]) -> str:
    return "" if row is None or row.y is None else f"{row.y - of_float['y']:+.3f}"


def _trained_lines(rows: Sequence[Row], of_float: float) -> Iterator[list[str]]:
    floats = [row.y for row in rows if row.method == FLOAT and row.y is not None]
    for bits in ["", *map(str, TRAINED_BITS)]:
        for name in [FLOAT, *TRAINED]:
            of = [row for row in rows if (row.method, row.bits) == (name, bits)]
            trained = [row.y for row in of if row.y is not None]
            if not trained:
                yield from ([bits, name, *[""] * 7, row.failure] for row in of[:1])
                continue
            mean = statistics.mean(trained)
            beside = f"{mean - statistics.mean(floats):+.3f}" if floats else ""
            figures = [
                f"{statistics.mean(row.calibrated or 0 for row in of):.3f}",
                f"{mean:.3f}",
                f"{max(trained) - min(trained):.3f}",
                f"{mean - of_float:+.3f}",
                beside,
                f"{statistics.mean(row.planes or 0 for row in of):.3f}",
            ]
            yield [bits or "float", name if bits else "", str(len(trained)), *figures, ""]


def page_lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Return the part of the page."""
    for title, names, lines in tables(results):
        if lines:
            made = f"{title}. Made by {made_by(results)} ({results['cpu']}, torch {results['torch']})."
            yield from ("", made, "", *markdown_lines(names, lines))
    yield ""


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure what the file of results lacks, and return all results."""
    schedule = QUICK if args.quick else FULL
    schedule = replace(schedule, steps=args.steps or schedule.steps)
    settings = {"schedule": asdict(schedule), "test_images": QUICK_TEST_IMAGES if args.quick else TEST_IMAGES}
    rows = [Row(**row) for row in rows_before(args.out, settings)]
    done = {row.key for row in rows}
    missing = [row for row in wanted(args.only, args.bits, args.seeds) if row.key not in done]
    if not missing:
        return dict(json.loads(args.out.read_text()))
    data = load(folder, settings["test_images"])
    results: dict[str, Any] = {
        **facts("cpu"),
        **settings,
        "commands": commands_of(args.out),
        "threads": args.threads,
        "float_model": psnr(float_model(folder), data),
    }
    for row in tqdm(missing, desc="lines"):
        rows.append(measure(row, folder, data, schedule, args.quick))
        write_rows(args.out, results, [asdict(each) for each in rows])
    return {**results, "rows": [asdict(row) for row in rows]}


def main() -> None:
    """Measure, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    names = [str(bits) for bits in ALL_BITS]
    parser.add_argument("--bits", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, help="of a training; other steps need another --out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few steps, and one test image")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="write the tables of --out into this page, and measure nothing")
    args = parser.parse_args()
    if args.page is not None:
        return write_part(args.page, BEGIN, END, list(page_lines(json.loads(args.out.read_text()))))
    if DATA is None:
        parser.error(MISSING)
    torch.set_num_threads(args.threads)
    results = run(args, DATA)
    for title, names, lines in tables(results):
        show(Console(width=160), title, names, lines)
    return None


if __name__ == "__main__":
    main()
