"""The rules of targets on where quantizers stand, checked on graphs of models and on files alike."""

from qtoolkit.instead import say_when_called
from qtoolkit.lint.findings import Finding

__all__ = ["Finding"]
say_when_called(
    __name__,
    "qtoolkit.export.lint(path, backend) for a file; for a model, from qtoolkit.graph.lint import lint and lint(prepared)",
)
