"""The pages that `make docs` builds: what they must name, by what is in the package."""

import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from fnmatch import fnmatch
from html import unescape
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path
from types import ModuleType
from typing import get_args, get_origin

import pytest

import qtoolkit as qt
from qtoolkit.graph import passes
from tests import messages, pages

DOCS = Path(__file__).parents[1] / "docs"
CONFIGS_AND_STEPS = ("api/config.html", "api/qtoolkit.html")
MODULES = (qt, qt.nn, qt.ops, qt.tuning, qt.tuning.mixed_precision, qt.export, qt.debug)
REFERENCE = re.findall(
    r"^::: (\S+)$", "\n".join(page.read_text() for page in DOCS.glob("api/*.md")), flags=re.MULTILINE
)


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module that are neither modules nor tables."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    values = {name: getattr(module, name) for name in names}
    return [
        name
        for name, value in values.items()
        if getattr(value, "__module__", None) and callable(value) and not isinstance(value, ModuleType)
    ]


def shown(target: str) -> list[object]:
    """Return what a line of the reference shows. A function behind a submodule of its own name has a line of its own."""
    found = resolve_name(target)
    if not isinstance(sys.modules.get(target), ModuleType):
        return [found]
    module = sys.modules[target]
    return [getattr(module, name) for name in names_of(module) if f"{target}.{name}" not in sys.modules]


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_shows_every_public_name(module: ModuleType) -> None:
    everything = [item for target in REFERENCE for item in shown(target)]
    assert [name for name in names_of(module) if getattr(module, name) not in everything] == []


def types_in(hint: object) -> set[type]:
    """Return the classes in an annotation, and in the fields of those that are dataclasses."""
    parts = [each for each in (hint, get_origin(hint)) if isinstance(each, type)]
    fields = [field.type for part in parts if is_dataclass(part) for field in dataclass_fields(part)]
    inner = [each for each in (*get_args(hint), *fields) if each is not hint]
    return {*parts, *(kind for each in inner for kind in types_in(each))}


def results(public: Iterable[object]) -> set[type]:
    """Return the classes of what public functions and methods return: their examples show them."""
    methods = [method for item in public if isinstance(item, type) for method in vars(item).values()]
    functions = [item for item in (*public, *methods) if inspect.isroutine(item)]
    return {
        kind for each in functions for kind in types_in(inspect.get_annotations(inspect.unwrap(each)).get("return"))
    }


def has_example(item: object) -> bool:
    """Return whether an example is with a function or a class, or with the class of qtoolkit that says what its family does."""
    own = (
        [kind for kind in item.__mro__ if kind.__module__.startswith("qtoolkit")] if isinstance(item, type) else [item]
    )
    return any(">>>" in (each.__doc__ or "") for each in own)


def test_every_public_name_has_an_example() -> None:
    graph = re.search(r"members: \[(.*)\]", (DOCS / "api" / "graph.md").read_text())[1].split(", ")
    own = [
        name
        for name, item in vars(qt.quant_modules).items()
        if getattr(item, "__module__", "") == qt.quant_modules.__name__
    ]
    packages = [(module, names_of(module)) for module in MODULES] + [(qt.graph, graph), (qt.quant_modules, own)]
    named = [(module, name) for module, names in packages for name in names if not name.startswith("_")]
    public = {f"{module.__name__}.{name}": getattr(module, name) for module, name in named}
    found = {target: resolve_name(target) for target in REFERENCE}
    public |= {target: item for target, item in found.items() if isinstance(item, type)}
    assert len(public) > 160
    shown_by_others = results(list(public.values()))
    assert [name for name, item in public.items() if not has_example(item) and item not in shown_by_others] == []


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    every, quotations = messages.messages(), messages.quotations((DOCS / "troubleshooting.md").read_text())
    assert len(quotations) > 100
    assert len(set(quotations)) == len(quotations)
    assert [quote for quote in quotations if not any(messages.quotes(quote, message) for message in every)] == []


@pytest.mark.sweep
@pytest.mark.parametrize(("task", "place", "words"), pages.tasks(), ids=lambda value: value)
@pytest.mark.slow
def test_a_reader_comes_to_the_page_of_a_task(task: str, place: str, words: str) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material, which is not installed")
    name, _, part = place.partition("#")
    assert not part or part in pages.text_of(name).places
    assert pages.clicks_from("index.html", 3).get(place, 4) <= 3
    terms = [word for word in words.lower().split() if len(word) > 2]
    sections = [text for at, text in pages.sections().items() if at.split("#")[0] == name]
    assert any(all(term in text.lower() for term in terms) for text in sections)


@pytest.mark.slow
def test_pages_have_a_dark_scheme_and_lead_to_their_neighbours() -> None:
    pytest.importorskip("material", reason="needs mkdocs-material, which is not installed")
    html = (pages.built() / "export.html").read_text()
    assert 'data-md-color-scheme="slate"' in html
    assert {"md-footer__link--prev", "md-footer__link--next"} <= set(re.findall(r"md-footer__link--\w+", html))


