"""The AP of a quantized detector without non-maximum suppression: after calibration, after training, and with a recipe.

python -m benchmarks.pages.detection                        trains what is missing, writes results/detection.json, prints it
python -m benchmarks.pages.detection --bins 8 --backends tensorrt --seeds 0
python -m benchmarks.pages.detection --quick                few steps and images
python -m benchmarks.pages.detection --page docs/detection.md    writes the tables of the results into the page

The network and the shapes are in benchmarks/training/detection.py. A float model is trained from random weights for each seed,
and kept in --checkpoints. All lines of a seed start from it; "float" is the float model trained on by the schedule of the
quantized ones. Seeds take turns, so that an early end leaves as many of each. One bin: boxes are regressed as
numbers; more: by DFL.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm

import qtoolkit as qt
from benchmarks.pages.stored import commands_of, made_by, rows_before, write_part, write_rows
from benchmarks.report import facts, markdown_lines, show
from benchmarks.training.detection import (
    LAST_LAYERS,
    SIZE,
    STRIDES,
    TRAINING_HEAD,
    Data,
    Detector,
    Maps,
    Schedule,
    average_precision,
    train,
)

RESULTS = Path(__file__).parents[1] / "results" / "detection.json"
BEGIN, END = "<!-- begin: benchmarks/pages/detection.py -->", "<!-- end -->"
SEEDS, BINS = (0, 1, 2), (1, 8)
CALIBRATION = 128  # images


@dataclass(frozen=True)
class Plan:
    """How much is trained, and on what.

    Attributes:
        first: The schedule of the float model.
        then: The schedule of trainings that start from it.
        training_images: Images that are drawn for training.
        test_images: Others, for the AP.
    """

    first: Schedule
    then: Schedule
    training_images: int
    test_images: int


FULL = Plan(Schedule(700, 16, 2e-3), Schedule(100, 16, 2e-4), 2048, 400)
QUICK = Plan(Schedule(2, 4, 2e-3), Schedule(2, 4, 2e-4), 32, 8)


@dataclass(frozen=True)
class Method:
    """How a line is made.

    Attributes:
        backend: The target; None for the float model.
        last_layers: What the last convolutions of the deployed head compute in: "int8", "float" or "int16".
        trained: Whether it is trained.
        taught: Whether the head that only trains stays in float, and the outputs of its last convolutions follow the
            float model's.
    """

    backend: str | None
    last_layers: str = "int8"
    trained: bool = False
    taught: bool = False

    def prepared(self, model: nn.Module, data: Data) -> nn.Module:
        """Return the calibrated model."""
        if self.backend is None:
            return copy.deepcopy(model)
        mapping = qt.QConfigMapping()
        if self.last_layers == "int16":
            mapping.set_module_name_regex(LAST_LAYERS, qt.QConfig(qt.QuantSpec(bits=16), qt.QuantSpec()))
        exclude = [LAST_LAYERS] if self.last_layers == "float" else []
        exclude += [TRAINING_HEAD] if self.taught else []
        images = data.images[:CALIBRATION]
        quantized = qt.prepare(
            model.train(self.trained), images[:2], self.backend, qconfig_mapping=mapping, exclude=exclude
        )
        qt.calibrate(quantized, images.split(16), progress=False)
        return quantized


def _methods() -> Iterator[tuple[str, Method]]:
    yield "float", Method(None, trained=True)
    for backend in ("tensorrt", "qnn"):
        widths = "int8", "float" if backend == "tensorrt" else "int16"  # Qualcomm's processor has no float
        for trained in (False, True):
            for taught in (False, True) if trained else (False,):
                for width in widths:
                    words = [backend, "trained" if trained else "calibrated", f"last layers {width}"]
                    yield ", ".join([*words, *["taught"] * taught]), Method(backend, width, trained, taught)


METHODS: Mapping[str, Method] = dict(_methods())


@dataclass(frozen=True)
class Row:
    """What a method gave.

    Attributes:
        method: A name of METHODS.
        bins: The bins of a distance; 1 without DFL.
        seed: The seed of the float model and of the training.
        before: AP before the training, over IoU 0.50 to 0.95, in percent; the method's where it does not train.
        ap: The same at the end.
        ap50: AP at IoU 0.50 at the end.
        minutes: How long it took.
    """

    method: str
    bins: int
    seed: int
    before: float = 0.0
    ap: float = 0.0
    ap50: float = 0.0
    minutes: float = 0.0

    @property
    def key(self) -> tuple[str, int, int]:
        """What it is a figure of."""
        return self.method, self.bins, self.seed


def float_model(bins: int, seed: int, plan: Plan, data: Data, folder: Path) -> Detector:
    """Return the float model, trained or as an earlier run has left it."""
    torch.manual_seed(seed)
    model, kept = Detector(bins), folder / f"detector_{bins}_{seed}_{plan.first.steps}.pt"
    if kept.exists():
        model.load_state_dict(torch.load(kept, weights_only=True))
        return model.eval()
    with tqdm(total=plan.first.steps, desc=f"float model, {bins} bins, seed {seed}", mininterval=5, leave=False) as bar:
        train(model, data, plan.first, seed, bar.update)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), kept)
    return model


def teacher_of(model: nn.Module, student: nn.Module) -> Callable[[Tensor, tuple[Maps, Maps]], Tensor]:
    """Return the loss that draws the head that only trains towards the float model's, which sees several places as a shape."""
    features = [f"{TRAINING_HEAD}.{part}.{scale}.2" for part in ("boxes", "classes") for scale in range(len(STRIDES))]
    return qt.tuning.Distillation(student, model, features=features, logits_weight=0.0)


