"""The arguments and the results that benchmarks/train_step.py and benchmarks/memory.py share."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers
from report import facts

import qtoolkit as qt
from training.networks import NETWORKS
from training.subjects import names
from training.trainer import Settings
from training.worker import SubjectError, Worker

RESULTS = Path(__file__).parents[1] / "results"


def parser_of(description: str | None, result: str) -> argparse.ArgumentParser:
    """Return the parser of the shared arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--only", nargs="+", default=[""], help="what is trained, by parts of names: ours NNCF")
    parser.add_argument("--compile", action="store_true", help="the compiled float model and ours compiled, too")
    parser.add_argument("--peers", action="store_true", help="other tools too, those that are installed")
    parser.add_argument("--backend", choices=qt.backends, default="tensorrt", help="the backend of our models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="batches of 4 small images")
    parser.add_argument("--batch", type=int, default=None, help="8; with --quick 4")
    parser.add_argument("--out", type=Path, default=RESULTS / result)
    return parser


def settings_of(args: argparse.Namespace, network: str) -> list[Settings]:
    """Return what is trained of a network; the float model, which all else is compared with, comes first."""
    count = args.batch or (4 if args.quick else 8)
    first, *others = names(args.compile, args.peers)
    chosen = [first, *(name for name in others if any(part in name for part in args.only))]
    return [Settings(network, name, args.backend, count, args.device, args.quick) for name in chosen]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that start inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def started(settings: Settings) -> Worker | str:
    """Return the process of a subject, or why there is none."""
    try:
        return Worker(settings)
    except SubjectError as error:
        return str(error)


def write(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], **more: object) -> None:
    """Write the results as JSON, with where and how they were measured."""
    run = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "backend": args.backend,
        "batch": args.batch or (4 if args.quick else 8),
        "peers": peers.versions() if args.peers else {},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**facts(args.device), **run, **more, "rows": rows}, indent=1))
