"""The command line: qtoolkit quantize, lint, verify and info. What it runs and prints; the package does the work."""

from qtoolkit.cli.running import main, run

__all__ = ["main", "run"]