def measure(row: Row, model: Detector, plan: Plan, data: Data, test: Data) -> Row:
    """Quantize, train and test."""
    method, start = METHODS[row.method], time.perf_counter()
    torch.manual_seed(row.seed)
    changed = method.prepared(copy.deepcopy(model), data)
    before = after = average_precision(changed.eval(), test)
    if method.trained:
        teacher = teacher_of(model, changed) if method.taught else None
        with tqdm(total=plan.then.steps, desc=" ".join(map(str, row.key)), mininterval=5, leave=False) as bar:
            after = average_precision(train(changed, data, plan.then, row.seed, bar.update, teacher), test)
    minutes = (time.perf_counter() - start) / 60
    return replace(row, before=before.mean, ap=after.mean, ap50=after.at_half, minutes=minutes)


def tables(results: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the title, the names of columns and the lines of a table for each number of bins."""
    rows = [Row(**row) for row in results["rows"]]
    first, then = results["plan"]["first"], results["plan"]["then"]
    for bins in sorted({row.bins for row in rows}):
        of = [row for row in rows if row.bins == bins]
        boxes = "boxes as numbers" if bins == 1 else f"boxes by DFL of {bins} bins"
        title = (
            f"Detector of {SIZE}x{SIZE} pixels, {boxes}: COCO's AP (IoU 0.50 to 0.95) on {results['plan']['test_images']} "
            f"images of shapes, in %; trained for {first['steps']:,} steps in float, then {then['steps']:,} "
            f"of {then['batch']} images"
        )
        names = [
            "target",
            "how",
            "last layers",
            "teacher",
            "seeds",
            "AP",
            "spread",
            "vs. float",
            "vs. float, trained",
            "AP50",
        ]
        yield title, names, list(_lines(of))


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    floats = {row.seed: row for row in rows if row.method == "float"}
    for name, method in METHODS.items():
        of = [row for row in rows if row.method == name and row.seed in floats]
        if not of:
            continue
        if method.backend is None:
            yield [
                "float",
                "as it is",
                "",
                "",
                *_figures([replace(row, ap=row.before, ap50=None) for row in of], floats),
            ]
            yield ["float", "trained on", "", "", *_figures(of, floats)]
            continue
        how = "trained" if method.trained else "calibrated"
        yield [method.backend, how, method.last_layers, "float" if method.taught else "", *_figures(of, floats)]


def _figures(rows: Sequence[Row], floats: Mapping[int, Row]) -> list[str]:
    aps = [row.ap for row in rows]
    beside = [
        statistics.mean(row.ap - of(floats[row.seed]) for row in rows) for of in (lambda f: f.before, lambda f: f.ap)
    ]
    at_half = "" if rows[0].ap50 is None else f"{statistics.mean(row.ap50 for row in rows):.1f}"
    spread = f"{max(aps) - min(aps):.1f}"
    return [str(len(rows)), f"{statistics.mean(aps):.1f}", spread, *(f"{each:+.2f}" for each in beside), at_half]


def page_lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Return the part of the page."""
    for title, names, lines in tables(results):
        yield from ("", f"{title}. Made by {made_by(results)} ({results['cpu']}, torch {results['torch']}).", "")
        yield from markdown_lines(names, lines)
    yield ""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the file of results lacks, and return all results."""
    plan = QUICK if args.quick else FULL
    settings = {"plan": asdict(plan)}
    rows = [Row(**row) for row in rows_before(args.out, settings)]
    done = {row.key for row in rows}
    names = [name for name in args.only if METHODS[name].backend in (None, *args.backends)]
    wanted = [Row(name, bins, seed) for seed in args.seeds for bins in args.bins for name in names]
    missing = [row for row in wanted if row.key not in done]
    if not missing:
        return dict(json.loads(args.out.read_text()))
    data, test = Data.drawn(plan.training_images, 0), Data.drawn(plan.test_images, 1)
    results: dict[str, Any] = {**facts("cpu"), **settings, "commands": commands_of(args.out), "threads": args.threads}
    for row in tqdm(missing, desc="lines"):
        model = float_model(row.bins, row.seed, plan, data, args.checkpoints)
        rows.append(measure(row, model, plan, data, test))
        write_rows(args.out, results, [asdict(each) for each in rows])
    return {**results, "rows": [asdict(row) for row in rows]}


def main() -> None:
    """Measure, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--backends", nargs="+", choices=("tensorrt", "qnn"), default=["tensorrt", "qnn"])
    parser.add_argument("--bins", type=int, nargs="+", default=BINS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few steps and images")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/detection"), help="folder for float models")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="write the tables of --out into this page, and measure nothing")
    args = parser.parse_args()
    if args.page is not None:
        return write_part(args.page, BEGIN, END, list(page_lines(json.loads(args.out.read_text()))))
    torch.set_num_threads(args.threads)
    results = run(args)
    for title, names, lines in tables(results):
        show(Console(width=160), title, names, lines)
    return None


if __name__ == "__main__":
    main()
