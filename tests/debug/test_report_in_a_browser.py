"""The page of report() in a headless Chromium: no errors, no requests, what hover, focus, zoom and sorting do."""

import io
from itertools import product
from pathlib import Path
from runpy import run_path

import pytest
import torch
from torch import nn

import qtoolkit as qt
from tests.browser import CHROMIUM, Page, browser
from tests.debug.test_report import deep
from tests.nets import ConvNet

if CHROMIUM is None:
    pytest.skip("needs Chromium, which is not installed: make browser", allow_module_level=True)

SHAPE = (2, 3, 8, 8)
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """A report of each route, and one whose names are markup."""
    torch.manual_seed(0)
    folder, x = tmp_path_factory.mktemp("pages"), torch.randn(SHAPE)
    model, hostile = ConvNet().eval(), nn.Sequential().eval()
    for name in ("<script>hacked=1</script>", "<img src=x onerror=hacked=1>", "</script>"):
        hostile.add_module(name, nn.Conv2d(3, 3, 1))
    models = {
        "graph": qt.prepare(model, backend="tensorrt"),
        "modules": qt.quant_modules.replace(model, backend="tensorrt"),
        "hostile": qt.prepare(hostile, backend="tensorrt"),
    }
    for name, quantized in models.items():
        qt.calibrate(quantized, [x], progress=False)
        scores = qt.debug.sensitivity(quantized, lambda m: float(m(x).sum().detach()), progress=False)
        options = {"float_model": model} if name == "graph" else {}
        qt.debug.report(quantized, x, folder / f"{name}.html", accuracy={"int8": 91.2}, sensitivity=scores, **options)
    return {name: folder / f"{name}.html" for name in models}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def view_of(page: Page) -> list[float]:
    return [float(x) for x in page.evaluate("document.getElementById('picture').getAttribute('viewBox')").split()]


def text_of(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({selector!r}).textContent")


@pytest.mark.parametrize("name", ["graph", "modules", "hostile"])
def test_the_script_runs_without_errors_and_nothing_is_requested(page: Page, files, name: str) -> None:
    page.open(files[name])
    assert page.evaluate("document.documentElement.dataset.ready") == "yes"
    assert page.complaints == []
    assert page.requests == [files[name].as_uri()]
    assert page.evaluate("window.hacked === undefined")
    assert page.evaluate(
        "[...document.querySelectorAll('section h2')].every(e => e.getBoundingClientRect().height > 0)"
    )
    for width, dark in product((1400, 400, 380), (False, True)):  # no sideways scrolling on a telephone
        page.resize(width, dark=dark)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, dark)


def test_the_policy_of_the_page_lets_no_other_script_run(page: Page, files) -> None:
    page.open(files["graph"])
    inserted = "(s => {s.textContent = 'hacked = 1'; document.body.append(s)})(document.createElement('script'))"
    fetched = "(i => {i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i)})(new Image())"
    page.evaluate(inserted)
    page.evaluate(fetched)
    assert page.evaluate("typeof hacked") == "undefined"
    assert sum("Content Security Policy" in complaint for complaint in page.complaints) >= 1


def test_the_pointer_and_the_focus_show_range_bits_and_reason(page: Page, files) -> None:
    page.open(files["graph"])
    assert page.evaluate("document.getElementById('tip').hidden")
    page.mouse("mouseMoved", *page.center_of(".node.quantizer"))
    said = text_of(page, "#tip")
    for words in ("bits8", "range[", "scale", "why", "clipped"):
        assert words in said
    assert page.evaluate("document.querySelectorAll('.edges .lit').length") == 2
    page.mouse("mouseMoved", 1, 1)
    assert page.evaluate("document.getElementById('tip').hidden")
    page.evaluate("document.querySelector('.node.quantized').focus()")
    assert "computed on quantized tensors" in text_of(page, "#tip")
    page.key("Enter")
    assert "own error" in text_of(page, "#panel")
    page.key("Escape")
    assert page.evaluate("document.getElementById('tip').hidden")


def test_wheel_keys_buttons_and_drags_move_the_view(page: Page, files) -> None:
    page.open(files["graph"])
    x, y = page.center_of("#picture")
    before = view_of(page)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    zoomed = view_of(page)
    assert zoomed[2] < before[2]
    middle = [view[1] + view[3] / 2 for view in (before, zoomed)]
    assert middle[1] == pytest.approx(middle[0], abs=1)  # the point under the pointer stays
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x - 50, y - 80, button="left")
    page.mouse("mouseReleased", x - 50, y - 80, button="left", clickCount=1)
    dragged = view_of(page)
    assert dragged[0] > zoomed[0]
    assert dragged[1] > zoomed[1]
    page.evaluate("document.getElementById('picture').focus()")
    page.key("ArrowDown")
    assert view_of(page)[1] > dragged[1]
    page.key("-")
    assert view_of(page)[2] == pytest.approx(dragged[2] * 1.25)
    page.click('[data-do="all"]')
    everything = view_of(page)
    assert page.evaluate(
        "[...document.querySelectorAll('.node')].every(n => {const b = n.getBBox(), [x, y, w, h] = "
        f"{everything}; return b.x >= x && b.y >= y && b.x + b.width <= x + w && b.y + b.height <= y + h}})"
    )
    page.click('[data-do="start"]')
    assert view_of(page) == pytest.approx(before)


