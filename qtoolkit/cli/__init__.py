"""The command line: run a command on each file, print the findings, and return the exit status."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

import qtoolkit_command
from qtoolkit.cli.commands import Answer, info, lint, quantize, verify

__all__ = ["main", "run"]

NOTHING_FOUND, FOUND, BAD_INPUT, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141
COMMANDS = {"quantize": quantize, "lint": lint, "verify": verify, "info": info}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default with the arguments of the process.

    Returns the exit status: 0 for no findings, 1 for findings, 2 for bad input, 130 after Ctrl-C, 141 if the reader of a pipe
    closed it. For several files it is the highest.
    """
    return run(qtoolkit_command.parser().parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """Run the command of parsed arguments; return the exit status of `main`."""
    worst = NOTHING_FOUND
    for file in getattr(arguments, "files", []) or [None]:
        worst = max(worst, _run(argparse.Namespace(**{**vars(arguments), "file": file})))
        if worst in (INTERRUPTED, CLOSED):
            break
    return worst


def _run(arguments: argparse.Namespace) -> int:
    try:
        return _print(COMMANDS[arguments.command](arguments), arguments.json)
    except (TypeError, ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"qtoolkit: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("qtoolkit: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except Exception:  # of the user's own model or batches: the place helps more than a sentence
        traceback.print_exc()
    return BAD_INPUT


def _print(answer: Answer, as_json: bool) -> int:
    text = answer.json() if as_json else answer.table()
    try:
        sys.stdout.write(text.rstrip() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return CLOSED
    return FOUND if answer.found else NOTHING_FOUND
