"""The arguments and the results that benchmarks/pages/train_step.py and benchmarks/pages/memory.py share."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import qtoolkit as qt
from benchmarks import peers
from benchmarks.measure import keep_memory
from benchmarks.report import facts, present_command
from benchmarks.training.networks import NETWORKS
from benchmarks.training.subjects import names
from benchmarks.training.trainer import Settings
from benchmarks.training.worker import SubjectError, Worker

RESULTS = Path(__file__).parents[1] / "results"


def parser_of(description: str | None, result: str) -> argparse.ArgumentParser:
    """Return the parser of the shared arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--only", nargs="+", default=[""], help="what is trained, by parts of names: ours NNCF")
    parser.add_argument("--compile", action="store_true", help="the compiled float model and ours compiled, too")
    parser.add_argument("--peers", action="store_true", help="other tools too, those that are installed")
    parser.add_argument("--backend", choices=qt.backends, default="tensorrt10", help="the backend of our models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="batches of 4 small images")
    parser.add_argument("--batch", type=int, default=None, help="8; with --quick 4")
    parser.add_argument(
        "--size", type=int, default=None, help="the height of all images; by default that of the network"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / result)
    return parser


def count_of(args: argparse.Namespace) -> int:
    """Return the number of images in a batch."""
    return args.batch or (4 if args.quick else 8)


def settings_of(args: argparse.Namespace, network: str) -> list[Settings]:
    """Return what is trained of a network; the float model, which all else is compared with, comes first."""
    first, *others = names(args.compile, args.peers)
    chosen = [first, *(name for name in others if any(part in name for part in args.only))]
    size = args.size or (NETWORKS[network].quick_size if args.quick else NETWORKS[network].size)
    return [Settings(network, name, args.backend, count_of(args), args.device, size) for name in chosen]


def started(settings: Settings, allocator: Callable[[], None] = keep_memory) -> Worker | str:
    """Return the process of a subject, or why there is none."""
    try:
        return Worker(settings, allocator=allocator)
    except SubjectError as error:
        return str(error)


def add_to_file(args: argparse.Namespace, network: str, **found: Any) -> dict[str, Any]:
    """Add the results of a network to the file, and return what it then has.

    Results of other networks stay, if they were measured on the same machine with the same versions, backend and batch.
    """
    head = {**facts(args.device), "backend": args.backend, "batch": count_of(args), "peers": peers.versions()}
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    networks = before["networks"] if all(before.get(name) == value for name, value in head.items()) else {}
    networks[network] = {"command": present_command(), **found}
    results = {**head, "networks": {name: networks[name] for name in NETWORKS if name in networks}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1))
    return results


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of all networks in a file."""
    return [row for network in results["networks"].values() for row in network["rows"]]