def test_names_in_tables_and_the_search_show_the_op_in_the_graph(page: Page, files) -> None:
    page.open(files["graph"])
    page.click('#errors-table [data-show="op up"]')
    assert text_of(page, "#panel h3").startswith("up")
    x, y, width, height = view_of(page)
    assert page.evaluate(
        f"(b => b.x >= {x} && b.y >= {y} && b.x + b.width <= {x + width} && b.y + b.height <= {y + height})"
        "(document.querySelector('.node.chosen').getBBox())"
    )
    page.evaluate("(f => {f.value = 'head'; f.dispatchEvent(new Event('input'))})(document.getElementById('find'))")
    assert text_of(page, "#panel h3").startswith("head")


SHOWN = "document.querySelector('.layout:not([hidden])')"


def test_a_click_unfolds_a_block_and_the_search_zooms_to_an_op_in_another(page: Page, tmp_path) -> None:
    prepared = qt.prepare(deep().eval(), backend="tensorrt")
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    qt.debug.report(prepared, path=tmp_path / "deep.html", progress=False)
    page.open(tmp_path / "deep.html")
    assert page.evaluate(f"{SHOWN}.dataset.block") == ""
    assert page.evaluate(f"{SHOWN}.querySelectorAll('.block').length") == 9
    assert page.evaluate("document.getElementById('picture').getScreenCTM().a") > 0.5  # readable
    page.click('.layout:not([hidden]) [data-key="block stage2.0"]')
    assert page.evaluate(f"{SHOWN}.dataset.block") == "stage2.0"
    page.click('[data-do="fold"]')
    assert page.evaluate(f"{SHOWN}.dataset.block") == ""
    page.evaluate(
        "(f => {f.value = 'stage3.1.relu (2)'; f.dispatchEvent(new Event('input'))})(document.getElementById('find'))"
    )
    assert page.evaluate(f"{SHOWN}.dataset.block") == "stage3.1"
    assert text_of(page, "#panel h3").startswith("stage3.1.relu (2)")
    assert page.evaluate("document.getElementById('picture').getScreenCTM().a") >= 0.8
    assert page.evaluate(
        "(([b, p]) => b.top >= p.top && b.bottom <= p.bottom && b.left >= p.left && b.right <= p.right)"
        f"([{SHOWN}.querySelector('.chosen'), document.getElementById('picture')].map(e => e.getBoundingClientRect()))"
    )
    page.click('#ranges-table [data-show="quantizer activation_quantizers.stage1_0_relu"]')
    assert page.evaluate(f"{SHOWN}.dataset.block") == "stage1.0"
    assert page.complaints == []


def test_the_picture_of_the_docs_is_drawn_from_a_page(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs pillow, which is not installed")
    prepared = qt.prepare(deep().eval(), backend="tensorrt")
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    qt.debug.report(prepared, path=tmp_path / "deep.html", progress=False)
    script = run_path(str(DOCS / "report_picture.py"))
    script["draw"](tmp_path / "deep.html", tmp_path / "report.png", op="stage2.0.conv1")
    drawn = image.open(tmp_path / "report.png")
    assert drawn.size == image.open(DOCS / "report.png").size == (script["WIDTH"], script["HEIGHT"])
    assert len(drawn.convert("RGB").getcolors(1 << 24)) > 20


def test_tables_sort_and_filter(page: Page, files) -> None:
    page.open(files["graph"])
    column = "[...document.querySelectorAll('#costs-table tbody tr')].map(r => Number(r.cells[3].dataset.sort))"
    page.click("#costs-table th:nth-child(4) button")
    falling = page.evaluate(column)
    assert falling == sorted(falling, reverse=True)
    page.click("#costs-table th:nth-child(4) button")
    assert page.evaluate(column) == falling[::-1]
    assert page.evaluate("document.querySelector('#costs-table th:nth-child(4)').ariaSort") == "ascending"
    rows = "[...document.querySelectorAll('#ranges-table tbody tr')].filter(r => !r.hidden).map(r => r.textContent)"
    every = page.evaluate(rows)
    page.evaluate(
        "(f => {f.value = 'CONV2'; f.dispatchEvent(new Event('input'))})"
        "(document.querySelector('[data-filter=ranges-table]'))"
    )
    assert page.evaluate(rows) == [row for row in every if "conv2" in row.lower()] != every


def test_a_tree_shows_the_same_without_a_graph(page: Page, files) -> None:
    page.open(files["modules"])
    page.mouse("mouseMoved", *page.center_of('.leaf[data-key="op conv1"]'))
    assert "int8" in text_of(page, "#tip")
    page.click('#costs-table [data-show="op head"]')
    assert text_of(page, "#panel h3").startswith("head")


@pytest.mark.parametrize("width", [1400, 400])
def test_dark_and_light_differ_and_the_graph_has_ink(page: Page, files, width: int, tmp_path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs pillow, which is not installed")
    brightness = {}
    for dark in (False, True):
        page.open(files["graph"], width=width, dark=dark).screenshot(tmp_path / "page.png", whole=True)
        picture = image.open(io.BytesIO((tmp_path / "page.png").read_bytes())).convert("RGB")
        assert picture.width == width
        colors = picture.getcolors(1 << 24)
        brightness[dark] = sum(count * sum(color) for count, color in colors) / (picture.width * picture.height * 3)
        assert len(colors) > 50
    assert brightness[False] > 200
    assert brightness[True] < 60
