"""The site as `make docs` builds it: its pages, the links in their text, and the sections that its search knows."""

import json
import os
import posixpath
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urldefrag

ROOT = Path(__file__).parents[1]
FOLDER = TemporaryDirectory(prefix="site")


@cache
def built() -> Path:
    """Build the site once in a process, and return its folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", FOLDER.name]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return Path(FOLDER.name)


@dataclass
class Text(HTMLParser):
    """What a page has beside navigation: where its links lead, and the places that a link can name."""

    links: set[str] = field(default_factory=set)
    places: set[str] = field(default_factory=set)
    inside: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        self.inside = self.inside or tag == "article"
        if self.inside and tag == "a" and of.get("href") and "headerlink" not in (of.get("class") or ""):
            self.links.add(of["href"] or "")
        if self.inside and of.get("id"):
            self.places.add(of["id"] or "")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "article"


@cache
def text_of(page: str) -> Text:
    """Read a page, by its path in the site."""
    text = Text()
    text.feed((built() / page).read_text())
    return text


def target_of(page: str, link: str) -> tuple[str, str]:
    """Return the page that a link of a page leads to, and the place in it."""
    address, place = urldefrag(link)
    return (posixpath.normpath(posixpath.join(posixpath.dirname(page), address)) if address else page), place


def clicks_from(start: str, most: int) -> dict[str, int]:
    """Return the pages, and the places in them, that links in the text of pages lead to, with the number of clicks."""
    found, pages = {start: 0}, [start]
    for count in range(1, most + 1):
        targets = [target_of(page, link) for page in pages for link in text_of(page).links if "//" not in link]
        targets = [(page, place) for page, place in targets if page.endswith(".html")]
        pages = list(dict.fromkeys(page for page, _ in targets if page not in found))
        for page, place in targets:
            found.setdefault(page, count)
            found.setdefault(f"{page}#{place}", count)
    return found


@cache
def sections() -> dict[str, str]:
    """Return the sections that the search knows, by their places: title and text."""
    index = json.loads((built() / "search" / "search_index.json").read_text())
    return {of["location"]: f"{of['title']} {of['text']}" for of in index["docs"]}


def tasks() -> list[tuple[str, str, str]]:
    """Return the tasks of readers in docs/contributing.md: the task, its place in the site, and what a reader searches."""
    text = (ROOT / "docs" / "contributing.md").read_text().split("## Readers' tasks")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| \[[^|]+\]\(([^|]+)\) \| ([^|]+) \|$", text, flags=re.MULTILINE)
    return [(task, place.replace(".md", ".html"), words) for task, place, words in rows]


# What programs of pages import that is an extra, and names that need one.
EXTRAS = re.compile(
    r"^(?:import|from) (?:torch\.utils\.)?"
    r"(accelerate|lightning|segmentation_models_pytorch|tensorboard|tensorrt|timm|transformers|ultralytics)\b",
    re.MULTILINE,
)
NEEDED_BY = {
    "MixedPrecision": "scipy",
    "save_checkpoint": "safetensors",
    "TrainingArguments": "accelerate",
    "export_litert": "ai_edge_litert",
    "CortexMPassManager": "executorch",
    "EthosUPartitioner": "tosa_serializer",  # of tosa-tools
    "EthosUCompileSpec": "ethosu",  # of ethos-u-vela
}


def needed(program: str) -> list[str]:
    """Return the optional packages that a program of a page needs."""
    return [*EXTRAS.findall(program), *(package for name, package in NEEDED_BY.items() if name in program)]


def source_of(page: str) -> str:
    """Return the Markdown of a page, by its path in the site, with the parts of the README that it includes."""

    def included(found: re.Match[str]) -> str:
        _, begin, rest = (ROOT / found[1]).read_text().partition(f"<!-- --8<-- [start:{found[2]}] -->")
        return rest.partition(f"<!-- --8<-- [end:{found[2]}] -->")[0] if begin else found[0]

    text = (ROOT / "docs" / page.replace(".html", ".md")).read_text()
    return re.sub(r'^--8<-- "([\w.]+):(\w+)"$', included, text, flags=re.MULTILINE)


def programs_of(place: str) -> list[str]:
    """Return the Python programs of a section, or of its page if the section has none; of a notebook one program."""
    page, _, part = place.partition("#")
    notebook = ROOT / "docs" / page.replace(".html", ".ipynb")
    if notebook.exists():
        cells = json.loads(notebook.read_text())["cells"]
        return ["\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")]
    text = source_of(page)
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    own = [section for section in sections if re.sub(r"\W+", "-", section.split("\n")[0].lower()).strip("-") == part]
    return blocks("python", "".join(own)) or blocks("python", text)


def shell_of(page: str) -> list[str]:
    """Return the commands that a page has in blocks for a shell."""
    return [line for block in blocks("", source_of(page)) for line in block.splitlines()]


def blocks(language: str, text: str) -> list[str]:
    """Return the blocks of code of a language."""
    return [
        block
        for name, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if name == language
    ]
