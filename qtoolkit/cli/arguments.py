"""The command line's arguments, and its exit codes."""

import argparse
import os
import sys
from collections.abc import Sequence

from qtoolkit.backends import backends
from qtoolkit.cli.commands import Answer, info, lint, verify
from qtoolkit.runtimes.table import EXECUTES

NOTHING_FOUND, FOUND, BAD_INPUT, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141
EXIT_CODES = (
    "Exit codes: 0: nothing found; 1: findings, or codes that differ; 2: bad arguments or a bad file, with a sentence."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit code: 0 if nothing was found, 1 for findings, 2 for bad input, 130 after Ctrl-C, 141 if the reader of a pipe
        closed it.
    """
    arguments = _parser().parse_args(argv)
    try:
        return _print(arguments.command(arguments), arguments.json)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"qtoolkit: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("qtoolkit: interrupted.", file=sys.stderr)
        return INTERRUPTED


def _print(answer: Answer, as_json: bool) -> int:
    text = answer.json() if as_json else answer.table()
    try:
        sys.stdout.write(text.rstrip() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return CLOSED
    return FOUND if answer.found else NOTHING_FOUND


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "qtoolkit", description="Checks of quantized ONNX files, of any tool.", epilog=EXIT_CODES, allow_abbrev=False
    )
    parser.set_defaults(command=info, file=None, json=False)  # without a command
    commands = parser.add_subparsers(metavar="command")

    check = commands.add_parser(
        "lint", help="check the Q/DQ nodes of a file against the rules of a target", epilog=EXIT_CODES
    )
    check.add_argument("file", help="an ONNX file with QuantizeLinear and DequantizeLinear nodes")
    check.add_argument(
        "--backend", required=True, choices=sorted(backends), metavar="NAME", help=", ".join(sorted(backends))
    )
    check.add_argument("--advice", action="store_true", help="also list what is quantized and gains nothing")
    check.set_defaults(command=lint)

    compare = commands.add_parser(
        "verify", help="compare the codes that runtimes compute from a file", epilog=EXIT_CODES
    )
    compare.add_argument("file", help="an ONNX file with QuantizeLinear and DequantizeLinear nodes")
    compare.add_argument(
        "--runtime",
        action="append",
        choices=sorted(EXECUTES),
        help="a runtime; may be repeated (default: those installed)",
    )
    compare.add_argument(
        "--inputs", metavar="NPZ", help="arrays by the names of the file's inputs (default: random ones)"
    )
    compare.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    compare.add_argument("--model", metavar="PT2", help="a program of torch.export, whose outputs are compared too")
    compare.add_argument(
        "--allow", type=float, default=0.0, metavar="SHARE", help="the share of the codes that may differ (default: 0)"
    )
    compare.set_defaults(command=verify)

    describe = commands.add_parser("info", help="describe a file; without one, this installation", epilog=EXIT_CODES)
    describe.add_argument("file", nargs="?", help="an ONNX file")
    describe.set_defaults(command=info)

    for command in (check, compare, describe):
        command.add_argument("--json", action="store_true", help="print JSON, as docs/command_line.md describes it")
    return parser