@pytest.mark.slow
def test_names_of_tools_that_a_script_had_lead_to_the_reference() -> None:
    pytest.importorskip("material", reason="needs mkdocs-material, which is not installed")
    targets = {pages.target_of("migration.html", link) for link in pages.text_of("migration.html").links}
    assert {"qtoolkit.QuantSpec", "qtoolkit.prepare.prepare", "qtoolkit.nn.QuantConv2d"} <= {at for _, at in targets}
    types = {pages.target_of("api/qtoolkit.html", link) for link in pages.text_of("api/qtoolkit.html").links}
    assert ("api/config.html", "qtoolkit.QConfigMapping") in types


@pytest.mark.slow
def test_the_reference_shows_the_defaults_of_classes_and_functions() -> None:
    pytest.importorskip("material", reason="needs mkdocs-material, which is not installed")
    shown = {page: re.sub(r"<[^>]+>", "", unescape((pages.built() / page).read_text())) for page in CONFIGS_AND_STEPS}
    configs, steps = shown.values()
    spec = configs[configs.index("QuantSpec(\n") : configs.index("How one kind of tensor")]
    assert all(f"    {field.name}: " in spec for field in dataclass_fields(qt.QuantSpec))
    assert {'observer: str = "minmax"', "bits: int = 8", "signed: bool = True"} <= {
        line.strip(" ,") for line in spec.splitlines()
    }
    assert steps.count("    backend: str | Backend = REQUIRED,\n") == 3  # quantize, prepare and prepare_parts


@pytest.mark.slow
def test_what_a_function_returns_is_one_item_of_the_reference() -> None:
    pytest.importorskip("material", reason="needs mkdocs-material, which is not installed")
    text = "".join(page.read_text() for page in (pages.built() / "api").glob("*.html"))
    found = re.findall(r'doc-section-title">Returns:.*?</ul>', text, flags=re.DOTALL)
    assert len(found) > 40
    assert {section.count("<li") for section in found} == {1}


@pytest.mark.parametrize("folder", ["csrc", "qtoolkit", "examples", "benchmarks"])
def test_the_map_names_every_file(folder: str) -> None:
    named = re.findall(r"[\w.*-]*\w", (DOCS / "design" / "map.md").read_text())
    stems = {Path(name).stem for name in named}  # x.h and x.cpp have one line
    found = [path for path in (DOCS.parent / folder).iterdir() if not path.name.startswith(("__", "."))]
    ours = [path.stem for path in found if path.suffix not in (".so", ".typed")]
    assert [stem for stem in ours if not any(fnmatch(stem, pattern) for pattern in stems)] == []


@pytest.mark.parametrize("source", sorted(DOCS.glob("design/*.dot")), ids=lambda path: path.stem)
def test_the_drawings_are_those_of_their_sources(source: Path) -> None:
    pytest.importorskip("pygraphviz", reason="needs pygraphviz, which is not installed")
    fresh, kept = run_path(str(DOCS / "design" / "draw.py"))["svg_of"](source), source.with_suffix(".svg").read_text()
    assert re.findall(r"<text.*?>(.*?)</text>|<title>(.*?)</title>", kept) == re.findall(
        r"<text.*?>(.*?)</text>|<title>(.*?)</title>", fresh
    )


def test_the_drawing_of_a_model_s_way_has_the_passes_in_order() -> None:
    source = (DOCS / "design" / "flow.dot").read_text()
    trace, *drawn = re.search(r"trace -> .*;", source)[0].rstrip(";").split(" -> ")
    module = inspect.getsource(sys.modules[qt.prepare.__module__])
    assert drawn == re.findall(r"passes\.(\w+)\.run\(gm", module)
    assert (trace, set(drawn) | {"freeze", "integers"}) == ("trace", set(passes.__all__))


def test_the_drawing_of_the_packages_has_their_imports() -> None:
    source, package = (DOCS / "design" / "house.dot").read_text(), Path(qt.__file__).parent
    labels = dict(re.findall(r'(\w+) \[label="(.*?)(?:\\n[^,]*)?"', source))
    places = {
        node: [name for name in re.findall(r"\w+(?:\.py)?", label) if (package / name).exists()]
        for node, label in labels.items()
    }
    edges = {edge for chain in re.findall(r"\w+(?: -> \w+)+", source) for edge in pairwise(chain.split(" -> "))}
    for below, above in edges:
        if places.get(below) and places.get(above):
            files = [
                file
                for name in places[above]
                for file in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py"))
            ]
            imported = "|".join(name.removesuffix(".py") for name in places[below])
            code = "\n".join(file.read_text() for file in files)
            assert re.search(rf"^\s*from qtoolkit(\.| import.*\b)({imported})\b", code, re.MULTILINE), (below, above)
