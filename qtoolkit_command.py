"""The command `qtoolkit`. Outside of the package, so that Ctrl-C while torch is imported ends it like any later one."""

import os
import signal
import sys
from typing import Any


def main() -> int:
    """Run the command line of `qtoolkit.cli`; return its exit code."""
    end_on_interrupt()
    from qtoolkit.cli import main as run

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process without a traceback, until `main` runs the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _end)


def _end(*_: Any) -> None:
    """End the process at once: an exception might be caught by code that tries an import."""
    sys.stderr.write("qtoolkit: interrupted.\n")
    os._exit(130)
