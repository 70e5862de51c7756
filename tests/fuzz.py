"""Calls ops with anything at all, many times (make fuzz):

    python -m tests.fuzz --calls 1000000 [--first-seed 0]

Each seed runs in a process of its own, so that after a signal the rest goes on. Each call that goes wrong is reported as the
`tests.ops.test_fuzz.trial` that repeats it.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from itertools import count

import torch

from tests.ops.test_fuzz import NAMES, trial

CALLS_EACH = 200  # of each op for a seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000, help="of all ops together (default: a million)")
    parser.add_argument("--first-seed", type=int, default=0, help="of those that are taken in turn (default: 0)")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads does not outlive a fork
    start, each, failed = time.monotonic(), CALLS_EACH * len(NAMES), []
    for seed in count(asked.first_seed):
        if (seed - asked.first_seed) * each >= asked.calls:
            break
        if (how := run(seed)) is not None:
            failed.append(seed)
            print(f"seed {seed}: {how}", flush=True)
    calls = (seed - asked.first_seed) * each
    seconds = time.monotonic() - start
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print(
        f"{datetime.now(UTC):%Y-%m-%d} {commit.strip()}: {calls} calls of {len(NAMES)} ops, seeds {asked.first_seed} to "
        f"{seed - 1}, torch {torch.__version__}, {seconds:.0f} s: {len(failed)} seeds failed {failed or ''}"
    )
    return 1 if failed else 0


def run(seed: int) -> str | None:
    """Return how the calls of a seed went wrong, or None."""
    child = os.fork()
    if child == 0:
        os._exit(min(sum(not is_right(name, f"{seed}-{i}") for name in NAMES for i in range(CALLS_EACH)), 255))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"{os.WEXITSTATUS(status)} calls went wrong" if os.WEXITSTATUS(status) else None


def is_right(name: str, seed: str) -> bool:
    try:
        trial(name, seed)
    except Exception as error:
        print(f"trial({name!r}, {seed!r}): {type(error).__name__}: {str(error)[:300]}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
