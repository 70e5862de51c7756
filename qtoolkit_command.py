"""The command `qtoolkit`. Outside of the package, so that Ctrl-C while torch is imported ends it like any later one."""

import os
import signal
import sys
from typing import Any


def main() -> int:
    """Run the command line of `qtoolkit.cli`; return its exit code."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _end)
    from qtoolkit.cli import main as run

    signal.signal(signal.SIGINT, handler)
    return run()


def _end(*_: Any) -> None:
    """End the process at once: an exception might be caught by code that tries an import."""
    sys.stderr.write("qtoolkit: interrupted.\n")
    os._exit(130)
