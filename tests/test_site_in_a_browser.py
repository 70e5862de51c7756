"""The site in a headless Chromium: nothing is wider than the window, light and dark, and the search finds pages of tasks."""

import io
import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread

import pytest

from tests import pages
from tests.browser import CHROMIUM, Page, browser

if CHROMIUM is None:
    pytest.skip("needs Chromium, which is not installed: make browser", allow_module_level=True)
pytest.importorskip("material", reason="needs mkdocs-material, which is not installed")

WIDE, NARROW = 1400, 400
TALLEST = 20_000  # pixels at 1400 of a page that lists many models or messages
FIRST = 5  # results of a search that a reader looks at
ALWAYS = (
    "index",
    "accuracy",
    "migration",
    "performance",
    "training",
    "tuning",
    "zoo",
    "api/qtoolkit",
    "troubleshooting",
)
OTHERS = sorted(
    {str(path.relative_to(pages.ROOT / "docs").with_suffix("")) for path in pages.ROOT.glob("docs/**/*.md")}
)
RESULTS = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the site; its search needs a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(pages.built())))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize(
    "name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHERS if name not in ALWAYS)]
)
def test_a_page_fits_the_window(page: Page, site: str, name: str) -> None:
    page.open(f"{site}{name}.html")
    for width, dark in product((WIDE, NARROW), (False, True)):
        page.resize(width, dark=dark)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, dark)
    page.resize(WIDE)
    tables = "[...document.querySelectorAll('.md-typeset__scrollwrap, .md-typeset table:not([class])')]"
    wider = f"{tables}.filter(e => e.scrollWidth > e.clientWidth + 1)"
    assert page.evaluate(f"{wider}.map(e => e.textContent.slice(0, 80))") == []
    assert page.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)") == []
    assert page.complaints == []


@pytest.mark.parametrize("name", ["index", "accuracy", "zoo"])  # the landing page, and the widest tables
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_screenshots_are_light_and_dark_with_nothing_cut_off(
    page: Page, site: str, width: int, dark: bool, name: str, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs pillow, which is not installed")
    page.open(f"{site}{name}.html", width=width, dark=dark)
    page.screenshot(tmp_path / "page.png", whole=name == "index")
    picture = image.open(io.BytesIO((tmp_path / "page.png").read_bytes())).convert("L")
    assert picture.width == width
    shades = picture.crop((0, 200, width, picture.height)).getcolors(1 << 16)
    ground, ink = max(shades)[1], sum(count for count, shade in shades if abs(shade - max(shades)[1]) > 100)
    assert ground < 60 if dark else ground > 240
    assert ink > 1000  # text that can be read
    table = "document.querySelector('article table').getBoundingClientRect()"
    assert page.evaluate(f"{table}.left >= 0 && ({table}.right <= innerWidth || {width} < 1000)")  # narrow: it scrolls


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_landing_page_shows_figures_code_and_install(page: Page, site: str, width: int) -> None:
    page.open(site, width=width)
    assert page.evaluate("document.querySelector('article img').getBoundingClientRect().bottom") < 900
    for words in ("pip install", "qt.prepare", "What do you want to do?"):
        assert page.evaluate(f"document.querySelector('article').textContent.includes({json.dumps(words)})")


SEARCHED = [*pages.tasks(), ("train on a GPU", "gpu.html", "cuda")]


@pytest.mark.parametrize(("task", "place", "words"), SEARCHED, ids=lambda value: value)
def test_a_search_finds_the_page_of_a_task(page: Page, site: str, task: str, place: str, words: str) -> None:
    page.open(f"{site}?q={words.replace(' ', '%20')}", width=WIDE)
    page.evaluate(
        "new Promise((done, fail) => {const end = Date.now() + 20000; const look = () => "
        "document.querySelector('.md-search-result__link') ? done() : Date.now() > end ? fail(new Error('no result')) : "
        "setTimeout(look, 50); look()})"
    )
    found = [link.removeprefix(site).split("?")[0].split("#")[0] for link in page.evaluate(RESULTS)]
    assert place.split("#")[0] in list(dict.fromkeys(found))[:FIRST], found[:20]


@pytest.mark.parametrize("name", ["troubleshooting", "zoo"])
def test_pages_of_many_entries_are_short(page: Page, site: str, name: str) -> None:
    assert page.open(f"{site}{name}.html", width=WIDE).evaluate("document.body.scrollHeight") <= TALLEST
