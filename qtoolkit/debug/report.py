"""report(): write an HTML report about a quantized model."""

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import fx, nn

from qtoolkit.debug.compare import compare
from qtoolkit.debug.page import charts, details, facts, picture, summary, tables
from qtoolkit.debug.sensitivity import Sensitivity
from qtoolkit.errors import check_flags
from qtoolkit.export.onnx import ExportResult
from qtoolkit.files import checked_path, write_atomically
from qtoolkit.instead import in_order
from qtoolkit.model_state import check_module
from qtoolkit.nn import QuantModule
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.progress import progress_bar, step
from qtoolkit.version import __version__

TEMPLATES = Path(__file__).parent / "page"


@in_order(model="model", inputs="inputs", path="path")
def report(
    model: nn.Module,
    inputs: object = None,
    path: str | os.PathLike[str] | None = None,
    *,
    float_model: nn.Module | None = None,
    accuracy: tables.Accuracy | None = None,
    sensitivity: Sensitivity | None = None,
    verification: ExportResult | tables.Verified | None = None,
    title: str | None = None,
    progress: bool = True,
) -> None:
    """Write a report about a quantized model as a single HTML file, which needs no network connection.

    The page shows the graph with the quantized ops, the weights of each channel with their ranges, the ops that stay in float
    and why, and sizes. In the graph, zoom with the wheel or + and -, move with the pointer or the arrow keys; hover over an op
    or focus it for its range, bits, scale and reason. The arguments add further sections; the last section lists omitted ones.
    The model is not changed.

    Args:
        model: The result of `qtoolkit.prepare`, `qtoolkit.quant_modules.replace` or `qtoolkit.convert`. For a model without a
            graph, the page shows its module tree.
        inputs: A tuple of inputs, a mapping of keyword inputs, or one tensor, such as a batch of real data. They are needed for
            histograms, clipped shares, multiplications and bit operations; None, or `report(model, path)`, omits these.
        path: The file to write; its folder is created. If a step fails, nothing is written.
        float_model: The original float model: with `inputs`, for the error of each layer (see `compare`).
        accuracy: A table to show: a dict of scores, or a list of dicts with the same keys.
        sensitivity: The result of `sensitivity`.
        verification: The result of `qtoolkit.export_onnx`, `qtoolkit.export.verify` or `verify_onnx`.
        title: The title of the page; None means the name of the model's class.
        progress: Show a progress bar.

    Raises:
        TypeError: An argument is of a wrong type, the model has no quantizer, or the inputs do not match its forward.
        ValueError: `float_model` is given without `inputs`, or is not the model that was quantized (see `compare`).
        RuntimeError: With inputs: a quantizer is not calibrated.

    Example:
        >>> import tempfile
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(1)), backend="tensorrt")
        >>> x = torch.rand(8, 4)
        >>> _ = qt.calibrate(prepared, [x], progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     qt.debug.report(prepared, x, folder + "/report.html", accuracy={"float": 0.91, "int8": 0.909})
        ...     page = open(folder + "/report.html").read()
        >>> "a softmax, which tensorrt computes in float" in page, "0.909" in page
        (True, True)
    """
    check_flags("report", progress=progress)
    model = check_module(model, "report")
    path = checked_path(path, "report", "report.html")
    found = verification.verification if isinstance(verification, ExportResult) else verification
    _check(inputs, float_model, accuracy, sensitivity, found)
    exported = str(replace(verification, verification=None)) if isinstance(verification, ExportResult) else ""
    with progress_bar("report", "steps", progress, total=3, after=0) as bar:
        step(bar, "comparing with the float model")
        comparison = None if float_model is None else compare(float_model, model, inputs, progress)
        step(bar, "running the inputs")
        known = facts.gather(model, inputs, comparison, sensitivity)
        step(bar, "drawing")
        page = _rendered(known, title, accuracy, found, exported)
    write_atomically(page.encode(), path)


def _check(inputs: object, float_model: object, accuracy: object, sensitivity: object, verification: object) -> None:
    if float_model is not None and inputs is None:
        raise ValueError("report: float_model requires inputs; pass inputs too, such as a batch of real data.")
    rows = [accuracy] if isinstance(accuracy, Mapping) else accuracy
    if rows is not None and (
        not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows)
    ):
        raise TypeError(
            f"report: accuracy must be a dict of scores, a list of dicts, or None, got {type(accuracy).__name__}."
        )
    for name, value, kind, wanted in (
        ("float_model", float_model, nn.Module, "a torch.nn.Module or"),
        ("sensitivity", sensitivity, Sensitivity, "the result of qtoolkit.debug.sensitivity, or"),
        (
            "verification",
            verification,
            tables.Verified,
            "the result of qtoolkit.export_onnx or qtoolkit.export.verify, or",
        ),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"report: {name} must be {wanted} None, got {type(value).__name__}.")


