"""What the site needs beside plugins: pages of notebooks, links to the reference, and a check of what pages load."""

import re
from functools import cache
from pathlib import Path

import griffe
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

NAME = re.compile(r"<code>(?:qt|qtoolkit)\.(?P<name>[\w.]*\w)(?:\([^<]*\))?</code>")
CELL = re.compile(r"<td>.*?</td>", flags=re.DOTALL)
BREAK = re.compile(r"((?<=[a-z*])[_./=](?=[\w*'])|(?<=\w)[_./](?=[a-z]))(?![^<]*>)")  # in a name, but not in a tag
KEPT = re.compile(r"(<pre\b.*?</pre>|<a\b.*?</a>|<autoref\b.*?</autoref>|<h\d\b.*?</h\d>)", flags=re.DOTALL)
# How much more the search makes of a page, by the beginning of its path.
BOOSTS = {
    "troubleshooting": 4,
    "gpu": 4,  # whose subject other pages name in titles: CUDA
    **dict.fromkeys(
        (
            "quickstart",
            "ptq",
            "training",
            "backends",
            "quantizers",
            "export.md",
            "debugging",
            "migration",
            "tutorials/index",
        ),
        2,
    ),
    **dict.fromkeys(("api/", "design/", "contributing", "changelog", "zoo", "performance"), 0.5),
}
FOREIGN = re.compile(r'<(?:script|img|iframe)\b[^>]*\ssrc="https?:|<link\b[^>]*\shref="https?:')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, which stays beside it to download."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = notebook.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=page_of(Path(notebook.abs_src_path or ""))))
    return files


def page_of(notebook: Path) -> str:
    """Return the Markdown of a notebook: its text, its code, what that prints and draws, and a link to the file."""
    parts = []
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            parts += [f"```python\n{cell.source}\n```", *map(shown, cell.outputs)]
    return "\n\n".join([parts[0], f"[This page as a notebook]({notebook.name})", *parts[1:]])


def shown(output: nbformat.NotebookNode) -> str:
    """Return the Markdown of an output of a cell."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="what the code above draws" src="data:image/png;base64,{data["image/png"].strip()}">'
    return f"```text\n{(output.get('text') or data['text/plain']).rstrip()}\n```"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show troubleshooting and guides before reference in the results of a search."""
    if boost := next((boost for begin, boost in BOOSTS.items() if page.file.src_uri.startswith(begin)), None):
        page.meta["search"] = {"boost": boost}
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link each public name of qtoolkit that a page has as code to the reference, and let long names in tables break."""
    places = references(Path(config.docs_dir))

    def link(found: re.Match[str]) -> str:
        name = f"qtoolkit.{found['name']}"
        return f'<autoref optional identifier="{places.get(name, name)}">{found[0]}</autoref>'

    parts = KEPT.split(html)  # what is between the parts that are kept has even places
    linked = "".join(part if place % 2 else NAME.sub(link, part) for place, part in enumerate(parts))
    return CELL.sub(lambda cell: BREAK.sub(r"\g<0><wbr>", cell[0]), linked)


@cache
def references(docs: Path) -> dict[str, str]:
    """Return where the reference has a name that users import: qtoolkit.convert is at qtoolkit.convert.convert."""
    targets = [
        line for page in docs.glob("api/*.md") for line in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    return {
        ".".join([*(parts := target.split("."))[:-2], parts[-1]]): target for target in targets if target.count(".") > 1
    }


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Raise an error for a page that loads from another server."""
    if found := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another server: {found.group()!r}. Put the file into docs/.")
    return output


class Examples(griffe.Extension):
    """Doctests under "Example:" are code, as those under "Examples:" are."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rename the section of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
