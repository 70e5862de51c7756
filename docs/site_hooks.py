"""What the site needs beside plugins: pages of notebooks and of all errors, and no page that loads from another server."""

import re
from pathlib import Path
from runpy import run_path

import griffe
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOREIGN = re.compile(r'<(?:script|img|iframe)\b[^>]*\ssrc="https?:|<link\b[^>]*\shref="https?:')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, which stays beside it to download, and the page of all errors."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = notebook.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=page_of(Path(notebook.abs_src_path or ""))))
    docs = Path(config.docs_dir)
    page_of_errors = run_path(str(docs / "sentences.py"))["page_of_all"]
    files.append(File.generated(config, "errors.md", content=page_of_errors((docs / "troubleshooting.md").read_text())))
    return files


def page_of(notebook: Path) -> str:
    """Return the Markdown of a notebook: its text, its code in fences, and a link to the file."""
    cells = nbformat.read(notebook, as_version=4).cells
    parts = [cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```" for cell in cells]
    return "\n\n".join([parts[0], f"[This page as a notebook]({notebook.name})", *parts[1:]])


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
