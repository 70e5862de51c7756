"""The command line: qtoolkit lint, verify and info. Arguments and tables only; `qtoolkit.export` does the work."""

from qtoolkit.cli.arguments import main

__all__ = ["main"]
