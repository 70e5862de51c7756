"""Processes that start with torch and this package imported, which takes a new one six seconds of a core.

They are forked from a server that has done nothing but import. What an import does, and what is chosen when the library
loads, takes a process that starts from nothing: `subprocess.run([sys.executable, ...])`.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed

KEPT: list[object] = []  # the ended groups of `group_of_one`
ROOT = Path(__file__).parents[1]
SECONDS_OF_RANKS = 300  # the longest test with ranks takes less than 30
IMPORTED = ["qtoolkit", "torch._dynamo"]  # prepare imports torch._dynamo


def context() -> ForkServerContext:
    """The context whose processes have these modules."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(IMPORTED)
    return forked


def spawn(work: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """Call `work(rank, *args)` in `count` processes; if one of them fails or hangs, end the others and raise an error.

    `work` leaves the process group that it begins to be ended here.
    """
    context()
    ranks = torch.multiprocessing.start_processes(_of_rank, (work, args), count, join=False, start_method="forkserver")
    end = time.monotonic() + SECONDS_OF_RANKS
    while not ranks.join(timeout=max(end - time.monotonic(), 0)):
        if time.monotonic() > end:
            for rank in ranks.processes:
                rank.kill()
            raise TimeoutError(f"{work.__name__} hangs: a rank runs for more than {SECONDS_OF_RANKS} s; it was ended.")


@contextmanager
def found_by_ranks(work: Callable[..., None], size: int, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Give what each rank found with one thread; here is one too: the last bits of a convolution depend on their number.

    `work(rank, folder)` writes what it found as `<rank>.pt`.
    """
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    spawn(work, (str(folder),), size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]
    torch.set_num_threads(threads)


def _of_rank(rank: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Do the work of a rank, and end without destroying what gloo's threads hold: that may hang, or abort the process.

    A thread of gloo that drops a finished collective needs Python's lock, which a DistributedDataParallel that outlives its
    group holds while it waits for the thread (torch 2.13; docs/distributed.md).
    """
    work(rank, *args)
    if distributed.is_initialized():
        distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make this process a group of its own within a `with` block.

    The group is kept: the threads of gloo end with its last owner, which may be a DistributedDataParallel (see `_of_rank`).
    """
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    KEPT.append(distributed.group.WORLD)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def python(
    *command: object, cwd: str | Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run what `python` would, and capture what it writes: a script, `-m` and a module, or `-c` and a program; then arguments.

    Variables of `env` have no effect on what reads them when it is imported.
    """
    words, environment = [str(word) for word in command], dict(os.environ if env is None else env)
    with TemporaryDirectory() as folder:
        outputs = [f"{folder}/stdout", f"{folder}/stderr"]
        process = context().Process(target=_run, args=(words, str(cwd), environment, outputs))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, process.exitcode, *(Path(output).read_text() for output in outputs))


def _run(words: list[str], cwd: str, environment: dict[str, str], outputs: list[str]) -> None:
    for stream, output in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = "" if words[0] in ("-c", "-m") else str(Path(words[0]).parent)
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