# ---- the page


def _rendered(
    known: facts.ReportFacts,
    title: str | None,
    accuracy: tables.Accuracy | None,
    verification: tables.Verified | None,
    exported: str,
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (TEMPLATES / "report.js").read_text()
    said = details.details_of(known)
    scores = None if accuracy is None else tables.accuracy_table(accuracy)
    drawn, why_not = _drawn(known.model)
    return environment.get_template("report.html").render(
        name=type(known.model).__name__ if title is None else title,
        backend="" if known.plan is None else known.plan.backend.name,
        versions=f"qtoolkit {__version__}, torch {torch.__version__}",
        style=(TEMPLATES / "report.css").read_text(),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        figures=summary.figures_of(known, scores, verification),
        accuracy=scores,
        pictures=drawn,
        why_no_picture=why_not,
        tree=None if drawn else _tree(known),
        details={key: asdict(detail) for key, detail in said.items()},
        errors=tables.error_table(known),
        sensitivity=tables.sensitivity_table(known),
        ranges=tables.range_table(known),
        histograms=_histograms(known),
        weights=_weights(known),
        left_float=tables.float_table(known),
        costs=tables.cost_table(known),
        verification=None if verification is None else tables.verification_tables(verification, known.titles),
        exported=exported,
        left_out=_left_out(known, accuracy, verification),
        width=charts.WIDTH,
        height=charts.HEIGHT,
    )


def _drawn(model: nn.Module) -> tuple[tuple[picture.Picture, ...], str]:
    """Return the pictures of the graph, or the reason why there are none."""
    if not isinstance(model, fx.GraphModule):
        return (), "Module replacement has no graph: the modules of the model are shown."
    try:
        return picture.draw_shapes(model), ""
    except ImportError as error:
        return (), f"The graph cannot be drawn: {error}. The ops are listed by name."


def _tree(known: facts.ReportFacts) -> picture.Branch:
    root = picture.Branch(type(known.model).__name__)
    for line in known.report.layers:
        branch = root.at(line.name)
        how = ", ".join(
            details.spec_and_range(known.quantizers[name]) for name in line.quantizers if name in known.quantizers
        )
        branch.key, branch.kind = f"op {line.name}", str(line.status)
        branch.says = f"{line.kind}: {how or line.reason or line.verdict.cause}"
    return root


def _histograms(known: facts.ReportFacts) -> list[tuple[str, str, charts.Histogram, facts.Values, str]]:
    """Return the key and the title of each quantizer with a histogram, its chart, its values and its spec."""
    found = []
    for name, values in known.values.items():
        quantizer, title = known.quantizers[name], known.titles.get(name, name)
        chart, how = charts.histogram_of(values, quantizer), quantizer.spec.describe()
        found.append((f"quantizer {name}", title, chart, values, how))
    return found


def _weights(known: facts.ReportFacts) -> list[tuple[str, charts.Channels, str, str]]:
    """Return the name of each quantized weight, its chart, its spec, and the key of its layer."""
    found, names = [], {quantizer: name for name, quantizer in known.quantizers.items()}
    layers = {module: name for name, module in known.model.named_modules() if isinstance(module, QuantModule)}
    with torch.no_grad():
        for layer, name in layers.items():
            for part, (quantizer, weight) in layer.quantized_weights().items():
                if quantizer not in names or weight.dim() < 2:
                    continue
                axis = quantizer.spec.axis
                if axis is None or quantizer.spec.group_size is not None:
                    axis = layer.OUTPUT_AXIS if isinstance(layer, QuantWeighted) else 0
                title = name if part == "weight_quantizer" else f"{name}.{layer.weight_name(part)}"
                chart = charts.channels_of(weight, axis, quantizer)
                found.append((title, chart, details.spec_and_range(quantizer), f"op {name}"))
    return found


def _left_out(known: facts.ReportFacts, accuracy: object, verification: object) -> list[tuple[str, str]]:
    """Return the omitted sections, and the argument for each."""
    wanted = [
        ("Accuracy", accuracy, 'accuracy={"float": 0.912, "int8": 0.909}'),
        ("Error of each layer", known.comparison, "float_model= and inputs="),
        ("Sensitivity", known.sensitivity, "sensitivity=qt.debug.sensitivity(model, evaluate)"),
        ("Histograms and clipped shares", known.values or None, "inputs="),
        ("Bit operations", next((True for cost in known.costs if cost.macs is not None), None), "inputs="),
        ("Verification", verification, "verification=qt.export_onnx(model, inputs, path)"),
    ]
    return [(title, what) for title, value, what in wanted if value is None]
