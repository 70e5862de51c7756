"""The README: its program, which runs as it stands, and its figures; the files that the map and the page on changes name."""

import json
import re
from pathlib import Path

import pytest

import qtoolkit as qt
from benchmarks.pages import front_page

README = Path(__file__).parents[1] / "README.md"
RESULTS = README.parent / "benchmarks" / "results"
TOOLS = {  # as the table and the results name them, and the package
    "torchao": ("torchao pt2e", "torchao"),
    "Model Optimizer": ("Model Optimizer", "nvidia-modelopt"),
    "Brevitas": ("Brevitas", "brevitas"),
    "NNCF": ("NNCF", "nncf"),
    "AIMET": ("AIMET", "aimet-torch"),
}
JARGON = r"\b(codes?|grid|VNNI|AVX|STE|observers?|fake[- ]quant\w*|QDQ|Q/DQ|PTQ|opset|sub-?pixel|requantiz\w*)\b"


def rows_of_the_comparison() -> dict[str, list[str]]:
    """Return the rows of the table beside other tools, by their first cell."""
    section = README.read_text().split("## Beside other tools")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {head.strip(): [cell.strip() for cell in cells] for head, *cells in lines}


def test_the_program_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(program, str(README), "exec"), {})
    out = capsys.readouterr().out
    assert (tmp_path / "model.onnx").exists()
    assert "weights:          0 of" in out
    assert "end to end: 0 of" in out
    assert re.search(r"in float: +none;", out)
    own = program.split("# your model and data\n")[1]  # without the imports, the model and the data
    assert len([line for line in own.splitlines() if line]) <= 10


def test_the_figures_and_the_plot_are_those_of_the_results(tmp_path: Path) -> None:
    figures, text = front_page.figures_of(RESULTS), README.read_text()
    for begin, lines in (
        (front_page.BEGIN_OPENING, front_page.opening_of(figures)),
        (front_page.BEGIN, front_page.lines_of(figures)),
    ):
        assert text.split(begin)[1].split(front_page.END)[0].strip().splitlines() == lines
    accuracy, deployment, training = front_page.opening_of(figures)
    assert "%" in accuracy
    assert "smaller" in deployment
    assert "step" in training
    pytest.importorskip("matplotlib", reason="needs matplotlib, which is not installed")
    front_page.draw(figures, tmp_path / "fresh.svg")
    texts = [
        re.findall(r"<text[^>]*>([^<]*)", path.read_text())
        for path in (tmp_path / "fresh.svg", README.parent / "docs" / front_page.PLOT)
    ]
    assert texts[0] == texts[1]
    assert f"{figures.time['qtoolkit']:.2f}" in texts[0]


def test_the_opening_is_short_and_states_what_is_not_tested() -> None:
    opening = re.sub(r"<!--.*?-->", "", README.read_text().split("\n## ")[0])
    assert len(opening.split()) <= 160
    for word in ("beta", qt.__version__, "not on PyPI", "TensorRT"):
        assert word in opening


def test_the_comparison_has_the_figures_and_versions_of_the_results() -> None:
    rows, figures = rows_of_the_comparison(), front_page.figures_of(RESULTS)
    versions = json.loads((RESULTS / "train_step.json").read_text())["peers"]
    assert rows["version"] == [qt.__version__, *(versions[package] for _, package in TOOLS.values())]
    for head, of in (("time of a ResNet-18", figures.time), ("memory for its", figures.memory)):
        (cells,) = (cells for name, cells in rows.items() if name.startswith(head))
        assert cells == [f"{of[name]:.2f}" for name in ("qtoolkit", *(subject for subject, _ in TOOLS.values()))]
    assert all(len(cells) == 1 + len(TOOLS) for cells in rows.values())


def test_a_stranger_knows_its_words() -> None:
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", README.read_text(), flags=re.DOTALL)
    assert re.findall(JARGON, text, flags=re.IGNORECASE) == []


def test_it_has_the_command_of_the_gate() -> None:
    targets = re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(), flags=re.MULTILINE)
    commands = re.findall(r"^make ([a-z-]+)", README.read_text(), flags=re.MULTILINE)
    assert "test" in commands
    assert set(commands) <= set(targets)


def test_its_links_lead_to_files() -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README.read_text()) if "//" not in link]
    assert len(links) > 30
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_the_map_names_what_exists() -> None:
    table = (README.parent / "docs" / "design" / "map.md").read_text()
    for name in re.findall(r"`([\w/]+(?:\.\w+)?)`", table):
        folders = ("", "csrc", "qtoolkit", "benchmarks", "benchmarks/pages")
        assert any((README.parent / folder / name).exists() for folder in folders), name


def test_the_page_on_changes_names_what_exists() -> None:
    text = (README.parent / "docs" / "contributing.md").read_text()
    paths = re.findall(r"`((?:qtoolkit|tests|docs)/[\w/]*(?:\.\w+)?)`", text)
    assert len(paths) > 20
    for path in paths:
        assert (README.parent / path).exists(), path
    for section in re.split(r"\n## ", text)[1:8]:  # each change touches three files at most
        assert 2 <= len([line for line in section.splitlines() if line.startswith("|")]) - 2 <= 3, section
