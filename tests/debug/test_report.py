"""report(): what stands in the page equals plain computations; hostile names, both routes, all quantizers, errors."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.debug.page import charts, facts, picture, tables
from qtoolkit.export.verification.codes import CodeCount
from qtoolkit.extras import install_command
from tests.nets import ConvNet

SHAPE = (4, 3, 8, 8)


class Content(HTMLParser):
    """The text of a page by section, its tags and attributes, and its tables."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.sections: dict[str, str] = {"": ""}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.details: dict[str, Any] = {}
        self.within, self.table, self.raw = "", "", ""
        self.text = path.read_text()
        self.feed(self.text)
        self.details = json.loads(self.text.split('id="details">')[1].split("</script>")[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "section":
            self.within = found["id"] or ""
            self.sections[self.within] = ""
        elif tag == "table":
            self.table = found["id"] or ""
            self.tables[self.table] = []
        elif tag == "tr":
            self.tables[self.table].append([])
        elif tag in ("td", "th"):
            self.tables[self.table][-1].append("")
        self.raw = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self.within = "" if tag == "section" else self.within
        self.table = "" if tag == "table" else self.table

    def handle_data(self, data: str) -> None:
        if self.raw:
            return
        self.sections[self.within] += data
        if self.table and self.tables[self.table] and self.tables[self.table][-1]:
            self.tables[self.table][-1][-1] += data.strip()

    def column(self, table: str, title: str) -> dict[str, str]:
        """Return a column of a table by the first cell of each row."""
        head, *rows = self.tables[table]
        return {row[0]: row[head.index(title)] for row in rows}


def calibrated(
    model: nn.Module | None = None, route: str = "graph", backend: str = "tensorrt10", **options: Any
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, x = (ConvNet() if model is None else model).eval(), torch.randn(SHAPE)
    if route == "graph":
        quantized = qt.prepare(model, backend=backend, **options)
    else:
        quantized = qt.quant_modules.replace(model, options.get("qconfig_mapping"), backend="tensorrt10")
    qt.calibrate(quantized, [x], progress=False)
    return model, quantized


def page_of(model: nn.Module, folder: Path, **options: Any) -> Content:
    qt.debug.report(model, path=folder / "out" / "report.html", progress=False, **options)
    return Content(folder / "out" / "report.html")


def test_every_section_is_there_with_all_arguments(tmp_path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime, which is not installed")
    mapping = qt.QConfigMapping().set_object_type(nn.ConvTranspose2d, None)
    model, prepared = calibrated(backend="onnxruntime", qconfig_mapping=mapping)
    x = torch.randn(SHAPE)
    result = qt.debug.compare(model, prepared, x, progress=False)
    scores = qt.debug.sensitivity(prepared, lambda m: float((m(x) - model(x)).square().mean().detach()), progress=False)
    exported = qt.export_onnx(prepared, (x,), tmp_path / "model.onnx", progress=False)
    page = page_of(
        prepared,
        tmp_path,
        inputs=x,
        float_model=model,
        accuracy=[{"model": "float", "top-1": 91.5}, {"model": "int8", "top-1": 91.25, "note": "PTQ"}],
        sensitivity=scores,
        verification=exported,
    )
    expected = ["accuracy", "graph", "errors", "sensitivity", "ranges", "weights", "float", "costs", "verification"]
    assert list(page.sections)[1:] == expected  # nothing is left out
    assert page.tables["accuracy-table"][1:] == [["float", "91.5", ""], ["int8", "91.25", "PTQ"]]
    own = page.column("errors-table", "own SQNR")
    assert own == {layer.name: f"{layer.own.sqnr:.1f} dB" for layer in result.layers}
    assert page.column("sensitivity-table", "drop") == {row.name: f"{row.drop:.3g}" for row in scores.rows}
    assert page.column("verification-table-1", "differing")["weights"] == "0"
    report = qt.quantization_report(prepared)
    assert [row[0] for row in page.tables["float-table"][1:]] == [line.name for line in report.left_float]
    assert len(page.tables["ranges-table"]) - 1 == len(report.tensors)
    quantizer = prepared.get_submodule("activation_quantizers.x")
    rows = dict(page.details["quantizer activation_quantizers.x"]["rows"])
    assert rows["bits"] == "8"
    assert rows["scale"] == f"{float(quantizer.scale):.6g}"
    assert rows["why"]
    deployed = qt.export.verify(qt.convert(prepared), (x,), tmp_path / "model.onnx", progress=False)
    assert "QuantizeLinear" in page.sections["verification"]
    found = page_of(prepared, tmp_path, verification=deployed)
    assert "end to end" in found.sections["verification"]
    (codes,) = deployed.runtimes.values()
    assert len(found.tables["verification-table-2"]) - 1 == len(codes.layers)
    titles = facts.gather(prepared, None, None, None).titles
    first, *others = codes.by_quantizer
    spread = {name: CodeCount(100, 3, 1) for name in codes.by_quantizer}
    begun = {first: CodeCount(100, 3, 1), **dict.fromkeys(others, CodeCount(100))}
    differing = replace(codes, by_quantizer=spread, layer_by_layer=begun)
    found = page_of(prepared, tmp_path, verification=replace(deployed, runtimes={"onnxruntime": differing}))
    assert found.column("verification-table-1", "differing") == dict.fromkeys(map(titles.get, spread), "3")
    assert found.column("verification-table-2", "differing") == {titles[first]: "3"}


def test_the_share_clipped_and_the_histogram_are_those_of_the_inputs(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    _, prepared = calibrated(model)
    quantizer = next(q for q in qt.quantizers_of(prepared).values() if not q.of_weight)
    quantizer.amax = 1.0
    x = torch.randn(64, 3, 32, 32)
    known = facts.gather(prepared, x, None, None)
    ((name, values),) = known.values.items()
    assert known.quantizers[name] is quantizer
    clipped = ((x > 1 + quantizer.scale / 2) | (x < -128.5 * quantizer.scale)).float().mean()
    assert values.clipped == pytest.approx(float(clipped), rel=0.02)
    assert int(values.histogram.counts.sum()) == x.numel()
    chart = charts.histogram_of(values, quantizer)
    assert chart.left < float(x.min()) < float(x.max()) < chart.right
    ends = [
        (end - chart.left) / (chart.right - chart.left) * charts.WIDTH for end in (-128 * float(quantizer.scale), 1.0)
    ]
    assert [chart.low, chart.high] == pytest.approx(ends, abs=0.1)
    # bars beyond the grid are left of its low end and right of its high end
    left_edges = [float(place) for place in re.findall(r"M([\d.]+) ", chart.outside)]
    assert left_edges
    assert not [place for place in left_edges if chart.low < place < chart.high - charts.WIDTH / charts.BARS]
    assert f"{100 * values.clipped:.3g} %" in page_of(prepared, tmp_path, inputs=x).sections["ranges"]


def test_the_chart_of_a_weight_has_each_channel_with_its_grid() -> None:
    weight = torch.tensor([[1.0, -1.0], [4.0, -2.0], [0.5, 0.25]])
    quantizer = qt.TensorQuantizer(qt.QuantSpec(axis=0, narrow=True), 3)
    qt.calibrate(nn.Sequential(quantizer), [weight], progress=False)
    chart = charts.channels_of(weight, 0, quantizer)
    assert (chart.channels, chart.each) == (3, 1)
    assert chart.top == pytest.approx(4.2)
    heights = [float(h) for h in re.findall(r"V([\d.]+)", chart.high)]
    expected = [charts.HEIGHT / 2 * (1 - high / chart.top) for high in (1.0, 4.0, 0.5)]
    assert heights == pytest.approx(expected, abs=0.1)
    wide = charts.channels_of(torch.randn(1000, 4), 0, qt.TensorQuantizer(qt.QuantSpec()))
    assert (wide.channels, wide.each, wide.high) == (1000, 8, "")
    assert charts.channels_of(torch.zeros(2, 2), 0, qt.TensorQuantizer(qt.QuantSpec())).top == 1.0


def test_sizes_and_operations_are_those_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2))
    mapping = qt.QConfigMapping().set_module_name("2", None)
    _, prepared = calibrated(model, qconfig_mapping=mapping)
    costs = {cost.name: cost for cost in facts.gather(prepared, torch.randn(SHAPE), None, None).costs}
    conv, linear = costs["0"], costs["2"]
    assert (conv.weights, conv.bytes, conv.float_bytes) == (108, 108 + 4 * 4, 432)
    assert (conv.macs, conv.bit_operations) == (4 * 64 * 108, 4 * 64 * 108 * 64)
    assert (linear.bytes, linear.macs, linear.bit_operations) == (2048, 4 * 512, 4 * 512 * 1024)
    (row,) = [row for row in tables.cost_table(facts.gather(prepared, None, None, None)).rows if row[0].text == "0"]
    assert [cell.text for cell in row][2:] == ["8 bits x 8 bits", "108", "432", "124", "-", "-"]


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_names_are_no_markup(route: str, tmp_path) -> None:
    names = ["<script>alert(1)</script>", "'onload='alert(2)", "</script><img src=x>", "{{ 7 * 7 }}", "<b>", "&lt;"]
    names += [] if route == "graph" else ['"onload="alert(2)', "a\\N{0}"]  # which torch.fx cannot trace
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Conv2d(3, 3, 1))
    _, quantized = calibrated(model, route)
    bad = {"<img src=y onerror=alert(3)>": "<script>alert(4)</script>"}
    page = page_of(quantized, tmp_path, inputs=torch.randn(SHAPE), accuracy=bad)
    found = {tag for tag, _ in page.tags}
    assert "img" not in found
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [
        {"type": "application/json", "id": "details"},
        {},
    ]
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
    listed = {row[0] for row in page.tables["costs-table"][1:]}
    assert listed == set(names)
    assert {f"op {name}" for name in names} <= set(page.details)
    drawn = [attributes["data-key"] for _, attributes in page.tags if "data-key" in attributes]
    assert {f"op {name}" for name in names} <= set(drawn)
    assert "<script>alert(4)</script>" in page.sections["accuracy"]  # as text


def test_nothing_is_fetched_and_two_pages_are_equal(tmp_path) -> None:
    model, prepared = calibrated()
    x = torch.randn(SHAPE)
    page = page_of(prepared, tmp_path, inputs=x, float_model=model)
    addresses = [a[name] for _, a in page.tags for name in ("src", "href", "action", "data") if name in a]
    assert addresses
    assert all(address.startswith(("#", "data:,")) for address in addresses)
    assert "http" not in re.sub(r"http-equiv", "", page.text)
    assert "url(" not in page.text
    assert page.text == page_of(prepared, tmp_path, inputs=x, float_model=model).text


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_the_model_stays_as_it_is(route: str, tmp_path) -> None:
    model, quantized = calibrated(route=route)
    quantized.train()
    for quantizer in qt.quantizers_of(quantized).values():
        quantizer.observing = not quantizer.of_weight
    before = {name: value.clone() for name, value in quantized.state_dict().items()}
    page_of(quantized, tmp_path, inputs=3 * torch.randn(SHAPE), float_model=model)
    after = quantized.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert quantized.training
    assert [q.observing for q in qt.quantizers_of(quantized).values() if not q.of_weight].count(False) == 0
    assert not any(module._forward_pre_hooks for module in qt.quantizers_of(quantized).values())


def test_what_is_left_out_says_what_to_pass(tmp_path) -> None:
    page = page_of(qt.prepare(ConvNet().eval(), backend="tensorrt10"), tmp_path)  # without ranges, too
    for words in ("accuracy=", "float_model=", "sensitivity=", "inputs=", "verification="):
        assert words in page.sections["left-out"]
    assert "not calibrated" in page.sections["ranges"]
    assert not {"errors", "sensitivity", "verification", "accuracy"} & set(page.sections)


def test_a_model_without_a_graph_has_a_tree(tmp_path) -> None:
    model, replaced = calibrated(route="modules")
    x = torch.randn(SHAPE)
    result = qt.debug.compare(model, replaced, x, progress=False)
    page = page_of(replaced, tmp_path, inputs=x, float_model=model)
    assert "no graph" in page.sections["graph"]
    own = {layer.name: f"{layer.own.sqnr:.1f} dB" for layer in result.layers}
    assert page.column("errors-table", "own SQNR") == own
    keys = [attributes.get("data-key") for _, attributes in page.tags]
    assert {"op conv1", "op up", "op head"} <= set(keys)
    assert dict(page.details["op conv1"]["rows"])["weight"].startswith("int8 per-channel(0) [")


def test_without_pygraphviz_the_ops_are_listed(tmp_path, monkeypatch) -> None:
    _, prepared = calibrated()
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    page = page_of(prepared, tmp_path)
    assert install_command("report") in page.sections["graph"]
    assert "op conv1" in {attributes.get("data-key") for _, attributes in page.tags}


class Mixed(nn.Module):
    """An attention, an LSTM, an embedding and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(10, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x)
        y, _ = self.attention(y, y, y)
        y, _ = self.lstm(y)
        return self.head(torch.softmax(y @ y.transpose(1, 2), -1) @ y)


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_layers_with_several_weights_and_indices(route: str, tmp_path) -> None:
    model, x = Mixed().eval(), torch.randint(10, (2, 5))
    quantized = (
        qt.prepare(model, backend="tensorrt10")
        if route == "graph"
        else qt.quant_modules.replace(model, backend="tensorrt10")
    )
    qt.calibrate(quantized, [x], progress=False)
    page = page_of(quantized, tmp_path, inputs={"x": x})
    assert {"op attention", "op lstm", "op head"} <= set(page.details)
    assert "lstm" in page.sections["weights"] or route == "graph"  # where it is float
    converted = qt.convert(quantized)
    assert "Left in float" in page_of(converted, tmp_path, inputs=x).sections["float"]


SPECS = {
    "learned": (qt.QuantSpec(quantizer="lsq"), qt.QuantSpec(bits=4, axis=0, quantizer="lsq")),
    "shaped": (qt.QuantSpec(bits=4, quantizer="qil"), qt.QuantSpec(bits=4, quantizer="apot")),
    "float": (qt.QuantSpec(format="e4m3"), qt.QuantSpec(format="e4m3", axis=0)),
    "groups": (None, qt.QuantSpec(bits=4, axis=1, group_size=4)),
    "channels": (qt.QuantSpec(axis=1), qt.QuantSpec(axis=0)),
    "dynamic": (qt.QuantSpec(symmetric=False, observer_args={}), qt.QuantSpec(bits=2, axis=0)),
}


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_quantizer(name: str, converted: bool, tmp_path) -> None:
    model, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(32, 16)
    prepared = qt.prepare(
        model, qconfig_mapping=qt.QConfigMapping().set_global(qt.QConfig(*SPECS[name])), backend="tensorrt10"
    )
    qt.calibrate(prepared, [x], progress=False)
    page = page_of(qt.convert(prepared) if converted else prepared, tmp_path, inputs=x, float_model=model)
    keys = [key for key in page.details if key.startswith("quantizer ")]
    assert keys
    for key in keys:
        rows = dict(page.details[key]["rows"])
        assert re.match(r"\[-?[\d.e+-]+, [\d.e+-]+\]", rows["range"]), (key, rows)
    assert len(page.tables["errors-table"]) == 3


class Block(nn.Module):
    """A residual block that calls one ReLU twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.relu = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.conv2(self.relu(self.conv1(x))) + x)


def deep() -> nn.Module:
    model = nn.Sequential()
    for name in ("stage1", "stage2", "stage3"):
        model.add_module(name, nn.Sequential(*(Block() for _ in range(3))))
    return model


def test_a_large_graph_has_its_blocks_folded_and_each_op_in_the_layout_of_its_block() -> None:
    _, prepared = calibrated(deep())
    folded, *unfolded = picture.draw_shapes(prepared)
    blocks = {shape.key for shape in folded.shapes if shape.kind == "block"}
    names = [f"stage{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]
    assert blocks == {f"block {name}" for name in names}
    assert len(folded.shapes) < 15
    assert [layout.block for layout in unfolded] == names
    every = {picture.key_of(node) for node in prepared.graph.nodes}
    assert every == {s.key for layout in (folded, *unfolded) for s in layout.shapes if s.kind != "block"}
    within = {shape.key for shape in unfolded[0].shapes}
    assert {"op stage1.0.conv1", "op add", "block stage1.1", "block stage3.2"} <= within
    assert not {"block stage1.0", "op stage2.0.conv1"} & within
    (only,) = picture.draw_shapes(calibrated()[1])  # a small graph stays as it is
    assert not [shape for shape in only.shapes if shape.kind == "block"]


def test_quantizers_are_called_what_the_model_calls_their_inputs(tmp_path) -> None:
    _, prepared = calibrated(deep())
    page = page_of(prepared, tmp_path, inputs=torch.randn(SHAPE))
    assert "activation_quantizers" not in "".join(page.sections.values())
    titles = [detail["title"] for detail in page.details.values()]
    assert not [title for title in titles if "activation_quantizers" in title]
    assert {"stage1.0.relu", "stage1.0.relu (2)"} <= set(titles)
    assert "stage1.0.relu (2)" in page.sections["ranges"]


class Twice(nn.Module):
    """Calls one ReLU twice, of which only the second result is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.conv = nn.ReLU(), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.relu(torch.softmax(self.relu(x), 1)))


@pytest.mark.parametrize("model", [deep, Twice, Mixed])
def test_each_tensor_has_a_name_of_its_own(model: Callable[[], nn.Module], tmp_path) -> None:
    prepared = qt.prepare(model().eval(), backend="tensorrt10")
    report = qt.quantization_report(prepared)
    titles = [line.title for line in report.tensors]
    assert len(set(titles)) == len(titles)
    page = page_of(prepared, tmp_path)
    assert [row[0] for row in page.tables["ranges-table"][1:]] == titles
    assert "activation_quantizers" not in str(report).split("\n\n")[1]  # the table of layers
    if model is Twice:
        assert titles == ["relu (2)"]


def test_numbers_have_three_digits_and_the_exact_range_is_beside_them(tmp_path) -> None:
    _, prepared = calibrated()
    page = page_of(prepared, tmp_path)
    grid = facts.known_range(prepared.get_submodule("activation_quantizers.x"))
    rows = dict(page.details["quantizer activation_quantizers.x"]["rows"])
    low, high = (float(end) for end in grid)
    assert rows["range"] == f"[{low:.3g}, {high:.3g}]"
    assert rows["exact range"] == f"{low:.9g} to {high:.9g}"


def test_the_head_has_the_title_and_the_score_of_the_accuracies(tmp_path) -> None:
    _, prepared = calibrated()
    page = page_of(prepared, tmp_path, accuracy={"float": 0.69758, "int8": 0.69512})
    assert "ConvNet: quantization report" in page.text
    assert "Score0.6951int8; 0.6976 float" in re.sub(r"\s*\n\s*", "", page.sections[""])
    rows = [{"model": "float", "top-1": 91.5}, {"model": "int8", "top-1": 91.25}]
    page = page_of(prepared, tmp_path, accuracy=rows, title="My <model>")
    assert "<title>My &lt;model&gt;: quantization report</title>" in page.text
    assert "top-191.25int8; 91.5 float" in re.sub(r"\s*\n\s*", "", page.sections[""])
    assert "<strong>" in page_of(prepared, tmp_path, accuracy={"note": "none"}).text  # no number, no score


def test_values_that_are_not_finite_have_no_histogram(tmp_path) -> None:
    _, prepared = calibrated()
    x = torch.randn(SHAPE)
    x[0, 0, 0, 0] = torch.nan
    assert "Histograms" not in page_of(prepared, tmp_path, inputs=x).sections["ranges"]


def test_errors_leave_the_file(tmp_path) -> None:
    model, prepared = calibrated()
    path, x = tmp_path / "report.html", torch.randn(SHAPE)
    path.write_text("old")
    cases: list[tuple[type[Exception], str, nn.Module, dict[str, Any]]] = [
        (ValueError, "report: float_model requires inputs; pass inputs too", prepared, {"float_model": model}),
        (TypeError, "float_model must be a torch.nn.Module or None, got int", prepared, {"float_model": 1, "inputs": x}),
        (TypeError, "accuracy must be a dict of scores, a list of dicts, or None, got float", prepared, {"accuracy": 1.0}),
        (TypeError, "got list", prepared, {"accuracy": [1.0]}),
        (TypeError, "sensitivity must be the result of qtoolkit.debug.sensitivity", prepared, {"sensitivity": []}),
        (TypeError, "verification must be the result of qtoolkit.export_onnx or", prepared, {"verification": "model.onnx"}),
        (TypeError, "report: inputs do not match GraphModule.forward|report: inputs do", prepared, {"inputs": (x, x, x)}),
        (RuntimeError, "has no range yet", qt.prepare(ConvNet().eval(), backend="tensorrt10"), {"inputs": x}),
        (TypeError, "without quantizers", ConvNet(), {}),
    ]  # fmt: skip
    for kind, words, of, options in cases:
        with pytest.raises(kind, match=words):
            qt.debug.report(of, path=path, **options)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
